"""Operations whose node does not keep all that a recipe needs, by the name of their node.

Most operators need no line here: `schema_rules.py` makes their rules. Here are casts, norms,
softmax, sums and means along dimensions, dropout from its mask, attention, convolutions, and
products with a bias; `moved_elements.py` has those that only move elements. Nothing here draws a
random number or changes a module's state. To add one: a builder (see `operation_graph.py`), its
line in `OPERATIONS`, and a case in `test_swapper_operations.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from kilter.memory.engine.fused import available, layer_norm
from kilter.memory.engine.moved_elements import MOVES
from kilter.memory.engine.operation_graph import (
    Build,
    Graph,
    Operator,
    RecomputeRule,
    Slot,
    number,
    of_input,
    of_saved,
)

_ATEN = torch.ops.aten


def _cast(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
    """With the layer norm that it follows, if it does."""
    before = node.next_functions[0]
    if before[0] is not None and before[0].name() == "NativeLayerNormBackward0":
        return _layer_norm(graph, before[0], dtype, size)
    source = graph.value(before)
    return source and graph.cast(source, dtype)


def _layer_norm(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
    """In the type of the cast that follows it, if one does."""
    source = graph.saved(node, "_raw_saved_input")
    weight = graph.saved(node, "_raw_saved_weight")
    bias = graph.saved(node, "_raw_saved_bias")
    mean = graph.saved(node, "_raw_saved_result1")
    rstd = graph.saved(node, "_raw_saved_result2")
    shape = list(node._saved_normalized_shape)
    if weight is bias is None and source and available(node._input_metadata[0].device):
        return graph.call(layer_norm, source, mean, rstd, None, None, shape, None, dtype)
    eps = graph.epsilon(node, weight)
    if eps is None or source is None:
        return None
    if node._input_metadata[0].dtype is dtype:
        operator = _ATEN.native_layer_norm
        return graph.call(operator, source, shape, weight, bias, eps, output=0)
    return graph.call(layer_norm, source, mean, rstd, weight, bias, shape, eps, dtype)


def _batch_norm(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
    """With the batch's own statistics; running statistics are neither read nor updated."""
    native = node.name() == "NativeBatchNormBackward0"
    training = getattr(node, "_saved_training", True)
    eps = getattr(node, "_saved_eps" if native else "_saved_epsilon", None)
    source = graph.saved(node, "_raw_saved_input")
    if not training or eps is None or source is None:
        return None
    weight = graph.saved(node, "_raw_saved_weight")
    bias: Slot | None = None
    if len(node.next_functions) > 2 and node.next_functions[2][0] is not None:
        bias = graph.value(node.next_functions[2])
        if bias is None:
            return None
    affine = source, weight, bias
    if not native:
        operator = _ATEN.cudnn_batch_norm
        return graph.call(operator, *affine, None, None, True, 0.0, eps, output=0)
    mean = graph.saved(node, "_raw_saved_result1")
    deviation = graph.saved(node, "_raw_saved_result2")
    on_cuda = node._input_metadata[0].device.type == "cuda"
    if on_cuda and mean is not None and deviation is not None:
        # The second half of the forward: its first half, the sums, is in what it saved.
        return graph.call(_ATEN.batch_norm_elemt, *affine, mean, deviation, eps)
    operator = _ATEN.native_batch_norm
    return graph.call(operator, *affine, None, None, True, 0.0, eps, output=0)


def _convolution(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
    source = graph.saved(node, "_raw_saved_input")
    weight = graph.saved(node, "_raw_saved_weight")
    edge = node.next_functions[2]
    bias = None if edge[0] is None else graph.value(edge)
    if source is None or weight is None or (bias is None and edge[0] is not None):
        return None
    names = "stride", "padding", "dilation", "transposed", "output_padding", "groups"
    how = [getattr(node, f"_saved_{name}") for name in names]
    return graph.call(_ATEN.convolution, source, weight, bias, *how)


def _lookup(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
    indices = graph.saved(node, "_raw_saved_indices")
    weight = graph.value(node.next_functions[0])
    if indices is None or weight is None:
        return None
    return graph.call(_ATEN.embedding, weight, indices)


def _dropout(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
    """With the mask that was drawn: backward does to a gradient what forward did to the input."""
    mask = graph.saved(node, "_raw_saved_result1")
    source = graph.value(node.next_functions[0])
    if mask is None or source is None or node._saved_p >= 1:
        return None
    scale = 1.0 / (1.0 - node._saved_p)
    return graph.call(_ATEN.native_dropout_backward, source, mask, scale)


def _sum_of_product(
    graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]
) -> Slot | None:
    if getattr(node, "_saved_alpha", 1) != 1 or getattr(node, "_saved_beta", 1) != 1:
        return None
    left, right = graph.saved(node, "_raw_saved_mat1"), graph.saved(node, "_raw_saved_mat2")
    edge = node.next_functions[0]
    while edge[0] is not None and edge[0].name() == "ToCopyBackward0":
        edge = edge[0].next_functions[0]  # the bias, cast to the type of the factors
    added = graph.value(edge)
    if left is None or right is None or added is None:
        return None
    return graph.call(_ATEN.addmm, graph.cast(added, dtype), left, right)


def _group_norm(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
    source, weight = graph.saved(node, "_raw_saved_input"), graph.saved(node, "_raw_saved_weight")
    edge = node.next_functions[2]
    eps = getattr(node, "_saved_eps", None)  # not in every torch
    if eps is None:
        eps = graph.epsilon(node, weight)
    # With a weight, a bias that is not in the graph is a frozen one.
    plain = edge[0] is None and weight is None
    bias = None if plain else graph.value(edge)
    if source is None or eps is None or (bias is None and not plain):
        return None
    how = [number(node, name) for name in ("N", "C", "HxW", "group")]
    operator = _ATEN.native_group_norm
    return graph.call(operator, source, weight, bias, *how, eps, output=0)


def _rms_norm(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
    source, weight = graph.saved(node, "_raw_saved_input"), graph.saved(node, "_raw_saved_weight")
    eps = graph.epsilon(node, weight)
    if source is None or weight is None or eps is None:
        return None
    shape = list(node._saved_normalized_shape)
    return graph.call(_ATEN.rms_norm, source, shape, weight, eps)


def _attention(operator: str, mask: str = "", **more: Any) -> Build:
    """Scaled dot product attention without dropout, by the kernel that made it; `mask` says what
    that calls the tensor that is added to the scores."""

    def build(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
        factors = [graph.saved(node, f"_raw_saved_{name}") for name in ("query", "key", "value")]
        added = {mask: graph.saved(node, f"_raw_saved_{mask}")} if mask else {}
        if None in factors or node._saved_dropout_p or graph.output:
            return None
        how = {"is_causal": node._saved_is_causal, "scale": node._saved_scale}
        return graph.call(operator, *factors, **added, **how, **more, dropout_p=0.0, output=0)

    return build


def _adaptive(operator: Operator, output: int | None = None) -> Build:
    """Pooling to a size that is that of the result."""

    def build(graph: Graph, node: Any, dtype: torch.dtype, size: tuple[int, ...]) -> Slot | None:
        source = graph.saved(node, "_raw_saved_self")
        return source and graph.call(operator, source, [*size[-2:]], output=output)

    return build


OPERATIONS = {
    **MOVES,
    "AdaptiveAvgPool2DBackward0": RecomputeRule("pooling", _adaptive("adaptive_avg_pool2d")),
    "AdaptiveMaxPool2DBackward0": RecomputeRule("pooling", _adaptive(_ATEN.adaptive_max_pool2d, 0)),
    "AddmmBackward0": RecomputeRule("matrix product", _sum_of_product),
    "CloneBackward0": RecomputeRule("copy", of_input(_ATEN.clone)),
    "ConvolutionBackward0": RecomputeRule("convolution", _convolution),
    "CudnnBatchNormBackward0": RecomputeRule("batch norm", _batch_norm),
    "EmbeddingBackward0": RecomputeRule("lookup", _lookup),
    "FusedRmsNormBackward0": RecomputeRule("RMS norm", _rms_norm),
    "LogSoftmaxBackward0": RecomputeRule(
        "softmax", of_input(_ATEN.log_softmax.int, "dim", typed=True)
    ),
    "MaxPool2DWithIndicesBackward0": RecomputeRule(
        "pooling",
        of_saved(
            _ATEN.max_pool2d_with_indices,
            *("kernel_size", "stride", "padding", "dilation", "ceil_mode"),
            output=0,
        ),
    ),
    "MeanBackward1": RecomputeRule("mean", of_input(_ATEN.mean.dim, "dim", "keepdim", typed=True)),
    "NativeBatchNormBackward0": RecomputeRule("batch norm", _batch_norm),
    "NativeDropoutBackward0": RecomputeRule("dropout", _dropout),
    "NativeGroupNormBackward0": RecomputeRule("group norm", _group_norm),
    "NativeLayerNormBackward0": RecomputeRule("layer norm", _layer_norm),
    "SafeSoftmaxBackward0": RecomputeRule(
        "softmax",
        of_input("safe_softmax", "dim", typed=True),
    ),
    "ScaledDotProductCudnnAttentionBackward0": RecomputeRule(
        "attention",
        _attention("attention_cudnn", "attn_bias", compute_log_sumexp=True),
    ),
    "ScaledDotProductEfficientAttentionBackward0": RecomputeRule(
        "attention",
        _attention("attention_efficient", "attn_bias", compute_log_sumexp=True),
    ),
    "ScaledDotProductFlashAttentionBackward0": RecomputeRule(
        "attention",
        _attention("attention_flash"),
    ),
    "ScaledDotProductFlashAttentionForCpuBackward0": RecomputeRule(
        "attention",
        _attention("attention_flash_cpu", "attn_mask"),
    ),
    "SoftmaxBackward0": RecomputeRule("softmax", of_input(_ATEN.softmax.int, "dim", typed=True)),
    "SumBackward1": RecomputeRule(
        "sum", of_input(_ATEN.sum.dim_IntList, "dim", "keepdim", typed=True)
    ),
    "ToCopyBackward0": RecomputeRule("cast", _cast),
}
