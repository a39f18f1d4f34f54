"""Bytes that a framework operation moves, estimated from the shapes and types of its inputs. Pure.

The profiler records inputs, not outputs. Read: every input tensor once. Written: what the rules
below say of the operation, else as much as its largest input. Views move nothing. Caches and
fused kernels move less than this, padded and strided ones more: it is the compulsory traffic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

_SIZES = {
    "double": 8, "long int": 8, "long": 8, "int64_t": 8, "unsigned long": 8,
    "float": 4, "int": 4, "unsigned int": 4,
    "c10::complex<float>": 8, "c10::complex<double>": 16,
    "c10::Half": 2, "c10::BFloat16": 2, "short": 2, "short int": 2,
    "unsigned char": 1, "signed char": 1, "char": 1, "bool": 1,
    "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1,
}  # fmt: skip
_DEFAULT_SIZE = 4

_VIEWS = {
    "alias", "as_strided", "as_strided_", "chunk", "contiguous", "detach", "detach_", "diagonal",
    "expand", "expand_as", "flatten", "item", "is_nonzero", "lift_fresh", "narrow", "numpy_T",
    "_local_scalar_dense", "permute", "reshape", "reshape_as", "resolve_conj", "resolve_neg",
    "result_type", "select", "set_", "size", "slice", "split", "split_with_sizes", "squeeze",
    "squeeze_", "stride", "swapaxes", "t", "t_", "transpose", "transpose_", "unbind", "unflatten",
    "unsafe_split", "unsqueeze", "unsqueeze_", "view", "view_as", "view_as_complex",
    "view_as_real", "_reshape_alias", "_unsafe_view", "resize_", "empty", "empty_like",
    "empty_strided", "new_empty", "new_empty_strided", "record_stream", "to", "dropout",
}  # fmt: skip
"""`to` and `dropout` only wrap the operations that do the work, or do nothing."""
_REDUCTIONS = {
    "sum", "mean", "max", "min", "amax", "amin", "norm", "linalg_vector_norm", "argmax", "argmin",
    "any", "all", "nll_loss_forward", "nll_loss", "nll_loss_nd", "var", "std", "prod",
    "_foreach_norm", "mse_loss",
}  # fmt: skip
_GATHERS = {"embedding", "index_select", "gather", "index", "take"}


def bytes_moved(name: str, shapes: Sequence[Any], types: Sequence[Any]) -> float:
    """Bytes read plus bytes written by `name` ("aten::addmm"), 0 for views and unknown shapes.

    `shapes` and `types` are Kineto's "Input Dims" and "Input type": per input its dimensions,
    or a list of such for a list of tensors, and the C++ name of its element type.
    """
    operation = name.partition("::")[2]
    if operation in _VIEWS:
        return 0.0
    inputs = [_input(s, t) for s, t in zip(shapes, types, strict=False)]
    inputs = [size for size in inputs if size > 0.0]
    if not inputs:
        return 0.0
    if operation in _GATHERS and len(shapes) > 1:
        return _gathered(shapes, types)
    return sum(inputs) + _written(operation, inputs, shapes, types)


def _written(
    operation: str, inputs: list[float], shapes: Sequence[Any], types: Sequence[Any]
) -> float:
    if operation in _REDUCTIONS:
        return 0.0
    if operation == "copy_":
        return 0.0  # The destination is one of the inputs and is not read.
    if operation in ("cat", "stack"):
        return sum(inputs)
    if operation.startswith("_fused_"):
        return inputs[0] + sum(inputs[2:])  # Parameters and state; gradients are only read.
    product = _product(operation, shapes)
    if product is not None:
        return math.prod(product) * _size(types[0])
    if operation == "convolution_backward":
        return sum(inputs[1:3])  # The gradients of the input and of the weight.
    if operation == "embedding_dense_backward" or operation.endswith("_"):
        return inputs[0]
    return max(inputs)


def _product(operation: str, shapes: Sequence[Any]) -> list[int] | None:
    """The shape of a matrix product or a convolution without padding's fine print."""
    if operation in ("mm", "bmm", "matmul", "linear"):
        a, b = shapes[0], shapes[1]
    elif operation in ("addmm", "baddbmm"):
        a, b = shapes[1], shapes[2]
    else:
        return None
    if len(a) < 1 or len(b) < 2:
        return None
    return [*a[:-1], b[0] if operation == "linear" else b[-1]]


def _gathered(shapes: Sequence[Any], types: Sequence[Any]) -> float:
    """Indices are read, and as many rows of the table are read and written."""
    table = shapes[0]
    index = next((s for s in shapes[1:] if isinstance(s, list) and s), [])
    rows = math.prod(_flat(index))
    row = math.prod(table[1:]) if len(table) > 1 else 1
    return rows * (8.0 + 2.0 * row * _size(types[0]))


def _input(shape: Any, kind: Any) -> float:
    if not isinstance(shape, list) or not _is_tensor(shape, kind):
        return 0.0
    if shape and isinstance(shape[0], list):
        return sum(math.prod(s) for s in shape) * _size(kind)
    return math.prod(shape) * _size(kind)


def _is_tensor(shape: list[Any], kind: Any) -> bool:
    return bool(shape) and kind not in ("", "Scalar", "ScalarList", "GenericList", "Device")


def _flat(shape: list[Any]) -> list[int]:
    return shape[0] if shape and isinstance(shape[0], list) else shape


def _size(kind: Any) -> int:
    return _SIZES.get(kind, _DEFAULT_SIZE)
