"""Fits the simulated devices (`src/kilter/device/sim/profiles/*.toml`) to tables of measurements.

    python tools/fit_profiles.py [--data DIR] [--only NAME ...] [--write]

`DIR` holds `clock_tables/*.csv` and `h200/facts.json`. Needs scipy (the dev extra).

The card's parameters (voltage curve, static power, energy per FLOP and byte, overlap, ...) are
shared by all workloads of a table. The tables say nothing about a workload's FLOPs and bytes, so a
workload is four hidden numbers: its time, how much of it is arithmetic and how much memory, the
part that no clock changes, and its switching activity. Fitting is maximum a posteriori in the
logarithms of time and energy, with a robust loss and the priors of `beliefs`.

The error that counts is on workloads the card was *not* fitted to: leave some workloads out, fit
the card to the others, find the four numbers of a left-out workload from a few of its rows
(`anchors`), and predict its remaining rows.

The H200 has measurements at its default clocks only: `h200` solves for what they determine and
takes the shape of the clock axis from the A100's fit, which is an assumption and is said to be one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.sparse import lil_matrix

from kilter.device.sim.profile import PROFILE_SCHEMA, parse_profile
from kilter.device.sim.replay import RecordedRow, RecordedWorkload, load_tables
from kilter.model.power import Power, capped_clock
from kilter.model.roofline import Roofline

Array = NDArray[np.float64]

T = TypeVar("T", "Errors", "Choices")

PROFILES = Path(__file__).parents[1] / "src/kilter/device/sim/profiles"
HIDDEN = 4


@dataclass(frozen=True)
class Prior:
    """A log-normal belief about a card's parameter: `mean` and the standard deviation of its log.
    A spread of 0 fixes the parameter: the table cannot tell it."""

    mean: float
    spread: float


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is known of a card before the table is looked at (data sheet), and the beliefs."""

    name: str
    top_hz: float
    """Highest SM clock, where a table's row says "unlocked"."""
    memory_hz: float
    limit_w: float
    limit_kept: float
    peak_flops: float
    """Of the sort of arithmetic that the workloads use, at the top clock: sets the scale of a
    FLOP, which the tables leave open."""
    peak_bytes_per_s: float
    launch_s: float
    priors: dict[str, Prior]


def beliefs(**changed: Prior) -> dict[str, Prior]:
    """Powers relative to the card's limit, clocks to its top clock."""
    return {
        "knee": Prior(2.0, 0.5),  # knee / (1 - knee), both relative to the top clock
        "lift": Prior(0.45, 0.3),  # of the voltage from the knee to the top clock
        "overlap": Prior(2.5, 0.5),
        "asking": Prior(1.8, 0.5),  # what SMs can ask for, over what the memory delivers
        "static": Prior(0.10, 0.25),
        "leakage": Prior(0.06, 0.25),
        "clock": Prior(0.05, 0.4),
        "busy": Prior(0.15, 0.4),
        "compute": Prior(0.30, 0.4),
        "memory": Prior(0.04, 0.4),
        "moving": Prior(0.15, 0.25),
        **changed,
    }


def models(card: Card, theta: dict[str, float]) -> tuple[Roofline, Power]:
    """The device that a parameter vector stands for."""
    knee_hz = card.top_hz * theta["knee"] / (1 + theta["knee"])
    v2_top = (1 + theta["lift"]) ** 2
    deliver = card.peak_bytes_per_s / card.memory_hz
    roofline = Roofline(
        flops_per_cycle=card.peak_flops / card.top_hz,
        bytes_per_memory_cycle=deliver,
        bytes_per_sm_cycle=theta["asking"] * card.peak_bytes_per_s / card.top_hz,
        overlap=1 + theta["overlap"],
        launch_s=card.launch_s,
    )
    power = Power(
        idle_w=card.limit_w * theta["static"],
        static_w=card.limit_w * theta["static"],
        leakage_w=card.limit_w * theta["leakage"],
        leakage_per_k=0.005,
        clock_w_per_hz=card.limit_w * theta["clock"] / (v2_top * card.top_hz),
        busy_w_per_hz=card.limit_w * theta["busy"] / (v2_top * card.top_hz),
        joule_per_flop=card.limit_w * theta["compute"] / (v2_top * card.peak_flops),
        memory_w_per_hz=card.limit_w * theta["memory"] / card.memory_hz,
        joule_per_byte=card.limit_w * theta["moving"] / card.peak_bytes_per_s,
        knee_hz=knee_hz,
        volts_per_hz=theta["lift"] / (card.top_hz - knee_hz),
    )
    return roofline, power


@dataclass(frozen=True)
class Rows:
    """Rows of several workloads as arrays; `owner` says whose each row is."""

    owner: NDArray[np.int64]
    sm_hz: Array
    memory_hz: Array
    limit_w: Array
    time_s: Array
    energy_j: Array


def rows_of(card: Card, chosen: Sequence[Sequence[RecordedRow]]) -> Rows:
    flat = [(i, row) for i, rows in enumerate(chosen) for row in rows]
    settings = [row.setting for _, row in flat]
    return Rows(
        owner=np.array([i for i, _ in flat]),
        sm_hz=np.array([s.sm_clock_hz or card.top_hz for s in settings]),
        memory_hz=np.array([s.memory_clock_hz or card.memory_hz for s in settings]),
        limit_w=np.array([s.power_limit_w or card.limit_w for s in settings]),
        time_s=np.array([row.time_s for _, row in flat]),
        energy_j=np.array([row.energy_j for _, row in flat]),
    )


def predict(card: Card, theta: dict[str, float], hidden: Array, rows: Rows) -> tuple[Array, Array]:
    """Time and energy of every row, by the functions that the simulator uses.

    `hidden` has one line per workload: log time at the default clocks, log-odds of arithmetic
    against memory, log-odds of the clockless part, log activity.
    """
    roofline, power = models(card, theta)
    log_time, balance, clockless, log_activity = hidden[rows.owner].T
    share = 1 / (1 + np.exp(-balance))
    gap_s = np.exp(log_time) / (1 + np.exp(-clockless))
    busy_s = np.exp(log_time) - gap_s
    p = roofline.overlap
    flops = busy_s * share ** (1 / p) * roofline.flops_per_cycle * card.top_hz
    moved = busy_s * (1 - share) ** (1 / p) * roofline.bandwidth(card.top_hz, card.memory_hz)
    activity = np.exp(log_activity)

    def cost(sm_hz: Array) -> tuple[Array, Array]:
        active_s = roofline.busy_s(flops, moved, sm_hz, rows.memory_hz)
        time_s = active_s + gap_s
        work_j = power.work_j(flops, moved, active_s, sm_hz, activity=activity)
        return time_s, time_s * power.waiting_w(sm_hz, rows.memory_hz) + work_j

    def power_w(sm_hz: Array) -> Array:
        time_s, energy_j = cost(sm_hz)
        return energy_j / time_s

    lowest = 0.1 * card.top_hz
    sm_hz = capped_clock(power_w, lowest, rows.sm_hz, card.limit_kept * rows.limit_w)
    return cost(sm_hz)


HIDDEN_MEAN = np.array([0.0, 0.0, -3.0, 0.0])
HIDDEN_SPREAD = np.array([0.5, 3.0, 2.0, 0.5])


def fit(
    card: Card, rows: Rows, workloads: int, fixed: dict[str, float] | None = None
) -> tuple[dict[str, float], Array]:
    """Card parameters (unless `fixed`) and hidden numbers, maximum a posteriori."""
    free = [] if fixed else [name for name, prior in card.priors.items() if prior.spread > 0]
    means = {name: prior.mean for name, prior in card.priors.items()}
    spreads = np.array([card.priors[name].spread for name in free])
    shortest = np.array([np.log(rows.time_s[rows.owner == i].min()) for i in range(workloads)])

    def unpack(x: Array) -> tuple[dict[str, float], Array]:
        moved = {name: means[name] * float(np.exp(x[i])) for i, name in enumerate(free)}
        hidden = x[len(free) :].reshape(workloads, HIDDEN).copy()
        hidden[:, 0] += shortest
        return {**means, **moved, **(fixed or {})}, hidden

    def residuals(x: Array) -> Array:
        theta, hidden = unpack(x)
        time_s, energy_j = predict(card, theta, hidden, rows)
        own = x[len(free) :].reshape(workloads, HIDDEN)
        return np.concatenate(
            [
                np.log(time_s / rows.time_s) / SIGMA,
                np.log(energy_j / rows.energy_j) / SIGMA,
                x[: len(free)] / spreads,
                ((own - HIDDEN_MEAN) / HIDDEN_SPREAD).ravel(),
            ]
        )

    n, k = len(rows.owner), len(free)
    pattern = lil_matrix((2 * n + k + workloads * HIDDEN, k + workloads * HIDDEN), dtype=int)
    pattern[: 2 * n, :k] = 1
    for i, owner in enumerate(rows.owner):
        for line in (i, n + i):
            pattern[line, k + owner * HIDDEN : k + (owner + 1) * HIDDEN] = 1
    for i in range(k + workloads * HIDDEN):
        pattern[2 * n + i, i] = 1
    start = np.concatenate([np.zeros(k), np.tile(HIDDEN_MEAN, workloads)])
    found = least_squares(
        residuals,
        start,
        jac_sparsity=pattern,
        loss="soft_l1",
        x_scale="jac" if k == 0 else 1.0,
        max_nfev=200,
    )
    return unpack(found.x)


SIGMA = 0.02
"""Relative error that a row is trusted to."""


def anchors(workload: RecordedWorkload) -> list[RecordedRow]:
    """The few rows from which a left-out workload is recognised: the default, and for each knob
    that varies its lowest and its middle value, the other knobs as high as the table has them."""
    chosen = [workload.default]
    for axis in range(3):
        values = sorted({v for row in workload.rows if (v := knobs(row)[axis]) is not None})
        if len(values) < 2:
            continue
        for value in (values[0], values[len(values) // 2]):
            line = [row for row in workload.rows if knobs(row)[axis] == value]
            chosen.append(max(line, key=lambda row: [v or 0.0 for v in knobs(row)]))
    return list({id(row): row for row in chosen}.values())


def knobs(row: RecordedRow) -> tuple[float | None, float | None, float | None]:
    s = row.setting
    return s.sm_clock_hz, s.memory_clock_hz, s.power_limit_w


@dataclass(frozen=True)
class Errors:
    """Relative errors, row by row."""

    time: Array
    energy: Array

    def line(self, what: str) -> str:
        def show(e: Array) -> str:
            return f"median {100 * np.median(e):5.2f} %  p90 {100 * np.quantile(e, 0.9):5.2f} %"

        rows = f"{len(self.time):5d} rows"
        return f"  {what}: {rows}   time {show(self.time)}   energy {show(self.energy)}"

    def said(self, what: str) -> str:
        """The same for a profile's file."""
        time, energy = 100 * np.median(self.time), 100 * np.median(self.energy)
        return f"{what}: {len(self.time)} rows, time {time:.1f} %, energy {energy:.1f} % (median)"


def errors(card: Card, theta: dict[str, float], hidden: Array, rows: Rows) -> Errors:
    time_s, energy_j = predict(card, theta, hidden, rows)
    return Errors(np.abs(time_s / rows.time_s - 1), np.abs(energy_j / rows.energy_j - 1))


@dataclass(frozen=True)
class Choices:
    """What one would win by trusting the simulator alone: per workload, the setting it would pick
    (least predicted energy, at most 5 % slower by its own account), and what that really does."""

    predicted: Array
    """Saving that the simulator promises."""
    true: Array
    """Saving of that setting in the table."""
    slowdown: Array
    oracle: Array
    """Saving of the best setting of the table that keeps the bound."""

    def said(self) -> str:
        return (
            f"trusted alone for the least energy within 5 %, on the same {len(self.true)} left-out "
            f"workloads: promises {100 * np.mean(self.predicted):.1f} % of energy, saves "
            f"{100 * np.mean(self.true):.1f} % (best possible {100 * np.mean(self.oracle):.1f} %), "
            f"breaks the bound in {int(np.sum(self.slowdown > 0.05))}"
        )


def choose(
    card: Card, theta: dict[str, float], hidden: Array, workloads: Sequence[RecordedWorkload]
) -> Choices:
    found = []
    for own, w in zip(hidden, workloads, strict=True):
        rows = rows_of(card, [[w.default, *w.rows]])
        time_s, energy_j = predict(card, theta, own[None, :], rows)
        legal = time_s <= 1.05 * time_s[0]
        pick = int(np.argmin(np.where(legal, energy_j, np.inf)))
        really = rows.time_s <= 1.05 * rows.time_s[0]
        best = float(np.min(rows.energy_j[really]))
        found.append(
            (
                1 - energy_j[pick] / energy_j[0],
                1 - rows.energy_j[pick] / rows.energy_j[0],
                rows.time_s[pick] / rows.time_s[0] - 1,
                1 - best / rows.energy_j[0],
            )
        )
    return Choices(*np.array(found).T)


def recognise(
    card: Card, theta: dict[str, float], workloads: Sequence[RecordedWorkload]
) -> tuple[Errors, Choices]:
    """Of workloads of which the card saw the anchors only: errors on their remaining rows."""
    known = [anchors(w) for w in workloads]
    rest = [[r for r in w.rows if r not in k] for w, k in zip(workloads, known, strict=True)]
    _, hidden = fit(card, rows_of(card, known), len(workloads), fixed=theta)
    return (
        errors(card, theta, hidden, rows_of(card, rest)),
        choose(card, theta, hidden, workloads),
    )


def cross_validate(
    card: Card, workloads: Sequence[RecordedWorkload], folds: int
) -> tuple[Errors, Choices]:
    wrong, chosen = [], []
    for fold in range(min(folds, len(workloads))):
        out = [w for i, w in enumerate(workloads) if i % folds == fold]
        stay = [w for i, w in enumerate(workloads) if i % folds != fold]
        theta, _ = fit(card, rows_of(card, [w.rows for w in stay]), len(stay))
        e, c = recognise(card, theta, out)
        wrong.append(e)
        chosen.append(c)
    return joined(Errors, wrong), joined(Choices, chosen)


def joined(kind: type[T], parts: Sequence[T]) -> T:
    return kind(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(kind)))


V100 = Card(
    name="v100",
    top_hz=1530e6,
    memory_hz=877e6,
    limit_w=300.0,
    limit_kept=0.98,
    peak_flops=14.0e12,
    peak_bytes_per_s=810e9,
    launch_s=6.5e-6,
    priors=beliefs(
        static=Prior(0.06, 0), leakage=Prior(0.04, 0), memory=Prior(0.03, 0), moving=Prior(0.12, 0)
    ),
)
RTX3080TI = Card(
    name="rtx3080ti",
    top_hz=1965e6,
    memory_hz=9501e6,
    limit_w=350.0,
    limit_kept=0.98,
    peak_flops=28e12,
    peak_bytes_per_s=850e9,
    launch_s=6.5e-6,
    priors=beliefs(),
)
A100 = Card(
    name="a100",
    top_hz=1410e6,
    memory_hz=1512e6,
    limit_w=300.0,
    limit_kept=0.98,
    peak_flops=240e12,
    peak_bytes_per_s=1700e9,
    launch_s=6.5e-6,
    priors=beliefs(memory=Prior(0.04, 0)),
)

THERMAL = {"ambient_c": 30.0, "time_constant_s": 40.0, "limit_c": 87.0}
NOT_MEASURED = (
    "warming (ambient, resistance, time constant), growth of leakage with temperature",
    "switching delay",
    "launch time per kernel: as measured on an H200's host",
    "sensor gain: up to 5 % per board, period and window as published in arXiv 2312.02741",
)
HELD_OUT = (
    "cross-validation by workload in {folds} parts: the card is fitted to the others, a left-out "
    "workload is recognised from {anchors} of its rows (default, lowest and middle of each knob), "
    "and the errors are those of its remaining rows"
)


def shell(card: Card, **own: Any) -> dict[str, Any]:
    """A profile as it is written, without the fitted models."""
    return {
        "schema": PROFILE_SCHEMA,
        "name": card.name,
        "title": own["title"],
        "memory_bytes": own["memory_mib"] * 2**20,
        "sleep_after_s": 5.0,
        "knobs": {
            "sm_lowest_hz": own["sm_lowest_hz"],
            "sm_highest_hz": card.top_hz,
            "sm_step_hz": own["sm_step_hz"],
            "sm_idle_hz": own["sm_idle_hz"],
            "memory_clocks_hz": own.get("memory_clocks_hz", [card.memory_hz]),
            "limit_lowest_w": own["limit_lowest_w"],
            "limit_highest_w": card.limit_w,
            "limit_step_w": own["limit_step_w"],
            "limit_kept": card.limit_kept,
        },
        "thermal": {**THERMAL, "kelvin_per_watt": 45.0 / card.limit_w},
        "sensor": {
            "period_s": own["sensor_s"][0],
            "window_s": own["sensor_s"][1],
            "gain_error": 0.05,
            "energy_counter": True,
        },
        "switch": {"median_s": own["switch_s"], "target_spread": 0.3, "spread": 0.3},
    }


def fitted(
    card: Card,
    workloads: Sequence[RecordedWorkload],
    *,
    folds: int,
    table: str,
    assumed: tuple[str, ...],
    idle_w: float,
    checks: Callable[[dict[str, float]], tuple[str, ...]] = lambda theta: (),
    **own: Any,
) -> tuple[dict[str, Any], dict[str, float]]:
    """A profile fitted to a table, and the card's parameters."""
    rows = rows_of(card, [w.rows for w in workloads])
    theta, hidden = fit(card, rows, len(workloads))
    on_fit = errors(card, theta, hidden, rows)
    print(on_fit.line(f"{card.name}: fitted to {len(workloads)} workloads"), flush=True)
    held_out, choices = cross_validate(card, workloads, folds)
    print(held_out.line("held out"), choices.said(), sep="\n  ", flush=True)
    roofline, power = models(card, theta)
    seen = len(anchors(workloads[0]))
    profile = shell(card, **own)
    profile["roofline"] = asdict(roofline)
    profile["power"] = asdict(replace(power, idle_w=idle_w))
    profile["evidence"] = {
        "fitted_to": table,
        "workloads": len(workloads),
        "rows": len(rows.owner),
        "fit_time_error": float(np.median(on_fit.time)),
        "fit_energy_error": float(np.median(on_fit.energy)),
        "held_out": HELD_OUT.format(folds=min(folds, len(workloads)), anchors=seen),
        "held_out_rows": len(held_out.time),
        "held_out_time_error": float(np.median(held_out.time)),
        "held_out_energy_error": float(np.median(held_out.energy)),
        "checks": [choices.said(), *checks(theta)],
        "assumed": [*assumed, *NOT_MEASURED],
    }
    return profile, theta


def restricted(
    workloads: Sequence[RecordedWorkload], keep: Callable[[RecordedRow], bool]
) -> list[RecordedWorkload]:
    return [replace(w, rows=tuple(r for r in w.rows if keep(r))) for w in workloads]


def v100(tables: Path) -> dict[str, Any]:
    def checks(theta: dict[str, float]) -> tuple[str, ...]:
        """Two other boards, by recognition only: no parameter of the card is changed."""
        above = restricted(
            load_tables(tables / "nvdvfs_v100_micro.csv"),
            lambda row: (row.setting.sm_clock_hz or 0.0) >= 750e6,
        )
        # The 250 W board, whose clocks end at 1380 MHz; short epochs are mostly noise.
        capped = [
            replace(w, rows=rows, default=max(rows, key=lambda row: row.setting))
            for w in load_tables(tables / "zeus_v100_a40.csv")
            if w.gpu == "V100" and "ncf" not in w.name and "shufflenetv2" not in w.name
            for rows in [tuple(at_clock(row, 1380e6) for row in w.rows)]
        ]
        lines = []
        for what, found in (
            ("138 microbenchmarks on another V100, 6 clocks from 802 MHz (nvdvfs)", above),
            ("35 training jobs on a 250 W V100, power limits (zeus, long epochs)", capped),
        ):
            e, _ = recognise(V100, theta, found)
            print(e.line(what), flush=True)
            lines.append(e.said(what))
        return tuple(lines)

    profile, _ = fitted(
        V100,
        load_tables(tables / "geepafs_v100_dev.csv"),
        folds=5,
        table="geepafs_v100_dev (zyjopensource/GPU-DVFS-Dataset, 17 workloads, 13 SM clocks)",
        checks=checks,
        assumed=(
            "static power, leakage, memory power and energy per byte: the table cannot tell them",
            "scale of a FLOP: 14 TFLOP/s float32 at 1530 MHz; of a byte: 810 GB/s",
            "idle power",
        ),
        idle_w=40.0,
        title="Tesla V100-SXM2 (simulated)",
        memory_mib=16384,
        sm_lowest_hz=757.5e6,
        sm_step_hz=7.5e6,
        sm_idle_hz=135e6,
        limit_lowest_w=150.0,
        limit_step_w=10.0,
        sensor_s=(0.02, 0.01),
        switch_s=0.02,
    )
    return profile


def at_clock(row: RecordedRow, sm_hz: float) -> RecordedRow:
    return replace(row, setting=row.setting.with_(sm_clock_hz=sm_hz))


def rtx3080ti(tables: Path) -> dict[str, Any]:
    profile, _ = fitted(
        RTX3080TI,
        restricted(
            load_tables(tables / "apadomas_rtx3080ti.csv"),
            lambda row: row.setting.sm_clock_hz != 210e6,
        ),
        folds=5,
        table=(
            "apadomas_rtx3080ti (apAdomas/GPU-FREQUENCY-DVFS, 15 kernels, SM x memory clock) "
            "without its rows at 210 MHz, where compute-bound kernels run 15 % faster than that "
            "clock allows"
        ),
        assumed=(
            "scale of a FLOP: 28 TFLOP/s float32 at 1965 MHz; of a byte: 850 GB/s",
            "the power limit: no row of the table sets one",
            "idle power",
        ),
        idle_w=30.0,
        title="GeForce RTX 3080 Ti (simulated)",
        memory_mib=12288,
        sm_lowest_hz=630e6,
        sm_step_hz=15e6,
        sm_idle_hz=210e6,
        memory_clocks_hz=[810e6, 5001e6, 9251e6, 9501e6],
        limit_lowest_w=175.0,
        limit_step_w=25.0,
        sensor_s=(0.1, 0.1),
        switch_s=0.02,
    )
    return profile


def a100(tables: Path) -> tuple[dict[str, Any], dict[str, float]]:
    return fitted(
        A100,
        load_tables(tables / "giordano_a100.csv"),
        folds=4,
        table=(
            "giordano_a100 (giordano/gpu-power-frequency-benchmarks, 4 HPC codes, SM clock x power "
            "limit)"
        ),
        assumed=(
            "memory power, and that the card is the 80 GB PCIe one (its limit is 300 W)",
            "scale of a FLOP: 240 TFLOP/s bfloat16 at 1410 MHz; of a byte: 1700 GB/s",
            "that networks behave like the four HPC codes: no network was measured",
            "idle power",
        ),
        idle_w=45.0,
        title="A100-PCIE-80GB (simulated)",
        memory_mib=81920,
        sm_lowest_hz=1005e6,
        sm_step_hz=15e6,
        sm_idle_hz=210e6,
        limit_lowest_w=150.0,
        limit_step_w=25.0,
        sensor_s=(0.1, 0.025),
        switch_s=0.02,
    )


def h200(facts: dict[str, Any], shape: dict[str, float]) -> dict[str, Any]:
    """Solved, not fitted: as many unknowns as measured loads. `shape` is the A100's fit, of which
    knee and lift of the voltage, overlap and the SMs' appetite for bytes are taken over."""
    load, idle, nvml = facts["steady_power"], facts["idle"], facts["nvml"]
    top, memory = 1e6 * nvml["sm_clocks_mhz"]["highest"], 1e6 * max(nvml["memory_clocks_mhz"])
    idle_hz, limit_w = 1e6 * idle["sm_clock_mhz"], nvml["power_limit_w"]
    copy, matmul = load["d2d_copy"], load["matmul_bf16"]
    waiting_w, capped_hz = load["tiny_kernels"]["power_w"], 1e6 * matmul["sm_clock_mhz"]
    launch_s = load["tiny_kernels"]["per_call_ms"] * 1e-3 / 200
    card = Card(
        name="h200",
        top_hz=top,
        memory_hz=memory,
        limit_w=limit_w,
        limit_kept=matmul["power_w"] / limit_w,
        peak_flops=2 * 8192**3 / (matmul["per_call_ms"] * 1e-3) * top / capped_hz,
        peak_bytes_per_s=1.0,
        launch_s=launch_s,
        priors={},
    )
    p = 1 + shape["overlap"]
    copied = 2 * 4 * 2**30 / (copy["per_call_ms"] * 1e-3)
    card = replace(card, peak_bytes_per_s=copied * (1 + shape["asking"] ** -p) ** (1 / p))
    _, at = models(card, {**shape, "memory": 0.03})
    v2 = float(at.voltage(top)) ** 2
    # Waiting: idle to awake is leakage with voltage and toggling clocks; leakage is assumed.
    leakage_w, memory_w = shape["leakage"] * limit_w, 0.5 * idle["memory_power_w"]
    toggling_w = waiting_w - idle["power_w"] - leakage_w * float(at.voltage(top) - 1)
    clock = toggling_w / (v2 * top - idle_hz)
    static_w = idle["power_w"] - leakage_w - memory_w - clock * idle_hz
    # Copying: what is above waiting, shared between SMs and memory as in the A100's fit.
    above_w = copy["power_w"] - waiting_w
    busy = above_w * shape["busy"] / (shape["busy"] + shape["moving"]) / (v2 * top)
    per_byte = above_w * shape["moving"] / (shape["busy"] + shape["moving"]) / copied
    power = replace(
        at,
        idle_w=idle["power_w"],
        static_w=static_w,
        leakage_w=leakage_w,
        clock_w_per_hz=clock,
        busy_w_per_hz=busy,
        memory_w_per_hz=memory_w / memory,
        joule_per_byte=per_byte,
    )
    # Multiplying: what is left at the clock to which the card fell by itself.
    seconds, flops, moved = matmul["per_call_ms"] * 1e-3, 2 * 8192**3, 3 * 2 * 8192**2
    v2_capped = float(power.voltage(capped_hz)) ** 2
    rest_w = float(power.waiting_w(capped_hz, memory)) + busy * v2_capped * capped_hz
    rest_w += per_byte * moved / seconds
    per_flop = (matmul["power_w"] - rest_w) * seconds / (v2_capped * flops)
    power = replace(power, joule_per_flop=per_flop)
    roofline, _ = models(card, {**shape, "memory": 0.03})
    return {
        **shell(
            card,
            title="H200 (simulated, clock axis assumed)",
            memory_mib=facts["machine"]["memory_total_mib"],
            sm_lowest_hz=idle_hz,
            sm_step_hz=1e6 * nvml["sm_clocks_mhz"]["step"],
            sm_idle_hz=idle_hz,
            memory_clocks_hz=sorted(1e6 * mhz for mhz in nvml["memory_clocks_mhz"]),
            limit_lowest_w=nvml["power_limit_range_w"][0],
            limit_step_w=25.0,
            sensor_s=(0.1, 0.025),
            switch_s=0.03,
        ),
        "roofline": asdict(roofline),
        "power": asdict(power),
        "evidence": {
            "fitted_to": (
                "h200/facts.json: idle, tiny kernels, copy, bf16 matmul under the power limit; all "
                "at default clocks (own measurements)"
            ),
            "workloads": 3,
            "rows": 4,
            "held_out": "impossible: there is one setting per load; see checks",
            "held_out_rows": 0,
            "checks": list(h200_checks(facts, roofline, power, top, memory)),
            "assumed": [
                "the whole clock axis: knee and rise of the voltage, overlap and the SMs' appetite "
                "for bytes are the A100's fit, scaled to 1980 MHz; no H200 was ever set",
                "leakage, and which half of the idle memory power follows the memory clock",
                "how the power of a copy divides between SMs and memory (as in the A100's fit)",
                "FLOPs are bf16 tensor FLOPs",
                *NOT_MEASURED[:2],
                "sensor window and gain (the 10 Hz period is measured)",
            ],
        },
    }


def h200_checks(
    facts: dict[str, Any], roofline: Roofline, power: Power, top: float, memory: float
) -> tuple[str, ...]:
    """Loads that the solution has not used."""
    load, train = facts["steady_power"], facts["training_one_gpu"]
    waiting = float(power.waiting_w(top, memory))
    multiply = load["elementwise"]
    seconds, moved = multiply["per_call_ms"] * 1e-3, 2 * 4 * 2**30
    busy_s = float(roofline.busy_s(moved / 8, moved, top, memory))
    multiply_j = waiting * seconds + float(power.work_j(moved / 8, moved, busy_s, top))
    short, stalled = train["resnet50"], train["resnet50_idle60"]
    pause_s = 1e-3 * (stalled["iteration_ms"] - short["iteration_ms"])
    stalled_j = short["energy_per_iteration_j"] + pause_s * waiting
    found = (
        ("multiplying 4 GiB by a number: time", busy_s, seconds),
        ("the same: energy", multiply_j, multiply["power_w"] * seconds),
        (
            "ResNet-50 with 60 ms of waiting per iteration: energy",
            stalled_j,
            stalled["energy_per_iteration_j"],
        ),
        ("copying from the host: power", waiting, load["h2d"]["power_w"]),
    )
    lines = [f"{what}: {100 * (model / real - 1):+.1f} %" for what, model, real in found]
    print("\n".join(f"  h200: {line}" for line in lines), flush=True)
    return tuple(lines)


def as_toml(profile: dict[str, Any]) -> str:
    """Flat values first, then one table per group; comments say who wrote it."""

    def show(value: Any) -> str:
        if isinstance(value, list):
            inner = ", ".join(show(item) for item in value)
            if len(inner) < 70:
                return f"[{inner}]"
            return "[\n" + "".join(f"  {show(item)},\n" for item in value) + "]"
        if isinstance(value, float):
            return (
                f"{value:.6g}" if "." in f"{value:.6g}" else f"{value:.6g}.0".replace(".0.0", ".0")
            )
        return json.dumps(value)

    lines = ["# Written by tools/fit_profiles.py. Units are SI: Hz, W, J, s, bytes.", ""]
    flat = {key: value for key, value in profile.items() if not isinstance(value, dict)}
    lines += [f"{key} = {show(value)}" for key, value in flat.items()]
    for group, values in profile.items():
        if isinstance(values, dict):
            lines += ["", f"[{group}]", *(f"{key} = {show(v)}" for key, v in values.items())]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Fit the simulated devices to measurements.")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--only", nargs="+", choices=("v100", "rtx3080ti", "a100", "h200"))
    parser.add_argument("--write", action="store_true", help="write the profiles of the package")
    options = parser.parse_args(arguments)
    wanted = options.only or ("v100", "rtx3080ti", "a100", "h200")
    tables = options.data / "clock_tables"
    profiles = []
    if "v100" in wanted:
        profiles.append(v100(tables))
    if "rtx3080ti" in wanted:
        profiles.append(rtx3080ti(tables))
    if "a100" in wanted or "h200" in wanted:
        ampere, shape = a100(tables)
        profiles.append(ampere)
        if "h200" in wanted:
            facts = json.loads((options.data / "h200/facts.json").read_text(encoding="utf-8"))
            profiles.append(h200(facts, shape))
    for profile in profiles:
        text = as_toml(profile)
        parse_profile(text, where=profile["name"])
        if options.write:
            (PROFILES / f"{profile['name']}.toml").write_text(text, encoding="utf-8")
        else:
            print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
