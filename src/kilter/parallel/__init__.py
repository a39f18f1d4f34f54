"""Parallel branches: independent pieces of a model run together, with the numbers of the loop.

This package has the name of the public function `kilter.parallel`, and Python binds a package to
its name in the parent when the package is imported. The package can therefore be called like the
function. Importing it imports no torch: `plan` is pure.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kilter.parallel.calls import Parallel, parallel

__all__ = ["Parallel", "parallel"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("kilter.parallel.calls"), name)


class _CallablePackage(types.ModuleType):
    def __call__(self, *branches: Any, **options: Any) -> Parallel:
        """See `kilter.parallel.calls.parallel`."""
        from kilter.parallel.calls import parallel

        return parallel(*branches, **options)


sys.modules[__name__].__class__ = _CallablePackage
