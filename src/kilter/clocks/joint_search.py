"""This rank's part of the search for section clocks in a running job, with what it needs of the
job: a meter of iterations, rank 0's lead, and the settings that are kept for the next run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from kilter.clocks.actuator import DeviceActuator
from kilter.clocks.plan.guard import Contract
from kilter.clocks.plan.section_job import RankOffer
from kilter.clocks.plan.section_search import SearchTarget
from kilter.clocks.plan.worth import ClockCosts
from kilter.clocks.section_agreement import FollowDepths, SectionAgreement
from kilter.clocks.section_leader import SectionLeader
from kilter.clocks.section_meters import IterationMeter, SimulatedMeter
from kilter.clocks.section_rehearsal import SimulatedRank, SimulatedRanks
from kilter.clocks.section_store import SectionStore
from kilter.controller import Run
from kilter.core.errors import FileError
from kilter.core.messages import RankMessages
from kilter.core.section_record import SectionsFound
from kilter.device.sim.profile import Switch
from kilter.observe.end_times import Iteration


class JointSearch:
    """`open` with a window's sections, then `tick`. A new `open` begins a new search."""

    def __init__(
        self,
        run: Run,
        messages: RankMessages,
        card: ClockCosts,
        switch: Switch,
        *,
        max_slowdown: float,
        follow: FollowDepths,
    ) -> None:
        self._run = run
        self._messages = messages
        self._card = card
        self._switch = switch
        self._contract = Contract(max_slowdown=max_slowdown)
        self._follow_clocks = follow
        self._store = SectionStore(os.environ)
        self._generation = -1
        self._agreement: SectionAgreement | None = None
        self._leader: SectionLeader | None = None
        self._meter: IterationMeter | SimulatedMeter | None = None
        self._rehearsed: SectionsFound | None = None
        self._index = -1
        """This is the last iteration whose time is known."""

    @property
    def simulated(self) -> bool:
        return self._run.info.backend == "sim"

    @property
    def found(self) -> SectionsFound | None:
        """What is held; None while the search is not over."""
        return self._rehearsed or (None if self._agreement is None else self._agreement.found)

    @property
    def open_and_undecided(self) -> bool:
        """Blocks are being tried out."""
        return self._agreement is not None and self._agreement.found is None

    @property
    def own(self) -> tuple[int, ...]:
        """The depths of this rank's stretches that stand."""
        assert self._agreement is not None
        return self._agreement.own

    @property
    def blocks(self) -> int:
        """That rank 0 has judged so far."""
        return 0 if self._leader is None else self._leader.blocks

    @property
    def reopened(self) -> bool:
        """A rank has seen that the sections are others now."""
        return self._agreement is not None and self._agreement.reopened

    def open(self, offer: RankOffer) -> None:
        """Offer what this rank could slow down."""
        run = self._run
        self._generation += 1
        if run.ranks.rank == 0:
            self._leader = SectionLeader(
                self._card,
                self._contract,
                device=f"{run.info.name}, driver {run.info.driver}",
                saved=self._saved,
                save=self._save,
                seed=self._generation,
            )

        def meter(targets: Sequence[SearchTarget]) -> IterationMeter | SimulatedMeter:
            if self.simulated:
                simulated = SimulatedRank(offer, targets, self._card, self._switch)
                self._meter = SimulatedMeter(simulated, (0,) * len(offer.keys))
            else:
                assert run.sampler is not None
                sensors = DeviceActuator(run.sampler, run.info, run.iterations)
                self._meter = IterationMeter(sensors.mean_power_w)
            return self._meter

        self._meter = None
        self._agreement = SectionAgreement(
            self._messages,
            offer,
            generation=self._generation,
            world_size=run.ranks.world_size,
            meter=meter,
            follow=self._follow,
            leader=self._leader,
        )

    def close(self) -> None:
        """The sections are others now: tell all ranks, and search no more until `open`."""
        if self._agreement is not None:
            self._agreement.reopen()
        self._agreement = self._leader = self._meter = None

    def refuse(self, why: str) -> None:
        """This rank sets nothing any more."""
        if self._agreement is not None:
            self._agreement.refused = why

    def tick(self, finished: Sequence[Iteration]) -> None:
        """Take the iterations whose times have become known, and go on as far as possible."""
        for iteration in finished:
            self._index = iteration.index
            if self._meter is not None:
                self._meter.iteration(iteration)
        if self._agreement is not None:
            self._agreement.step(self._index, self._run.iterations.index)

    def rehearse(self, seconds: float, progress: Callable[[float], None]) -> None:
        """The script is over: on rank 0 of a simulated job, go on for so long without it."""
        leader = self._leader
        if leader is None or not leader.offers:
            return
        ranks = SimulatedRanks(leader.offers, leader.targets, self._card, self._switch)
        end_s = time.monotonic() + seconds

        def goes_on() -> bool:
            progress(ranks.now_s)
            return time.monotonic() < end_s

        self._rehearsed = leader.rehearse(ranks, goes_on)

    def _follow(self, now: Sequence[int], arms: Sequence[tuple[int, Sequence[int]]]) -> None:
        assert self._meter is not None
        self._meter.follow(now, arms)
        self._follow_clocks(now, arms)

    def _saved(self, signature: str) -> SectionsFound | None:
        try:
            return self._store.load(signature)
        except FileError as error:
            self._run.log.refuse("using the settings of an earlier run", str(error))
            return None

    def _save(self, signature: str, found: SectionsFound) -> None:
        try:
            self._store.save(signature, found)
        except FileError as error:
            self._run.log.refuse("keeping the settings for the next run", str(error))
