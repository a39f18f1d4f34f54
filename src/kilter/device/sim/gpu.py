"""A simulated GPU in virtual time: `SimGpu` is a `Device` that also runs work.

Nothing here waits: `run` and `idle` move the device's own clock forward, thousands of times faster
than the job would. What is asked for, what is in force, and what the sensors say are three
different things, as on a real card: a setting acts after a delay, a power or temperature limit
holds the clock below it, and the sensors show a mean of the past, ten times a second, off by the
board's own gain. Every number is labelled *simulated*.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kilter.core.errors import NotSupported
from kilter.core.label import Label
from kilter.core.setting import DeviceInfo, Sample, Setting, Supported, Throttle
from kilter.core.trace import IterationTrace
from kilter.core.units import show_clock, show_power
from kilter.device.sim.noise import Noise, NoiseSource
from kilter.device.sim.profile import Profile
from kilter.device.sim.work import Cost, Work, cost_of, work_of
from kilter.model.power import capped_clock
from kilter.model.roofline import Quantity

STEADY = Noise(white=0.003, drift=0.002, outlier_probability=0.005, power=0.005)
"""A job that has its GPU to itself has this noise: about twice what was measured on an H200 (0.15
to 0.17 % between iterations of three training loops, neighbours correlated by 0.3 to 0.5)."""


class _Point(NamedTuple):
    """A moment of the past with what had added up by then. Since the point before it, everything
    was constant: clocks and reasons are those of the stretch that ends here."""

    t_s: float
    energy_j: float
    busy_s: float
    memory_s: float
    sm_hz: float
    memory_hz: float
    temperature_c: float
    throttle: tuple[Throttle, ...]


class _State(NamedTuple):
    """What the card does with some work under the request in force."""

    cost: Cost
    waiting_w: float
    sm_hz: float
    memory_hz: float
    throttle: tuple[Throttle, ...]


class SimGpu:
    """One simulated GPU. Same seed, same calls, same results.

    `seed` also draws the board's sensor gain and the switching delays. Not thread-safe. It has many
    attributes, because settings, heat and sensors are read at every step of one virtual time.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        seed: int = 0,
        noise: Noise = STEADY,
        index: int = 0,
    ) -> None:
        self.profile = profile
        self._seed = seed
        self._index = index
        sensors, self._delays, jitter = np.random.default_rng([seed, index]).spawn(3)
        gain = profile.sensor.gain_error
        self._gain = 1.0 + sensors.uniform(-gain, gain)
        self._phase_s = sensors.uniform(0.0, profile.sensor.period_s)
        self._noise = NoiseSource(noise, jitter)
        self._supported = profile.knobs.supported()
        self._asked = Setting()
        self._force = Setting()
        self._pending: list[tuple[float, Setting]] = []
        """It holds settings on their way, and when they begin to act; in that order."""
        self._states: dict[tuple[Work, Setting, float, float], _State] = {}
        asleep_c = profile.thermal.after(0.0, profile.power.idle_w, math.inf)
        self._now = _Point(
            t_s=0.0,
            energy_j=0.0,
            busy_s=0.0,
            memory_s=0.0,
            sm_hz=profile.knobs.sm_idle_hz,
            memory_hz=profile.knobs.memory_clocks_hz[-1],
            temperature_c=asleep_c,
            throttle=(Throttle.IDLE,),
        )
        self._past: deque[_Point] = deque([self._now])
        self._remember_s = 2 * profile.sensor.period_s + profile.sensor.window_s
        self._idle_s = math.inf
        self._hot = False
        self._read: Callable[[], None] | None = None
        self._read_at_s = math.inf

    # The truth, which no sensor shows.

    @property
    def now_s(self) -> float:
        """Virtual time since the device was made."""
        return self._now.t_s

    @property
    def energy_j(self) -> float:
        return self._now.energy_j

    @property
    def in_force(self) -> Setting:
        """The request that acts now."""
        return self._force

    # Work.

    def work(self, trace: IterationTrace) -> Work:
        """A trace as this device would run it; make it once, run it often."""
        return work_of(trace, self.profile)

    def run(self, *parts: Work) -> float:
        """Run one iteration, in parts that follow each other: the clock and the meters move on.
        Returns its time in seconds.

        A setting that begins to act on the way changes the speed from there on.
        """
        time_factor, power_factor = self._noise.draw()
        self._idle_s = 0.0
        return sum(self._run(part, time_factor, power_factor) for part in parts)

    def _run(self, work: Work, time_factor: float, power_factor: float) -> float:
        left, taken_s = 1.0, 0.0
        while left > 1e-12:
            self._reach()
            state = self._state(work)
            cost = state.cost
            whole_s = cost.time_s * time_factor
            extra_j = (time_factor - 1.0) * cost.time_s * state.waiting_w
            whole_j = cost.energy_j * power_factor + extra_j
            step_s = min(left * whole_s, self._quiet_s())
            share = step_s / whole_s
            self._move(step_s, share * whole_j, share * cost.busy_s, share * cost.memory_s, state)
            left -= share
            taken_s += step_s
        return taken_s

    def at_each_tick(self, read: Callable[[], None]) -> None:
        """Call `read` whenever the sensors have just changed, also inside an iteration: what a
        process beside the job can see of it."""
        self._read = read
        self._read_at_s = self._now.t_s

    def idle(self, seconds: float) -> None:
        """Let virtual time pass without work: awake at first, later asleep."""
        left = seconds
        while left > 0:
            self._reach()
            state = self._waiting()
            until_sleep = self.profile.sleep_after_s - self._idle_s
            step_s = min(left, self._quiet_s(), until_sleep if until_sleep > 0 else math.inf)
            self._move(step_s, step_s * state.waiting_w, 0.0, 0.0, state)
            self._idle_s += step_s
            left -= step_s

    # The Device protocol.

    def info(self) -> DeviceInfo:
        self._reach()
        profile = self.profile
        return DeviceInfo(
            name=profile.title,
            uuid=f"SIM-{profile.name}-{self._seed}-{self._index}",
            backend="sim",
            label=Label.SIMULATED,
            can_set=True,
            persistent=False,
            has_energy_counter=profile.sensor.energy_counter,
            sensor_period_s=profile.sensor.period_s,
            switch_latency_s=profile.switch.p95_s,
            memory_bytes=profile.memory_bytes,
            index=self._index,
        )

    def supported(self) -> Supported:
        self._reach()
        return self._supported

    def settings(self) -> Setting:
        self._reach()
        return self._asked

    def set(self, setting: Setting) -> None:
        self._reach()
        self._require("SM clock", show_clock, setting.sm_clock_hz, self._supported.sm_clocks_hz)
        self._require(
            "memory clock", show_clock, setting.memory_clock_hz, self._supported.memory_clocks_hz
        )
        self._require(
            "power limit", show_power, setting.power_limit_w, self._supported.power_limits_w
        )
        self._asked = setting
        acts_at_s = self._now.t_s + self._delay_s(setting)
        if self._pending:
            acts_at_s = max(acts_at_s, self._pending[-1][0])
        self._pending.append((acts_at_s, setting))

    def reset(self) -> None:
        self.set(Setting())

    def sample(self, *, energy: bool = False) -> Sample:
        self._reach()
        sensor = self.profile.sensor
        tick_s = self._tick(self._now.t_s)
        end, begin = self._at(tick_s), self._at(tick_s - sensor.window_s)
        before = self._at(tick_s - sensor.period_s)
        window_s, period_s = end.t_s - begin.t_s, end.t_s - before.t_s
        idle_w = self.profile.power.idle_w
        power_w = (end.energy_j - begin.energy_j) / window_s if window_s > 0 else idle_w
        counted = energy and sensor.energy_counter
        return Sample(
            t_s=self._now.t_s,
            power_w=self._gain * power_w,
            energy_j=self._gain * end.energy_j if counted else None,
            sm_clock_hz=self._on_grid(end.sm_hz),
            memory_clock_hz=end.memory_hz,
            sm_utilisation=_share(end.busy_s - before.busy_s, period_s),
            memory_utilisation=_share(end.memory_s - before.memory_s, period_s),
            temperature_c=end.temperature_c,
            throttle=end.throttle,
        )

    def close(self) -> None:
        """Nothing is held."""

    # Inside.

    def _reach(self) -> None:
        """First of everything that touches the device: what acts by now?"""
        while self._pending and self._pending[0][0] <= self._now.t_s:
            _, self._force = self._pending.pop(0)

    def _quiet_s(self) -> float:
        """Time until something may change by itself."""
        now = self._now.t_s
        next_act = self._pending[0][0] if self._pending else math.inf
        next_s = min(next_act, max(self._read_at_s, now + _AFTER_TICK_S))
        return min(next_s - now, self.profile.thermal.time_constant_s / 10)

    def _state(self, work: Work) -> _State:
        """The work under the request in force, at the present temperature; solved once each."""
        warm_c = _TEMPERATURE_STEP_C * round(self._now.temperature_c / _TEMPERATURE_STEP_C)
        sustainable_w = self.profile.thermal.sustainable_w if self._hot else math.inf
        key = (work, self._force, warm_c, sustainable_w)
        state = self._states.get(key)
        if state is None:
            if len(self._states) > _MOST_STATES:
                self._states.clear()
            state = self._states[key] = self._solve(*key)
        return state

    def _solve(self, work: Work, force: Setting, warm_c: float, sustainable_w: float) -> _State:
        profile = self.profile
        knobs, roofline, power = profile.knobs, profile.roofline, profile.power
        memory_hz = force.memory_clock_hz or knobs.memory_clocks_hz[-1]
        asked_hz = force.sm_clock_hz or knobs.sm_highest_hz
        limit_w = (force.power_limit_w or knobs.limit_highest_w) * knobs.limit_kept

        def cost(sm_hz: float) -> Cost:
            return cost_of(
                work, roofline, power, sm_hz=sm_hz, memory_hz=memory_hz, temperature_c=warm_c
            )

        def power_w(sm_hz: Quantity) -> Quantity:
            return cost(float(sm_hz)).power_w

        sm_hz = float(
            capped_clock(power_w, knobs.sm_lowest_hz, asked_hz, min(limit_w, sustainable_w))
        )
        throttle = []
        if sm_hz < asked_hz:
            throttle.append(Throttle.POWER_CAP if limit_w <= sustainable_w else Throttle.THERMAL)
        if asked_hz < knobs.sm_highest_hz:
            throttle.append(Throttle.CLOCK_SETTING)
        return _State(
            cost=cost(sm_hz),
            waiting_w=float(power.waiting_w(sm_hz, memory_hz, warm_c)),
            sm_hz=sm_hz,
            memory_hz=memory_hz,
            throttle=tuple(throttle),
        )

    def _waiting(self) -> _State:
        """No work: awake at the requested clocks, or asleep."""
        knobs, power = self.profile.knobs, self.profile.power
        asleep = self._idle_s >= self.profile.sleep_after_s
        asked_hz = self._force.sm_clock_hz or knobs.sm_highest_hz
        memory_hz = self._force.memory_clock_hz or knobs.memory_clocks_hz[-1]
        awake_w = float(power.waiting_w(asked_hz, memory_hz, self._now.temperature_c))
        return _State(
            cost=Cost(time_s=0.0, energy_j=0.0, busy_s=0.0, memory_s=0.0),
            waiting_w=power.idle_w if asleep else awake_w,
            sm_hz=knobs.sm_idle_hz if asleep else asked_hz,
            memory_hz=memory_hz,
            throttle=(Throttle.IDLE,) if asleep else (),
        )

    def _move(
        self, step_s: float, energy_j: float, busy_s: float, memory_s: float, state: _State
    ) -> None:
        now, thermal = self._now, self.profile.thermal
        celsius = thermal.after(now.temperature_c, energy_j / step_s, step_s)
        if celsius >= thermal.limit_c:
            self._hot = True
        elif celsius < thermal.limit_c - _HYSTERESIS_K:
            self._hot = False
        self._now = _Point(
            t_s=now.t_s + step_s,
            energy_j=now.energy_j + energy_j,
            busy_s=now.busy_s + busy_s,
            memory_s=now.memory_s + memory_s,
            sm_hz=state.sm_hz,
            memory_hz=state.memory_hz,
            temperature_c=celsius,
            throttle=state.throttle,
        )
        self._past.append(self._now)
        while self._past[1].t_s < self._now.t_s - self._remember_s:
            self._past.popleft()
        if self._read is not None and self._now.t_s >= self._read_at_s:
            tick_s = self._tick(self._now.t_s + _AFTER_TICK_S)
            self._read_at_s = tick_s + self.profile.sensor.period_s + _AFTER_TICK_S
            self._read()

    def _tick(self, t_s: float) -> float:
        """The last moment up to `t_s` at which the sensors changed."""
        period = self.profile.sensor.period_s
        return period * math.floor((t_s - self._phase_s) / period) + self._phase_s

    def _at(self, t_s: float) -> _Point:
        """The card at a moment of the remembered past."""
        after = self._past[-1]
        for point in reversed(self._past):
            if point.t_s <= t_s:
                if point is after:
                    return point
                part = (t_s - point.t_s) / (after.t_s - point.t_s)
                return after._replace(
                    t_s=t_s,
                    energy_j=point.energy_j + part * (after.energy_j - point.energy_j),
                    busy_s=point.busy_s + part * (after.busy_s - point.busy_s),
                    memory_s=point.memory_s + part * (after.memory_s - point.memory_s),
                )
            after = point
        return after

    def _on_grid(self, sm_hz: float) -> float:
        """Clocks are read back as the step below."""
        knobs = self.profile.knobs
        steps = math.floor((sm_hz - knobs.sm_lowest_hz) / knobs.sm_step_hz + 1e-6)
        return min(sm_hz, knobs.sm_lowest_hz + knobs.sm_step_hz * steps)

    def _delay_s(self, setting: Setting) -> float:
        """A draw of the switching delay. The median belongs to the target, the rest is chance."""
        switch = self.profile.switch
        chance = self._delays.standard_normal()
        return switch.median_to_s(setting) * math.exp(switch.spread * chance)

    def _require(
        self,
        knob: str,
        show: Callable[[float], str],
        value: float | None,
        allowed: tuple[float, ...],
    ) -> None:
        if value is not None and value not in allowed:
            raise NotSupported(
                f"{self.profile.title}: {knob} {show(value)} is none of the {len(allowed)} it takes"
            )


_AFTER_TICK_S = 1e-6
"""Whoever waits for a tick reads this much after it."""
_TEMPERATURE_STEP_C = 2.0
"""Leakage is followed in steps of this, so that states can be kept."""
_MOST_STATES = 10_000
_HYSTERESIS_K = 3.0
"""A device that was too hot speeds up again when it is this much below the limit."""


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0
