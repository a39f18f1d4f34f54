"""One kernel where a recipe would take two: a layer norm from its statistics, cast on the way.

Autograd keeps mean and reciprocal deviation of every row, so a layer norm is recomputed without
summing anything, and the result is written in the type of the cast that follows: 6 bytes an element
are moved instead of 14. As with every recipe, it is used only where a trial found it bitwise equal.
Needs Triton, which PyTorch's CUDA builds for Linux bring along.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from kilter.observe import torch_internals


@functools.cache
def _kernels() -> Any:
    """The kernels; None without Triton."""
    try:
        from kilter.memory.engine import kernels
    except ImportError:
        return None
    return kernels


_refused: list[bool] = []


def refuse() -> None:
    """After an error: from here on only the framework's own operations."""
    _refused.append(True)


def can_normalise(x: torch.Tensor, weight: Any, bias: Any, width: int) -> bool:
    """The kernel is for contiguous float32 rows on a GPU, with both affine parameters."""
    return (
        not _refused
        and x.is_cuda
        and x.dtype is torch.float32
        and x.is_contiguous()
        and weight is not None
        and bias is not None
        and weight.dtype is bias.dtype is torch.float32
        and width <= 2**14
        and _kernels() is not None
    )


def normalised(
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`layer_norm(x).to(dtype)` over the last dimension, from the statistics of its rows."""
    out = torch.empty_like(x, dtype=dtype)
    tensors = (out, x, mean, rstd, weight, bias)
    addresses = [tensor.data_ptr() for tensor in tensors]
    width, index = weight.numel(), x.device.index
    rows = x.numel() // width
    if torch_internals.cuda_device() != index or any(address % ALIGNED for address in addresses):
        _kernels().normalised[(rows,)](*tensors, width, **_shape(width))
        return out
    kernel, block = _loaded(index, dtype, width)
    kernel.run(
        rows, 1, 1, torch_internals.cuda_raw_stream(index),
        kernel.function, kernel.packed_metadata, None, None, None, *addresses, width, block,
    )  # fmt: skip
    return out


ALIGNED = 16
"""Triton tells addresses apart by so many bytes when it compiles."""


def _shape(width: int) -> dict[str, int]:
    block = 1 << (width - 1).bit_length()
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 256))}


@functools.cache
def _loaded(index: int, dtype: torch.dtype, width: int) -> tuple[Any, int]:
    """The kernel, compiled and on the present device. To find it anew for each launch takes Triton,
    and so the host, longer than to launch it."""
    row = torch.empty(width, device=torch.device("cuda", index))
    shape = _shape(width)
    out = row.to(dtype)
    kernel = _kernels().normalised[(1,)](out, row, row, row, row, row, width, **shape)
    return kernel, shape["BLOCK"]
