"""Passes as sequences of ticks, by which weights are moved: a module has run, a gradient
arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kilter.memory.engine.backend import CopyEvent
from kilter.memory.engine.weight_store import MovedWeight
from kilter.memory.plan.problem import Link
from kilter.memory.plan.weights import Weight, WeightPlan, plan_weights

TIMED_PASSES = 4
"""So many passes under a plan are timed as well, before it is made anew with their times."""

Tick = tuple[str, int, int]
"""What happened (a module ran or a gradient arrived), the identity of the module or parameter, and
the how-many-th time in the pass."""


class WeightPass:
    """The ticks of the present pass, in order."""

    def __init__(self) -> None:
        self.number = 0
        """So many passes have begun so far; 0: none."""
        self.ticks: list[Tick] = []
        self.marks: list[CopyEvent] = []
        """These are the moments of the ticks, while they are timed."""
        self.turn: int | None = None
        """It is its first tick of backward."""
        self.timed = True
        self._runs: dict[int, int] = {}

    def begin(self, *, timed: bool) -> None:
        """The first module of a forward has run."""
        self.number += 1
        self.ticks, self.marks, self.turn = [], [], None
        self.timed = timed
        self._runs.clear()

    def add(self, what: str, key: int, mark: Callable[[], CopyEvent]) -> Tick:
        """One more tick, of the module or parameter with this identity."""
        run = self._runs[key] = self._runs.get(key, 0) + 1
        tick = (what, key, run)
        self.ticks.append(tick)
        if self.timed:
            self.marks.append(mark())
        return tick


class RepeatedPass:
    """The kind of pass that repeats, and the times between its ticks."""

    def __init__(self) -> None:
        self.kind: tuple[tuple[Tick, ...], int] | None = None
        """It has its ticks, and the first of backward among them."""
        self.seen = 0
        """So many passes were of this kind."""
        self._gaps_s: list[float] = []
        """They are the shortest times between ticks; the last one is up to the next pass."""
        self._timed = 0
        """So many passes ran under a plan."""

    @property
    def wants_times(self) -> bool:
        """Passes under a plan are still timed."""
        return self._timed < TIMED_PASSES

    def add(
        self,
        done: WeightPass,
        end: CopyEvent,
        elapsed_s: Callable[[CopyEvent, CopyEvent], float],
        *,
        planned: bool,
    ) -> bool:
        """A pass has ended, at the mark `end`. Whether a plan is to be made with its times."""
        assert done.turn is not None
        kind = tuple(done.ticks), done.turn
        if kind != self.kind:
            if planned:
                return False
            self.kind, self.seen, self._gaps_s = kind, 0, []
        if self.seen == 0:
            self.seen = 1  # the first makes whatever is made once
            return False
        ends = [*done.marks[1:], end]
        gaps_s = [elapsed_s(a, b) for a, b in zip(done.marks, ends, strict=True)]
        self._gaps_s = [min(pair) for pair in zip(gaps_s, self._gaps_s or gaps_s, strict=True)]
        self.seen += 1
        self._timed += planned
        return not planned or self._timed == TIMED_PASSES

    def schedule(
        self,
        moved: Iterable[MovedWeight],
        used_by: Mapping[int, Sequence[MovedWeight]],
        *,
        offloaded_bytes: int,
        link: Link,
    ) -> WeightSchedule:
        """Have at least `offloaded_bytes` of the `moved` weights on the host at the end of forward.
        `used_by` has the weights of each module."""
        assert self.kind is not None
        ticks, turn = self.kind
        at_s = [0.0]
        for gap_s in self._gaps_s:
            at_s.append(at_s[-1] + gap_s)
        period_s = at_s.pop()
        arrivals = {key: i for i, (_, key, _) in enumerate(ticks) if i >= turn}
        used_at = {w: i for i, (_, key, _) in enumerate(ticks[:turn]) for w in used_by.get(key, ())}
        mine, weights = [], []
        for weight in moved:
            if weight.stays or weight not in used_at:
                continue
            needed_at = arrivals.get(weight.marker, len(ticks) - 1)
            if weight.needed_at is not None:
                needed_at = max(turn, min(needed_at, weight.needed_at))
            mine.append(weight)
            weights.append(
                Weight(
                    size_bytes=weight.size_bytes,
                    used_at=used_at[weight],
                    needed_at=needed_at,
                    updated_at=weight.updated_at,
                )
            )
        plan = plan_weights(
            weights,
            at_s=at_s,
            turn=turn,
            period_s=period_s,
            offloaded_bytes=offloaded_bytes,
            link=link,
        )
        return WeightSchedule(
            plan,
            {ticks[t]: [mine[i] for i in ns] for t, ns in plan.release.items()},
            {ticks[t]: [mine[i] for i in ns] for t, ns in plan.load.items()},
        )


class WeightSchedule(NamedTuple):
    """A plan, with the weights that are offloaded and prefetched at each tick."""

    plan: WeightPlan
    release: dict[Tick, list[MovedWeight]]
    load: dict[Tick, list[MovedWeight]]
