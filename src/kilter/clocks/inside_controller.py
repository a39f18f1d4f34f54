"""What the controllers of clocks inside the iteration share: the conductor, the joint search, and
the handing over to one clock for the whole job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kilter.clocks.iteration_keys import IterationKeys
from kilter.controller import Controller, Hurried, Run
from kilter.core.errors import DeviceError
from kilter.core.messages import MessagesGone
from kilter.core.reasons import REHEARSAL_CUT
from kilter.core.script_end import ScriptEnd
from kilter.core.section_record import SectionsFound
from kilter.device.sim.cards import profile_of, stand_in_of
from kilter.observe.end_times import Iteration

if TYPE_CHECKING:
    from kilter.clocks.joint_search import JointSearch
    from kilter.clocks.operation_plan import OperationPlan
    from kilter.clocks.plan.section_job import RankOffer
    from kilter.clocks.plan.worth import Worth
    from kilter.clocks.section_plan import RankPlan
    from kilter.clocks.section_process import Conducting
    from kilter.device.sim.profile import Profile

GIVEN_UP = "inside/given-up"
"""With this message a rank says why it has no clocks inside the iteration."""


class InsideController(ABC):
    """At most `max_slowdown` slower. `otherwise` makes the controller of the whole job's clock.
    `rehearse_s`: the real time that a search on simulated devices may take after the script."""

    def __init__(
        self,
        run: Run,
        *,
        max_slowdown: float,
        otherwise: Callable[[], Controller],
        rehearse_s: float,
    ) -> None:
        self._run = run
        self._max_slowdown = max_slowdown
        self._otherwise = otherwise
        self._rehearse_s = rehearse_s
        self._instead: Controller | None = None
        self._why_instead: str | None = None
        self._untold: str | None = None
        """Why the whole job's clock is governed, for the other ranks."""
        self._off = False
        self._told = False
        """It was said that the profile is another device's."""
        self._keys = IterationKeys()
        self._conducting: Conducting | None = None
        self._search: JointSearch | None = None

    @property
    def settled(self) -> bool:
        """Nothing comes after clocks."""
        return True

    def iteration_ended(self, index: int) -> None:
        if not self._off:
            self._keys.iteration_ended(index, self._run.iterations.device)

    def tick(self, finished: Sequence[Iteration], *, settled: bool) -> None:
        if self._untold is not None:
            self._tell(self._untold)
        if self._instead is not None:
            self._instead.tick(finished, settled=settled)
        elif not self._off and settled:
            self._go_on(finished)

    def script_ended(self) -> None:
        """The hooks are those of the iteration clock and of the profiler's window."""
        if self._instead is not None:
            self._instead.script_ended()
        self._off = True
        self._keys.script_ended()

    def end(self, finished: Sequence[Iteration], outcome: ScriptEnd) -> None:
        if self._conducting is not None:
            self._conducting.stop()
        self._keys.close()
        if self._run.fence.down:
            return
        search = self._search
        if search is not None and search.simulated and search.found is None and outcome.finished:
            self._rehearse(search)
        self._record_end()
        if self._instead is not None:
            self._instead.end(finished, outcome)

    @abstractmethod
    def _go_on(self, finished: Sequence[Iteration]) -> None:
        """One tick, while clocks inside the iteration are governed."""

    @abstractmethod
    def _record_end(self) -> None:
        """The script is over: record what came of it."""

    @abstractmethod
    def _follow(self, now: Sequence[int], arms: Sequence[tuple[int, Sequence[int]]]) -> None:
        """See `FollowDepths`."""

    @abstractmethod
    def _give_up(self, subject: str, reason: str) -> None:
        """Set no clocks inside the iteration, and say why."""

    @abstractmethod
    def _is_for_the_whole_job(self, found: SectionsFound) -> bool:
        """Whether one clock for the whole job takes over after this end of the search."""

    @abstractmethod
    def _say(self) -> None:
        """Record what has come of it so far."""

    def _profile(self) -> str | None:
        """The name of the profile to plan with; None: there is none for this device."""
        info = self._run.info
        if info.backend == "sim":
            return info.uuid.split("-")[1]
        name = profile_of(info.name)
        if name is None and (name := stand_in_of(info.name)) is not None and not self._told:
            self._told = True
            self._run.log.notice(f"{info.name} has no profile: planned with that of sim:{name}")
        return name

    def _conduct(self, profile: Profile) -> bool:
        """Start the conductor, unless there is one. False: it cannot be started."""
        if self._conducting is not None:
            return True
        from kilter.clocks.section_process import Conducting

        self._keys.marking = True
        try:
            self._conducting = Conducting(self._run, self._keys.marker, profile.name)
        except DeviceError as error:
            self._give_up("conducting", str(error))
            return False
        self._run.tell_risks()
        return True

    def _notice_ended_conductor(self) -> None:
        """A conductor that has ended on its own sets nothing any more."""
        ended = None if self._conducting is None else self._conducting.look()
        if ended is not None and self._search is not None:
            self._search.refuse(ended)

    def _open_search(self, plan: OperationPlan | RankPlan, offer: RankOffer) -> None:
        """Offer this rank's stretches to the others. One search judges all of a run's plans."""
        from kilter.clocks.joint_search import JointSearch

        messages = self._run.messages()
        if messages is None:
            reason = "the ranks have no process group (any more) to agree through"
            self._give_up("searching clocks inside the iteration", reason)
            return
        self._search = self._search or JointSearch(
            self._run,
            messages,
            plan.card,
            plan.profile.switch,
            max_slowdown=self._max_slowdown,
            follow=self._follow,
        )
        self._search.open(offer)

    def _judge(self, search: JointSearch, finished: Sequence[Iteration]) -> None:
        before = search.found
        try:
            search.tick(finished)
        except MessagesGone as error:
            self._give_up("going on with the other ranks", str(error))
            return
        found = search.found
        if found is before:
            return
        if found is not None and self._is_for_the_whole_job(found):
            self._hand_over(found.reason)
        self._say()

    def _close_search(self) -> None:
        """The iteration is another one: the default clock stands until that is planned for."""
        if self._search is not None:
            self._search.close()
        if self._conducting is not None:
            self._conducting.pause()

    def _of_all_kinds(self, plan: OperationPlan | RankPlan, found: Worth) -> dict[str, Any]:
        """The fields of `ClocksInside`."""
        search, conducting = self._search, self._conducting
        return {
            "t_s": self._run.log.now_s(),
            "summary": plan.summary,
            "planned": bool(found.stretches),
            "stretches": len(found.stretches),
            "longest_s": found.longest_s,
            "break_even_s": plan.card.break_even_s,
            "calibrated": plan.calibrated,
            "saving": found.saving,
            "slowdown": found.slowdown,
            "search": None if search is None else search.found,
            "instead": self._why_instead,
            "blocks": 0 if search is None else search.blocks,
            **({"sets": False} if conducting is None else conducting.told()),
        }

    def _rehearse(self, search: JointSearch) -> None:
        log = self._run.log
        log.rehearsal_begins()
        try:
            search.rehearse(self._rehearse_s, log.rehearsing)
        except Hurried:
            log.refuse("a complete rehearsal", "ended by Ctrl-C", REHEARSAL_CUT)
        log.rehearsal_ended()

    def _another_gave_up(self) -> bool:
        """The ranks set one kind of clocks together: one that has the whole job's, and all have."""
        if self._search is not None and self._search.found is not None:
            return False
        try:
            messages = self._run.messages()
            told = None if messages is None else messages.look(GIVEN_UP)
        except MessagesGone:
            return False  # whoever needs the messages says so
        if told is not None:
            self._hand_over(told.decode())
        return told is not None

    def _tell(self, why: str) -> None:
        """As soon as the ranks have met, and the program iterates."""
        messages = self._run.messages() if self._run.iterations.index >= 0 else None
        if messages is not None:
            self._untold = None
            with suppress(MessagesGone):  # whoever needs the messages says so
                messages.post(GIVEN_UP, why.encode())

    def _hand_over(self, why: str, *, tell: bool = False) -> None:
        """To one clock for the whole job. The conductor lets the device go. `tell`: the other ranks
        do not know it."""
        if tell:
            self._untold = f"rank {self._run.ranks.rank}: {why}"
        self._off = True
        self._keys.marking = False
        if self._conducting is not None:
            self._conducting.stop()
        self._why_instead = why
        self._instead = self._otherwise()
        self._instead.begin()
