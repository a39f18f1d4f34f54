"""One kernel where a recipe would take two: a layer norm from its statistics, cast on the way.

Autograd keeps mean and reciprocal deviation of every row, so a layer norm is made again without
summing anything, and the result leaves in the type of the cast that follows: 6 bytes an element
move instead of 14. As with every recipe, it is used only where a trial found it bitwise equal.
Needs Triton, which PyTorch's CUDA builds for Linux bring along.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@functools.cache
def _kernels() -> Any:
    """The kernels; None without Triton."""
    try:
        from kilter.act.swapper import kernels
    except ImportError:
        return None
    return kernels


def can_normalise(x: torch.Tensor, weight: Any, bias: Any, width: int) -> bool:
    """The kernel is for contiguous float32 rows on a GPU, with both affine parameters."""
    import torch

    return (
        x.is_cuda
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
    import torch

    width = weight.numel()
    out = torch.empty_like(x, dtype=dtype)
    block = 1 << (width - 1).bit_length()
    warps = min(16, max(1, block // 256))
    _kernels().normalised[(x.numel() // width,)](
        out, x, mean, rstd, weight, bias, width, BLOCK=block, num_warps=warps
    )
    return out
