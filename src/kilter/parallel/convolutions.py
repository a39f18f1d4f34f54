"""Convolutions by a kernel of ours, with the norm, residual and ReLU behind them.

At batch 1 a convolution is too little work for the library's tiles: most of the GPU idles, layouts
are converted before and after, and norm and ReLU are launches of their own. The kernel is one
product of the pixels under the window, looked up where they lie, with the weights as they lie; long
sums are split over programs. Float32 products are three TF32 products with the errors added back,
as in `linear_layers`. For each shape both are timed, and the faster one is used.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx

from kilter.observe.torch_internals.branches import BATCH_NORM_INFERENCE
from kilter.parallel.checks import tf32_allowed
from kilter.parallel.compilation import with_body
from kilter.parallel.program import BranchProgram, Unit
from kilter.parallel.timing import graph_seconds, like
from kilter.parallel.trace import WayRefused, value

aten = torch.ops.aten

CONVOLUTION_PROGRAMS = 160
"""A launch of fewer programs leaves multiprocessors idle: sums are split until there are as many.
With the tile below this is on average within 4 % (16-bit numbers: 7 %) of the best of about 25
settings for each of 19 shapes on an H200."""
MOST_SPLITS = 8
"""A sum has at most so many parts: adding up more takes longer than it saves."""
SHORTEST = 64
"""A sum is not split into parts shorter than this."""
WINDOW = 64
"""The largest window has so many pixels: the kernel keeps a bit for each."""

_NORMS = {
    # operation: (training, epsilon) positions
    aten.native_batch_norm.default: (5, 7),
    aten.cudnn_batch_norm.default: (5, 7),
    BATCH_NORM_INFERENCE: (None, 6),
}


@dataclass(frozen=True)
class Tile:
    """How the kernel cuts its work: output channels, pixels and summands of a block; programs that
    share a sum."""

    rows: int
    columns: int
    inner: int
    splits: int


def tile_of(channels: int, pixels: int, inner: int, *, half: bool) -> Tile:
    """The cut for a product of (pixels x inner) pixels with (inner x channels) weights."""
    programs = -(-channels // 64) * -(-pixels // 32)
    splits = 1
    while (
        programs * splits < CONVOLUTION_PROGRAMS
        and splits < MOST_SPLITS
        and inner // (2 * splits) >= SHORTEST
    ):
        splits *= 2
    return Tile(64, 32, 64 if half else 32, splits)


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Sequence[Tensor],
    residual: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    epsilon: float, relu: bool,
) -> Tensor:  # fmt: skip
    if not x.is_cuda:
        return defined(x, weight, bias, norm, residual, stride, padding, epsilon, relu)
    from kilter.parallel.kernels import convolution as kernels
    from kilter.parallel.kernels.common import launch

    out = _shape(x, weight, bias, norm, residual, stride, padding, epsilon, relu)
    x, weight = x.contiguous(), weight.contiguous()
    images, channels_in, height, width = x.shape
    channels, _, high, wide = weight.shape
    inner, area = channels_in * high * wide, out.shape[2] * out.shape[3]
    tile = tile_of(channels, images * area, inner, half=x.element_size() < 4)
    share = -(-inner // (tile.splits * tile.inner)) * tile.inner
    parts = out
    if tile.splits > 1:
        parts = torch.empty((tile.splits, *out.shape), dtype=torch.float32, device=x.device)
    exact = x.dtype == torch.float32 and not tf32_allowed()[1]
    flags = {
        "BIAS": bias is not None,
        "NORM": bool(norm),
        "RESIDUAL": residual is not None,
        "RELU": relu,
    }
    behind = (
        x if bias is None else bias,
        *(norm or (x, x, x, x)),
        x if residual is None else residual.contiguous(),
        epsilon,
    )
    launch(
        kernels.convolve,
        (-(-channels // tile.rows), -(-images * area // tile.columns), tile.splits),
        x, weight, parts, *behind, channels, images * area, inner, share,
        channels_in * height * width, height, width, area, out.shape[3],
        stride[0], stride[1], padding[0], padding[1], ONE=images == 1, HIGH=high, WIDE=wide,
        POINT=_is_point(weight, stride, padding),
        ROWS=tile.rows, COLUMNS=tile.columns, INNER=tile.inner, SPLIT=tile.splits > 1,
        PRECISION="tf32x3" if exact else "tf32", num_warps=4, num_stages=3, **flags,
    )  # fmt: skip
    if tile.splits > 1:
        launch(
            kernels.add_up, (-(-out.numel() // 512),),
            parts, out, *behind, out.numel(), area, channels,
            SIZE=512, PARTS=tile.splits, num_warps=4, **flags,
        )  # fmt: skip
    return out


def _is_point(weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether the window is one pixel, moves by one and never leaves the map."""
    return (*weight.shape[2:], *stride, *padding) == (1, 1, 1, 1, 0, 0)


def _shape(
    x: Tensor, weight: Tensor, _b: Any, _n: Any, _r: Any,
    stride: Sequence[int], padding: Sequence[int], *_: Any,
) -> Tensor:  # fmt: skip
    high, wide = (
        (x.shape[2 + i] + 2 * padding[i] - weight.shape[2 + i]) // stride[i] + 1 for i in (0, 1)
    )
    return x.new_empty((x.shape[0], weight.shape[0], high, wide))


def defined(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Sequence[Tensor],
    residual: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    epsilon: float, relu: bool,
) -> Tensor:  # fmt: skip
    found = torch.nn.functional.conv2d(x, weight, bias, list(stride), list(padding))
    if norm:
        mean, spread, gain, shift = norm
        found = torch.nn.functional.batch_norm(found, mean, spread, gain, shift, eps=epsilon)
    found = found if residual is None else found + residual
    return found.relu() if relu else found


@cache
def operation() -> Any:
    """The kernel as an operation that the compiler can call; registered at first use."""
    schema = (
        "(Tensor x, Tensor weight, Tensor? bias, Tensor[] norm, Tensor? residual, int[] stride, "
        "int[] padding, float epsilon, bool relu) -> Tensor"
    )
    made = torch.library.custom_op("kilter::convolve", _convolve, mutates_args=(), schema=schema)
    made.register_fake(_shape)
    return torch.ops.kilter.convolve.default


# --- finding them ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convolution:
    """A convolution in a graph, and the operations that it takes along."""

    node: fx.Node
    end: fx.Node
    """It is the last operation, whose result the kernel makes."""
    norm: tuple[fx.Node, ...] = ()
    """It has mean, variance, gain and shift."""
    residual: fx.Node | None = None
    epsilon: float = 0.0
    relu: bool = False

    @property
    def arguments(self) -> tuple[Any, ...]:
        x, weight, bias, stride, padding = self.node.args[:5]
        return (
            x, weight, bias, list(self.norm), self.residual, list(stride), list(padding),
            self.epsilon, self.relu,
        )  # fmt: skip

    @property
    def key(self) -> Hashable:
        """Equal where the same kernels do the same to tensors of the same shapes."""
        tensors = [value(self.node.args[0]), value(self.node.args[1]), value(self.end)]
        shapes = tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors)
        bias, behind = self.node.args[2] is not None, (bool(self.norm), self.residual is not None)
        return shapes, str(self.node.args[3:5]), bias, behind, self.relu

    @property
    def kind(self) -> Hashable:
        """Equal where the kernels are compiled the same: sizes are not compiled in, but whether
        each is a multiple of 16 is."""
        x, weight, out = value(self.node.args[0]), value(self.node.args[1]), value(self.end)
        inner, pixels = weight[0].numel(), out[:, 0].numel()
        tile = tile_of(weight.shape[0], pixels, inner, half=x.element_size() < 4)
        form = x.dtype, x.shape[0] == 1, tuple(weight.shape[2:]), tile.splits
        point = _is_point(weight, *self.node.args[3:5])
        behind = self.node.args[2] is None, bool(self.norm), self.residual is None, self.relu
        divides = tuple(n % 16 == 0 for n in (inner, pixels, out[0, 0].numel()))
        return form, point, behind, divides


def is_faster(found: Convolution, device: torch.device) -> bool:
    """Whether the kernel is faster than the library's convolution and what follows it, which the
    compiler makes one launch of. The library is timed in both layouts; weights are converted to
    the other layout in every call, as the compiler does."""

    given = fx.map_arg(found.arguments, lambda node: like(value(node), device))
    x, weight, bias, _, _, stride, padding, *_ = given
    alone = found.end is found.node

    def theirs(x: Tensor, layout: torch.memory_format) -> Tensor:
        turned = weight.contiguous(memory_format=layout)
        done = torch.nn.functional.conv2d(x, turned, bias, stride, padding)
        return done if alone else done.relu()

    def ours() -> Tensor:
        made: Tensor = operation()(*given)
        return made

    calls = [
        partial(theirs, x.contiguous(memory_format=layout), layout)
        for layout in (torch.contiguous_format, torch.channels_last)
    ]
    try:
        ours_s = graph_seconds(ours, device, times=SEVERAL)
    except WayRefused:
        return False
    return ours_s < min(graph_seconds(call, device, times=SEVERAL) for call in calls)


SEVERAL = 4
"""So many calls are timed together: a single call takes no longer than the time between events."""


Better = Callable[[Convolution], bool]
"""Whether our kernel is better for a convolution."""


def with_convolutions(program: BranchProgram, better: Better) -> BranchProgram:
    """Convolutions by the kernel where that is better. A unit of convolutions alone needs no
    compiler."""

    def replaced(unit: Unit) -> Unit:
        found = [] if unit.graph is None else _find(unit.graph.graph)
        ours = [c for c in found if better(c)]
        return _rewritten(unit, ours) if ours else unit

    return program.with_units(replaced)


def _find(graph: fx.Graph) -> list[Convolution]:
    return [c for node in graph.nodes if (c := _match(node)) is not None]


def _match(node: fx.Node) -> Convolution | None:
    if node.target is not aten.convolution.default or node.kwargs:
        return None
    x, weight, _, stride, padding, dilation, transposed, _, groups = node.args
    tensors = [value(x), value(weight)]
    plain = all(t.dim() == 4 and t.is_contiguous() for t in (*tensors, value(node)))
    known = tensors[0].dtype == tensors[1].dtype and tensors[0].dtype in _DTYPES
    pairs = len(stride) == len(padding) == 2 and list(dilation) == [1, 1]
    if not plain or not known or not pairs or transposed or groups != 1:
        return None
    if max(t.numel() for t in (*tensors, value(node))) >= 2**31:
        return None
    if tensors[1][0, 0].numel() > WINDOW:
        return None
    found = Convolution(node, node)
    end = _reader(node)
    if end is not None and end.target in _NORMS:
        found = _with_norm(found, end)
    end = _reader(found.end)
    if end is not None and end.target is aten.add.Tensor and not end.kwargs and len(end.args) == 2:
        residual = end.args[1] if end.args[0] is found.end else end.args[0]
        same = isinstance(residual, fx.Node) and residual is not found.end
        if same and _alike(value(residual), value(found.end)):
            found = replace(found, residual=residual, end=end)
            end = _reader(end)
    if end is not None and end.target is aten.relu.default:
        found = replace(found, relu=True, end=end)
    return found


_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _alike(a: Any, b: Tensor) -> bool:
    known = isinstance(a, Tensor) and a.shape == b.shape and a.dtype == b.dtype
    return bool(known and a.is_contiguous())


def _reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _with_norm(found: Convolution, norm: fx.Node) -> Convolution:
    training, epsilon = _NORMS[norm.target]
    first = _reader(norm)
    reads = norm.args[3], norm.args[4], norm.args[1], norm.args[2]
    if (
        norm.args[0] is not found.node
        or norm.kwargs
        or not all(isinstance(read, fx.Node) for read in reads)
    ):
        return found
    if training is not None and norm.args[training]:
        return found
    if first is None or first.target is not operator.getitem or first.args[1] != 0:
        return found
    return replace(found, norm=reads, epsilon=norm.args[epsilon], end=first)


def _rewritten(unit: Unit, ours: Sequence[Convolution]) -> Unit:
    assert unit.graph is not None
    ends = {c.end: c for c in ours}
    body = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for old in unit.graph.graph.nodes:
        if old in ends:
            arguments = fx.map_arg(ends[old].arguments, made.__getitem__)
            made[old] = body.call_function(operation(), arguments)
            made[old].meta = {**old.meta, "kind": ends[old].kind}
        else:
            made[old] = body.node_copy(old, made.__getitem__)
    key = ("convolutions", tuple(c.key for c in ours), unit.key)
    return with_body(unit, body, {operation()}, key)
