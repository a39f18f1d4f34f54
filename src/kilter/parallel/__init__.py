"""Parallel branches: `parallel(branches_or_module)` runs them together, with the same numbers."""

from kilter.act.branches.parallel import Parallel, parallel

__all__ = ["Parallel", "parallel"]
