"""The plan for the operations of a running job, from one trace of it: `OperationPlan`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kilter.clocks.operation_costs import costs_of
from kilter.clocks.plan.operation_stretches import (
    OperationStretches,
    OrderedOperations,
    as_set,
    operation_stretches,
)
from kilter.clocks.plan.timing import CommandSchedule, at_depths, schedule
from kilter.clocks.plan.worth import ClockCosts
from kilter.clocks.section_card import card_of
from kilter.clocks.section_plan import SEARCHED_LEVELS
from kilter.clocks.section_store import SectionStore
from kilter.core.trace import IterationTrace, Kind, Operation
from kilter.device.protocol import Device
from kilter.device.sim.profile import Profile, load_profile


class OperationPlan:
    """`profile`: the name of the device's. Raises `PlanError` for a trace without work, `FileError`
    for measured switch times that cannot be read, and the device's errors."""

    def __init__(
        self, profile: str, trace: IterationTrace, max_slowdown: float, device: Device
    ) -> None:
        calibration = SectionStore(os.environ).switches(device.info())
        self.profile: Profile = load_profile(profile)
        self.calibrated = calibration is not None
        self.card: ClockCosts = card_of(
            self.profile,
            levels=SEARCHED_LEVELS,
            calibration=calibration,
            memory_clocks_hz=device.supported().memory_clocks_hz,
        )
        ordered = ordered_operations(self.profile, trace, self.card)
        self.operations = len(ordered.names)
        self.made: OperationStretches = operation_stretches(
            ordered, self.card, max_slowdown=max_slowdown
        )
        self.found, self.summary = self.made.found, self.made.summary

    def schedule(self, depths: Sequence[int], *, is_set: bool = True) -> CommandSchedule:
        """The commands of every iteration at these depths. In a dry run nothing is set, and the
        stretches stay where they are."""
        found = self.found
        places = as_set(found.stretches, depths) if is_set else found.stretches
        return schedule(at_depths(places, depths, self.card), self.card, found.iteration_s)


def ordered_operations(
    profile: Profile, trace: IterationTrace, card: ClockCosts
) -> OrderedOperations:
    """The operations of a trace at the clocks of a card. Each takes the time that was measured at
    the default clock, on a host's timeline as well, and follows the clock that its FLOPs and bytes
    say."""
    operations = tuple(op for op in trace.operations if op.duration_s > 0.0)
    costs = costs_of(
        profile,
        replace(trace, operations=operations, timeline="gpu"),
        [(level.sm_clock_hz, level.memory_clock_hz) for level in card.levels],
    )
    return OrderedOperations(
        names=tuple(_names(operations)),
        start_s=np.array([op.start_s for op in operations]),
        end_s=np.array([op.start_s + op.duration_s for op in operations]),
        time_s=costs.time_s,
        energy_j=costs.energy_j,
        waiting_w=costs.waiting_w,
        iteration_s=trace.iteration_s,
    )


def _names(operations: Sequence[Operation]) -> Iterator[str]:
    """Of modules with what they do, and of gaps by what is before them; a name that comes again is
    numbered."""
    seen: Counter[str] = Counter()
    before = "the marker"
    for op in operations:
        name = f"gap after {before}" if op.kind is Kind.GAP else f"{op.kind.value} {op.name}"
        seen[name] += 1
        numbered = name if seen[name] == 1 else f"{name} #{seen[name]}"
        before = before if op.kind is Kind.GAP else numbered
        yield numbered
