"""`kilter bench clocks`: policies against tables of other people's measurements. All replayed.

Each run plays one workload of a table: a policy sees noisy blocks of iterations at settings of the
table and has to choose one; it is scored by the table's own values at its choice.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import msgspec
import numpy as np

from kilter.app.bench import clock_peers, clocks_learned
from kilter.app.cli.options import fraction
from kilter.clocks.plan.governor import BlockOutcome, Governor, Order
from kilter.clocks.plan.job import SEARCHED_KNOBS, Space
from kilter.core.errors import UsageError
from kilter.core.plan import Goal, Objective
from kilter.core.setting import Setting
from kilter.device.sim.noise import Noise, NoiseSource
from kilter.device.sim.replay import RecordedRow, RecordedWorkload, load_tables
from kilter.model.stats import usual_time

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
"""

BLOCK = 5
"""Iterations per block."""


class OutOfTime(Exception):
    """The time budget of the run is spent."""


class Replay:
    """One run of a workload: plays blocks, and keeps the books of what they cost."""

    def __init__(
        self, workload: RecordedWorkload, *, noise: float, seed: int, budget_s: float, placebo: bool
    ) -> None:
        self.workload = workload
        self.iterations = 0
        self.probe_energy_j = 0.0
        self._elapsed_s = 0.0
        self._budget_s = budget_s
        self._placebo = placebo
        self._noise_sd, self._seed = noise, seed
        self._rows = {row.setting: row for row in workload.rows}
        kind = Noise(
            white=noise, drift=noise, outlier_probability=0.02 if noise else 0.0, power=noise
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
"""(the run, the goal, the seed, the other workloads of the same card) -> the chosen setting."""


def space(workload: RecordedWorkload) -> Space:
    """The settings of a table; an unlocked knob counts as the highest value in the table."""
    found = workload.default.setting

    def top(knob: str) -> float | None:
        values = [v for row in workload.rows if (v := getattr(row.setting, knob)) is not None]
        return max(values, default=None)

    reference = Setting(**{knob: getattr(found, knob) or top(knob) for knob in SEARCHED_KNOBS})
    others = tuple(row.setting for row in workload.rows if row is not workload.default)
    return Space(found=found, reference=reference, candidates=others)


def kilter(run: Replay, goal: Goal, seed: int, _others: Sequence[RecordedWorkload]) -> Setting:
    """Ours: search under the contract; what stands when time runs out is what counts."""
    budget = run._budget_s / (BLOCK * run.workload.default.time_s)
    blocks = int(budget) if math.isfinite(budget) else None
    governor = Governor(space(run.workload), goal, seed=seed, blocks=blocks)
    search = governor.search()
    try:
        order: Order = next(search)
        while True:
            order = search.send(run.block(order.setting))
    except (StopIteration, OutOfTime):
        return governor.choice.setting


def default(run: Replay, _goal: Goal, _seed: int, _others: Sequence[RecordedWorkload]) -> Setting:
    """Do nothing."""
    return run.workload.default.setting


def static(run: Replay, goal: Goal, _seed: int, others: Sequence[RecordedWorkload]) -> Setting:
    """The one setting that saves most on the other workloads of the card while keeping the bound
    on their average: what a careful operator would lock for everybody."""
    scores: dict[Setting, float] = {}
    for row in run.workload.rows:
        pairs = [(r, w.default) for w in others if (r := w.at(row.setting)) is not None]
        if pairs and statistics.fmean(slowdown(r, d) for r, d in pairs) <= _bound(goal):
            scores[row.setting] = statistics.fmean(saving(r, d) for r, d in pairs)
    return max(scores, key=scores.__getitem__, default=run.workload.default.setting)


def oracle(run: Replay, goal: Goal, _seed: int, _others: Sequence[RecordedWorkload]) -> Setting:
    """The best row that keeps the bound, chosen and scored on the same true values."""
    workload, n = run.workload, goal.objective.time_exponent
    legal = [r for r in workload.rows if slowdown(r, workload.default) <= _bound(goal)]
    return min(legal, key=lambda r: r.energy_j * r.time_s**n).setting


def zeus(run: Replay, goal: Goal, _seed: int, _others: Sequence[RecordedWorkload]) -> Setting:
    """Power limits from the top down (`clock_peers.zeus`)."""
    return clock_peers.zeus(run, _bound(goal))


def gpoeo(run: Replay, goal: Goal, seed: int, others: Sequence[RecordedWorkload]) -> Setting:
    """Prediction, then golden section (`clock_peers.gpoeo`)."""
    return clock_peers.gpoeo(run, _bound(goal), static(run, goal, seed, others))


def mf_gpoeo(run: Replay, goal: Goal, _seed: int, _others: Sequence[RecordedWorkload]) -> Setting:
    """A PID controller of the slowdown (`clock_peers.mf_gpoeo`)."""
    return clock_peers.mf_gpoeo(run, _bound(goal))


def geepafs(run: Replay, goal: Goal, _seed: int, _others: Sequence[RecordedWorkload]) -> Setting:
    """Four probes and a fold line (`clock_peers.geepafs`)."""
    return clock_peers.geepafs(run, _bound(goal))


def kilter_learned(
    run: Replay, goal: Goal, seed: int, others: Sequence[RecordedWorkload]
) -> Setting:
    """Ours, its first probes ordered by a predictor (`clocks_learned.learned`)."""
    return clocks_learned.learned(run, space(run.workload), goal, seed, others)


def kilter_recurring(
    run: Replay, goal: Goal, seed: int, _others: Sequence[RecordedWorkload]
) -> Setting:
    """Ours, of a job that has run before (`clocks_learned.recurring`)."""
    return clocks_learned.recurring(run, space(run.workload), goal, seed)


POLICIES: Mapping[str, BenchPolicy] = {
    "kilter": kilter,
    "kilter-learned": kilter_learned,
    "kilter-recurring": kilter_recurring,
    "default": default,
    "static": static,
    "zeus": zeus,
    "gpoeo": gpoeo,
    "mf-gpoeo": mf_gpoeo,
    "geepafs": geepafs,
    "oracle": oracle,
}


def _bound(goal: Goal) -> float:
    return goal.max_slowdown or 0.0


def saving(row: RecordedRow, default: RecordedRow) -> float:
    return 1.0 - row.energy_j / default.energy_j


def slowdown(row: RecordedRow, default: RecordedRow) -> float:
    return row.time_s / default.time_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """One run of one policy, scored by the table's own values."""

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


def play(
    tables: Mapping[str, Sequence[RecordedWorkload]],
    policies: Sequence[str],
    goal: Goal,
    *,
    seeds: int,
    noise: float,
    budget_s: float = math.inf,
    placebo: bool = False,
) -> list[PolicyResult]:
    """Every policy on every workload of every table, `seeds` times each."""
    results = []
    for table, workloads in tables.items():
        for number, workload in enumerate(workloads):
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
                    )
                    try:
                        setting = POLICIES[policy](run, goal, seed, others)
                    except OutOfTime:  # a policy that has not decided leaves the default
                        setting = workload.default.setting
                    # in a placebo run every setting is the default in disguise
                    row = workload.default if placebo else workload.at(setting) or workload.default
                    slow = slowdown(row, workload.default)
                    results.append(
                        PolicyResult(
                            policy=policy,
                            table=table,
                            gpu=workload.gpu,
                            workload=workload.name,
                            seed=seed,
                            setting=str(setting),
                            chose_default=setting == workload.default.setting,
                            saving=saving(row, workload.default),
                            slowdown=slow,
                            violated=slow > _bound(goal) + 1e-9,
                            iterations=run.iterations,
                            probe_energy_j=run.probe_energy_j,
                        )
                    )
    return results


def summarise(results: Sequence[PolicyResult]) -> dict[str, dict[str, float | int | None]]:
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
            "n": len(rows),
            "of_oracle": mean / oracle_saving if oracle_saving else None,
            "chose_default": statistics.fmean(r.chose_default for r in rows),
            "median_iterations": statistics.median(r.iterations for r in rows),
        }
        for policy, rows in by_policy.items()
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--table", nargs="+", required=True, metavar="CSV", help="clock tables to replay"
    )
    parser.add_argument(
        "--max-slowdown", type=fraction, default=0.05, metavar="S", help="contract (default 5%%)"
    )
    parser.add_argument(
        "--price-of-time",
        type=float,
        default=Goal().price_of_time,
        metavar="P",
        help="a setting has to save P times as large a fraction as it is slower (%(default)g)",
    )
    parser.add_argument(
        "--objective", choices=[o.value for o in Objective], default="energy", help="(energy)"
    )
    parser.add_argument(
        "--policies",
        default="kilter,static,zeus,gpoeo,mf-gpoeo,geepafs,default,oracle",
        metavar="A,B",
        help="of: " + ", ".join(POLICIES) + " (default: all but the learned ones)",
    )
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="runs each (default 5)")
    parser.add_argument(
        "--noise", type=fraction, default=0.01, metavar="S", help="of an iteration (default 1%%)"
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
    policies = [name for name in args.policies.split(",") if name]
    unknown = [name for name in policies if name not in POLICIES]
    if unknown or not policies:
        raise UsageError(f"unknown policies {unknown}; choose from {', '.join(POLICIES)}")
    if args.seeds < 1:
        raise UsageError(f"--seeds {args.seeds}: at least 1")
    if not args.time_budget_s > 0:
        raise UsageError(f"--time-budget-s {args.time_budget_s}: must be positive")
    goal = Goal(
        max_slowdown=args.max_slowdown,
        objective=Objective(args.objective),
        price_of_time=args.price_of_time,
    )
    tables = {path: load_tables(path) for path in args.table}
    results = []
    for path, workloads in tables.items():  # one by one: progress on a long work
        if not args.json:
            print(f"{path}: {len(workloads)} workloads ...", file=sys.stderr)
        results += play(
            {path: workloads},
            policies,
            goal,
            seeds=args.seeds,
            noise=args.noise,
            budget_s=args.time_budget_s,
            placebo=args.aa,
        )
    summary = summarise(results)
    if args.json:
        document = {
            "schema": "kilter.bench.clocks/1",
            "label": "replayed",
            "max_slowdown": args.max_slowdown,
            "price_of_time": args.price_of_time,
            "noise": args.noise,
            "seeds": args.seeds,
            "block_iterations": BLOCK,
            "aa": args.aa,
            "tables": list(tables),
            "rows": [asdict(r) for r in results],
            "summary": summary,
            "by_table": {t: summarise([r for r in results if r.table == t]) for t in tables},
        }
        print(msgspec.json.encode(document).decode())
        return 0
    if args.aa:
        for policy, s in summary.items():
            fooled = 1.0 - (s["chose_default"] or 0.0)
            print(f"{policy:<8} fooled in {fooled * 100:.1f} % of {s['n']} A/A runs (replayed)")
        return 0
    for table in tables:
        _print(table, summarise([r for r in results if r.table == table]))
    if len(tables) > 1:
        _print("all tables", summary)
    return 0


def _print(title: str, summary: Mapping[str, Mapping[str, float | int | None]]) -> None:
    print(f"\n{title} (replayed)")
    print("  policy    saving  of oracle  slowdown   worst  violations  iterations")
    for policy, s in summary.items():
        share = "-" if s["of_oracle"] is None else f"{s['of_oracle'] * 100:.1f} %"
        print(
            f"  {policy:<8} {_percent(s['mean_saving'])}  {share:>9}   "
            f"{_percent(s['mean_slowdown'])} {_percent(s['worst_slowdown'])}  "
            f"{s['violations']:>4} / {s['n']:<5} {s['median_iterations']:>8.0f}"
        )


def _percent(value: float | int | None) -> str:
    return "      -" if value is None else f"{value * 100:5.1f} %"
