"""The operations that recipes can recompute, by the name of their node in autograd's graph.

These are operations that cost little beside the bytes that they save (casts, activations, norms,
softmax, pooling, sums, products, dropout from its mask), those that only move elements
(`moved_elements.py`), and attention, matrix products and convolutions for the planner to weigh.
Nothing here draws a random number or changes a module's state. To add one: a builder (see
`operation_graph.py`), its line in `OPERATIONS`, and a case in `test_swapper_operations.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from kilter.memory.engine.fused import can_normalise, normalised
from kilter.memory.engine.moved_elements import MOVES
from kilter.memory.engine.operation_graph import (
    Build,
    GivenTensors,
    Graph,
    Make,
    RecomputeRule,
    Source,
    number,
    of_input,
    of_saved,
)
from kilter.observe import torch_internals


def _cast(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
    before = node.next_functions[0]
    if before[0] is not None and before[0].name() == "NativeLayerNormBackward0":
        return _layer_norm(graph, before[0], dtype, size)
    source = graph.value(before)
    return None if source is None else lambda given: source(given).to(dtype)


def _layer_norm(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
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
    sources: tuple[Source, ...],
    shape: list[int],
    eps: float,
    dtype: torch.dtype,
    given: GivenTensors,
) -> torch.Tensor:
    x, mean, rstd, weight, bias = (source(given) for source in sources)
    if x.dtype is not dtype and len(shape) == 1 and can_normalise(x, weight, bias, shape[0]):
        return normalised(x, mean, rstd, weight, bias, dtype)
    out: torch.Tensor = torch.native_layer_norm(x, shape, weight, bias, eps)[0]
    return out if out.dtype is dtype else out.to(dtype)


def _nothing(given: GivenTensors) -> Any:
    """An affine parameter that the norm does not have."""
    return None


def _batch_norm(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
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
        return lambda given: torch.cudnn_batch_norm(
            source(given), weight(given), bias(given), None, None, True, 0.0, eps
        )[0]
    mean = graph.saved(node, "_raw_saved_result1")
    deviation = graph.saved(node, "_raw_saved_result2")

    def make(given: GivenTensors) -> torch.Tensor:
        x = source(given)
        if x.is_cuda and mean is not None and deviation is not None:
            # The second half of the forward: its first half, the sums, is in what it saved.
            return torch.batch_norm_elemt(
                x, weight(given), bias(given), mean(given), deviation(given), eps
            )
        return torch.native_batch_norm(x, weight(given), bias(given), None, None, True, 0.0, eps)[0]

    return make


def _convolution(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
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
    return lambda given: torch.convolution(source(given), weight(given), bias(given), *how)


def _power(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
    source, exponent = graph.saved(node, "_raw_saved_self"), node._saved_exponent
    return None if source is None else lambda given: source(given) ** exponent


def _lookup(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
    indices = graph.saved(node, "_raw_saved_indices")
    weight = graph.value(node.next_functions[0])
    if indices is None or weight is None:
        return None
    return lambda given: torch.embedding(weight(given), indices(given))


def _dropout(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
    """With the mask that was drawn: backward does to a gradient what forward did to the input."""
    mask = graph.saved(node, "_raw_saved_result1")
    source = graph.value(node.next_functions[0])
    if mask is None or source is None or node._saved_p >= 1:
        return None
    scale = 1.0 / (1.0 - node._saved_p)
    again = torch.ops.aten.native_dropout_backward.default
    return lambda given: again(source(given), mask(given), scale)


def _add(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
    if getattr(node, "_saved_alpha", 1) != 1 or len(node.next_functions) != 2:
        return None
    # A missing edge is a number or a tensor outside the graph: unknown.
    left, right = (graph.value(edge) for edge in node.next_functions)
    if left is None or right is None:
        return None
    return lambda given: left(given) + right(given)


def _factors(graph: Graph, node: Any) -> tuple[Source | None, Source | None]:
    """Of an operation on two tensors that saves one only for the other's gradient."""
    left, right = graph.saved(node, "_raw_saved_self"), graph.saved(node, "_raw_saved_other")
    edges = node.next_functions
    return left or graph.value(edges[0]), right or (graph.value(edges[1]) if edges[1:] else None)


def _multiply(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
    left, right = _factors(graph, node)
    if left is None or right is None:
        return None
    return lambda given: left(given) * right(given)


def _divide(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
    left, right = _factors(graph, node)
    if left is None or right is None:
        return None
    return lambda given: left(given) / right(given)


def _matrix_product(
    graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]
) -> Make | None:
    left, right = graph.saved(node, "_raw_saved_self"), graph.saved(node, "_raw_saved_mat2")
    if left is None or right is None:
        return None
    return lambda given: left(given) @ right(given)


def _sum_of_product(
    graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]
) -> Make | None:
    if getattr(node, "_saved_alpha", 1) != 1 or getattr(node, "_saved_beta", 1) != 1:
        return None
    left, right = graph.saved(node, "_raw_saved_mat1"), graph.saved(node, "_raw_saved_mat2")
    edge = node.next_functions[0]
    while edge[0] is not None and edge[0].name() == "ToCopyBackward0":
        edge = edge[0].next_functions[0]  # the bias, cast to the type of the factors
    added = graph.value(edge)
    if left is None or right is None or added is None:
        return None

    def make(given: GivenTensors) -> torch.Tensor:
        factor = left(given)
        return torch.addmm(added(given).to(factor.dtype), factor, right(given))

    return make


def _group_norm(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
    source, weight = graph.saved(node, "_raw_saved_input"), graph.saved(node, "_raw_saved_weight")
    edge = node.next_functions[2]
    eps = getattr(node, "_saved_eps", None)  # not in every torch
    if eps is None:
        eps = graph.epsilon(node, weight)
    # With a weight, a bias that is not in the graph is a frozen one.
    bias = _nothing if edge[0] is None and weight is None else graph.value(edge)
    if source is None or bias is None or eps is None:
        return None
    how = [number(node, name) for name in ("N", "C", "HxW", "group")]
    scale = weight or _nothing
    return lambda given: torch.native_group_norm(
        source(given), scale(given), bias(given), *how, eps
    )[0]


def _rms_norm(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
    source, weight = graph.saved(node, "_raw_saved_input"), graph.saved(node, "_raw_saved_weight")
    eps = graph.epsilon(node, weight)
    if source is None or weight is None or eps is None:
        return None
    shape = list(node._saved_normalized_shape)
    return lambda given: torch.rms_norm(source(given), shape, weight(given), eps)


def _to_dtype(apply: Callable[..., torch.Tensor], *names: str) -> Build:
    """An operation that was told the type of its result, which its node does not keep."""

    def build(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
        source = graph.value(node.next_functions[0])
        how = [number(node, name) for name in names]
        return None if source is None else lambda given: apply(source(given), *how, dtype=dtype)

    return build


def _batch_product(
    graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]
) -> Make | None:
    left, right = graph.saved(node, "_raw_saved_batch1"), graph.saved(node, "_raw_saved_batch2")
    added = graph.value(node.next_functions[0])
    if left is None or right is None or added is None:
        return None
    how = {"alpha": node._saved_alpha, "beta": node._saved_beta}
    return lambda given: torch.baddbmm(added(given), left(given), right(given), **how)


def _subtract(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
    left, right = (graph.value(edge) for edge in node.next_functions)
    alpha = node._saved_alpha
    if left is None or right is None:
        return None
    return lambda given: torch.sub(left(given), right(given), alpha=alpha)


def _where(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
    condition = graph.saved(node, "_raw_saved_condition")
    left, right = (graph.value(edge) for edge in node.next_functions)
    if condition is None or left is None or right is None:
        return None
    return lambda given: torch.where(condition(given), left(given), right(given))


def _attention(apply: Callable[..., tuple[torch.Tensor, ...]], mask: str = "") -> Build:
    """Scaled dot product attention without dropout, by the kernel that made it; `mask` is where
    its node keeps what is added to the scores."""

    def build(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
        factors = [graph.saved(node, f"_raw_saved_{name}") for name in ("query", "key", "value")]
        added = graph.saved(node, mask) if mask else None
        if None in factors or node._saved_dropout_p or graph.output:
            return None
        causal, scale = node._saved_is_causal, node._saved_scale

        def make(given: GivenTensors) -> torch.Tensor:
            bias = None if added is None else added(given)
            return apply(*(one(given) for one in factors), bias, causal, scale)[0]  # type: ignore[misc]

        return make

    return build


def _adaptive(apply: Callable[[torch.Tensor, list[int]], torch.Tensor]) -> Build:
    """Pooling to a size that is that of the result."""

    def build(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Make | None:
        source = graph.saved(node, "_raw_saved_self")
        return None if source is None else lambda given: apply(source(given), [*size[-2:]])

    return build


def _upsampled(apply: Callable[..., torch.Tensor], *names: str) -> RecomputeRule:
    build = of_input(apply, "output_size", *names, "scales_h", "scales_w")
    return RecomputeRule("upsampling", build)


_ATEN = torch.ops.aten
_POOL = ("kernel_size", "stride", "padding")

OPERATIONS = {
    **MOVES,
    "AbsBackward0": RecomputeRule("absolute value", of_saved(torch.abs)),
    "AdaptiveAvgPool2DBackward0": RecomputeRule(
        "pooling", _adaptive(lambda x, size: torch_internals.adaptive_avg_pool2d(x, size))
    ),
    "AdaptiveMaxPool2DBackward0": RecomputeRule(
        "pooling", _adaptive(lambda x, size: _ATEN.adaptive_max_pool2d(x, size)[0])
    ),
    "AddBackward0": RecomputeRule("sum", _add),
    "AddmmBackward0": RecomputeRule("matrix product", _sum_of_product),
    "AvgPool2DBackward0": RecomputeRule(
        "pooling",
        of_saved(_ATEN.avg_pool2d, *_POOL, "ceil_mode", "count_include_pad", "divisor_override"),
    ),
    "BaddbmmBackward0": RecomputeRule("matrix product", _batch_product),
    "BmmBackward0": RecomputeRule("matrix product", _matrix_product),
    "ClampBackward1": RecomputeRule("clamp", of_saved(torch.clamp, "min", "max")),
    "CloneBackward0": RecomputeRule("copy", of_input(torch.clone)),
    "ConvolutionBackward0": RecomputeRule("convolution", _convolution),
    "CosBackward0": RecomputeRule("cosine", of_saved(torch.cos)),
    "CudnnBatchNormBackward0": RecomputeRule("batch norm", _batch_norm),
    "DivBackward0": RecomputeRule("quotient", _divide),
    "DivBackward1": RecomputeRule("quotient", of_input(torch.div, "other")),
    "EluBackward0": RecomputeRule("elu", of_saved(_ATEN.elu, "alpha", "scale", "input_scale")),
    "EmbeddingBackward0": RecomputeRule("lookup", _lookup),
    "ErfBackward0": RecomputeRule("erf", of_saved(torch.erf)),
    "ExpBackward0": RecomputeRule("exponential", of_input(torch.exp)),
    "FusedRmsNormBackward0": RecomputeRule("RMS norm", _rms_norm),
    "GeluBackward0": RecomputeRule(
        "gelu", of_saved(lambda x, how: F.gelu(x, approximate=how), "approximate")
    ),
    "GluBackward0": RecomputeRule("glu", of_saved(F.glu, "dim")),
    "HardsigmoidBackward0": RecomputeRule("hardsigmoid", of_saved(_ATEN.hardsigmoid)),
    "HardswishBackward0": RecomputeRule("hardswish", of_saved(_ATEN.hardswish)),
    "HardtanhBackward0": RecomputeRule("hardtanh", of_saved(_ATEN.hardtanh, "min_val", "max_val")),
    "LeakyReluBackward0": RecomputeRule("leaky relu", of_saved(F.leaky_relu, "negative_slope")),
    "LogSoftmaxBackward0": RecomputeRule("softmax", _to_dtype(torch.log_softmax, "dim")),
    "MaxPool2DWithIndicesBackward0": RecomputeRule(
        "pooling",
        of_saved(
            lambda *how: _ATEN.max_pool2d_with_indices(*how)[0], *_POOL, "dilation", "ceil_mode"
        ),
    ),
    "MeanBackward1": RecomputeRule("mean", _to_dtype(torch.mean, "dim", "keepdim")),
    "MishBackward0": RecomputeRule("mish", of_saved(_ATEN.mish)),
    "MmBackward0": RecomputeRule("matrix product", _matrix_product),
    "MulBackward0": RecomputeRule("product", _multiply),
    "MulBackward1": RecomputeRule("product", of_input(torch.mul, "other")),
    "NativeBatchNormBackward0": RecomputeRule("batch norm", _batch_norm),
    "NativeDropoutBackward0": RecomputeRule("dropout", _dropout),
    "NativeGroupNormBackward0": RecomputeRule("group norm", _group_norm),
    "NativeLayerNormBackward0": RecomputeRule("layer norm", _layer_norm),
    "NegBackward0": RecomputeRule("negation", of_input(torch.neg)),
    "PowBackward0": RecomputeRule("power", _power),
    "ReflectionPad2DBackward0": RecomputeRule(
        "padding", of_saved(_ATEN.reflection_pad2d, "padding")
    ),
    "ReluBackward0": RecomputeRule("relu", of_input(torch.relu)),
    "ReplicationPad2DBackward0": RecomputeRule(
        "padding", of_saved(_ATEN.replication_pad2d, "padding")
    ),
    "RsqrtBackward0": RecomputeRule("root", of_input(torch.rsqrt)),
    "SafeSoftmaxBackward0": RecomputeRule(
        "softmax",
        _to_dtype(lambda x, dim, dtype: torch_internals.safe_softmax(x, dim, dtype=dtype), "dim"),
    ),
    "ScaledDotProductCudnnAttentionBackward0": RecomputeRule(
        "attention",
        _attention(
            lambda q, k, v, bias, causal, scale: torch_internals.attention_cudnn(
                q, k, v, bias, True, 0.0, causal, False, scale=scale
            ),
            "_raw_saved_attn_bias",
        ),
    ),
    "ScaledDotProductEfficientAttentionBackward0": RecomputeRule(
        "attention",
        _attention(
            lambda q, k, v, bias, causal, scale: torch_internals.attention_efficient(
                q, k, v, bias, True, 0.0, causal, scale=scale
            ),
            "_raw_saved_attn_bias",
        ),
    ),
    "ScaledDotProductFlashAttentionBackward0": RecomputeRule(
        "attention",
        _attention(
            lambda q, k, v, _, causal, scale: torch_internals.attention_flash(
                q, k, v, 0.0, causal, False, scale=scale
            )
        ),
    ),
    "ScaledDotProductFlashAttentionForCpuBackward0": RecomputeRule(
        "attention",
        _attention(
            lambda q, k, v, mask, causal, scale: torch_internals.attention_flash_cpu(
                q, k, v, 0.0, causal, attn_mask=mask, scale=scale
            ),
            "_raw_saved_attn_mask",
        ),
    ),
    "SigmoidBackward0": RecomputeRule("sigmoid", of_input(torch.sigmoid)),
    "SiluBackward0": RecomputeRule("silu", of_saved(F.silu)),
    "SinBackward0": RecomputeRule("sine", of_saved(torch.sin)),
    "SoftmaxBackward0": RecomputeRule("softmax", _to_dtype(torch.softmax, "dim")),
    "SoftplusBackward0": RecomputeRule("softplus", of_saved(F.softplus, "beta", "threshold")),
    "SqrtBackward0": RecomputeRule("root", of_input(torch.sqrt)),
    "SubBackward0": RecomputeRule("difference", _subtract),
    "SumBackward1": RecomputeRule("sum", _to_dtype(torch.sum, "dim", "keepdim")),
    "TanhBackward0": RecomputeRule("tanh", of_input(torch.tanh)),
    "ToCopyBackward0": RecomputeRule("cast", _cast),
    "UpsampleBicubic2DBackward0": _upsampled(_ATEN.upsample_bicubic2d, "align_corners"),
    "UpsampleBilinear2DBackward0": _upsampled(_ATEN.upsample_bilinear2d, "align_corners"),
    "UpsampleNearest2DBackward0": _upsampled(_ATEN.upsample_nearest2d),
    "UpsampleNearestExact2DBackward0": _upsampled(
        lambda x, *how: torch_internals.upsample_nearest_exact2d(x, *how)
    ),
    "WhereBackward0": RecomputeRule("choice", _where),
}
