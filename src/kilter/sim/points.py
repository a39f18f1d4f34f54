"""What the clocks of a simulated card do to a job's work and power, for planners."""

from __future__ import annotations

from kilter.core.setting import Setting
from kilter.core.trace import IterationTrace
from kilter.model.power import LEAKAGE_AT_C, capped_clock
from kilter.plan.combine import Point
from kilter.sim.profile import Profile
from kilter.sim.work import cost_of, work_of


def points_of(profile: Profile, trace: IterationTrace) -> list[Point]:
    """Each SM clock at the default memory clock, the card's own choice first: the highest that its
    power limit lets this work have. Warm, without noise. `ValueError` for a trace without work."""
    knobs, roofline, power = profile.knobs, profile.roofline, profile.power
    memory_hz = knobs.memory_clocks_hz[-1]
    work = work_of(trace, roofline, sm_hz=knobs.sm_highest_hz, memory_hz=memory_hz)

    def busy_w(sm_hz: object) -> float:
        return cost_of(
            work,
            roofline,
            power,
            sm_hz=float(sm_hz),  # type: ignore[arg-type]
            memory_hz=memory_hz,
            temperature_c=LEAKAGE_AT_C,
        ).power_w

    own_hz = float(
        capped_clock(
            busy_w,
            knobs.sm_lowest_hz,
            knobs.sm_highest_hz,
            knobs.limit_highest_w * knobs.limit_kept,
        )
    )

    def point(sm_hz: float, setting: Setting) -> Point:
        there, own = (
            cost_of(
                work, roofline, power, sm_hz=hz, memory_hz=memory_hz, temperature_c=LEAKAGE_AT_C
            )
            for hz in (sm_hz, own_hz)
        )
        return Point(
            setting=setting,
            stretch=there.time_s / own.time_s,
            busy_w=there.power_w,
            stalled_w=float(power.waiting_w(sm_hz, memory_hz, LEAKAGE_AT_C)),
        )

    lower = [hz for hz in knobs.supported().sm_clocks_hz if hz < own_hz]
    return [
        point(own_hz, Setting()),
        *(point(hz, Setting(sm_clock_hz=hz)) for hz in sorted(lower, reverse=True)),
    ]
