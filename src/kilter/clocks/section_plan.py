"""The plan for a rank's sections as the last window of the profiler saw them: `RankPlan`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kilter.clocks.plan.sections import RankSections, analyse
from kilter.clocks.plan.switching import Calibration
from kilter.clocks.plan.timing import CommandSchedule, at_depths, schedule
from kilter.clocks.plan.waits import WaitPlan, wait_plan
from kilter.clocks.plan.worth import ClockCosts, Worth, retimed, summary, worth
from kilter.clocks.section_card import card_of
from kilter.core.rank_trace import RankTrace
from kilter.device.sim.profile import Profile, load_profile

SEARCHED_LEVELS = 12
"""Clocks below the default, in equal ratios down to the lowest."""


class RankPlan:
    """Which sections get a lower clock, and the commands for that. `profile`: of the device."""

    def __init__(
        self, profile: str, max_slowdown: float, calibration: Calibration | None = None
    ) -> None:
        self.profile: Profile = load_profile(profile)
        self.calibrated = calibration is not None
        self.card: ClockCosts = card_of(
            self.profile, levels=SEARCHED_LEVELS, calibration=calibration
        )
        self.rank: RankSections | None = None
        self.found: Worth | None = None
        self._max_slowdown = max_slowdown

    def make(self, trace: RankTrace) -> None:
        (self.rank,) = analyse([trace]).ranks
        self.found = worth(self.rank, self.card, max_slowdown=self._max_slowdown)

    def retime(self, trace: RankTrace) -> bool:
        """The same stretches at the times of a newer window. False: they are not there any more,
        or the rank has others to offer where it had none."""
        assert self.found is not None
        before = self.found
        self.make(trace)
        assert self.rank is not None
        if bool(self.found.stretches) != bool(before.stretches):
            return False
        stretches = retimed(before.stretches, self.rank, self.card)
        if stretches is None:
            return False
        self.found = msgspec.structs.replace(self.found, stretches=stretches)
        return True

    def schedule(self, depths: Sequence[int] | None = None) -> CommandSchedule:
        """The commands of every iteration: at the planned clocks, or at these depths."""
        assert self.found is not None
        found = self.found.stretches
        stretches = found if depths is None else at_depths(found, depths, self.card)
        return schedule(stretches, self.card, self.found.iteration_s)

    def waits(self, usual_w: float, *, spent: float, sensor_period_s: float) -> WaitPlan | None:
        """For waits that no window predicts, in a job that draws this power on average and whose
        sections already spend so much of the slowdown."""
        assert self.found is not None
        return wait_plan(
            self.card,
            max_slowdown=self._max_slowdown - spent,
            usual_w=usual_w,
            compute_share=self.found.compute_s / self.found.iteration_s,
            sensor_period_s=sensor_period_s,
        )

    @property
    def stretches(self) -> bool:
        return self.found is not None and bool(self.found.stretches)

    @property
    def summary(self) -> str:
        assert self.found is not None
        return summary([self.found], self.card)
