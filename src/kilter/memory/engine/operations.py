"""The operations that recipes know, by the name of their node in autograd's graph.

For each a *builder* reads off the node what the operation read, and says how to do it again; None
if part of that is out of reach. Known are operations that cost little beside the bytes they spare
(casts, activations, norms, sums, products, dropout from its mask), the views between them, and
matrix products and convolutions for the planner to weigh. Nothing here draws a random number or
changes a module's state. To add one: a builder, and its line in `OPERATIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch

from kilter.memory.engine.fused import can_normalise, normalised
from kilter.memory.engine.modified import Modified

if TYPE_CHECKING:
    _Make: TypeAlias = Callable[[], torch.Tensor]
    _Build: TypeAlias = Callable[["Graph", Any, torch.dtype, tuple[int, ...]], _Make | None]

Source = Any
"""How to have a tensor that a recipe reads: called without arguments, it gives the tensor, or None
for an affine parameter that a norm does not have."""


class Graph(Protocol):
    """What a builder may ask for. All of it is had when the recipe is carried out."""

    def saved(self, node: Any, name: str) -> Source | None:
        """A tensor that a node saved."""

    def value(self, edge: tuple[Any, int]) -> Source | None:
        """What a node produced."""

    def epsilon(self, node: Any, weight: Source | None) -> float | None:
        """Of a layer norm with this weight."""


class HeldSource:
    """A source that is no datum of the engine: a parameter, or a small tensor that autograd saved.

    It must have the version that the operation read. `own` puts a copy in its place, which nobody
    else can write to.
    """

    __slots__ = ("__weakref__", "take", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, version: int, take: Source | None = None) -> None:
        """`take` gives the tensor where holding the tensor itself is not enough (its bytes may be
        on the host)."""
        self.tensor = tensor
        self.version = version
        self.take = take

    def __call__(self) -> torch.Tensor:
        if self.changed:
            raise Modified(self.tensor, self.version)
        found: torch.Tensor = self.tensor if self.take is None else self.take()
        return found

    @property
    def changed(self) -> bool:
        return bool(self.tensor._version != self.version)

    def own(self) -> None:
        self.tensor = self().detach().clone()
        self.version, self.take = self.tensor._version, None


def _of_saved(apply: Callable[[Source, Any], torch.Tensor]) -> _Build:
    """An operation of its saved input and attributes of the node, read now."""

    def build(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> _Make | None:
        source = graph.saved(node, "_raw_saved_self")
        if source is None:
            return None
        return partial(apply, source, getattr(node, "_saved_approximate", None))

    return build


def _of_input(apply: Callable[[torch.Tensor], torch.Tensor]) -> _Build:
    """An operation of what came in, which it did not save."""

    def build(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> _Make | None:
        source = graph.value(node.next_functions[0])
        return None if source is None else lambda: apply(source())

    return build


def _gelu(x: Source, approximate: str) -> torch.Tensor:
    return torch.nn.functional.gelu(x(), approximate=approximate)


def _silu(x: Source, _: None) -> torch.Tensor:
    return torch.nn.functional.silu(x())


def _cast(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> _Make | None:
    before = node.next_functions[0]
    if before[0] is not None and before[0].name() == "NativeLayerNormBackward0":
        return _layer_norm(graph, before[0], dtype, size)
    source = graph.value(before)
    return None if source is None else partial(_cast_again, source, dtype)


def _cast_again(x: Source, dtype: torch.dtype) -> torch.Tensor:
    made: torch.Tensor = x().to(dtype)
    return made


def _view(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> _Make | None:
    before = getattr(node, "_saved_self_sym_sizes", None)
    if before is None or math.prod(before) != math.prod(size):
        return None
    source = graph.value(node.next_functions[0])
    return None if source is None else lambda: source().reshape(size)


def _layer_norm(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> _Make | None:
    """With the cast that follows it, if one does."""

    source = graph.saved(node, "_raw_saved_input")
    weight = graph.saved(node, "_raw_saved_weight")
    eps = graph.epsilon(node, weight)
    if eps is None or source is None:
        return None
    shape = list(node._saved_normalized_shape)
    bias = graph.saved(node, "_raw_saved_bias") or _nothing
    mean = graph.saved(node, "_raw_saved_result1") or _nothing
    rstd = graph.saved(node, "_raw_saved_result2") or _nothing

    return partial(_normalise, (source, mean, rstd, weight or _nothing, bias), shape, eps, dtype)


def _normalise(
    sources: tuple[Source, ...], shape: list[int], eps: float, dtype: torch.dtype
) -> torch.Tensor:
    x, mean, rstd, weight, bias = (source() for source in sources)
    if x.dtype is not dtype and len(shape) == 1 and can_normalise(x, weight, bias, shape[0]):
        return normalised(x, mean, rstd, weight, bias, dtype)
    out: torch.Tensor = torch.native_layer_norm(x, shape, weight, bias, eps)[0]
    return out if out.dtype is dtype else out.to(dtype)


def _nothing() -> Any:
    """An affine parameter that the norm does not have."""
    return None


def _batch_norm(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> _Make | None:
    """With the batch's own statistics; running statistics are neither read nor updated."""
    name = node.name()
    native = name == "NativeBatchNormBackward0"
    training = getattr(node, "_saved_training", True)
    eps = getattr(node, "_saved_eps" if native else "_saved_epsilon", None)
    source = graph.saved(node, "_raw_saved_input")
    if not training or eps is None or source is None:
        return None
    weight = graph.saved(node, "_raw_saved_weight") or _nothing
    bias: Source | None = _nothing
    if len(node.next_functions) > 2 and node.next_functions[2][0] is not None:
        bias = graph.value(node.next_functions[2])
    if bias is None:
        return None
    if not native:
        return lambda: torch.cudnn_batch_norm(
            source(), weight(), bias(), None, None, True, 0.0, eps
        )[0]
    mean = graph.saved(node, "_raw_saved_result1")
    deviation = graph.saved(node, "_raw_saved_result2")

    def make() -> torch.Tensor:
        x = source()
        if x.is_cuda and mean is not None and deviation is not None:
            # The second half of the forward: its first half, the sums, is in what it saved.
            return torch.batch_norm_elemt(x, weight(), bias(), mean(), deviation(), eps)
        return torch.native_batch_norm(x, weight(), bias(), None, None, True, 0.0, eps)[0]

    return make


def _convolution(
    graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]
) -> _Make | None:
    source = graph.saved(node, "_raw_saved_input")
    weight = graph.saved(node, "_raw_saved_weight")
    edge = node.next_functions[2]
    bias = _nothing if edge[0] is None else graph.value(edge)
    if source is None or weight is None or bias is None:
        return None
    how = tuple(
        getattr(node, f"_saved_{name}")
        for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    )
    return lambda: torch.convolution(source(), weight(), bias(), *how)


def _transpose(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> _Make | None:
    source = graph.value(node.next_functions[0])
    if source is None:
        return None
    first, second = _signed(node._saved_dim0), _signed(node._saved_dim1)
    return lambda: source().transpose(first, second)


def _permute(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> _Make | None:
    source = graph.value(node.next_functions[0])
    dims = [_signed(dim) for dim in node._saved_dims]
    return None if source is None else lambda: source().permute(dims)


def _signed(dim: int) -> int:
    """Negative dimensions come as unsigned numbers of 64 bits."""
    return dim - 2**64 if dim >= 2**63 else dim


def _power(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> _Make | None:
    source, exponent = graph.saved(node, "_raw_saved_self"), node._saved_exponent
    return None if source is None else lambda: source() ** exponent


def _lookup(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> _Make | None:
    indices = graph.saved(node, "_raw_saved_indices")
    weight = graph.value(node.next_functions[0])
    if indices is None or weight is None:
        return None
    return lambda: torch.embedding(weight(), indices())


def _dropout(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> _Make | None:
    """With the very mask that was drawn: what backward does to a gradient is what forward did."""
    mask = graph.saved(node, "_raw_saved_result1")
    source = graph.value(node.next_functions[0])
    if mask is None or source is None or node._saved_p >= 1:
        return None
    scale = 1.0 / (1.0 - node._saved_p)
    again = torch.ops.aten.native_dropout_backward.default
    return lambda: again(source(), mask(), scale)


def _add(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> _Make | None:
    if getattr(node, "_saved_alpha", 1) != 1 or len(node.next_functions) != 2:
        return None
    # A missing edge is a number or a tensor outside the graph: unknown.
    left, right = (graph.value(edge) for edge in node.next_functions)
    if left is None or right is None:
        return None
    return lambda: left() + right()


def _factors(graph: Graph, node: Any) -> tuple[Source | None, Source | None]:
    """Of an operation on two tensors that saves one only for the other's gradient."""
    left, right = graph.saved(node, "_raw_saved_self"), graph.saved(node, "_raw_saved_other")
    edges = node.next_functions
    return left or graph.value(edges[0]), right or (graph.value(edges[1]) if edges[1:] else None)


def _multiply(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> _Make | None:
    left, right = _factors(graph, node)
    if left is None or right is None:
        return None
    return lambda: left() * right()


def _divide(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> _Make | None:
    left, right = _factors(graph, node)
    if left is None or right is None:
        return None
    return lambda: left() / right()


def _matrix_product(
    graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]
) -> _Make | None:
    left, right = graph.saved(node, "_raw_saved_self"), graph.saved(node, "_raw_saved_mat2")
    if left is None or right is None:
        return None
    return lambda: left() @ right()


def _sum_of_product(
    graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]
) -> _Make | None:
    if getattr(node, "_saved_alpha", 1) != 1 or getattr(node, "_saved_beta", 1) != 1:
        return None
    left, right = graph.saved(node, "_raw_saved_mat1"), graph.saved(node, "_raw_saved_mat2")
    edge = node.next_functions[0]
    while edge[0] is not None and edge[0].name() == "ToCopyBackward0":
        edge = edge[0].next_functions[0]  # the bias, cast to the type of the factors
    added = graph.value(edge)
    if left is None or right is None or added is None:
        return None

    def make() -> torch.Tensor:
        factor = left()
        return torch.addmm(added().to(factor.dtype), factor, right())

    return make


class RecomputeRule(NamedTuple):
    """One kind of node."""

    kind: str
    """What the operation is called, for people."""
    build: _Build
    """What makes an output of this type and size again."""


OPERATIONS = {
    "AddBackward0": RecomputeRule("sum", _add),
    "AddmmBackward0": RecomputeRule("matrix product", _sum_of_product),
    "BmmBackward0": RecomputeRule("matrix product", _matrix_product),
    "CloneBackward0": RecomputeRule("copy", _of_input(methodcaller("clone"))),
    "ConvolutionBackward0": RecomputeRule("convolution", _convolution),
    "CudnnBatchNormBackward0": RecomputeRule("batch norm", _batch_norm),
    "DivBackward0": RecomputeRule("quotient", _divide),
    "EmbeddingBackward0": RecomputeRule("lookup", _lookup),
    "GeluBackward0": RecomputeRule("gelu", _of_saved(_gelu)),
    "MmBackward0": RecomputeRule("matrix product", _matrix_product),
    "MulBackward0": RecomputeRule("product", _multiply),
    "NativeBatchNormBackward0": RecomputeRule("batch norm", _batch_norm),
    "NativeDropoutBackward0": RecomputeRule("dropout", _dropout),
    "NativeLayerNormBackward0": RecomputeRule("layer norm", _layer_norm),
    "PermuteBackward0": RecomputeRule("view", _permute),
    "PowBackward0": RecomputeRule("power", _power),
    "ReluBackward0": RecomputeRule("relu", _of_input(methodcaller("relu"))),
    "SigmoidBackward0": RecomputeRule("sigmoid", _of_input(methodcaller("sigmoid"))),
    "SiluBackward0": RecomputeRule("silu", _of_saved(_silu)),
    "TanhBackward0": RecomputeRule("tanh", _of_input(methodcaller("tanh"))),
    "ToCopyBackward0": RecomputeRule("cast", _cast),
    "TransposeBackward0": RecomputeRule("view", _transpose),
    "UnsafeViewBackward0": RecomputeRule("view", _view),
    "ViewBackward0": RecomputeRule("view", _view),
}
