"""Every test on a GPU begins with a device that holds nothing of the tests before it."""

from __future__ import annotations

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def _empty_device() -> None:
    if torch.cuda.is_available():
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each stream that was used
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
