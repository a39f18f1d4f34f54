"""Attributes of the framework's classes and modules that ours replace for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Replacements:
    """Puts values in the place of attributes, and takes them out again."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Until `undo`; left alone then if somebody has replaced ours in turn."""
        before = vars(owner).get(name)

        def undo() -> None:
            if vars(owner).get(name) is not value:
                return
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        setattr(owner, name, value)
        self._undo.append(undo)

    def undo(self) -> None:
        """Put everything back, the last replacement first. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
