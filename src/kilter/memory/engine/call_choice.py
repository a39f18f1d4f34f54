"""Which calls of modules a plan recomputes, and how much of what each has saved.

Either all of it, as checkpointing does, or a part: a plan is made as if each tensor of these calls
could be recomputed alone, and what that plan recomputes of a call becomes one part, made at one
time; the rest is offloaded or kept. A part takes more memory than its tensors one by one, so that
plan is made for a smaller budget where the parts do not fit.

Finding them takes seconds, in which the program waits. So what an earlier run of the job has chosen
is tried first, and taken without a search where its plan is as good as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple, Protocol

from kilter.core.errors import PlanError
from kilter.memory.engine.pass_record import PassRecord, SavedSegment
from kilter.memory.kept_calls import KeptCall, KeptCalls
from kilter.memory.plan.mix import cost_s, roughly
from kilter.memory.plan.problem import Problem
from kilter.memory.plan.segments import SegmentChoice, best_set, levels

SMALLER = (0.0, 0.25, 0.5, 1.0)
"""By these shares of the largest call the budget is smaller for which parts are chosen."""
LEFT_OUT = (1 / 8, 1 / 4, 1 / 2)
"""Where no parts fit, such a share of the calls is left out, the first ones, which are needed last:
at the end of backward gradients fill the device."""
LARGEST_LEVELS = 2
"""Parts are tried of so many sets of calls."""
AS_GOOD = 1.01
"""Calls are taken again where their plan takes at most this many times as long as when they were
chosen, both by what the operations of the pass take: this GPU may be a little slower."""
LARGER = 1.05
"""The budget may be at most this many times as large, too: with more memory others may be
better."""

Segments = tuple[SavedSegment, ...]


class MakeProblem(Protocol):
    """Gives the problem of a record, and the tensor of each interval."""

    def __call__(
        self, record: PassRecord, *, segments: Sequence[SavedSegment] = ()
    ) -> tuple[Problem, tuple[int, ...]]: ...


class CallChoice(NamedTuple):
    """Chooses for one kind of pass."""

    record: PassRecord
    make_problem: MakeProblem
    alone_s: float
    """The host takes this for each tensor that is offloaded, or recomputed alone."""

    def best(self) -> Segments:
        """The calls with which a plan takes the least time; empty: single operations alone."""
        found = self.record.segments
        if not found:
            return ()
        sizes = [sum(self.record.data[n].size_bytes for n in one.members) for one in found]
        choices = [
            SegmentChoice(one.first, one.last, size_bytes or 1, one.recompute_s)
            for one, size_bytes in zip(found, sizes, strict=True)
        ]
        best: Segments = ()
        best_s = inf  # parts first: few, and good enough to leave most sets unsimulated
        for level in levels(choices)[:LARGEST_LEVELS]:
            calls = sorted((found[i] for i in level), key=lambda one: one.first)
            for several in self._parts(calls, max(sizes[i] for i in level)):
                costs_s = [self._cost_s(parts, inf) for parts in several]
                least_s = min(costs_s, default=inf)
                if least_s < best_s:
                    best, best_s = several[costs_s.index(least_s)], least_s
                if least_s < inf:
                    break
        whole = best_set(
            choices, lambda some, s: self._cost_s(tuple(found[i] for i in some), s), best_s
        )
        return best if whole is None else tuple(found[i] for i in whole)

    def again(self, kept: KeptCalls) -> Segments | None:
        """What an earlier run has chosen; None: it is not all there, or not as good."""
        found = {(one.name, one.first, one.last): one for one in self.record.segments}
        calls = []
        for call in kept.calls:
            one = found.get((call.name, call.first, call.last))
            members = frozenset(call.members)
            if one is not None and one.members != members:
                one = self.record.part(one, members)
            if one is None or one.members != members:
                return None
            calls.append(one)
        now = self.kept(tuple(calls))
        longer = now.cost_s * kept.plain_s > AS_GOOD * kept.cost_s * now.plain_s
        return None if longer or now.budget_bytes > LARGER * kept.budget_bytes else tuple(calls)

    def kept(self, segments: Segments) -> KeptCalls:
        """What another run may begin with."""
        problem, _ = self.make_problem(self.record, segments=segments)
        return KeptCalls(
            events=self.record.fingerprint,
            calls=tuple(
                KeptCall(one.name, one.first, one.last, tuple(sorted(one.members)))
                for one in segments
            ),
            budget_bytes=problem.budget_bytes,
            cost_s=self._cost_s(segments, inf),
            plain_s=problem.compute_s,
        )

    def _cost_s(self, segments: Segments, below_s: float) -> float:
        problem, _ = self.make_problem(self.record, segments=segments)
        problem = replace(problem, alone_s=self.alone_s, moved_s=self.alone_s)
        try:
            return cost_s(problem, *roughly(problem, below_s))
        except PlanError:
            return inf

    def _parts(self, calls: Sequence[SavedSegment], largest_bytes: int) -> Iterator[list[Segments]]:
        """Parts of all these calls; then, for where none fits, of the later ones."""
        problem, numbers = self.make_problem(self.record.taken_apart(calls))
        found: list[Segments] = []
        for share in SMALLER:
            budget_bytes = problem.budget_bytes - int(share * largest_bytes)
            try:
                smaller = replace(problem, budget_bytes=budget_bytes, moved_s=self.alone_s)
                schedule, _ = roughly(smaller)
            except PlanError:
                break
            chosen = {numbers[index] for index in schedule.recomputed}
            every = [self.record.part(one, chosen) for one in calls]
            parts = tuple(part for part in every if part.members)
            if parts not in found:
                found.append(parts)
        yield found
        for share in LEFT_OUT:
            yield [parts[int(share * len(parts)) :] for parts in found[-1:]]
