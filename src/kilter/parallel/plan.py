"""Parallel branches: which run together, on which streams, and which way of running them wins.

Pure functions from values to values. A *branch* is a piece of work that needs nothing from its
siblings: an attention head, an expert, a tower. The planner knows of each branch a signature (equal
branches have equal signatures and are compiled once) and a time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kilter.core.errors import PlanError
from kilter.core.label import Label
from kilter.core.reasons import Reason
from kilter.core.units import show_bytes, show_count, show_time

FORK_GAIN = 0.03
"""A forked plan must be this much faster than the best unforked one (fraction of its time)."""
ERROR_FACTOR = 2.0
"""The largest difference to a float64 reference may be at most this, relative to the serial loop's
own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One way of running the branches: what it cost, or why it was refused."""

    mode: str
    streams: int = 1
    seconds: float | None = None
    """A call takes this in the median."""
    error: float | None = None
    """It is the largest difference to the float64 reference."""
    bitwise: bool = False
    """Every output was equal to the serial loop's, bit for bit."""
    prepare_s: float = 0.0
    """To build, compile and capture this way takes this."""
    memory_bytes: int | None = None
    """The pool that the captured graphs use takes so much device memory."""
    refused: Reason | None = None
    searched: bool = False
    """Convolutions use the algorithms that the library found fastest when it tried them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPlan:
    """The decision for one input signature, and everything that it was made from."""

    chosen: str
    reason: Reason
    streams: int
    branches: int
    """So many branches were found, over all layers."""
    steps: int
    """So many pieces run one after the other; branches of one step run together."""
    groups: tuple[tuple[int, ...], ...]
    """Branches in one group, of the widest step, do the same work on tensors of the same shapes."""
    lanes: tuple[tuple[int, ...], ...]
    """Each stream has the pieces of the widest step in the order of issue; the main stream comes
    first."""
    trials: tuple[Trial, ...]
    serial_error: float | None
    label: Label
    searched: bool = False
    """It is as in `Trial`."""

    @property
    def trial(self) -> Trial:
        chosen = self.chosen, self.streams, self.searched
        return next(t for t in self.trials if (t.mode, t.streams, t.searched) == chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A stretch `[start, end)` of a program whose nodes fall into independent branches."""

    start: int
    end: int
    branches: tuple[tuple[int, ...], ...]
    """Each branch has its node numbers, ascending; branches are in the order of their first
    node."""
    gain: float
    """This work can be hidden behind the longest branch, in units of the weights."""


def group_equal(signatures: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Positions with equal signatures together, in the order of their first member."""
    groups: dict[Hashable, list[int]] = {}
    for position, signature in enumerate(signatures):
        groups.setdefault(signature, []).append(position)
    return tuple(tuple(members) for members in groups.values())


def assign_lanes(seconds: Sequence[float], lanes: int) -> tuple[tuple[int, ...], ...]:
    """Work onto at most `lanes` streams, longest first, each to the lane that is free first.

    The first lane is the main stream and holds the longest piece: it is issued first. Longest
    processing time first (Graham 1969) ends within 4/3 - 1/(3 lanes) of the best assignment.
    """
    if lanes < 1:
        raise PlanError(f"{lanes} streams: at least one is needed")
    if any(not math.isfinite(s) or s < 0 for s in seconds):
        raise PlanError("a branch has no finite time")
    free = [(0.0, lane) for lane in range(min(lanes, max(len(seconds), 1)))]
    filled: list[list[int]] = [[] for _ in free]
    for piece in sorted(range(len(seconds)), key=lambda i: (-seconds[i], i)):
        busy_s, lane = heapq.heappop(free)
        filled[lane].append(piece)
        heapq.heappush(free, (busy_s + seconds[piece], lane))
    return tuple(tuple(pieces) for pieces in filled if pieces)


def lane_counts(widest: int) -> tuple[int, ...]:
    """Numbers of streams worth trying for a step of `widest` pieces: 1, 2, 4 and one for each."""
    return tuple(sorted({count for count in (1, 2, 4, widest) if 1 <= count <= max(widest, 1)}))


def within(error: float, serial_error: float, floor: float) -> bool:
    """Whether a candidate's error is at most twice the serial loop's own, or below `floor` (one
    rounding of the largest output, where the serial loop happens to be exact)."""
    return error <= max(ERROR_FACTOR * serial_error, floor)


def choose(trials: Sequence[Trial]) -> tuple[Trial, Reason]:
    """The fastest trial that was not refused. A trial on several streams must be faster by
    `FORK_GAIN` than the best on one stream, and every trial must be faster than the serial loop.
    The first trial is the serial loop, which is always allowed.

    A trial that is not chosen is never chosen after more trials either, so whoever tries ways one
    after the other has to keep the chosen one only.
    """
    serial = trials[0]
    if serial.mode != "serial" or serial.refused is not None:
        raise PlanError("the first trial must be the serial loop")
    timed = [t for t in trials if t.refused is None and t.seconds is not None]
    if len(timed) < 2 or serial.seconds is None:
        return serial, combined(trials) or Reason("nothing_tried", "", "nothing else was tried")
    best = min(timed, key=_seconds)
    unforked = min((t for t in timed if t.streams == 1), key=_seconds)
    if best.streams > 1 and _seconds(best) > (1 - FORK_GAIN) * _seconds(unforked):
        best, forking = unforked, f" (forking gains less than {FORK_GAIN:.0%})"
    else:
        forking = ""
    if best.mode == "serial" or _seconds(best) >= serial.seconds:
        text = f"nothing tried is faster than the serial loop{forking}"
        return serial, Reason("none_faster", "serial", text)
    text = f"{serial.seconds / _seconds(best):.2f}x faster than the serial loop{forking}"
    return best, Reason("fastest", best.mode, text)


def combined(trials: Sequence[Trial]) -> Reason | None:
    """The reasons of all refused trials as one; None if no trial was refused."""
    refusals = {t.refused.text: t.refused for t in trials if t.refused is not None}
    if len(refusals) < 2:
        return next(iter(refusals.values()), None)
    return Reason("all_refused", "", "; ".join(sorted(refusals)))


def describe(plan: BranchPlan) -> str:
    """A plan as a table for people."""
    way = f"{plan.chosen} on {show_count(plan.streams, 'stream')}"
    lines = [f"{way}: {plan.reason.text} ({plan.label.value})"]
    if plan.branches:
        branches = "1 branch" if plan.branches == 1 else f"{plan.branches} branches"
        lines.append(f"{branches} in {show_count(plan.steps, 'step')}")
    if plan.groups:
        groups = " ".join("{" + ",".join(map(str, g)) + "}" for g in plan.groups)
        lines.append(f"equal branches of the widest step: {groups}")
    if plan.lanes:
        lanes = " | ".join(",".join(map(str, lane)) for lane in plan.lanes)
        lines.append(f"streams of the widest step, main first: {lanes}")
    for t in plan.trials:
        searched = "+" if t.searched else " "
        name = f"  {t.mode:<14}{t.streams:>2}{searched}"
        if t.refused is not None:
            lines.append(f"{name} refused: {t.refused.text}")
            continue
        error = "" if t.error is None else f", error {t.error:.2g}"
        same = ", bitwise equal" if t.bitwise else ""
        memory = "" if t.memory_bytes is None else f", {show_bytes(t.memory_bytes)}"
        ready = f", ready in {show_time(t.prepare_s)}" if t.prepare_s else ""
        lines.append(f"{name} {show_time(t.seconds)}{error}{same}{memory}{ready}")
    if any(t.searched for t in plan.trials):
        lines.append(
            "  +: convolutions by the algorithms that were the fastest when all were tried"
        )
    return "\n".join(lines)


def _seconds(trial: Trial) -> float:
    return math.inf if trial.seconds is None else trial.seconds


BRANCH_SHARE = 0.05
"""A branch has at least this share of its region's work."""


def find_regions(
    producers: Sequence[Sequence[int]], weights: Sequence[float]
) -> tuple[Region, ...]:
    """Stretches of a program, in its own order, that split into independent branches.

    Node `i` reads the nodes `producers[i]`, all before it. A serial loop over branches leaves each
    of them as a run of nodes in program order, closed by a node that joins them. For every join,
    the nodes before it are added one by one, backwards, while a union-find keeps the connected
    components. The best start is where the most work lies outside the heaviest component: once the
    node that feeds all branches is added, everything is one component and the gain is zero. Among
    overlapping stretches those with the largest total gain are kept (weighted interval
    scheduling). A component with less than `BRANCH_SHARE` of its region's work is no branch of its
    own: it joins the lightest branch.
    """
    count = len(weights)
    users: list[list[int]] = [[] for _ in range(count)]
    for node, reads in enumerate(producers):
        for read in reads:
            if not 0 <= read < node:
                raise PlanError(f"node {node} reads node {read}: not in program order")
            users[read].append(node)
    joins = [j for j in range(count) if len(set(producers[j])) > 1 and weights[j] > 0]
    found: list[tuple[float, int, int]] = []
    for end in [*joins, count]:
        gain, start = _best_start(users, weights, end)
        if gain > 0:
            found.append((gain, start, end))
    regions = []
    for gain, start, end in _heaviest_disjoint(found):
        branches = _branches(users, weights, start, end)
        if len(branches) > 1:
            regions.append(Region(start=start, end=end, branches=branches, gain=gain))
    return tuple(regions)


def _best_start(
    users: Sequence[Sequence[int]], weights: Sequence[float], end: int
) -> tuple[float, int]:
    parent: dict[int, int] = {}
    weight: dict[int, float] = {}
    total = heaviest = best = 0.0
    best_start = end
    for node in range(end - 1, -1, -1):
        parent[node] = node
        weight[node] = weights[node]
        total += weights[node]
        for user in users[node]:
            if user < end:
                other = _root(parent, user)
                mine = _root(parent, node)
                if other != mine:
                    parent[other] = mine
                    weight[mine] += weight.pop(other)
        heaviest = max(heaviest, weight[_root(parent, node)])
        if total - heaviest > best:
            best, best_start = total - heaviest, node
        elif total - heaviest < 0.25 * best:
            break
    return best, best_start


def _root(parent: dict[int, int], node: int) -> int:
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


def _heaviest_disjoint(
    intervals: Sequence[tuple[float, int, int]],
) -> list[tuple[float, int, int]]:
    """Weighted interval scheduling over (gain, start, end); ties go to the shorter intervals."""
    ordered = sorted(intervals, key=lambda item: (item[2], item[2] - item[1]))
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for number, (gain, start, _) in enumerate(ordered):
        before = 0
        for earlier in range(number, 0, -1):
            if ordered[earlier - 1][2] <= start:
                before = earlier
                break
        taken = best[before][0] + gain
        best.append(
            (taken, (*best[before][1], number)) if taken > best[-1][0] else best[-1],
        )
    return [ordered[number] for number in best[-1][1]]


def _branches(
    users: Sequence[Sequence[int]],
    weights: Sequence[float],
    start: int,
    end: int,
) -> tuple[tuple[int, ...], ...]:
    parent = {node: node for node in range(start, end)}
    for node in range(start, end):
        for user in users[node]:
            if user < end:
                a, b = sorted((_root(parent, node), _root(parent, user)))
                parent[b] = a
    components: dict[int, list[int]] = {}
    for node in range(start, end):
        components.setdefault(_root(parent, node), []).append(node)
    parts = list(components.values())
    floor = BRANCH_SHARE * sum(weights[start:end])
    heavy = [p for p in parts if sum(weights[n] for n in p) >= floor]
    for part in parts:
        if part not in heavy and heavy:
            min(heavy, key=lambda p: sum(weights[n] for n in p)).extend(part)
    return tuple(sorted((tuple(sorted(p)) for p in heavy), key=lambda p: p[0]))
