"""`kilter bench drift`: how often a held setting is given up without a cause, and how soon with.

The governor's own hold on simulated blocks. Everything here is simulated.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kilter.app.cli.options import add_noise_argument, positive
from kilter.app.cli.output import print_json
from kilter.clocks.plan.governor import BlockOutcome, Choice, Governor, Order
from kilter.clocks.plan.job import Space
from kilter.core.errors import UsageError
from kilter.core.label import Label
from kilter.core.plan import Goal
from kilter.core.setting import Setting
from kilter.core.units import MHZ
from kilter.device.sim.noise import Noise, NoiseSource

HELP = "How often a held setting is given up although nothing changed, and how soon when it has."
EPILOG = """\
A held setting is 3 % slower than its baseline and saves 20 %, under a contract of 5 %. In the first
row nothing changes: each alarm is a false one. In the second the setting is 5 % slower from the
beginning, where an alarm only begins a new search. In the others the job, or what the setting
costs, changes in the middle of the hold. A block is 5 iterations with white noise and an AR(1)
drift of standard deviation S each and 2 % outliers, as in `kilter bench clocks`; on a real job it
lasts 2 s or more.

examples:
  kilter bench drift
  kilter bench drift --noise 2% --seeds 50 --json
"""

BLOCK_ITERATIONS = 5
BLOCK_S = 2.0
"""A block of a real job takes at least this (`search_leader.SENSOR_PERIODS`)."""
HELD_SETTING = Setting(sm_clock_hz=1200.0 * MHZ)
SLOWDOWN, SAVING = 0.03, 0.20


@dataclass(frozen=True, slots=True)
class HoldChange:
    """What becomes of the job in the middle of a hold: factors."""

    name: str
    job: float = 1.0
    """The time and energy of each iteration are multiplied by it, under any setting."""
    setting: float = 1.0
    """The time under the held setting is multiplied by it."""
    always: bool = False
    """From the beginning of the hold: nothing changes in it."""


AT_THE_BOUND = HoldChange("the setting is at the bound", setting=1.05 / 1.03, always=True)
CHANGES = (
    HoldChange("nothing changes"),
    AT_THE_BOUND,
    HoldChange("iterations become 5 % longer", job=1.05),
    HoldChange("iterations become 15 % longer", job=1.15),
    HoldChange("iterations become twice as long", job=2.0),
    HoldChange("the setting becomes 5 % slower", setting=1.05),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftRow:
    """All holds of one kind of change."""

    change: str
    holds: int
    blocks: int
    """In all, each hold until its first alarm."""
    false_alarms: int
    """Alarms came before anything had changed."""
    quiet_h: float
    """So many hours passed until the change or a false alarm, with blocks of `BLOCK_S`."""
    noticed: int
    median_blocks: float | None
    """The alarm came so many blocks after the change, where it was noticed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_noise_argument(parser)
    parser.add_argument("--blocks", type=int, default=4000, metavar="N", help="of a hold (4000)")
    parser.add_argument("--seeds", type=positive, default=20, metavar="N", help="holds each (20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.blocks < 600:
        raise UsageError("at least 600 blocks are needed")
    rows = []
    for change in CHANGES:
        if not args.json:
            print(f"{change.name} ...", file=sys.stderr)
        rows.append(measure(change, noise=args.noise, blocks=args.blocks, seeds=args.seeds))
    if args.json:
        document = {
            "noise": args.noise,
            "most_false_alarms_per_1000_h": most_events(_quiet(rows)[0]) / _quiet(rows)[1] * 1e3,
            "rows": rows,
        }
        print_json("kilter.bench.drift/1", Label.SIMULATED, document)
        return 0
    print(f"holds of up to {args.blocks} blocks at {args.noise:.1%} noise (simulated)")
    print(f"  {'change':<34} false alarms   noticed   after (median)")
    for row in rows:
        after = "-" if row.median_blocks is None else f"{row.median_blocks:.0f} blocks"
        noticed = f"{row.noticed} / {row.holds}" if row.noticed else "-"
        print(
            f"  {row.change:<34} {row.false_alarms:>4} / {row.holds:<5}  {noticed:>8}   {after:>14}"
        )
    alarms, hours = _quiet(rows)
    most = most_events(alarms) / hours * 1000.0
    print(
        f"false alarms: {alarms} in {hours:.0f} h of blocks of {BLOCK_S:g} s before any change, so "
        f"at most {most:.0f} in 1,000 h (95 %)"
    )
    return 0


def measure(change: HoldChange, *, noise: float, blocks: int, seeds: int) -> DriftRow:
    """So many holds of one kind."""
    changes_at = blocks if change == CHANGES[0] or change.always else blocks // 2
    alarms = [_alarm(change, changes_at, blocks, noise, seed) for seed in range(seeds)]
    false = sum(alarm is not None and alarm < changes_at for alarm in alarms)
    after = [alarm - changes_at for alarm in alarms if alarm is not None and alarm >= changes_at]
    quiet = sum(min(changes_at, blocks if alarm is None else alarm) for alarm in alarms)
    return DriftRow(
        change=change.name,
        holds=seeds,
        blocks=sum(blocks if alarm is None else alarm for alarm in alarms),
        false_alarms=false,
        quiet_h=quiet * BLOCK_S / 3600.0,
        noticed=len(after),
        median_blocks=statistics.median(after) if after else None,
    )


def _quiet(rows: Sequence[DriftRow]) -> tuple[int, float]:
    """False alarms, and the hours before any change, of the holds that keep the bound with room."""
    inside = [row for row in rows if row.change != AT_THE_BOUND.name]
    return sum(row.false_alarms for row in inside), sum(row.quiet_h for row in inside)


def most_events(seen: int) -> float:
    """The largest mean of a Poisson distribution that so few events do not refute (at 95 %)."""
    low, high = 0.0, 10.0 + 3.0 * seen
    while high - low > 1e-6:
        mean = (low + high) / 2
        terms = (math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(seen + 1))
        low, high = (mean, high) if sum(terms) > 0.05 else (low, mean)
    return low


def _alarm(change: HoldChange, changes_at: int, blocks: int, noise: float, seed: int) -> int | None:
    """The block after which the hold has ended; None: it has not."""
    found = Setting()
    governor = Governor(
        Space(found=found, reference=Setting(sm_clock_hz=1500.0 * MHZ), candidates=(HELD_SETTING,)),
        Goal(max_slowdown=0.05),
        seed=seed,
    )
    governor.choice = Choice(setting=HELD_SETTING, reason="held")
    kind = Noise(white=noise, drift=noise, outlier_probability=0.02 if noise else 0.0, power=noise)
    source = NoiseSource(kind, np.random.default_rng(seed))
    hold = governor.hold()
    order = next(hold)
    for block in range(blocks):
        changed = change.always or block >= changes_at
        try:
            order = hold.send(_outcome(order, change if changed else CHANGES[0], source))
        except StopIteration:
            return block
    return None


def _outcome(order: Order, change: HoldChange, source: NoiseSource) -> BlockOutcome:
    time = change.job
    if not order.baseline:
        time *= (1.0 + SLOWDOWN) * change.setting
    power = 1.0 if order.baseline else (1.0 - SAVING) / (1.0 + SLOWDOWN)
    draws = [source.draw() for _ in range(BLOCK_ITERATIONS)]
    return BlockOutcome(
        iteration_s=time * statistics.median(factor for factor, _ in draws),
        energy_j=time * power * statistics.fmean(t * p for t, p in draws),
    )
