"""Where the present pass is in its plan.

The compiled library sees to the events of a pass by itself, as long as they are those that the
plan expects (`position.h`): a tensor is saved that autograd keeps, or that moves later, or one is
used, or some leave or come back. It calls Python for each copy, to read a recipe for the first
time, to carry it out, and for what is out of the ordinary. Without it the engine looks at each
event.
"""

from __future__ import annotations

import weakref
from enum import IntEnum
from typing import Any

NO_STEPS = b"", b""
"""The engine looks at each event."""


class Position:
    """In Python, where the engine looks at each event. The compiled one also has

    - `save(tensor)`, which gives what autograd holds instead of a tensor that is saved, if that is
      the event that the plan expects, or the engine does not take the tensor; size and address of
      the storage, if the engine takes it; or None: not known;
    - `use(packed)`, which gives the tensor that was saved, if the plan expects that, or it is no
      event; or None: not known.
    """

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event = 0
        """How many events the pass had under its plan."""

    def follow(
        self,
        steps: tuple[bytes, bytes],
        hosts: dict[int, Any],
        recipes: dict[int, Any],
        within: weakref.ref[Any],
        calls: Any,
    ) -> None:
        """From here on these are the steps (`packed_steps`), of this pass, with host memory for
        what they offload and resolved recipes, by number. `calls` are those of modules, where some
        are recomputed, or None."""


class StepKind(IntEnum):
    """What becomes of the tensor at an event of a plan."""

    KEPT = 0
    """Autograd keeps it."""
    TAKEN = 1
    """The engine follows it; no recipe of its own makes it."""
    RECOMPUTED = 2
    """The engine follows it; a recipe of its own makes it."""
