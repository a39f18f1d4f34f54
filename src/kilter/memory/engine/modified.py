"""The error of the plain run for a saved tensor that was written to, in the framework's own words.

Under hooks on saved tensors, whoever sets them, the framework does not compare versions. Ours do,
and what they raise in the program is what the framework would have raised.
"""

from __future__ import annotations

import _thread
import re
from typing import Any, NoReturn

import torch

from kilter.observe import torch_internals

_TEXT = (
    "one of the variables needed for gradient computation has been modified by an inplace operation"
)
_MAKER = re.compile(r"(?<=which is output 0 of )[^,]+")


class Modified(Exception):
    """Inside of the engine: a saved tensor has another version than the one that was saved."""

    def __init__(self, tensor: torch.Tensor, version: int) -> None:
        """`version` is the one that was saved."""
        super().__init__(_TEXT)
        self.tensor = tensor
        self.version = version

    def raise_in_the_program(self, packed: Any, original: torch.Tensor | None) -> NoReturn:
        """What the framework raises. `packed` is what autograd was given for the tensor, and
        `original` the program's own tensor, if it is alive."""
        text, tensor = [_TEXT], self.tensor
        kind = tensor.dtype, tensor.device, tensor.size()
        question = (kind, (self.version, tensor._version), _maker(packed, original), text)
        # Hooks belong to a thread: in one of its own the framework checks versions itself.
        # `threading.Thread` would lose what a signal handler of the program raises meanwhile.
        answered = _thread.allocate_lock()
        answered.acquire()
        _thread.start_new_thread(_answer, (answered, question))
        answered.acquire()
        plain = RuntimeError(text[-1])
        try:
            raise plain
        finally:
            plain.__context__ = None  # this error, which the program does not know
            del self, tensor, packed, original, plain  # the traceback keeps this frame alive


def _maker(packed: Any, original: torch.Tensor | None) -> str:
    """The node that made the tensor, as far as it is known; empty for one that none has made.

    Not known is it where a view was changed in place, whose node is hidden within another one, and
    for a dead input of an operation with several.
    """
    node = torch_internals.current_node()
    saved = [name for name in dir(node) if name.startswith("_raw_saved_")]
    # Nodes name what they have made themselves so.
    own = [name for name in saved if name.startswith(("_raw_saved_result", "_raw_saved_output"))]
    raw = [getattr(node, name) for name in own]
    # PyTorch 2.8 does not show which tensor that is: known where the node saved nothing else.
    shown = all(hasattr(each, "data") for each in raw)
    if raw and (any(each.data is packed for each in raw) if shown else own == saved):
        return str(node.name())
    if original is not None:
        return "" if original.grad_fn is None else str(original.grad_fn.name())
    inputs = [] if node is None else [made_by for made_by, _ in node.next_functions]
    names_of_inputs = {str(made_by.name()) for made_by in inputs if made_by is not None}
    names_of_inputs -= {"torch::autograd::AccumulateGrad"}
    return names_of_inputs.pop() if len(names_of_inputs) == 1 else ""


class _Kept(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return other.clone()


def _answer(answered: _thread.LockType, question: tuple[Any, ...]) -> None:
    try:
        _ask(*question)
    finally:
        answered.release()


def _ask(
    kind: tuple[torch.dtype, torch.device, torch.Size],
    versions: tuple[int, int],
    maker: str,
    text: list[str],
) -> None:
    """Have the framework find a tensor of this type and size, without its memory, modified.
    `versions` are the one that was saved and the one now; the answer is added to `text`."""
    (dtype, device, size), (saved, now) = kind, versions
    one = torch.empty(1, dtype=dtype, device=device)
    differentiable = one.is_floating_point() or one.is_complex()
    with torch.enable_grad():
        example = one.requires_grad_(bool(maker) and differentiable).expand(size)
        setting = torch_internals.set_version_counter
        setting((example,), (saved,))
        kept: Any = _Kept.apply(example, torch.ones((), requires_grad=True))
        setting((example,), (now,))
    try:
        kept.grad_fn.saved_tensors  # noqa: B018
    except RuntimeError as error:
        text.append(_MAKER.sub(lambda found: _styled(maker, found[0]), str(error)))


def _styled(maker: str, example: str) -> str:
    """Some versions of the framework name a node without the end of its name."""
    return maker if "Backward" in example else re.sub(r"Backward\d*$", "", maker)
