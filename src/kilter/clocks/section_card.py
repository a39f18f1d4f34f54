"""What a simulated GPU's clocks do in communication sections, for planners."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import msgspec

from kilter.clocks.plan.switching import Calibration
from kilter.clocks.plan.worth import ClockCosts, Latency, Level
from kilter.core.setting import Setting
from kilter.device.sim.profile import Profile
from kilter.model.power import LEAKAGE_AT_C

LEVELS = 6
"""So many clocks are planned with, in equal ratios from the highest to the lowest."""
LEAST_MEMORY_SHARE = 0.5
"""Clocks below this share of the highest memory clock are for idle GPUs, with few SM clocks."""


def card_of(
    profile: Profile,
    *,
    switch_s: float | None = None,
    levels: int = LEVELS,
    calibration: Calibration | None = None,
    memory_clocks_hz: Sequence[float] = (),
) -> ClockCosts:
    """The card of a profile: so many SM clocks below the highest and, with the lower ones of these
    memory clocks, the highest SM clock and each of those. A switch takes what was
    calibrated, clock by clock, or always `switch_s`, or else the profile's latency, of which the
    spread between targets is taken as calibrated. Two clocks are set one after the other, and are
    taken to need twice the time."""
    knobs, power = profile.knobs, profile.power
    memory_hz, top_hz = knobs.memory_clocks_hz[-1], knobs.sm_highest_hz
    ratio = (knobs.sm_lowest_hz / top_hz) ** (1 / levels)
    supported = knobs.supported().sm_clocks_hz
    wanted = [top_hz * ratio ** (i + 1) for i in range(levels)]
    clocks = sorted({min(supported, key=lambda hz: abs(hz - w)) for w in wanted}, reverse=True)
    waiting_w = float(power.waiting_w(top_hz, memory_hz, LEAKAGE_AT_C))
    latency = Latency(median_s=profile.switch.median_s, spread=profile.switch.spread)
    if switch_s is not None:
        latency = Latency(median_s=switch_s, spread=0.0)

    def measured(down: bool, hz: float | None = None) -> Latency | None:
        return None if calibration is None else calibration.latency(down=down, sm_clock_hz=hz)

    computing_w = knobs.limit_highest_w * knobs.limit_kept
    # Work per second that draws the limit at the highest clock; less of it at a lower one.
    alone_w = float(power.work_j(0.0, 0.0, 1.0, top_hz))
    flops = (computing_w - waiting_w - alone_w) / float(power.work_j(1.0, 0.0, 0.0, top_hz))

    def switch(down: bool, hz: float, calls: int) -> Latency | None:
        own = measured(down, hz)
        if calls == 1:
            return own
        one = own or latency
        return msgspec.structs.replace(one, median_s=calls * one.median_s)

    def level(own_hz: float | None, lower_hz: float | None) -> Level:
        hz, calls = own_hz or top_hz, Setting(sm_clock_hz=own_hz, memory_clock_hz=lower_hz).calls
        there_w = float(power.waiting_w(hz, lower_hz or memory_hz, LEAKAGE_AT_C))
        return Level(
            sm_clock_hz=own_hz,
            memory_clock_hz=lower_hz,
            saved_w=waiting_w - there_w,
            waiting_w=there_w,
            computing_w=there_w + float(power.work_j(flops * hz / top_hz, 0.0, 1.0, hz)),
            stretch=max(top_hz / hz, memory_hz / (lower_hz or memory_hz)),
            down=switch(True, hz, calls),
            up=switch(False, hz, calls),
        )

    usable = [hz for hz in reversed(memory_clocks_hz) if hz in knobs.memory_clocks_hz]
    lower = [hz for hz in usable if LEAST_MEMORY_SHARE * memory_hz <= hz < memory_hz]
    pairs = product((None, *lower), (None, *(hz for hz in clocks if hz < top_hz)))
    return ClockCosts(
        levels=tuple(level(hz, lower_hz) for lower_hz, hz in pairs if hz or lower_hz),
        down=measured(True) or latency,
        up=measured(False) or latency,
        computing_w=computing_w,
        waiting_w=waiting_w,
    )
