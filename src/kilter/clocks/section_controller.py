"""The controller of sections: learns a rank's communication sections, and has clocks set in them.

    profiler window -> sections -> plan -> commands -> conductor's process -> lease -> device
    process groups' numbers (cheap) -> has the sequence of collectives changed? -> a new window

Each rank plans for its own device from what it sees itself, and the ranks agree by messages through
the job's key-value store; no collective is added.
Between two windows the program's thread does two things per iteration: it reads the numbers of its
process groups, and, while there is a conductor, moves the marker or has its GPU's stream move it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from kilter.clocks.inside_controller import InsideController
from kilter.clocks.own_gpu import why_not_this_gpu
from kilter.clocks.section_windows import SectionWindows
from kilter.controller import Controller, Run
from kilter.core.codec import write_atomically
from kilter.core.errors import FileError
from kilter.core.events import Sectioned
from kilter.core.rank_trace import WINDOW_FILE, RankTrace
from kilter.core.reasons import CLOCKS_REFUSED
from kilter.core.script_end import ScriptEnd
from kilter.core.section_record import SectionsFound
from kilter.device.sim.cards import names
from kilter.observe.end_times import Iteration

if TYPE_CHECKING:
    from kilter.clocks.plan.section_job import RankOffer
    from kilter.clocks.plan.switching import Calibration
    from kilter.clocks.plan.waits import WaitPlan
    from kilter.clocks.section_plan import RankPlan

UNKNOWN_SENSOR_PERIOD_S = 1.0
"""A device that does not say is taken to be as slow as a power averaged over a second."""
WINDOW_FAILURES = 3
"""After so many windows without a trace nothing more is tried."""


class SectionsController(InsideController):
    """The sections of one rank.

    A device that may be set: the ranks search together (`JointSearch`), and what is found is held.
    Otherwise the plan of each rank is written down by its conductor as it stands. The whole job's
    clock takes over where that is expected to pay more; unless the user `asked` for sections, it
    takes over wherever no section gets a lower clock.
    """

    def __init__(
        self,
        run: Run,
        *,
        max_slowdown: float,
        otherwise: Callable[[], Controller],
        asked: bool,
        rehearse_s: float,
    ) -> None:
        super().__init__(run, max_slowdown=max_slowdown, otherwise=otherwise, rehearse_s=rehearse_s)
        self._asked = asked
        self._given_up = False
        self._plan: RankPlan | None = None
        self._windows = SectionWindows()
        self._usual_w = 0.0
        """The job's mean power, as far as known."""

    def begin(self) -> None:
        if self._run.dry_run or self._run.info.can_set:
            return
        reason = self._run.info.refusal or "this device cannot be set"
        if self._asked:
            self._run.log.refuse("setting clocks", reason, CLOCKS_REFUSED)
        else:
            self._hand_over(reason, tell=True)  # the whole job's controller refuses it, too

    def _go_on(self, finished: Sequence[Iteration]) -> None:
        if self._plan is None:
            self._plan = self._begin_planning()
        if self._plan is None or (not self._asked and self._another_gave_up()):
            return
        self._notice_ended_conductor()
        if self._keys.failed is not None:
            self._give_up("marking iterations for the conductor", self._keys.failed)
            return
        self._observe(self._plan)
        if self._search is not None and not self._off:
            self._judge(self._search, finished)

    def end(self, finished: Sequence[Iteration], outcome: ScriptEnd) -> None:
        if self._keys.failed is not None and not self._given_up:
            self._run.log.refuse("marking iterations for the conductor", self._keys.failed)
        super().end(finished, outcome)

    def _record_end(self) -> None:
        if self._plan is not None and self._plan.found is not None:
            self._say()
        elif self._instead is None and not self._given_up:
            subject = "looking for sections" if self._asked else "governing"
            self._run.log.refuse(subject, self._why_unseen())

    # Steps ----------------------------------------------------------------------------------

    def _begin_planning(self) -> RankPlan | None:
        """Once the program iterates; None before, and where nothing can be planned."""
        run = self._run
        if run.iterations.index < 0:
            return None
        from kilter.clocks.section_plan import RankPlan  # imports numpy

        refused = why_not_this_gpu(run.info, run.iterations.gpu_uuid)
        if refused is not None and not self._asked:
            self._hand_over(refused, tell=True)  # as above
            return None
        if refused is not None:
            self._give_up("setting clocks", refused, CLOCKS_REFUSED)
            return None
        name = self._profile()
        if name is None:
            known = ", ".join(f"sim:{each}" for each in names())
            self._give_up(
                "looking for sections",
                f"how fast {run.info.name} changes its clocks is not known: --device {known}",
            )
            return None
        return RankPlan(name, self._max_slowdown, self._switches())

    def _switches(self) -> Calibration | None:
        """The device's own switch times, where somebody has measured and kept them."""
        from kilter.clocks.section_store import SectionStore

        try:
            return SectionStore(os.environ).switches(self._run.info)
        except FileError as error:
            self._run.log.refuse("using the measured switch times", str(error))
            return None

    def _observe(self, plan: RankPlan) -> None:
        """Windows of the profiler: at the start, after a change, and now and then while nothing is
        tried out, which they would disturb."""
        search = self._search
        searching = search is not None and search.open_and_undecided
        seen = self._windows.take(self._run, self._keys.marked_s)
        if seen is not None:
            self._take(plan, seen)
        elif self._windows.failures >= WINDOW_FAILURES:
            self._give_up("observing sections", self._windows.why_not)
        elif not self._windows.open and (
            self._keys.changed or (search is not None and search.reopened)
        ):
            self._reopen()
        elif self._windows.due(self._run) and not searching:
            self._windows.begin(self._run)

    def _take(self, plan: RankPlan, trace: RankTrace) -> None:
        """A window has been read: plan anew, and hold the commands so far against it."""
        path = self._run.files.directory / WINDOW_FILE.format(rank=self._run.ranks.rank)
        write_atomically(path, msgspec.json.encode(trace))
        if self._conducting is not None:
            self._conducting.compare(trace)
        search = self._search
        if search is not None and search.found is not None:
            self._keys.accept()
            if not plan.retime(trace):
                self._reopen()
            elif self._conducting is not None:
                self._conducting.follow(plan.schedule(search.own), waits=self._waits(plan))
            return
        plan.make(trace)
        self._keys.accept()
        search_first = self._run.info.can_set and not self._run.dry_run
        waits = None if search_first else self._waits(plan)
        wanted = plan.stretches or waits is not None
        if wanted and not self._conduct(plan.profile):
            return
        if search_first:
            self._open_search(plan, self._offer(plan))
        elif self._conducting is not None:
            self._conducting.follow(plan.schedule(), waits=waits)
        self._say()

    def _waits(self, plan: RankPlan) -> WaitPlan | None:
        """What to do in long waits; None: nothing. A simulated device in the conductor's process
        does not see the program's load, so its power says nothing about waits."""
        run = self._run
        ends_s = list(self._keys.marked_s.values())  # at once: the program's thread adds to them
        if run.info.backend != "nvml" or run.sampler is None or not ends_s:
            return None
        mean_w = run.sampler.record.mean_power_w(min(ends_s), max(ends_s))
        # Low clocks and long waits make later means smaller, and the job computes as it did.
        self._usual_w = max(self._usual_w, mean_w or 0.0)
        return plan.waits(
            self._usual_w,
            spent=self._spent(plan),
            sensor_period_s=run.info.sensor_period_s or UNKNOWN_SENSOR_PERIOD_S,
        )

    def _spent(self, plan: RankPlan) -> float:
        """Of the slowdown, by the sections whose clocks are held, or would be."""
        assert plan.found is not None
        found = None if self._search is None else self._search.found
        if found is None:
            return plan.found.slowdown
        if not found.held:
            return 0.0
        ratio = found.time_ratio
        return plan.found.slowdown if ratio is None else max(0.0, ratio - 1.0)

    def _offer(self, plan: RankPlan) -> RankOffer:
        assert plan.rank is not None
        assert plan.found is not None
        from kilter.clocks.plan.section_job import offer_of  # imports numpy

        return offer_of(plan.rank, plan.found, self._run.iterations.role)

    def _follow(self, now: Sequence[int], arms: Sequence[tuple[int, Sequence[int]]]) -> None:
        plan = self._plan
        if plan is None:
            return
        found = None if self._search is None else self._search.found
        # Not while blocks are tried out, and not where the conductor is about to be stopped.
        held = found is not None and found.taken != "whole job"
        waits = self._waits(plan) if held else None
        if self._conducting is None and (waits is None or not self._conduct(plan.profile)):
            return
        assert self._conducting is not None
        from kilter.clocks.plan.timing import ScheduleArm

        later = [ScheduleArm(first=first, schedule=plan.schedule(depths)) for first, depths in arms]
        self._conducting.follow(plan.schedule(now), later, waits)

    def _is_for_the_whole_job(self, found: SectionsFound) -> bool:
        return found.taken == "whole job" or (found.taken == "default" and not self._asked)

    def _reopen(self) -> None:
        """The collectives are not those that were planned for."""
        self._keys.forget()
        self._close_search()
        self._windows.begin(self._run)

    def _say(self) -> None:
        plan = self._plan
        if plan is None or plan.found is None:
            return
        conducting = self._conducting
        self._run.log(
            Sectioned(
                **self._of_all_kinds(plan, plan.found),
                exposed_share=plan.found.exposed_share,
                windows=self._windows.count,
                reopened=self._keys.reopened,
                collectives=self._keys.collectives,
                window_iteration_s=plan.found.iteration_s,
                iteration_s=self._run.iterations.usual_s,
                window_cost_s=self._windows.cost_s,
                key_cost_s=self._keys.cost_s,
                **({} if conducting is None else conducting.told_of_sections()),
            )
        )

    def _give_up(self, subject: str, reason: str, code: str | None = None) -> None:
        self._off = self._given_up = True
        if self._conducting is not None:
            self._conducting.pause()
        self._run.log.refuse(subject, reason, code)
        if not self._asked:
            self._hand_over(reason, tell=True)

    def _why_unseen(self) -> str:
        if self._plan is None:
            return self._run.too_few(1)
        if self._windows.why_not:
            return self._windows.why_not
        if self._run.iterations.index + 1 < self._windows.needed:
            return self._run.too_few(self._windows.needed)
        return "the script ended before a window of the profiler was read"
