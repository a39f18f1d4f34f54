"""The way in which tensors are recomputed now, carried out on the engine and on the models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kilter.core.units import show_time
from kilter.memory.host_time import HostTime
from kilter.memory.iteration_times import IterationTimes
from kilter.memory.kept_calls import KeptCalls
from kilter.memory.kept_recompute import RecomputeWay
from kilter.memory.own_checkpointing import OwnCheckpointing

if TYPE_CHECKING:
    from kilter.memory.engine.engine import Swapper


class WayInForce:
    """Used in the thread whose tensors are governed, between iterations."""

    def __init__(
        self, swapper: Swapper, times: IterationTimes, own: OwnCheckpointing | None, host: HostTime
    ) -> None:
        """`own` is None where checkpointing of the model's own is not to be tried."""
        self._swapper = swapper
        self._times = times
        self._own = own
        self._host = host
        self.way = RecomputeWay.OPERATIONS
        self.models = ""
        """These have checkpointing of their own."""
        self._aside: dict[RecomputeWay, Any] = {}
        """What the engine knows of the passes of ways that are not in force."""

    def looks(self) -> bool:
        """The iteration that begins is looked at for such models. When it is over it is not, and
        they are known."""
        if self._own is None:
            return False
        looks = self._own.look()
        self.models = "" if looks else self._own.found()
        return looks

    def take(self, way: RecomputeWay, share: float, calls: tuple[KeptCalls, ...] = ()) -> None:
        """Go on in this way. The model's own checkpointing covers this share of its blocks; an
        earlier run has chosen these calls."""
        if self._own is not None and RecomputeWay.OWN in (way, self.way):
            if way is RecomputeWay.OWN:
                self._own.switch_on(share)
            else:
                self._own.switch_off()
            known = self._aside.pop(way, None)
            if known is None and way is RecomputeWay.CALLS:
                known = self._aside.pop(RecomputeWay.OPERATIONS, None)
            self._aside[self.way] = self._swapper.exchange(known)
        if RecomputeWay.CALLS in (way, self.way):
            self._swapper.recompute(
                calls=way is RecomputeWay.CALLS, each_s=self._host.of(way), kept=calls
            )
        self.way = way
        self._times.begin_plan()

    def stay(self, why: str, *, on_demand: bool = False) -> str:
        """Nothing changes any more. Gives the sentence that says so; `on_demand` says that
        shapes keep changing."""
        self._aside.clear()
        what = {
            RecomputeWay.CALLS: "calls of modules are recomputed where they pay",
            RecomputeWay.OWN: f"the model's own checkpointing is on ({self.models})",
            RecomputeWay.OPERATIONS: "single operations are recomputed",
        }[self.way]
        if on_demand and self.way is RecomputeWay.OPERATIONS:
            what = "tensors are recomputed by plans or offloaded on demand, as shapes keep changing"
        if self._host.counted_s and self.way is RecomputeWay.OPERATIONS:
            what += f", each counted with {show_time(self._host.counted_s)} of the host's time"
        why_not = "" if self._own is None else self._own.why_not
        return f"{what}: {why}" + (f"; {why_not}" if why_not else "")

    def close(self) -> None:
        """The models are as they were found."""
        if self._own is not None:
            self._own.switch_off()
