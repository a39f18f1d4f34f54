"""Where the present pass is in its plan.

At most events of a plan nothing moves: a tensor is saved that autograd keeps, or that moves later,
or one is used that is there. The compiled library sees to these *quiet* events by itself, as long
as they are those that the plan expects (`position.h`). Without it the engine looks at each.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple

NO_STEPS = b""
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

    def follow(self, steps: bytes, within: weakref.ref[Any], calls: Any) -> None:
        """From here on these are the steps (`packed_steps`), of this pass. `calls` are those of
        modules, where some are recomputed, or None."""


class StepKind(IntEnum):
    """What happens at an event of a plan."""

    MOVES = 0
    FOLLOWED = 1
    """Nothing moves; the engine follows the tensor."""
    KEPT = 2
    """Nothing moves, and autograd keeps the tensor."""
    TAKEN = 3
    """Nothing moves; the engine follows the tensor, which no recipe of its own makes."""


class PlannedStep(NamedTuple):
    """What the compiled library needs of an event."""

    expected: int
    """The storage's size where a tensor is saved, its `use_code` where it is used."""
    code: int
    """The `use_code` of the tensor."""
    kind: StepKind
    called: bool = False
    """A call is recomputed that makes the tensor."""
    read: bool = False
    """Another tensor is recomputed from it."""
    version: int = 0
    """How often it had been written to before it was saved."""


def packed_steps(steps: Iterable[PlannedStep]) -> bytes:
    """As `position.h` reads them."""
    return b"".join(struct.pack("=6q", *step) for step in steps)
