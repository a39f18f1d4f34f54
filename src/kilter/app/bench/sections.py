"""`kilter bench sections`: searches of section clocks in simulation, where the truth is known."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kilter.app.bench.driven import driven
from kilter.app.bench.pipelines import savings
from kilter.app.bench.section_jobs import (
    SECTION_SCENARIOS,
    SectionJob,
    SectionScenario,
    names,
    step_error,
)
from kilter.app.bench.switch_times import tell_switches
from kilter.app.cli.options import add_noise_argument, fraction, positive, simulated
from kilter.app.cli.output import print_json, show_progress
from kilter.clocks.plan.guard import Contract
from kilter.clocks.plan.section_search import Depths, Search, search, stepwise
from kilter.clocks.plan.worth import ClockCosts
from kilter.clocks.section_card import card_of
from kilter.core.errors import UsageError
from kilter.core.label import Label
from kilter.core.units import show_fraction
from kilter.device.sim.profile import Profile, load_profile
from kilter.model.stats import binomial_interval

HELP = "search the lowest harmless clock of every section, in simulation with a known truth"
EPILOG = "scenarios:\n" + "\n".join(
    f"  {name:<14} {scenario.what}" for name, scenario in SECTION_SCENARIOS.items()
)
EPILOG += """
  pipeline_1f1b  4 unequal stages, 16 micro-batches, no slowdown; beside Perseus' optimum (HiGHS)
  switch_times   how long the device takes to change its clocks, by the calibrator, from the
                 lengths of kernels; not in `all`. With --device nvml on the GPU of this process,
                 whose clocks are really set for some minutes: needs that right, and PyTorch

Policies: kilter; stepwise, the patent's search (US 2025/0264922, S221-S227) taken literally;
oracle, the deepest clocks that cost no more than each section's share of the bound.
`found_step_error` is the largest distance from the oracle in steps of the clock (12 from the
highest to the lowest), `accepted_harmful` a true slowdown above the bound. Every figure is
simulated, but for those of switch_times with --device nvml: they are measured.

examples:
  kilter bench sections --scenario all
  kilter bench sections --scenario mix_64 --seeds 200 --json
"""

STEPS = 12
"""The clock has so many steps, from the highest to the lowest."""
PIPELINE = "pipeline_1f1b"
SWITCHES = "switch_times"
NVML = "nvml"
SEARCHES = ("kilter", "stepwise", "oracle")


class SectionsRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one policy."""

    scenario: str
    policy: str
    seed: int
    saving: float
    slowdown: float
    accepted_harmful: bool
    found_step_error: int | None
    """It is None for the pipeline, where clocks are planned and not searched."""
    iterations: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scenario",
        choices=("all", *SECTION_SCENARIOS, PIPELINE, SWITCHES),
        default="all",
        metavar="NAME",
        help="(all)",
    )
    parser.add_argument(
        "--seeds",
        type=positive,
        default=20,
        metavar="N",
        help="runs each (20); switch_times: the seed",
    )
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="(0)")
    parser.add_argument(
        "--keep", action="store_true", help=f"keep what {SWITCHES} finds, for runs on that device"
    )
    add_noise_argument(parser)
    parser.add_argument("--max-slowdown", type=fraction, default=0.01, metavar="B", help="(1%%)")
    parser.add_argument(
        "--device",
        type=_device,
        default=None,
        metavar="sim:NAME",
        help=f"(sim:h200); with {SWITCHES} also nvml, whose clocks are set",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _device(text: str) -> Profile | str:
    return NVML if text == NVML else simulated(text)


def run(args: argparse.Namespace) -> int:
    if args.first_seed < 0:
        raise UsageError(f"--first-seed {args.first_seed}: at least 0")
    if args.device == NVML and args.scenario != SWITCHES:
        raise UsageError(f"--device {NVML} goes with --scenario {SWITCHES} alone")
    if args.device == NVML:
        return tell_switches(None, seed=args.first_seed, as_json=args.json, keep=args.keep)
    profile = args.device or load_profile("h200")
    if args.scenario == SWITCHES:
        return tell_switches(profile, seed=args.first_seed, as_json=args.json, keep=args.keep)
    rows = [*_rows(args, card_of(profile, levels=STEPS)), *_pipeline(args, profile)]
    if args.json:
        result: dict[str, Any] = {
            "device": profile.name,
            "max_slowdown": args.max_slowdown,
            "noise": args.noise,
            "rows": msgspec.to_builtins(rows),
            "summary": _summary(rows),
        }
        print_json("kilter.bench.sections/1", Label.SIMULATED, result)
    else:
        _tell(rows)
    return 0


def _rows(args: argparse.Namespace, card: ClockCosts) -> Iterator[SectionsRow]:
    for name in () if args.scenario == PIPELINE else names(args.scenario):
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            show_progress(f"{name}, seed {seed}")
            for policy in SEARCHES:
                yield play(
                    name,
                    SECTION_SCENARIOS[name],
                    card,
                    policy,
                    seed=seed,
                    noise=args.noise,
                    bound=args.max_slowdown,
                )
    show_progress()


def _pipeline(args: argparse.Namespace, profile: Profile) -> Iterator[SectionsRow]:
    count = args.seeds if args.scenario in ("all", PIPELINE) else 0
    for seed in range(args.first_seed, args.first_seed + count):
        found = savings(profile, seed=seed, max_slowdown=0.0)
        for policy, (saving, slowdown) in found.items():
            yield SectionsRow(
                scenario=PIPELINE,
                policy=policy,
                seed=seed,
                saving=saving,
                slowdown=slowdown,
                accepted_harmful=slowdown > args.max_slowdown,
                found_step_error=None,
                iterations=0,
            )


def play(
    name: str,
    scenario: SectionScenario,
    card: ClockCosts,
    policy: str,
    *,
    seed: int,
    noise: float,
    bound: float,
) -> SectionsRow:
    """One run: the policy sees blocks, the row says what its choice truly does."""
    job = SectionJob(scenario, card, seed=seed, noise=noise)
    truth = job.lowest_harmless(bound)
    targets = job.targets()
    if policy == "oracle":
        found = truth
    elif policy == "stepwise":
        found = _played(stepwise(targets, lowest=job.lowest, threshold=bound), job)
    else:
        contract = Contract(max_slowdown=bound)
        found = _played(search(targets, lowest=job.lowest, contract=contract, seed=seed), job)
    slowdown = job.slowdown(found)
    return SectionsRow(
        scenario=name,
        policy=policy,
        seed=seed,
        saving=job.saving(found),
        slowdown=slowdown,
        accepted_harmful=slowdown > bound * (1 + 1e-9),
        found_step_error=step_error(found, truth),
        iterations=job.iterations,
    )


def _played(orders: Search, job: SectionJob) -> Depths:
    return driven(orders, lambda trials: tuple(map(job.run, trials))).depths


def _summary(rows: Sequence[SectionsRow]) -> dict[str, Any]:
    """By scenario and policy."""
    result: dict[str, Any] = {}
    for row in rows:
        result.setdefault(row.scenario, {}).setdefault(row.policy, []).append(row)
    return {
        scenario: {policy: _figures(group) for policy, group in policies.items()}
        for scenario, policies in result.items()
    }


def _figures(rows: Sequence[SectionsRow]) -> dict[str, Any]:
    errors = [row.found_step_error for row in rows if row.found_step_error is not None]
    near = sum(error <= 1 for error in errors)
    harmful = sum(row.accepted_harmful for row in rows)
    return {
        "n": len(rows),
        "within_one_step": near / len(errors) if errors else None,
        "within_one_step_ci95": binomial_interval(near, len(errors)) if errors else None,
        "accepted_harmful": harmful / len(rows),
        "accepted_harmful_ci95": binomial_interval(harmful, len(rows)),
        "mean_saving": statistics.fmean(row.saving for row in rows),
        "mean_slowdown": statistics.fmean(row.slowdown for row in rows),
        "worst_slowdown": max(row.slowdown for row in rows),
        "median_iterations": statistics.median(row.iterations for row in rows),
    }


def _tell(rows: Sequence[SectionsRow]) -> None:
    heads = ("scenario", "policy", "within a step", "harmful", "saving", "slowdown", "iterations")
    print("{:<14} {:<9} {:>14} {:>8} {:>8} {:>9} {:>11}".format(*heads))
    for scenario, policies in _summary(rows).items():
        for policy, figures in policies.items():
            print(
                f"{scenario:<14} {policy:<9} {show_fraction(figures['within_one_step']):>14} "
                f"{show_fraction(figures['accepted_harmful']):>8} "
                f"{show_fraction(figures['mean_saving']):>8} "
                f"{show_fraction(figures['mean_slowdown']):>9} "
                f"{figures['median_iterations']:>11.0f}"
            )
    print("\nMeans over the seeds, true values of the simulated jobs [simulated].")
