"""Turns callables into one graph of framework operations, or says why that would not be right.

The trace runs on fake tensors: no memory, no kernels, no side effect. It is also the proof that a
call may be repeated, reordered and replayed: work that draws random numbers, writes to its inputs,
weights or buffers, or reads a tensor's value on the host is refused with the line it happens on.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

Callable_ = Callable[..., Any]

TRACE_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    AssertionError,
    OSError,
    ImportError,
)
"""What tracing, compiling or capturing somebody's code can raise. The serial loop, whose errors
belong to the user, never runs inside a handler of these."""


class Refused(Exception):
    """This way of running the branches would be wrong or impossible here; the message says why."""


def reason_of(error: BaseException) -> str:
    """Why, in one line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, Refused) else f"{type(error).__name__}: {first}"


@dataclass(frozen=True)
class Trace:
    """A pure graph: no mutation, no randomness, no host reads, every shape known."""

    graph: fx.GraphModule
    inputs: tuple[int, ...]
    """Positions among the flattened arguments that are tensors: the graph's placeholders."""
    out_spec: pytree.TreeSpec
    out_const: dict[int, Any]
    """Flattened outputs that are no tensors."""
    cuts_gradient: str | None
    """The line that takes something out of autograd: the graph's own gradient would flow there."""


@contextmanager
def without_collecting() -> Iterator[None]:
    """No garbage collection inside: a trace makes objects by the hundred thousand and drops few;
    to look through them again and again took a fifth of its time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def value(node: fx.Node) -> Any:
    """The fake tensor (or tuple of them) that a node makes."""
    return node.meta.get("val")


def tensor_of(graph: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    """The real tensor behind a `get_attr` node."""
    found = getattr(graph, str(node.target))
    assert isinstance(found, torch.Tensor)
    return found


_HOST_READS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.cpu,
    torch.Tensor.__array__,
}


_REAL = (torch.Tensor, torch.nn.Parameter)


_CUTS = {
    torch.Tensor.detach,
    torch.Tensor.detach_,
    torch.Tensor.requires_grad_,
    torch.Tensor.data.__get__,
    torch._C._set_grad_enabled,
}


class _NoHostReads(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """Reading a tensor's value on the host would bake today's value into the graph; writing to a
    real tensor would happen now, while tracing."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        """In the user's function: the tracer's own doings around it do not count."""
        self.cuts_gradient: str | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _HOST_READS:
            raise Refused(f"a tensor's value is read on the host ({func.__name__}) at {_line()}")
        if func in _CUTS and self.inside:
            self.cuts_gradient = self.cuts_gradient or _line()
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if writes and args and type(args[0]) in _REAL and not torch._is_functional_tensor(args[0]):
            raise Refused(f"writes to a tensor that outlives the call ({name}) at {_line()}")
        return func(*args, **(kwargs or {}))


def _line() -> str:
    """The innermost line of the user's that runs inside the trace; if there is none, of a module of
    the framework's."""
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
    function: Callable_, inputs: tuple[Any, ...], named: dict[str, Any] | None = None
) -> Trace:
    """The graph of `function(*inputs, **named)`; `Refused` if it is not pure or not traceable."""
    from torch.fx.experimental.proxy_tensor import make_fx

    flat, spec = pytree.tree_flatten((inputs, named or {}))
    tensor_at = tuple(i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor))
    seen: dict[str, Any] = {}
    watch = _NoHostReads()

    def flat_function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = list(flat)
        for position, tensor in zip(tensor_at, tensors, strict=True):
            leaves[position] = tensor
        given, by_name = pytree.tree_unflatten(leaves, spec)
        watch.inside = True
        made = function(*given, **by_name)
        watch.inside = False
        outputs, seen["spec"] = pytree.tree_flatten(made)
        is_tensor = [isinstance(leaf, torch.Tensor) for leaf in outputs]
        seen["const"] = {
            i: leaf for i, (leaf, yes) in enumerate(zip(outputs, is_tensor, strict=True)) if not yes
        }
        return [leaf for leaf, yes in zip(outputs, is_tensor, strict=True) if yes]

    # Functions such as the addition of a residual in place become pure ones here.
    pure = torch.func.functionalize(flat_function, remove="mutations")
    tracer = make_fx(pure, tracing_mode="fake", _allow_non_fake_inputs=True)
    try:
        with torch.no_grad(), watch:
            graph = tracer(*(flat[i].detach() for i in tensor_at))
    except TRACE_ERRORS as error:
        raise Refused(f"cannot be traced ({reason_of(error)})") from error
    graph.graph.eliminate_dead_code()
    _reshape_copies(graph)
    _check_pure(graph)
    return Trace(graph, tensor_at, seen["spec"], seen["const"], watch.cuts_gradient)


def _reshape_copies(graph: fx.GraphModule) -> None:
    """`squeeze_` and its like give a temporary another shape in place: the same as a view."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        source = node.args[0] if node.args else None
        temporary = isinstance(source, fx.Node) and source.op == "call_function"
        if torch.Tag.inplace_view in node.target.tags and temporary:
            schema = node.target._schema
            packet = getattr(torch.ops.aten, schema.name.split("::")[1].removesuffix("_"))
            wanted = [str(a.type) for a in schema.arguments]
            for overload in packet.overloads():
                found = getattr(packet, overload)
                if [str(a.type) for a in found._schema.arguments] == wanted:
                    node.target = found
    graph.recompile()


def _argument(node: fx.Node, name: str) -> Any:
    """What an operation is called with, by name; None if it has no such argument."""
    for position, formal in enumerate(node.target._schema.arguments):
        if formal.name == name:
            given = node.args[position] if position < len(node.args) else formal.default_value
            return node.kwargs.get(name, given)
    return None


def _check_pure(graph: fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = str(node.target)
        if torch.Tag.nondeterministic_seeded in node.target.tags and _argument(
            node, "dropout_p"
        ) not in (0, 0.0):
            raise Refused(f"draws random numbers ({name}); is a dropout active?")
        if node.target._schema.is_mutable:
            raise Refused(f"writes to an input, a weight or a buffer ({name})")
        if "batch_norm" in name and any(argument is True for argument in node.args):
            raise Refused(f"updates running statistics ({name} in training mode)")
        for made in pytree.tree_leaves(value(node)):
            if isinstance(made, torch.Tensor) and not all(isinstance(s, int) for s in made.shape):
                raise Refused(f"makes a tensor whose shape depends on data ({name})")
