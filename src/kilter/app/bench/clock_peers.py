"""Other systems' ways to choose a clock, as `kilter bench clocks` replays them.

Each follows the published code, as far as a table can answer what the system would ask a GPU. What
had to be replaced is said at each. All of them get the same noisy blocks as kilter, and their own
bound scaled to the one that is asked for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from kilter.clocks.plan.governor import BlockOutcome
from kilter.clocks.plan.job import SEARCHED_KNOBS
from kilter.core.setting import Setting
from kilter.device.sim.replay import RecordedWorkload


class PeerRun(Protocol):
    """A run of one workload of a table."""

    workload: RecordedWorkload

    def block(self, setting: Setting, iterations: int = ...) -> BlockOutcome: ...


def mean(outcomes: Iterable[BlockOutcome]) -> BlockOutcome:
    listed = list(outcomes)
    return BlockOutcome(
        iteration_s=statistics.fmean(o.iteration_s for o in listed),
        energy_j=statistics.fmean(o.energy_j or 0.0 for o in listed),
    )


def ladder(workload: RecordedWorkload, around: Setting, knob: str | None = None) -> list[Setting]:
    """The settings that differ from `around` in the ordered knob alone, highest first: the core
    clock, or the power limit in tables that have no clocks."""
    settings = [row.setting for row in workload.rows]
    if knob is None:
        clocks = {s.sm_clock_hz for s in settings}
        knob = "sm_clock_hz" if len(clocks) > 1 else "power_limit_w"
    tops = {
        k: max((v for s in settings if (v := getattr(s, k))), default=None) for k in SEARCHED_KNOBS
    }

    def value(setting: Setting, k: str) -> float | None:
        """A knob left to the device counts as the highest."""
        return getattr(setting, k) or tops[k]

    others = [k for k in SEARCHED_KNOBS if k != knob]
    same = [s for s in settings if all(value(s, k) == value(around, k) for k in others)]
    return sorted(same, key=lambda s: -(getattr(s, knob) or math.inf))


def height(settings: Sequence[Setting]) -> list[float]:
    """The knob's value of each over the highest known one; of an unset knob 1."""
    knob = "sm_clock_hz" if len({s.sm_clock_hz for s in settings}) > 1 else "power_limit_w"
    values = [getattr(s, knob) for s in settings]
    top = max((v for v in values if v), default=1.0)
    return [(v or top) / top for v in values]


def zeus(run: PeerRun, bound: float) -> Setting:
    """Zeus' power-limit optimizer with its max-slowdown selector (ml-energy/zeus 75a8b93): limits
    from the highest to the lowest in order, 10 warm-up and 40 measured steps each, one sample per
    limit, then the least energy among those within the factor. Replaced: in tables without limits
    the core clock takes their place."""
    default = run.workload.default.setting
    by_limit = any(r.setting.power_limit_w for r in run.workload.rows)
    measured: dict[Setting, BlockOutcome] = {}
    for setting in ladder(run.workload, default, "power_limit_w" if by_limit else "sm_clock_hz"):
        run.block(setting, 10)
        measured[setting] = mean(run.block(setting, 1) for _ in range(40))
    limit = measured[default].iteration_s * (1 + bound)
    legal = [s for s, o in measured.items() if o.iteration_s <= limit]
    return min(legal, key=lambda s: measured[s].energy_j or math.inf)


def gpoeo(run: PeerRun, bound: float, predicted: Setting) -> Setting:
    """GPOEO's local search (ruixueqingyang/GPOEO 37d5a34; Wang et al., TPDS 33(11), 2022): memory
    clock first, one step to each side of the prediction; then a golden section over the core
    clock, +-10 % of the gears about the prediction, of E T^2 under a slowdown of at most nine
    tenths of the bound (4.5 % of 5 %); cubics fitted to the gears measured choose the gear.
    Replaced: the model files are not published, so the prediction is the best static setting of
    the other workloads."""
    default = run.workload.default.setting
    base = mean(run.block(default, 1) for _ in range(10))
    measured: dict[Setting, tuple[float, float]] = {default: (1.0, 1.0)}

    def value(setting: Setting) -> float:
        if setting not in measured:
            seen = mean(run.block(setting, 1) for _ in range(10))
            measured[setting] = (
                seen.iteration_s / base.iteration_s,
                (seen.energy_j or 0.0) / (base.energy_j or 1.0),
            )
        time, energy = measured[setting]
        # an illegal gear is worse than any legal one, the more the slower it is
        return energy * time**2 if time <= 1 + 0.9 * bound else 10.0 + time

    memories = ladder(run.workload, predicted, "memory_clock_hz")
    start = _least_neighbour(memories, predicted, value) if len(memories) > 1 else predicted
    gears = ladder(run.workload, start)
    place = gears.index(start) if start in gears else 0
    reach = max(2, round(0.1 * len(gears)))
    low, high = max(0, place - reach), min(len(gears) - 1, place + reach)
    for _ in range(5):  # golden section until the span is below seven gears, or five trials
        step = round(0.382 * (high - low))
        if high - low < 2 or step == 0:
            break
        a, b = low + step, high - step
        if value(gears[a]) <= value(gears[b]):
            high, low = (
                (b, max(0, low - reach)) if value(gears[low]) < value(gears[a]) else (b, low)
            )
        else:
            low = a
    return _fitted(gears, measured, bound)


def _least_neighbour(
    settings: Sequence[Setting], begin: Setting, value: Callable[[Setting], float]
) -> Setting:
    place = settings.index(begin)
    for step in (1, -1):
        while 0 <= place + step < len(settings) and (
            value(settings[place + step]) < value(settings[place])
        ):
            place += step
    return settings[place]


def _fitted(
    gears: Sequence[Setting], measured: dict[Setting, tuple[float, float]], bound: float
) -> Setting:
    """The best gear of cubics through those measured (of a lower order for few)."""
    places = dict(zip(gears, height(gears), strict=True))
    known = [g for g in gears if g in measured]
    x = np.array([places[g] for g in known])
    if len(known) < 2:
        return known[0] if known else gears[0]
    middle = float(x.mean())
    order = min(3, len(np.unique(x)) - 1)
    times = np.polyfit(x - middle, [measured[g][0] for g in known], order)
    energies = np.polyfit(x - middle, [measured[g][1] for g in known], order)
    # only between the gears measured: outside, a cubic says anything
    inside = [g for g in gears if x.min() <= places[g] <= x.max()]
    time = {g: float(np.polyval(times, places[g] - middle)) for g in inside}
    energy = {g: float(np.polyval(energies, places[g] - middle)) for g in inside}
    legal = [g for g in inside if time[g] <= 1 + 0.9 * bound]
    return min(legal, key=lambda g: energy[g] * time[g] ** 2) if legal else gears[0]


def mf_gpoeo(run: PeerRun, bound: float) -> Setting:
    """MF-GPOEO (0b051df; TSUSC 2023): a PID controller moves the upper limit of the core clock by
    the error of the slowdown (Kp 2.8, Ki 0.002, Kd 0.9, integral cleared when the error changes
    its sign), aiming 0.2 % inside the bound; the baseline is measured again every five steps; it
    stops when a gear repeats after at least five steps; the best feasible point visited wins.
    Replaced: the slowdown comes from the time of iterations, not from kernels matched by name;
    the memory clock is left alone, since tables hold no memory utilisation."""
    gears = ladder(run.workload, run.workload.default.setting)
    places = height(gears)
    target, dead_band = max(bound - 0.002, 0.0), 0.01 * bound
    visited: dict[int, tuple[float, float]] = {}
    at, integral, before = 1.0, 0.0, 0.0
    base = mean(run.block(gears[0], 1) for _ in range(20))
    for step in range(20):
        if step and step % 5 == 0:
            base = mean(run.block(gears[0], 1) for _ in range(20))
        gear = min(range(len(gears)), key=lambda i: abs(places[i] - at))
        repeated = gear in visited
        seen = mean(run.block(gears[gear], 1) for _ in range(20))
        slowdown = seen.iteration_s / base.iteration_s - 1
        visited[gear] = (slowdown, (seen.energy_j or 0.0) / (base.energy_j or 1.0))
        error = target - slowdown
        if (repeated and step >= 5) or abs(error) <= dead_band:
            break
        integral = error + (integral if error * before > 0 else 0.0)
        change = 2.8 * error + 0.002 * integral + 0.9 * (error - before if step else 0.0)
        at = min(max(places[gear] * (1 - change), places[-1]), 1.0)
        before = error
    legal = [g for g, (slowdown, _) in visited.items() if slowdown <= bound]
    return gears[min(legal, key=lambda g: visited[g][1])] if legal else gears[0]


GEEPAFS_PROBES = (1.0, 0.87, 0.75, 0.62)
"""GEEPAFS probes four clocks on a V100 (1530, 1335, 1147, 952 MHz); these are they, over the
highest."""


def geepafs(run: PeerRun, bound: float) -> Setting:
    """GEEPAFS (zyjopensource/geepafs e3680ba; EuroSys 2024): four clocks probed twice, down and
    up; one line or a two-piece fold line of performance over the clock (the fold only where the
    upper slope is smaller); the higher of the lowest clock whose modelled performance keeps the
    floor and the most efficient probed clock; the top clock after a bad fit. Replaced: performance
    is one over the iteration time, where GEEPAFS takes the memory utilisation for it."""
    gears = ladder(run.workload, run.workload.default.setting)
    places = np.array(height(gears))
    wanted = {int(np.argmin(np.abs(places - share))) for share in GEEPAFS_PROBES}
    seen: list[tuple[int, float, float]] = []
    for gear in (*sorted(wanted), *sorted(wanted, reverse=True)):
        block = run.block(gears[gear])
        seen.append((gear, 1.0 / block.iteration_s, block.energy_j or math.inf))
    x = places[[gear for gear, _, _ in seen]]
    y = np.array([performance for _, performance, _ in seen])
    if len(wanted) < 2:
        return gears[0]
    model = _fold_line(x, y)
    if np.abs(model(x) / y - 1).max() > 0.1:
        return gears[0]
    floor = float(model(places[:1])[0]) / (1 + bound)
    keeping = [i for i in range(len(gears)) if float(model(places[i : i + 1])[0]) >= floor]
    efficient = min(wanted, key=lambda g: statistics.fmean(e for i, _, e in seen if i == g))
    return gears[min(max(keeping, default=0), efficient)]


def _fold_line(x: np.ndarray, y: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """The line, or two lines that meet at a probed clock, with the least squared error."""
    line = np.polyfit(x, y, 1)
    best: tuple[float, Callable[[np.ndarray], np.ndarray]] = (
        float(((np.polyval(line, x) - y) ** 2).sum()),
        lambda at: np.polyval(line, at),
    )
    for fold in np.unique(x)[1:-1]:
        basis = np.column_stack([np.ones_like(x), x, np.maximum(x - fold, 0.0)])
        c, *_ = np.linalg.lstsq(basis, y, rcond=None)
        error = float(((basis @ c - y) ** 2).sum())
        if c[2] < 0.0 and error < best[0]:
            best = (error, _folded(c, float(fold)))
    return best[1]


def _folded(c: np.ndarray, fold: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda at: c[0] + c[1] * at + c[2] * np.maximum(at - fold, 0.0)
