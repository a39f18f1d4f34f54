"""Our own Triton kernels. The modules here import Triton, so they are imported where a kernel is
launched; without Triton the ways that need them are refused or use other kernels."""

from __future__ import annotations

from functools import cache


@cache
def has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
