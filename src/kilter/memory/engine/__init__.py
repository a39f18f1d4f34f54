"""Applies a memory schedule to a running PyTorch job. Results never depend on the schedule.

`engine` is called by the saved-tensor hooks, `backend` moves bytes (CUDA, or a stand-in on the
CPU), `recompute` knows how a saved tensor can be recomputed from others.
"""

# First, and whole: who waits for torch to be imported imports modules of this package then.
import torch  # noqa: F401

from kilter.memory.engine.backend import Backend, CpuStandIn
from kilter.memory.engine.engine import Swapper, SwapReport

__all__ = ["Backend", "CpuStandIn", "SwapReport", "Swapper"]
