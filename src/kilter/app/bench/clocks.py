"""`kilter bench clocks`: policies against tables of other people's measurements. All replayed.

Each run plays one workload of a table: a policy sees noisy blocks of iterations at settings of the
table and has to choose one; it is scored by the table's own values at its choice.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kilter.app.bench import clock_peers, clocks_learned
from kilter.app.bench.driven import driven
from kilter.app.bench.random_tables import random_tables
from kilter.app.cli.options import (
    add_goal_arguments,
    add_noise_argument,
    fraction,
    goal_of,
    positive,
    some_of,
)
from kilter.app.cli.output import print_json, show_progress
from kilter.app.learning import reference_of
from kilter.clocks.plan.governor import BlockOutcome, Governor, Order, Phase
from kilter.clocks.plan.job import Space
from kilter.clocks.plan.job_class import IDLE_TOLD, Bound, JobReadings, first_settings
from kilter.core.errors import UsageError
from kilter.core.label import Label
from kilter.core.plan import Goal
from kilter.core.setting import Setting
from kilter.core.units import show_count
from kilter.device.sim.noise import Noise, NoiseSource
from kilter.device.sim.replay import RecordedRow, RecordedWorkload, load_tables
from kilter.model.stats import binomial_interval, usual_time

HELP = "replay clock policies over tables of measurements (CSV); every figure is replayed"
EPILOG = """\
A block is 5 iterations. Noise S is, of each iteration's time: white noise of standard deviation S,
an AR(1) drift of standard deviation S (correlation 0.9), and 2 % outliers of mean +10 %; and white
noise of standard deviation S on its power. `saving` and `slowdown` are the table's true values at
the chosen setting against its default.

examples:
  kilter bench clocks --table zeus_v100_a40.csv --max-slowdown 5% --seeds 20
  kilter bench clocks --table a.csv b.csv --policies kilter,oracle --json
  kilter bench clocks --table a.csv --aa      both arms default: how often is it fooled?
  kilter bench clocks --random 16             cards and jobs that nobody has measured
"""

BLOCK = 5
"""A block has so many iterations."""
HOUR_ITERATIONS = 12_000
"""A job of one hour has so many, at 300 ms each."""


OUTLIERS = 0.02
"""An iteration is one with this probability."""


class OutOfTime(Exception):
    """The time budget of the run is spent."""


class Replay:
    """One run of a workload: plays blocks, and keeps the books of what they cost."""

    def __init__(
        self,
        workload: RecordedWorkload,
        *,
        noise: float,
        seed: int,
        budget_s: float = math.inf,
        placebo: bool = False,
        outliers: float = OUTLIERS,
    ) -> None:
        self.workload = workload
        self.iterations = 0
        self.energy_j = 0.0
        self.tried: dict[Setting, Phase] = {}
        """What the policy has done last with each setting, if it says so."""
        self.probe_energy_j = 0.0
        self._elapsed_s = 0.0
        self._budget_s = budget_s
        self._placebo = placebo
        self._noise_sd, self._seed = noise, seed
        self._rows = {row.setting: row for row in workload.rows}
        kind = Noise(
            white=noise, drift=noise, outlier_probability=outliers if noise else 0.0, power=noise
        )
        self._noise = NoiseSource(kind, np.random.default_rng(seed))

    def again(self, seed: int) -> Replay:
        """The same job with other noise, as if it ran on another day."""
        return Replay(
            self.workload,
            noise=self._noise_sd,
            seed=self._seed + seed,
            budget_s=self._budget_s,
            placebo=self._placebo,
        )

    def block(self, setting: Setting, iterations: int = BLOCK) -> BlockOutcome:
        """Time and energy of a usual iteration of some at a setting of the table, as the conductor
        takes them: the energy is mean power times usual time."""
        row = self.workload.default if self._placebo else self._rows[setting]
        draws = [self._noise.draw() for _ in range(iterations)]
        energies = [row.energy_j * time * power for time, power in draws]
        usual = usual_time([time for time, _ in draws])
        self.iterations += iterations
        self.energy_j += sum(energies)
        self._elapsed_s += row.time_s * sum(time for time, _ in draws)
        if setting != self.workload.default.setting:
            self.probe_energy_j += sum(energies)
        if self._elapsed_s > self._budget_s:
            raise OutOfTime
        return BlockOutcome(
            iteration_s=row.time_s * usual,
            energy_j=statistics.fmean(energies) * usual / statistics.fmean(t for t, _ in draws),
        )


BenchPolicy = Callable[[Replay, Goal, int, Sequence[RecordedWorkload]], Setting]
"""It takes the run, the goal, the seed, and the other workloads of the same card, and gives the
chosen setting."""


def space(workload: RecordedWorkload) -> Space:
    """The settings of a table."""
    default = workload.default
    others = tuple(row.setting for row in workload.rows if row is not default)
    return Space(found=default.setting, reference=reference_of(workload), candidates=others)


def kilter(run: Replay, goal: Goal, seed: int, _others: Sequence[RecordedWorkload]) -> Setting:
    """Ours: search under the contract; what stands when time runs out is what counts."""
    return _search(run, goal, seed)


def kilter_classed(
    run: Replay, goal: Goal, seed: int, _others: Sequence[RecordedWorkload]
) -> Setting:
    """Ours, with the first action of a card that waits, where the table tells that it does."""
    busy = 1.0 if run.workload.busy is None else run.workload.busy
    job = JobReadings(name=Bound.IDLE if 1.0 - busy >= IDLE_TOLD else Bound.UNKNOWN, busy=busy)
    return _search(run, goal, seed, first_settings(job, space(run.workload)))


def _search(run: Replay, goal: Goal, seed: int, first: Sequence[Setting] = ()) -> Setting:
    budget = run._budget_s / (BLOCK * run.workload.default.time_s)
    blocks = int(budget) if math.isfinite(budget) else None
    governor = Governor(space(run.workload), goal, seed=seed, blocks=blocks, first=first)
    with suppress(OutOfTime):
        driven(governor.search(), partial(_answer, run))
    return governor.choice.setting


def _answer(run: Replay, order: Order) -> BlockOutcome:
    if not order.baseline:
        run.tried[order.setting] = order.phase
    return run.block(order.setting)


def half(workloads: Sequence[RecordedWorkload], which: int | None) -> tuple[RecordedWorkload, ...]:
    """Those of one half, by a hash of their names; None: all."""
    return tuple(
        w for w in workloads if which is None or zlib.crc32((w.name + w.gpu).encode()) % 2 == which
    )


def static(run: Replay, goal: Goal, _seed: int, others: Sequence[RecordedWorkload]) -> Setting:
    """The one setting that saves most on the other workloads of the card while keeping the bound
    on their average: what a careful operator would lock for everybody."""
    scores: dict[Setting, float] = {}
    for row in run.workload.rows:
        pairs = [(r, w.default) for w in others if (r := w.at(row.setting)) is not None]
        if pairs and statistics.fmean(slowdown(r, d) for r, d in pairs) <= _bound(goal):
            scores[row.setting] = statistics.fmean(saving(r, d) for r, d in pairs)
    return max(scores, key=scores.__getitem__, default=run.workload.default.setting)


POLICIES: Mapping[str, BenchPolicy] = {
    "kilter": kilter,
    "kilter-classed": kilter_classed,
    "kilter-learned": lambda run, *others: clocks_learned.learned(
        run, space(run.workload), *others
    ),
    "kilter-recurring": lambda run, goal, seed, _: clocks_learned.recurring(
        run, space(run.workload), goal, seed
    ),
    "default": lambda run, *_: run.workload.default.setting,
    "static": static,
    "zeus": lambda run, goal, *_: clock_peers.zeus(run, _bound(goal)),
    "gpoeo": lambda run, goal, *others: clock_peers.gpoeo(
        run, _bound(goal), static(run, goal, *others)
    ),
    "mf-gpoeo": lambda run, goal, *_: clock_peers.mf_gpoeo(run, _bound(goal)),
    "geepafs": lambda run, goal, *_: clock_peers.geepafs(run, _bound(goal)),
    "oracle": lambda run, goal, *_: _best(run.workload, goal, price_of_time=0.0).setting,
}
"""`oracle` takes the best row that keeps the bound, chosen and scored on the same true values."""


def _bound(goal: Goal) -> float:
    return goal.max_slowdown or 0.0


def saving(row: RecordedRow, default: RecordedRow) -> float:
    return 1.0 - row.energy_j / default.energy_j


def slowdown(row: RecordedRow, default: RecordedRow) -> float:
    return row.time_s / default.time_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """One run of one policy, scored by the table's own values. Its many attributes are the keys of
    a row of the JSON."""

    policy: str
    table: str
    gpu: str
    workload: str
    seed: int
    setting: str
    chose_default: bool
    saving: float
    slowdown: float
    violated: bool
    iterations: int
    probe_energy_j: float
    search_cost: float | None
    """The search used so much energy beyond that of as many iterations at the choice, over what a
    job of `HOUR_ITERATIONS` saves; None where nothing is saved."""
    lost: str
    """Why the saving is less than the oracle's: the best setting's slowdown is not worth its saving
    ("price"), it was tested and not taken ("test"), probed and not tested ("probe"), or neither
    ("unseen"); "none": it was taken; "bound": more was taken than is allowed."""
    oracle_saving: float


def play(
    tables: Mapping[str, Sequence[RecordedWorkload]],
    policies: Sequence[str],
    goal: Goal,
    *,
    seeds: int,
    noise: float,
    budget_s: float = math.inf,
    placebo: bool = False,
    outliers: float = OUTLIERS,
    progress: Callable[[str], None] = lambda line: None,
) -> list[PolicyResult]:
    """Every policy on every workload of every table, `seeds` times each."""
    results = []
    for table, workloads in tables.items():
        for number, workload in enumerate(workloads):
            progress(f"{table}: workload {number + 1} of {len(workloads)} ...")
            others = [w for w in workloads if w.gpu == workload.gpu and w is not workload]
            for policy in policies:
                deterministic = policy in ("default", "static", "oracle")
                for seed in range(1 if deterministic else seeds):
                    run = Replay(
                        workload,
                        noise=noise,
                        seed=seed * 100_003 + number,
                        budget_s=budget_s,
                        placebo=placebo,
                        outliers=outliers,
                    )
                    try:
                        setting = POLICIES[policy](run, goal, seed, others)
                    except OutOfTime:  # a policy that has not decided leaves the default
                        setting = workload.default.setting
                    results.append(_scored(run, policy, table, goal, seed, setting, placebo))
    return results


def _scored(
    run: Replay, policy: str, table: str, goal: Goal, seed: int, setting: Setting, placebo: bool
) -> PolicyResult:
    workload, default = run.workload, run.workload.default
    # in a placebo run every setting is the default in disguise
    row = default if placebo else workload.at(setting) or default
    slow, saved_j = slowdown(row, default), default.energy_j - row.energy_j
    best = _best(workload, goal, price_of_time=0.0)
    return PolicyResult(
        policy=policy,
        table=table,
        gpu=workload.gpu,
        workload=workload.name,
        seed=seed,
        setting=str(setting),
        chose_default=setting == default.setting,
        saving=saving(row, default),
        slowdown=slow,
        violated=slow > _bound(goal) + 1e-9,
        iterations=run.iterations,
        probe_energy_j=run.probe_energy_j,
        search_cost=(run.energy_j - run.iterations * row.energy_j) / (HOUR_ITERATIONS * saved_j)
        if saved_j > 0.0
        else None,
        lost=_why_less(run, goal, row),
        oracle_saving=saving(best, default),
    )


def _best(workload: RecordedWorkload, goal: Goal, *, price_of_time: float) -> RecordedRow:
    """The row that saves most within the bound and is worth its time."""
    default = workload.default
    rows = [
        row
        for row in workload.rows
        if slowdown(row, default) <= _bound(goal) + 1e-9
        and saving(row, default) >= price_of_time * max(slowdown(row, default), 0.0)
    ]
    return min(rows, key=lambda row: row.energy_j * row.time_s**goal.objective.time_exponent)


def _why_less(run: Replay, goal: Goal, row: RecordedRow) -> str:
    best = _best(run.workload, goal, price_of_time=goal.price_of_time)
    if slowdown(row, run.workload.default) > _bound(goal) + 1e-9:
        return "bound"
    if row.energy_j <= best.energy_j:
        return "none" if best is _best(run.workload, goal, price_of_time=0.0) else "price"
    if best.setting not in run.tried:
        return "unseen"
    return "test" if run.tried[best.setting] is Phase.CONFIRM else "probe"


def summarise(results: Sequence[PolicyResult]) -> dict[str, dict[str, Any]]:
    """Per policy: means over its runs. `of_oracle` = mean saving over the oracle's, where the
    oracle played the same workloads."""
    by_policy: dict[str, list[PolicyResult]] = defaultdict(list)
    for result in results:
        by_policy[result.policy].append(result)
    best = by_policy.get("oracle")
    oracle_saving = statistics.fmean(r.saving for r in best) if best else None
    return {
        policy: {
            "mean_saving": (mean := statistics.fmean(r.saving for r in rows)),
            "mean_slowdown": statistics.fmean(r.slowdown for r in rows),
            "worst_slowdown": max(r.slowdown for r in rows),
            "violations": sum(r.violated for r in rows),
            "violation_rate": statistics.fmean(r.violated for r in rows),
            "violation_rate_ci95": binomial_interval(sum(r.violated for r in rows), len(rows)),
            "n": len(rows),
            "of_oracle": mean / oracle_saving if oracle_saving else None,
            "chose_default": statistics.fmean(r.chose_default for r in rows),
            "median_iterations": statistics.median(r.iterations for r in rows),
            "most_iterations": max(r.iterations for r in rows),
            "search_cost": statistics.fmean(costs)
            if (
                costs := [
                    r.search_cost
                    for r in rows
                    if r.search_cost is not None and r.oracle_saving >= 0.05
                ]
            )
            else None,
            "lost": _lost(rows),
        }
        for policy, rows in by_policy.items()
    }


def _lost(rows: Sequence[PolicyResult]) -> dict[str, float]:
    """Of the oracle's saving, by the reason."""
    whole = math.fsum(r.oracle_saving for r in rows)
    lost: dict[str, float] = defaultdict(float)
    for r in rows:
        lost[r.lost] += r.oracle_saving - r.saving
    return {why: share / whole for why, share in sorted(lost.items())} if whole > 0.0 else {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--table", nargs="+", default=[], metavar="CSV", help="clock tables to replay"
    )
    parser.add_argument(
        "--random", type=int, default=0, metavar="N", help="this many random cards, simulated"
    )
    parser.add_argument(
        "--waiting",
        action="store_true",
        help="the jobs on random cards leave them idle for 30 to 97%% of the time",
    )
    parser.add_argument(
        "--half",
        type=int,
        choices=(0, 1),
        help="of all workloads, by their names: constants were chosen on half 0",
    )
    add_goal_arguments(parser, max_slowdown=0.05)
    parser.add_argument(
        "--policies",
        type=some_of(POLICIES),
        default="kilter,static,zeus,gpoeo,mf-gpoeo,geepafs,default,oracle",
        metavar="A,B",
        help="of: " + ", ".join(POLICIES) + " (default: without the other three of ours)",
    )
    parser.add_argument(
        "--seeds", type=positive, default=5, metavar="N", help="runs each (default 5)"
    )
    add_noise_argument(parser)
    parser.add_argument(
        "--outliers",
        type=fraction,
        default=OUTLIERS,
        metavar="P",
        help="share of iterations that take 10%% longer in the mean (default 2%%)",
    )
    parser.add_argument(
        "--time-budget-s",
        type=float,
        default=math.inf,
        metavar="T",
        help="length of the job in the table's seconds (default: no end)",
    )
    parser.add_argument(
        "--aa", action="store_true", help="every setting behaves like the default (A/A)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if not args.time_budget_s > 0:
        raise UsageError(f"--time-budget-s {args.time_budget_s}: must be positive")
    goal = goal_of(args)
    if not args.table and args.random < 1:
        raise UsageError("nothing to replay: give --table CSV, or --random N")
    tables = {path: load_tables(path) for path in args.table}
    simulated = random_tables(args.random, waiting=args.waiting)
    tables |= simulated
    tables = {path: half(workloads, args.half) for path, workloads in tables.items()}
    tables = {path: workloads for path, workloads in tables.items() if workloads}
    labels = {t: (Label.SIMULATED if t in simulated else Label.REPLAYED).value for t in tables}
    label = " and ".join(sorted(set(labels.values())))
    results = []
    for path, workloads in tables.items():  # one by one: progress on a long work
        if not args.json:
            print(f"{path}: {show_count(len(workloads), 'workload')} ...", file=sys.stderr)
        results += play(
            {path: workloads},
            args.policies,
            goal,
            seeds=args.seeds,
            noise=args.noise,
            budget_s=args.time_budget_s,
            placebo=args.aa,
            outliers=args.outliers,
            progress=show_progress,
        )
    show_progress()
    summary = summarise(results)
    if args.json:
        document = {
            "max_slowdown": args.max_slowdown,
            "price_of_time": args.price_of_time,
            "noise": args.noise,
            "outliers": args.outliers,
            "seeds": args.seeds,
            "block_iterations": BLOCK,
            "aa": args.aa,
            "tables": list(tables),
            "rows": results,
            "summary": summary,
            "by_table": {t: summarise([r for r in results if r.table == t]) for t in tables},
        }
        print_json("kilter.bench.clocks/1", label, document)
        return 0
    if args.aa:
        _print_fooled(summary)
        return 0
    for table in tables:
        _print(table, labels[table], summarise([r for r in results if r.table == table]))
    if len(tables) > 1:
        _print("all tables", label, summary)
    return 0


def _print_fooled(summary: Mapping[str, Mapping[str, Any]]) -> None:
    for policy, s in summary.items():
        fooled = 1.0 - (s["chose_default"] or 0.0)
        print(f"{policy:<8} fooled in {fooled * 100:.1f} % of {s['n']} A/A runs (replayed)")


def _print(title: str, label: str, summary: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"\n{title} ({label})")
    print("  policy    saving  of oracle  slowdown   worst  violations  iterations    most  search")
    for policy, s in summary.items():
        share = "-" if s["of_oracle"] is None else f"{s['of_oracle'] * 100:.1f} %"
        print(
            f"  {policy:<8} {_percent(s['mean_saving'])}  {share:>9}   "
            f"{_percent(s['mean_slowdown'])} {_percent(s['worst_slowdown'])}  "
            f"{s['violations']:>4} / {s['n']:<5} {s['median_iterations']:>8.0f} "
            f"{s['most_iterations']:>7} {_percent(s['search_cost'])}"
        )
    if "kilter" in summary:
        s = summary["kilter"]
        low, high = s["violation_rate_ci95"]
        told = ", ".join(f"{why} {part * 100:.1f} %" for why, part in s["lost"].items() if part)
        lost = f"; of the oracle's saving lost by: {told}" if told else ""
        print(f"  kilter: violations {low * 100:.2f} to {high * 100:.2f} % (95 %){lost}")


def _percent(value: float | int | None) -> str:
    return "      -" if value is None else f"{value * 100:5.1f} %"
