"""Where the present pass is in its plan.

At most events of a plan nothing is copied: a tensor is saved that autograd keeps, or that moves
later, or one is used that is there, or tensors leave that are recomputed alone. The compiled
library sees to these *quiet* events by itself, as long as they are those that the plan expects
(`position.h`). Without it the engine looks at each.
"""

from __future__ import annotations

import weakref
from enum import IntEnum
from typing import Any

NO_STEPS = b"", b""
"""No event is quiet."""


class Position:
    """In Python, where none is quiet. The compiled one also has

    - `save(tensor)`, which gives what autograd holds instead of a tensor that is saved, if that is
      a quiet event, or the engine does not take the tensor; size and address of the storage, if
      the engine takes it; or None: not known;
    - `use(packed)`, which gives the tensor that was saved, if this is a quiet event, or none; or
      None: not known.
    """

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event = 0
        """How many events the pass had under its plan."""

    def follow(self, steps: tuple[bytes, bytes], within: weakref.ref[Any], calls: Any) -> None:
        """From here on these are the steps (`packed_steps`), of this pass. `calls` are those of
        modules, where some are recomputed, or None."""


class StepKind(IntEnum):
    """What happens at an event of a plan."""

    MOVES = 0
    """Something is copied, or leaves for a call that is recomputed."""
    RECOMPUTED = 1
    """The engine follows the tensor, which a recipe of its own makes."""
    KEPT = 2
    """Autograd keeps the tensor."""
    TAKEN = 3
    """The engine follows the tensor, which no recipe of its own makes."""
