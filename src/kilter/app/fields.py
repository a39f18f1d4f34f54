"""Fields that one value takes over from another one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def taken(value: object, names: Iterable[str]) -> dict[str, Any]:
    """The attributes of these names, for a value or a JSON object that has them as well."""
    return {name: getattr(value, name) for name in names}
