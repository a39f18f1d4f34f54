"""One kernel where a recipe would take two: a layer norm from its statistics, cast on the way.

Autograd keeps mean and reciprocal deviation of every row, so a layer norm is recomputed without
summing anything, and the result is written in the type of the cast that follows: 6 bytes an element
are moved instead of 14. As with every recipe, it is used only where a trial found it bitwise equal.
Needs Triton, which PyTorch's CUDA builds for Linux bring along.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from kilter.memory.engine import compiled_recorder
from kilter.observe import torch_internals

kernels: dict[tuple[int, torch.dtype, int, bool], Any] = {}
"""By device, type of the result, width, and whether there are weights: those that the compiled
library can launch."""


def layer_norm(
    x: torch.Tensor,
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    shape: list[int],
    eps: float | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """A layer norm whose statistics are known, in the type of the cast that follows it. Only one
    without weights may do without `eps`. (The library does the same without Python where one of
    the `kernels` is for it: `norm_kernel.h`.)"""
    if len(shape) == 1 and can_normalise(x, weight, bias, shape[0]):
        return normalised(x, mean, rstd, weight, bias, dtype)
    if eps is None:
        return ((x - mean) * rstd).to(dtype)
    return torch.native_layer_norm(x, shape, weight, bias, eps)[0].to(dtype)


def available(device: torch.device) -> bool:
    """Norms on this device can be recomputed from their statistics alone."""
    return not _refused and device.type == "cuda" and _kernels() is not None


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
    kernels.clear()


def can_normalise(x: torch.Tensor, weight: Any, bias: Any, width: int) -> bool:
    """The kernel is for contiguous float32 rows on a GPU, with both affine parameters or none."""
    if not (x.is_cuda and x.dtype is torch.float32 and x.is_contiguous() and width <= 2**14):
        return False
    if weight is None or bias is None:
        return weight is bias and available(x.device)
    return weight.dtype is bias.dtype is torch.float32 and available(x.device)


def normalised(
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`layer_norm(x).to(dtype)` over the last dimension, from the statistics of its rows."""
    out = torch.empty_like(x, dtype=dtype)
    affine = weight is not None
    tensors = (out, x, mean, rstd, x if weight is None else weight, x if bias is None else bias)
    addresses = [tensor.data_ptr() for tensor in tensors]
    width, index = x.shape[-1], x.device.index
    rows = x.numel() // width
    if torch_internals.cuda_device() != index or any(address % ALIGNED for address in addresses):
        _kernels().normalised[(rows,)](*tensors, width, **_shape(width, affine))
        return out
    kernel, block = _loaded(index, dtype, width, affine)
    kernel.run(
        rows, 1, 1, torch_internals.cuda_raw_stream(index),
        kernel.function, kernel.packed_metadata, None, None, None,
        *addresses, width, block, affine,
    )  # fmt: skip
    return out


WARP = 32
"""So many threads."""
ALIGNED = 16
"""Triton tells addresses apart by so many bytes when it compiles."""


def _shape(width: int, affine: bool) -> dict[str, Any]:
    block = 1 << (width - 1).bit_length()
    return {"BLOCK": block, "AFFINE": affine, "num_warps": min(16, max(1, block // 256))}


@functools.cache
def _loaded(index: int, dtype: torch.dtype, width: int, affine: bool) -> tuple[Any, int]:
    """The kernel, compiled and on the present device. To find it anew for each launch takes Triton,
    and so the host, longer than to launch it."""
    row = torch.empty(width, device=torch.device("cuda", index))
    shape = _shape(width, affine)
    out = row.to(dtype, copy=True)
    kernel = _kernels().normalised[(1,)](out, row, row, row, row, row, width, **shape)
    library = compiled_recorder.library()
    if library is not None and width > 1:  # (Triton leaves out a 1.)
        launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
        kernels[index, dtype, width, affine] = library.NormKernel(
            ctypes.cast(launch, ctypes.c_void_p).value,
            kernel.function,
            WARP * kernel.metadata.num_warps,
            kernel.metadata.shared,
            torch_internals.cuda_raw_stream,
        )
    return kernel, shape["BLOCK"]
