"""Below what weights, gradients and optimizer state take: lets gradients and state move as well.

The swapper alone cannot go below the floor of its plans. Here it is decided, from what was
observed, how much of the rest has to go: first the gradients are used up as they arrive, where
nothing forbids it; if that is not enough, so much optimizer state is moved as is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kilter.act.fence import Fence
from kilter.core.units import show_bytes

if TYPE_CHECKING:
    from kilter.act.swapper import Swapper
    from kilter.act.swapper.backend import Backend
    from kilter.act.swapper.state import StateMover, StateReport
    from kilter.plan.swap.problem import Link

SLACK = 0.1
"""More state goes than what is missing, as a share of it: buckets are whole."""
FREE_SHARE = 0.02
"""Of an iteration: waiting for state that may be had for the room that it leaves."""
SETTLES = 8
"""Borders after which what the gradients' end has brought is known."""


class Floor:
    """Brings the swapper's floor down to the budget, as far as that goes."""

    def __init__(
        self,
        swapper: Swapper,
        backend: Callable[[], Backend],
        link: Link,
        fence: Fence,
        gradients: str = "auto",
    ) -> None:
        self._swapper = swapper
        self._backend = backend
        self._link = link
        self._fence = fence
        self._gradients = gradients
        self._mover: StateMover | None = None
        self._borders = 0
        self.report: StateReport | None = None
        """How it stood at the last border: optimizers may be gone at the end."""

    def border(self) -> None:
        """An iteration has ended."""
        self._borders += 1
        if self._mover is not None:
            self.report = self._mover.report()

    def lower(self, missing_bytes: int, iteration_s: float) -> None:
        """Between passes: the budget is missed by so much, and an iteration takes so long."""
        mover, report = self._mover, self.report
        if mover is None:
            self._open()
        elif report is not None and mover.room_bytes is None and self._borders > SETTLES:
            room_bytes = report.state_bytes - int((1 + SLACK) * missing_bytes)
            if report.consuming:  # then what streams for free streams: the swapper has more room
                free_bytes = mover.least_room_bytes(stall_s=FREE_SHARE * iteration_s)
                room_bytes = min(room_bytes, free_bytes)
            if room_bytes > 0:
                mover.room_bytes = room_bytes

    def close(self) -> None:
        """Bring everything home."""
        if self._mover is not None:
            self._mover.__exit__(None, None, None)
            self._mover = None

    @property
    def exhausted(self) -> bool:
        """There is nothing left to try."""
        return self.room_bytes is not None or self._borders > 3 * SETTLES

    @property
    def room_bytes(self) -> int | None:
        """Optimizer state that stays on the device; None: all of it."""
        return None if self._mover is None else self._mover.room_bytes

    def _open(self) -> None:
        from kilter.act.swapper.state import StateMover

        self._borders = 0
        mover = StateMover(
            self._backend(),
            link=self._link,
            gradients=self._gradients,
            before_update=self._swapper.before_update,
            changed=self._swapper.forget,
            fence=self._fence,
        )
        mover.__enter__()
        self._mover = mover


def words(report: StateReport) -> str:
    """What became of gradients and state."""
    parts = []
    if report.consuming:
        parts.append(f"gradients are used up as they arrive ({show_bytes(report.gradient_bytes)})")
    if report.away_bytes:
        parts.append(f"{show_bytes(report.away_bytes)} of optimizer state wait on the host")
    return ", ".join(parts) or "gradients and optimizer state stay"
