"""Paths of modules, of which layers that are alike have the same."""

from __future__ import annotations

import functools
import re


@functools.cache
def without_numbers(path: str) -> str:
    """The same for layers that are alike: `layers.*.mlp`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
