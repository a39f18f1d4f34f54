"""Clock tables of cards and jobs that nobody has measured, for `kilter bench clocks --random`.

A card is a roofline and a power model (`model/roofline`, `model/power`) with random parameters, a
job is a random mixture of arithmetic, memory traffic and waiting; the knobs, their number of
values and their range are random as well. Each row is a little off its model's value, as a
measurement would be. Whatever is tuned to the tables that somebody measured fails here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kilter.core.setting import Setting
from kilter.device.sim.replay import RecordedRow, RecordedWorkload
from kilter.device.sim.work import Cost, Work, cost_of
from kilter.model.power import Power, capped_clock
from kilter.model.roofline import Quantity, Roofline

JOBS = 6
"""One card has so many workloads."""
IDLE = (0.3, 0.97)
RANDOM_KNOBS = ("sm", "limit", "sm+memory", "sm+limit")
ROW_ERROR = 0.002
"""A row's time and energy have this standard deviation about the model's."""


def random_tables(
    count: int, *, seed: int = 0, waiting: bool = False
) -> dict[str, tuple[RecordedWorkload, ...]]:
    """So many cards with `JOBS` workloads each. Same seed, same tables. `waiting`: the jobs leave
    the card idle for a share of the time within `IDLE`."""
    cards = {n: _RandomCard(np.random.default_rng([n, 16])) for n in range(seed, seed + count)}
    return {f"random {n}": card.table(f"random {n}", waiting) for n, card in cards.items()}


class _RandomCard:
    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self.knobs = str(rng.choice(RANDOM_KNOBS))
        top_hz = rng.uniform(1.2e9, 2.6e9)
        lowest_hz = top_hz * rng.uniform(0.3, 0.75)
        self.sm_hz = np.linspace(top_hz, lowest_hz, int(rng.integers(5, 60)))
        memory_hz = rng.uniform(0.8e9, 9e9)
        shares = np.sort(rng.uniform(0.3, 0.95, int(rng.integers(1, 4))))[::-1]
        self.memory_hz = memory_hz * np.array([1.0, *shares])
        board_w = rng.uniform(70.0, 900.0)
        self.limits_w = board_w * np.linspace(1.0, rng.uniform(0.35, 0.7), int(rng.integers(4, 13)))
        self.roofline = Roofline(
            flops_per_cycle=1e4,
            bytes_per_memory_cycle=500.0,
            bytes_per_sm_cycle=500.0 * memory_hz / top_hz * rng.uniform(1.1, 3.0),
            overlap=rng.uniform(2.0, 8.0),
            launch_s=1e-6,
        )
        # shares of the board's power at the top clock, with arithmetic at its peak
        static, leakage, clock, busy, flop, memory, traffic = rng.dirichlet(
            (2.0, 1.0, 2.0, 2.0, 4.0, 1.0, 2.0)
        ) * (board_w * rng.uniform(0.8, 1.5))
        knee_hz = top_hz * rng.uniform(0.4, 0.85)
        slope = rng.uniform(0.2, 0.7) / (top_hz - knee_hz)
        v = 1.0 + slope * (top_hz - knee_hz)
        self.power = Power(
            idle_w=0.1 * board_w,
            static_w=static,
            leakage_w=leakage / v,
            leakage_per_k=0.005,
            clock_w_per_hz=clock / (v**2 * top_hz),
            busy_w_per_hz=busy / (v**2 * top_hz),
            joule_per_flop=flop / (v**2 * self.roofline.flops_per_cycle * top_hz),
            memory_w_per_hz=memory / memory_hz,
            joule_per_byte=traffic / (500.0 * memory_hz),
            knee_hz=knee_hz,
            volts_per_hz=slope,
        )

    def table(self, name: str, waiting: bool) -> tuple[RecordedWorkload, ...]:
        settings = self._settings()
        return tuple(self._workload(name, number, settings, waiting) for number in range(JOBS))

    def _settings(self) -> Sequence[Setting]:
        """The first one is the default."""
        if self.knobs == "limit":
            return [Setting(power_limit_w=float(w)) for w in self.limits_w]
        if self.knobs == "sm":
            return [Setting(sm_clock_hz=float(hz)) for hz in self.sm_hz]
        second = self.memory_hz if self.knobs == "sm+memory" else self.limits_w
        knob = "memory_clock_hz" if self.knobs == "sm+memory" else "power_limit_w"
        return [
            Setting(sm_clock_hz=float(hz), **{knob: float(other)})
            for hz, other in itertools.product(self.sm_hz, second)
        ]

    def _workload(
        self, card: str, number: int, settings: Sequence[Setting], waiting: bool
    ) -> RecordedWorkload:
        rng = self._rng
        kernels = 8
        # seconds that each kernel would spend in arithmetic and in memory traffic at the top
        compute_s, memory_s = rng.exponential(1.0, kernels), rng.exponential(1.0, kernels)
        lean = rng.uniform()  # of the whole job: to memory, or to arithmetic
        top_hz, memory_hz = self.sm_hz[0], self.memory_hz[0]
        work = Work(
            flops=lean * compute_s * self.roofline.flops_per_cycle * top_hz,
            bytes_moved=(1 - lean) * memory_s * self.roofline.bytes_per_memory_cycle * memory_hz,
            floor_s=np.zeros(kernels),
            fixed_s=float(rng.choice([0.0, rng.exponential(2.0)])),
            switched_flops=float(np.sum(lean * compute_s))
            * self.roofline.flops_per_cycle
            * top_hz
            * rng.uniform(0.3, 1.0),
            switched_bytes=float(np.sum((1 - lean) * memory_s)) * 500.0 * memory_hz,
        )
        if waiting:
            idle = rng.uniform(*IDLE)
            busy_s = self._row(replace(work, fixed_s=0.0), settings[0]).time_s
            work = replace(work, fixed_s=busy_s * idle / (1.0 - idle))
        rows = tuple(self._row(work, setting) for setting in settings)
        return RecordedWorkload(
            source="random",
            gpu=card,
            name=f"job {number}",
            rows=rows,
            default=rows[0],
            busy=max(0.0, 1.0 - work.fixed_s / rows[0].time_s),
        )

    def _row(self, work: Work, setting: Setting) -> RecordedRow:
        memory_hz = setting.memory_clock_hz or float(self.memory_hz[0])

        def cost(sm_hz: float) -> Cost:
            return cost_of(work, self.roofline, self.power, sm_hz=sm_hz, memory_hz=memory_hz)

        def power_w(sm_hz: Quantity) -> Quantity:
            return cost(float(sm_hz)).power_w

        limit_w = setting.power_limit_w or float(self.limits_w[0])
        asked_hz = setting.sm_clock_hz or float(self.sm_hz[0])
        found = cost(float(capped_clock(power_w, 0.15 * self.sm_hz[0], asked_hz, limit_w)))
        time_s = found.time_s * (1 + self._rng.normal(0.0, ROW_ERROR))
        energy_j = found.energy_j * (1 + self._rng.normal(0.0, ROW_ERROR))
        return RecordedRow(
            setting=setting, time_s=time_s, power_w=energy_j / time_s, energy_j=energy_j
        )
