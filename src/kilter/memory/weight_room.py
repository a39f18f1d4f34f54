"""Memory that is saved by offloading weights between forward and backward: the last resort."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kilter.memory.engine import Swapper
    from kilter.memory.engine.backend import Backend
    from kilter.memory.engine.weights import WeightMover, WeightReport
    from kilter.memory.plan.problem import Link
    from kilter.session.fence import Fence

LEFT_TO_WEIGHTS = 0.5
"""Share of the link to the device, however much state takes: with less, weights would be prefetched
so early that they take the memory that they are to free."""


class WeightRoom:
    """Asks for more weights on the host, a little more each time, until that does not help."""

    def __init__(
        self,
        swapper: Swapper,
        backend: Callable[[], Backend],
        link: Link,
        fence: Fence,
        min_bytes: int,
        *,
        offload: bool,
    ) -> None:
        """`offload`: weights may be offloaded at all."""
        self._swapper = swapper
        self._backend = backend
        self._link = link
        self._fence = fence
        self._min_bytes = min_bytes
        self._offload = offload
        self.kept = False
        """Memory was needed from weights, and they may not be offloaded."""
        self._asked_bytes = 0
        """So much is to be on the host at the end of forward."""
        self.mover: WeightMover | None = None
        self.report: WeightReport | None = None
        """How it stood at the last iteration end."""

    def iteration_ended(self) -> None:
        """Take the report."""
        if self.mover is not None:
            self.report = self.mover.report()

    def before_update(self, parameters: list[torch.Tensor]) -> None:
        """These parameters are about to change."""
        if self.mover is not None:
            self.mover.before_update(parameters)

    def make(self, more_bytes: int, taken: float) -> bool:
        """Have so much more on the host from the next pass on, beside state that takes the share
        `taken` of the way to the device. `False` if no more can be had."""
        from kilter.memory.engine.weights import WeightMover
        from kilter.memory.plan.feedback import slower

        self.kept = not self._offload
        if self.kept:
            return False
        report = self.report
        if report is not None and (not report.moving or report.offloaded_bytes < self._asked_bytes):
            return False  # what was asked for before is not there
        self._asked_bytes += more_bytes
        if self.mover is not None:
            self.mover.make_room(self._asked_bytes)
            return True
        mover = WeightMover(
            self._backend(),
            link=slower(self._link, out=1.0, back=1 / max(LEFT_TO_WEIGHTS, 1 - taken)),
            offloaded_bytes=self._asked_bytes,
            own_hooks=False,
            min_bytes=self._min_bytes,
            changed=self._swapper.forget,
            fence=self._fence,
        )
        mover.__enter__()
        if not self._swapper.hooks.stand_behind(mover.around):
            mover.__exit__(None, None, None)  # the program has put hooks of its own about the loop
            return False
        self.mover = mover
        return True

    def close(self) -> None:
        """Have all weights on the device."""
        if self.mover is not None:
            self._swapper.hooks.stand_behind(lambda pack, unpack: (pack, unpack))
            self.mover.__exit__(None, None, None)
            self.mover = None
