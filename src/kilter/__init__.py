"""kilter keeps GPU training and inference in kilter. See `kilter --help` or the README.

    import kilter

    with kilter.govern(max_slowdown=0.02):
        train()

The names are imported when they are used: `import kilter` costs nothing and changes nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kilter.app.govern import govern
    from kilter.connect.accelerate import AccelerateCallback as AccelerateCallback
    from kilter.connect.huggingface import HuggingFaceCallback as HuggingFaceCallback
    from kilter.connect.lightning import LightningCallback as LightningCallback
    from kilter.connect.share import share
    from kilter.memory.divided import divided
    from kilter.memory.size import size
    from kilter.parallel.calls import parallel

__version__ = "0.1.0"
__all__ = ["__version__", "divided", "govern", "parallel", "share", "size"]
"""It is without the callbacks: `from kilter import *` must not ask for frameworks that are not
there."""

_HOMES = {
    "AccelerateCallback": "kilter.connect.accelerate",
    "HuggingFaceCallback": "kilter.connect.huggingface",
    "LightningCallback": "kilter.connect.lightning",
    "divided": "kilter.memory.divided",
    "govern": "kilter.app.govern",
    "parallel": "kilter.parallel.calls",
    "share": "kilter.connect.share",
    "size": "kilter.memory.size",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kilter' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
