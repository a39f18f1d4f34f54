"""Turns callables into one graph of framework operations, or says why that would not be right.

The trace runs on fake tensors: it uses no memory, runs no kernels and has no side effect. It is
also the proof that a call may be repeated, reordered and replayed. Work that draws random numbers,
writes to its inputs, weights or buffers, or reads a tensor's value on the host is refused with the
line of source that does so.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from kilter.core.reasons import Reason
from kilter.observe.torch_internals.branches import (
    SET_GRAD_ENABLED,
    TorchOperation,
    arguments_of,
    fake_tracer,
    is_functional,
    is_mutable,
    names_of,
    overloads_of,
    pytree,
)

TRACE_ERRORS = (
    RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, OSError,
    ImportError,
)  # fmt: skip
"""What tracing, compiling or capturing the user's code can raise. The serial loop, whose errors
belong to the user, never runs inside a handler of these."""


class WayRefused(Exception):
    """This way of running the branches would be wrong or impossible here; `reason` says why."""

    def __init__(self, code: str, text: str, subject: str = "") -> None:
        super().__init__(text)
        self.reason = Reason(code, subject, text)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def reason_of(error: BaseException) -> Reason:
    """Why a way is refused, in one line."""
    if isinstance(error, WayRefused):
        return error.reason
    kind = type(error).__name__
    return Reason("raised", kind, f"{kind}: {first_line(error)}")


@dataclass(frozen=True)
class Trace:
    """A pure graph: no mutation, no randomness, no host reads, every shape known."""

    graph: fx.GraphModule
    out_spec: pytree.TreeSpec
    out_const: dict[int, Any]
    """These flattened outputs are no tensors."""
    cuts_gradient: str | None
    """It names the line that detaches a tensor from autograd. The gradient of the traced operations
    would flow through it."""
    reads: dict[int, str] = field(default_factory=dict)
    """It has, for each tensor (by `id`) that outlives the call and is not watched, the line that
    reads it."""


@contextmanager
def without_collecting() -> Iterator[None]:
    """No garbage collection inside: a trace allocates hundreds of thousands of objects and frees
    few of them. The collector's passes over them took a fifth of the trace's time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def value(node: fx.Node) -> Any:
    """The fake tensor, or the tuple of fake tensors, that a node makes."""
    return node.meta.get("val")


def tensor_of(graph: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    """The real tensor behind a `get_attr` node."""
    found = getattr(graph, str(node.target))
    assert isinstance(found, torch.Tensor)
    return found


_HOST_READS = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__bool__,
    torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.cpu,
    torch.Tensor.__array__,
}  # fmt: skip


_REAL = (torch.Tensor, torch.nn.Parameter)
_CONSTANTS = (
    int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size,
)  # fmt: skip
"""A replay may return results of these types as the trace has seen them. An object of another type
could hold a tensor of the trace, which has no values."""


_CUTS = {
    torch.Tensor.detach, torch.Tensor.detach_, torch.Tensor.requires_grad_,
    torch.Tensor.data.__get__, SET_GRAD_ENABLED,
}  # fmt: skip


class _Watch(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """Sees every call of a torch function. Reading a tensor's value on the host would put today's
    value into the graph, and a write to a real tensor would happen now, while tracing: both are
    refused."""

    def __init__(self, watched: Container[int]) -> None:
        super().__init__()
        self.watched = watched
        self.inside = False
        """Whether the user's function runs now, and not the tracer around it."""
        self.cuts_gradient: str | None = None
        self.reads: dict[int, str] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if func in _HOST_READS:
            line = _line()
            text = f"a tensor's value is read on the host ({name}) at {line}"
            raise WayRefused("host_read", text, line)
        if func in _CUTS and self.inside:
            self.cuts_gradient = self.cuts_gradient or _line()
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if writes and args and _outlives_the_call(args[0]):
            line = _line()
            text = f"writes to a tensor that outlives the call ({name}) at {line}"
            raise WayRefused("writes", text, line)
        if self.inside:
            self._note_reads((*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))

    def _note_reads(self, given: tuple[Any, ...]) -> None:
        """Note the line at which a tensor is read that is not watched for replacement."""
        for one in given:
            if isinstance(one, (tuple, list)):
                self._note_reads(tuple(one))
            elif _outlives_the_call(one) and not (id(one) in self.watched or id(one) in self.reads):
                self.reads[id(one)] = _line()


def _outlives_the_call(given: Any) -> bool:
    """Whether this is a real tensor: those of the trace are functional wrappers of fake ones."""
    return type(given) in _REAL and not is_functional(given)


def _line() -> str:
    """The innermost line of the user's that runs inside the trace, or else of a module of the
    framework's."""
    inside: list[traceback.FrameSummary] = []
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_OURS):
            inside.append(frame)
        elif inside:
            break
    theirs = [f for f in inside if "/torch/" not in f.filename and f.filename[0] != "<"]
    modules = [f for f in inside if "/torch/nn/" in f.filename]
    for frame in (*theirs, *modules):
        return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "an unknown line"


_OURS = str(Path(__file__).parent)


def trace(
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    named: dict[str, Any] | None = None,
    watched: Container[int] = (),
) -> Trace:
    """The graph of `function(*inputs, **named)`; `WayRefused` if it is not pure or not traceable.
    `watched`: ids of the tensors whose replacement would be noticed."""
    flat, spec = pytree.tree_flatten((inputs, named or {}))
    tensor_at = tuple(i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor))
    seen: dict[str, Any] = {}
    watch = _Watch(watched)

    def flat_function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = list(flat)
        for position, tensor in zip(tensor_at, tensors, strict=True):
            leaves[position] = tensor
        given, by_name = pytree.tree_unflatten(leaves, spec)
        watch.inside = True
        made = function(*given, **by_name)
        watch.inside = False
        outputs, seen["spec"] = pytree.tree_flatten(made)
        for leaf in outputs:
            if not isinstance(leaf, (torch.Tensor, *_CONSTANTS)):
                kind = type(leaf).__name__
                text = f"a result is a {kind}, which may hold tensors of the trace"
                raise WayRefused("unknown_output", text, kind)
        is_tensor = [isinstance(leaf, torch.Tensor) for leaf in outputs]
        seen["const"] = {
            i: leaf for i, (leaf, yes) in enumerate(zip(outputs, is_tensor, strict=True)) if not yes
        }
        return [leaf for leaf, yes in zip(outputs, is_tensor, strict=True) if yes]

    # Functions such as the addition of a residual in place become pure ones here.
    pure = torch.func.functionalize(flat_function, remove="mutations")
    tracer = fake_tracer(pure)
    try:
        with torch.no_grad(), watch:
            graph = tracer(*(flat[i].detach() for i in tensor_at))
    except TRACE_ERRORS as error:
        raise WayRefused("not_traceable", f"cannot be traced ({reason_of(error)})") from error
    graph.graph.eliminate_dead_code()
    _reshape_copies(graph)
    _check_pure(graph)
    return Trace(graph, seen["spec"], seen["const"], watch.cuts_gradient, watch.reads)


def _reshape_copies(graph: fx.GraphModule) -> None:
    """`squeeze_` and its like change the shape of a temporary in place: the same as a view."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, TorchOperation):
            continue
        source = node.args[0] if node.args else None
        temporary = isinstance(source, fx.Node) and source.op == "call_function"
        if torch.Tag.inplace_view in node.target.tags and temporary:
            name = names_of(node.target)[0].split("::")[1].removesuffix("_")
            wanted = [str(a.type) for a in arguments_of(node.target)]
            for found in overloads_of(name):
                if [str(a.type) for a in arguments_of(found)] == wanted:
                    node.target = found
    graph.recompile()


def _argument(node: fx.Node, name: str) -> Any:
    """The argument of this name that an operation is called with; None if it has none."""
    for position, formal in enumerate(arguments_of(node.target)):
        if formal.name == name:
            given = node.args[position] if position < len(node.args) else formal.default_value
            return node.kwargs.get(name, given)
    return None


def _check_pure(graph: fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, TorchOperation):
            continue
        name = str(node.target)
        random = torch.Tag.nondeterministic_seeded in node.target.tags
        if random and _argument(node, "dropout_p") not in (0, 0.0):
            text = f"draws random numbers ({name}); is a dropout active?"
            raise WayRefused("random", text, name)
        if is_mutable(node.target):
            raise WayRefused("writes", f"writes to an input, a weight or a buffer ({name})", name)
        if "batch_norm" in name and any(argument is True for argument in node.args):
            text = f"updates running statistics ({name} in training mode)"
            raise WayRefused("writes", text, name)
        for made in pytree.tree_leaves(value(node)):
            if isinstance(made, torch.Tensor) and not all(isinstance(s, int) for s in made.shape):
                text = f"makes a tensor whose shape depends on data ({name})"
                raise WayRefused("data_dependent_shape", text, name)
