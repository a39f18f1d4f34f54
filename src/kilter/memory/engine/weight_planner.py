"""When a plan for weights is made, from passes that were watched and from what came too late."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kilter.memory.engine.backend import Backend
from kilter.memory.engine.moved_weight import MovedWeight
from kilter.memory.engine.weight_pass import Tick, WeightPass
from kilter.memory.plan.problem import Link
from kilter.memory.plan.weights import Weight, WeightPlan, plan_weights

WATCHED_PASSES = 2
"""So many passes of one kind are watched before weights are offloaded."""
TIMED_PASSES = 4
"""So many passes under a plan are timed as well, before it is made anew with their times."""


class WeightSchedule(NamedTuple):
    """A plan, with the weights that are offloaded and prefetched at each tick."""

    plan: WeightPlan
    release: dict[Tick, list[MovedWeight]]
    load: dict[Tick, list[MovedWeight]]


class WeightPlanner:
    """Follows the passes, times those of the kind that repeats, and has the plan for that kind."""

    def __init__(self, backend: Backend, link: Link, offloaded_bytes: int) -> None:
        self._backend = backend
        self._link = link
        self._offload_bytes = offloaded_bytes
        self.present = WeightPass()
        self.schedule: WeightSchedule | None = None
        self._anew = False
        """After the next step a plan is made."""
        self._kind: tuple[tuple[Tick, ...], int] | None = None
        """Of the kind of pass that repeats, it has the ticks, and the first of backward among
        them."""
        self._seen = 0
        """So many passes were of this kind."""
        self._gaps_s: list[float] = []
        """They are the shortest times between ticks; the last one is up to the next pass."""
        self._timed = 0
        """So many passes ran under a plan."""

    def make_room(self, offloaded_bytes: int) -> None:
        """From the next pass on, have `offloaded_bytes` offloaded at the end of forward."""
        self._offload_bytes = offloaded_bytes
        self._anew = True

    def late(self, weight: MovedWeight) -> bool:
        """A weight is needed that is not being prefetched: the next plan prefetches it in time.
        `True` if forward needs it in two passes one after the other: it stays from now on."""
        present, use = self.present, weight.use
        if present.turn is not None:
            now = len(present.ticks)
            use.needed_at = now if use.needed_at is None else min(now, use.needed_at)
        elif use.asked_in == present.number - 1:
            weight.stays = True
        else:
            use.asked_in = present.number
            return False
        self._anew = True
        return weight.stays

    def begin_pass(self) -> None:
        """The first module of a forward has run."""
        planned = self.schedule is not None
        if self.present.timed and self.present.turn is not None and self.present.steps:
            self._learn(self.present.turn, planned=planned)
        self.present.begin(timed=not planned or self._timed < TIMED_PASSES)

    def _learn(self, turn: int, *, planned: bool) -> None:
        """A pass has ended: take its times."""
        done, end = self.present, self._backend.mark()
        kind = tuple(done.ticks), turn
        if kind != self._kind:
            if planned:
                return
            self._kind, self._seen, self._gaps_s = kind, 0, []
        if self._seen == 0:
            self._seen = 1  # the first makes whatever is made once
            return
        marks = zip(done.marks, [*done.marks[1:], end], strict=True)
        gaps_s = [self._backend.elapsed_s(*pair) for pair in marks]
        self._gaps_s = [min(pair) for pair in zip(gaps_s, self._gaps_s or gaps_s, strict=True)]
        self._seen += 1
        self._timed += planned
        self._anew |= not planned or self._timed == TIMED_PASSES

    def is_due(self) -> bool:
        """Whether a plan is to be made, between two passes."""
        return self._anew and self._seen >= WATCHED_PASSES

    def plan(
        self, weights: Iterable[MovedWeight], used_by: Mapping[int, Sequence[MovedWeight]]
    ) -> WeightSchedule:
        """Make it, for these weights. `used_by` has those of each module."""
        self._anew = False
        assert self._kind is not None
        ticks, turn = self._kind
        at_s = [0.0]
        for gap_s in self._gaps_s:
            at_s.append(at_s[-1] + gap_s)
        period_s = at_s.pop()
        arrivals = {key: i for i, (_, key, _) in enumerate(ticks) if i >= turn}
        used_at = {w: i for i, (_, key, _) in enumerate(ticks[:turn]) for w in used_by.get(key, ())}
        mine, planned = [], []
        for weight in weights:
            if weight.stays or weight not in used_at:
                continue
            needed_at = arrivals.get(weight.use.marker, len(ticks) - 1)
            if weight.use.needed_at is not None:
                needed_at = max(turn, min(needed_at, weight.use.needed_at))
            updated_at = weight.use.updated_at
            if updated_at is not None and updated_at >= len(ticks):
                updated_at = None  # that was in a longer pass: here it may be as late as the step
            mine.append(weight)
            planned.append(
                Weight(
                    size_bytes=weight.size_bytes,
                    used_at=used_at[weight],
                    needed_at=needed_at,
                    updated_at=updated_at,
                )
            )
        plan = plan_weights(
            planned,
            at_s=at_s,
            turn=turn,
            period_s=period_s,
            offloaded_bytes=self._offload_bytes,
            link=self._link,
        )
        self.schedule = WeightSchedule(
            plan,
            {ticks[t]: [mine[i] for i in ns] for t, ns in plan.release.items()},
            {ticks[t]: [mine[i] for i in ns] for t, ns in plan.load.items()},
        )
        return self.schedule
