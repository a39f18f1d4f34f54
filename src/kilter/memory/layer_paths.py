"""Paths of modules without the numbers of layers."""

from __future__ import annotations

import functools
import re


@functools.cache
def without_numbers(path: str) -> str:
    """`layers.*.mlp` for `layers.3.mlp`: the same for layers that are alike."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
