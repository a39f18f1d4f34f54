"""Tables of accidents for `kilter bench faults`: what happens to a job, by the name of its row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kilter.core.setting import Setting

Accident = Callable[..., Setting | None]
"""Makes it happen on a box; the settings to be found afterwards, if others than before."""


_Kind = TypeVar("_Kind", bound=Accident)


class Accidents(dict[str, Accident]):
    """Name of the row -> what happens."""

    def row(self, name: str) -> Callable[[_Kind], _Kind]:
        """Takes in a function under this name."""

        def take(accident: _Kind) -> _Kind:
            self[name] = accident
            return accident

        return take
