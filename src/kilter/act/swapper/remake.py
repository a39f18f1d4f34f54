"""How a saved tensor can be made again: a recipe read off the autograd graph that made it.

The node that produced a tensor names the operation, and its own saved inputs are the very tensors
that the operation read, so a recipe is right by construction: there is no matching of shapes or
positions. It is taken anew in every pass, and holds what it reads. Known are operations that cost
little beside the bytes they spare: casts, activations, norms, sums, and matrix products for the
planner to weigh. Random operations are not made again, and nothing that changes a module's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from kilter.act.swapper.fused import can_normalise, normalised

if TYPE_CHECKING:
    import torch

    _Type: TypeAlias = torch.dtype | None
    _Size: TypeAlias = torch.Size | None
    _Make: TypeAlias = Callable[[], torch.Tensor]
    _Build: TypeAlias = Callable[["Reader", Any, _Type, _Size], _Make | None]

DEPTH = 5
"""Longest chain of operations that are not saved in between."""
EPS = "kilter.eps"
"""Key in a node's metadata: the epsilon of a norm without weights, which nothing else tells."""

Source = Any
"""How to have a tensor that a recipe reads: a tensor with its version, which must not have changed
(what autograd was given for it begins like that), or a function. A closure for each would be dear:
recipes are built in every pass by the hundred, and Python's collector counts what is built."""


class Memory(Protocol):
    """Who knows what operations saved and produced."""

    def kept_by(self, node: Any, name: str) -> tuple[Source, int | torch.Tensor] | None:
        """How to have later what a node saved under an attribute's name, and the number of its
        datum, or itself if it is none; None if the node saved nothing there. May raise `Foreign`.
        """

    def produced_by(self, node: Any) -> tuple[Source, int] | None:
        """A node's output, if some operation saved it: how to have it, and its number."""

    def epsilon(self, node: Any, weight: Source | None) -> float | None:
        """Of a layer norm with this weight: its node does not keep it."""


class Foreign(Exception):
    """Part of the graph is kept by other hooks than ours, so a recipe cannot be read off it."""


class Stale(RuntimeError):
    """What the recipe reads was modified in between, so the tensor cannot be made again."""


def have(source: Source) -> Any:
    """The tensor, now; None for an affine parameter that a norm does not have."""
    if type(source) is tuple:
        if source[0]._version != source[1]:
            raise Stale("a tensor that the recipe reads was modified in place")
        return source[0]
    return source()


class Recipe:
    """Makes a tensor again. Taken in every pass, for hundreds of tensors, so it is kept small."""

    __slots__ = ("_make", "dtype", "leaves", "node", "others", "size", "sources", "stride")

    def __init__(self, tensor: torch.Tensor, node: str, make: _Make, reader: Reader) -> None:
        self._make = make
        self.node = node
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.leaves = tuple(reader.leaves)
        """Identities of the parameters that it reads."""
        self.sources = tuple(reader.sources)
        """Numbers of the saved data that it reads."""
        self.others = tuple(reader.others)
        """What it reads that is not ours to move: parameters, and small tensors."""

    @property
    def kind(self) -> str:
        """What the operation is called, for people."""
        return _KINDS[self.node]

    def make(self) -> torch.Tensor:
        """The tensor, in its own layout. May raise `Stale`."""
        made = self._make()
        if made.requires_grad:  # nothing was to be done to a parameter
            made = made.detach()
        if made.dtype is not self.dtype or made.size() != self.size:
            raise Stale(f"made {made.dtype} {tuple(made.size())}, expected {tuple(self.size)}")
        if (
            made.stride() == self.stride
            and made.storage_offset() == 0
            and made.untyped_storage().nbytes() == made.nbytes
        ):
            return made
        import torch

        out = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=made.device)
        return out.copy_(made)


class Reader:
    """Reads recipes off the graph, one after the other. With `noting` each names what it reads."""

    def __init__(self, memory: Memory, *, noting: bool = False) -> None:
        self._memory = memory
        self.epsilon = memory.epsilon
        self._noting = noting
        self._depth = 0
        self.leaves: list[int] = []
        self.sources: list[int] = []
        self.others: list[torch.Tensor] = []

    def read(self, tensor: torch.Tensor) -> Recipe | None:
        """The recipe of the whole storage behind `tensor`, or None if there is none."""
        base = tensor._base if tensor._is_view() else tensor
        if base is None or base.storage_offset() != 0:
            return None
        node, storage = base.grad_fn, base.untyped_storage()
        if node is None or storage.nbytes() != base.nbytes:
            return None
        if base is not tensor and storage._cdata != tensor.untyped_storage()._cdata:
            return None
        name: str = node.name()
        build = _BUILDERS.get(name)
        if build is None:
            return None
        self._depth = 1
        self.leaves.clear()
        if self._noting:
            self.sources.clear()
            self.others.clear()
        try:
            make = build(self, node, base.dtype, base.size())
        except Foreign:
            return None
        return None if make is None else Recipe(base, name, make, self)

    # For builders

    def saved(self, node: Any, name: str) -> Source | None:
        """A tensor that a node saved."""
        found = self._memory.kept_by(node, name)
        if found is None:
            return None
        if self._noting:
            self._note(found[1])
        return found[0]

    def value(self, edge: tuple[Any, int], dtype: _Type, size: _Size) -> Source | None:
        """What a node produced: a parameter, something saved, or made again from its inputs. Its
        type and size, where they are known."""
        node, output = edge
        if node is None or output != 0 or self._depth > DEPTH:
            return None
        if node.name() == "torch::autograd::AccumulateGrad":
            parameter = node.variable
            self.leaves.append(id(parameter))
            if self._noting:
                self.others.append(parameter)
            return parameter, parameter._version
        found = self._memory.produced_by(node)
        if found is None:
            return self.made(node, dtype, size)
        if self._noting:
            self._note(found[1])
        return found[0]

    def made(self, node: Any, dtype: _Type, size: _Size) -> _Make | None:
        build = _BUILDERS.get(node.name())
        if build is None:
            return None
        self._depth += 1
        made = build(self, node, dtype, size)
        self._depth -= 1
        return made

    def _note(self, source: int | torch.Tensor) -> None:
        if isinstance(source, int):
            self.sources.append(source)
        else:
            self.others.append(source)


def _unary(apply: Callable[[Source, Any], torch.Tensor]) -> _Build:
    """An operation of its saved input and attributes of the node, read now."""

    def build(reader: Reader, node: Any, dtype: _Type, size: _Size) -> _Make | None:
        source = reader.saved(node, "_raw_saved_self")
        if source is None:
            return None
        return partial(apply, source, getattr(node, "_saved_approximate", None))

    return build


def _gelu(x: Source, approximate: str) -> torch.Tensor:
    import torch

    return torch.nn.functional.gelu(have(x), approximate=approximate)


def _silu(x: Source, _: None) -> torch.Tensor:
    import torch

    return torch.nn.functional.silu(have(x))


def _cast(reader: Reader, node: Any, dtype: _Type, size: _Size) -> _Make | None:
    if dtype is None:
        return None  # in the middle of a recipe the target type is not known
    before = node.next_functions[0]
    if before[0] is not None and before[0].name() == "NativeLayerNormBackward0":
        return _layer_norm(reader, before[0], dtype, size)
    source = reader.value(before, None, size)
    return None if source is None else partial(_cast_again, source, dtype)


def _cast_again(x: Source, dtype: torch.dtype) -> torch.Tensor:
    made: torch.Tensor = have(x).to(dtype)
    return made


def _view(reader: Reader, node: Any, dtype: _Type, size: _Size) -> _Make | None:
    before = getattr(node, "_saved_self_sym_sizes", None)
    if size is None or before is None or math.prod(before) != size.numel():
        return None
    source = reader.value(node.next_functions[0], dtype, None)
    return None if source is None else lambda: have(source).reshape(size)


def _layer_norm(reader: Reader, node: Any, dtype: _Type, size: _Size) -> _Make | None:
    """With the cast that follows it, if one does."""

    source = reader.saved(node, "_raw_saved_input")
    weight = reader.saved(node, "_raw_saved_weight")
    eps = reader.epsilon(node, weight)
    if eps is None or source is None or dtype is None:
        return None
    shape = list(node._saved_normalized_shape)
    bias = reader.saved(node, "_raw_saved_bias") or _nothing
    mean = reader.saved(node, "_raw_saved_result1") or _nothing
    rstd = reader.saved(node, "_raw_saved_result2") or _nothing

    return partial(_normalise, (source, mean, rstd, weight or _nothing, bias), shape, eps, dtype)


def _normalise(
    sources: tuple[Source, ...], shape: list[int], eps: float, dtype: torch.dtype
) -> torch.Tensor:
    import torch

    x, mean, rstd, weight, bias = map(have, sources)
    if x.dtype is not dtype and len(shape) == 1 and can_normalise(x, weight, bias, shape[0]):
        return normalised(x, mean, rstd, weight, bias, dtype)
    out: torch.Tensor = torch.native_layer_norm(x, shape, weight, bias, eps)[0]
    return out if out.dtype is dtype else out.to(dtype)


def _nothing() -> Any:
    """An affine parameter that the norm does not have."""
    return None


def _batch_norm(reader: Reader, node: Any, dtype: _Type, size: _Size) -> _Make | None:
    """With the batch's own statistics; running statistics are neither read nor updated."""
    import torch

    name = node.name()
    native = name == "NativeBatchNormBackward0"
    training = getattr(node, "_saved_training", True)
    eps = getattr(node, "_saved_eps" if native else "_saved_epsilon", None)
    source = reader.saved(node, "_raw_saved_input")
    if not training or eps is None or source is None:
        return None
    weight = reader.saved(node, "_raw_saved_weight") or _nothing
    bias: Source | None = _nothing
    if len(node.next_functions) > 2 and node.next_functions[2][0] is not None:
        bias = reader.value(node.next_functions[2], None, None)
    if bias is None:
        return None
    if not native:
        return lambda: torch.cudnn_batch_norm(
            have(source), have(weight), have(bias), None, None, True, 0.0, eps
        )[0]
    mean = reader.saved(node, "_raw_saved_result1")
    deviation = reader.saved(node, "_raw_saved_result2")

    def make() -> torch.Tensor:
        x = have(source)
        if x.is_cuda and mean is not None and deviation is not None:
            # The second half of the forward: its first half, the sums, is in what it saved.
            return torch.batch_norm_elemt(
                x, have(weight), have(bias), have(mean), have(deviation), eps
            )
        return torch.native_batch_norm(x, have(weight), have(bias), None, None, True, 0.0, eps)[0]

    return make


def _convolution(reader: Reader, node: Any, dtype: _Type, size: _Size) -> _Make | None:
    import torch

    source = reader.saved(node, "_raw_saved_input")
    weight = reader.saved(node, "_raw_saved_weight")
    edge = node.next_functions[2]
    bias = _nothing if edge[0] is None else reader.value(edge, None, None)
    if source is None or weight is None or bias is None:
        return None
    how = tuple(
        getattr(node, f"_saved_{name}")
        for name in ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    )
    return lambda: torch.convolution(have(source), have(weight), have(bias), *how)


def _relu(reader: Reader, node: Any, dtype: _Type, size: _Size) -> _Make | None:
    source = reader.value(node.next_functions[0], dtype, size)
    return None if source is None else lambda: have(source).relu()


def _add(reader: Reader, node: Any, dtype: _Type, size: _Size) -> _Make | None:
    if getattr(node, "_saved_alpha", 1) != 1 or len(node.next_functions) != 2:
        return None
    # A missing edge is a number or a tensor outside the graph: unknown. The sizes are the result's
    # unless something is broadcast, and then the views in between find a wrong count.
    left, right = (reader.value(edge, None, size) for edge in node.next_functions)
    if left is None or right is None:
        return None
    return lambda: have(left) + have(right)


def _multiply(reader: Reader, node: Any, dtype: _Type, size: _Size) -> _Make | None:
    left, right = reader.saved(node, "_raw_saved_self"), reader.saved(node, "_raw_saved_other")
    if left is None or right is None:
        return None
    return lambda: have(left) * have(right)


def _matrix_product(reader: Reader, node: Any, dtype: _Type, size: _Size) -> _Make | None:
    import torch

    if getattr(node, "_saved_alpha", 1) != 1 or getattr(node, "_saved_beta", 1) != 1:
        return None
    left, right = reader.saved(node, "_raw_saved_mat1"), reader.saved(node, "_raw_saved_mat2")
    edge = node.next_functions[0]
    while edge[0] is not None and edge[0].name() == "ToCopyBackward0":
        edge = edge[0].next_functions[0]  # the bias, cast to the type of the factors
    added = reader.value(edge, None, None)
    if left is None or right is None or added is None:
        return None

    def make() -> torch.Tensor:
        factor = have(left)
        return torch.addmm(have(added).to(factor.dtype), factor, have(right))

    return make


_BUILDERS: dict[str, _Build] = {
    "GeluBackward0": _unary(_gelu),
    "SiluBackward0": _unary(_silu),
    "ToCopyBackward0": _cast,
    "NativeLayerNormBackward0": _layer_norm,
    "NativeBatchNormBackward0": _batch_norm,
    "CudnnBatchNormBackward0": _batch_norm,
    "ConvolutionBackward0": _convolution,
    "ReluBackward0": _relu,
    "AddBackward0": _add,
    "MulBackward0": _multiply,
    "AddmmBackward0": _matrix_product,
    "ViewBackward0": _view,
    "UnsafeViewBackward0": _view,
}
_KINDS = {
    "GeluBackward0": "gelu",
    "SiluBackward0": "silu",
    "ToCopyBackward0": "cast",
    "NativeLayerNormBackward0": "layer norm",
    "NativeBatchNormBackward0": "batch norm",
    "CudnnBatchNormBackward0": "batch norm",
    "ConvolutionBackward0": "convolution",
    "ReluBackward0": "relu",
    "AddBackward0": "sum",
    "MulBackward0": "product",
    "AddmmBackward0": "matrix product",
    "ViewBackward0": "view",
    "UnsafeViewBackward0": "view",
}
