"""Class verdicts, the governed test and periods on a real GPU that may not be set.

    KILTER_READ_ONLY=1 python benchmarks/energy_gpu.py --out DIR [--limit-s 300] [--rows ROW,...]

Rows, each one JSON line as soon as it is known, all of them in DIR/energy.json:

- `resnet50`, `gpt`, `vgg16`, `mobilenet`, `input` (a slow data loader), `accumulated` (`gpt` with
  gradients of 12 batches in each iteration, 45 s), `fetched` (the same, all batches of an iteration
  fetched at once, for which the GPU waits), `ddp_sockets` (two GPUs whose collectives go
  through sockets; only if named): the class and the evidence that
  `kilter report` names after `kilter run --dry-run`, and the period that telemetry alone shows,
  beside the script's own marks.
- `test`: the governor's pairs on blocks of a real job, run by the conductor. Its "settings" only
  make iterations wait on the host, by 0 (A/A), 1, 2 and 5 %. False alarms of the tests where both
  arms are the same, and how often the slowdowns are found, beside what a simulation predicts.

This file is also the training script (`--job`), which knows nothing of kilter. `--tiny` is for a
test of this file without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

CLASSES = ("resnet50", "gpt", "vgg16", "mobilenet", "input", "accumulated", "fetched")
ROWS = (*CLASSES, "test")
START_S = 25.0
"""Of the time of a class row: imports, CUDA's start and the report."""
JOB_S = 12.0
"""Of training in a class row: the profiler's window and a few blocks of two seconds."""
ACCUMULATING = ("accumulated", "fetched")
ACCUMULATED = 12
"""Batches whose gradients one iteration sums up, so that sensors of 0.1 s resolve it."""
ACCUMULATED_S = 45.0
"""Of training then."""
FETCH_S = 0.2
"""For which an iteration of `fetched` waits for its batches."""
SLOWDOWNS = (0.0, 0.0, 0.01, 0.02, 0.05)
"""The arms of one round: A/A twice as often as each slowdown."""
WINDOW = 6
"""Pairs of one test of a slowdown."""
SIMULATED = 200
"""Tests of a prediction, and random relabellings of the arms of an A/A test."""
SEARCHES = 60


# The training script -----------------------------------------------------------------------------


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, **more: Any) -> Any:
    from torch import nn

    active = more.pop("active", True)
    layers: list[Any] = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False, **more),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, *([nn.ReLU(inplace=True)] if active else []))


def residual(body: Any, skip: Any) -> Any:
    from torch import nn

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.skip = body, skip

        def forward(self, x: Any) -> Any:
            return self.body(x) + self.skip(x)

    return Residual()


def head(channels: int) -> list[Any]:
    from torch import nn

    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]


def resnet50() -> Any:
    from torch import nn

    layers: list[Any] = [convolution(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, count, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            stride, outputs = (first if number == 0 else 1), 4 * width
            body = nn.Sequential(
                convolution(inputs, width, 1),
                convolution(width, width, 3, stride),
                convolution(width, outputs, 1, active=False),
            )
            same = inputs == outputs and stride == 1
            skip = nn.Identity() if same else convolution(inputs, outputs, 1, stride, active=False)
            layers += [residual(body, skip), nn.ReLU(inplace=True)]
            inputs = outputs
    return nn.Sequential(*layers, *head(2048))


def vgg16() -> Any:
    from torch import nn

    layers, inputs = [], 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    full = [nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *full, nn.Linear(4096, 1000)
    )


def mobilenet() -> Any:
    """MobileNetV2 (Sandler et al., CVPR 2018, table 2)."""
    from torch import nn

    layers, inputs = [convolution(3, 32, 3, 2)], 32
    table = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1))
    for factor, width, count, first in (*table, (6, 160, 3, 2), (6, 320, 1, 1)):
        for number in range(count):
            stride, inner = (first if number == 0 else 1), factor * inputs
            body = nn.Sequential(
                convolution(inputs, inner, 1),
                convolution(inner, inner, 3, stride, groups=inner),
                convolution(inner, width, 1, active=False),
            )
            same = inputs == width and stride == 1
            layers.append(residual(body, nn.Identity()) if same else body)
            inputs = width
    return nn.Sequential(*layers, convolution(inputs, 1280, 1), *head(1280))


def batches(name: str, device: Any, tiny: bool) -> Iterator[tuple[Any, Any]]:
    import torch

    if name in ("gpt", "ddp", *ACCUMULATING):
        batch, length, words = (2, 17, 256) if tiny else (8, 1025, 50304)
        tokens = torch.randint(0, words, (batch, length), device=device)
        while True:
            yield tokens[:, :-1], tokens[:, 1:]
    shape = (2, 3, 32, 32) if tiny else (128, 3, 224, 224)
    targets = torch.randint(0, 1000, (shape[0],), device=device)
    if name != "input":
        images = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
        while True:
            yield images, targets

    class Slow(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        """Decoding that takes several times as long as the GPU's part."""

        def __iter__(self) -> Iterator[Any]:
            image = torch.randn(shape)
            while True:
                time.sleep(0.02 if tiny else 0.25)
                yield image

    for images in torch.utils.data.DataLoader(Slow(), batch_size=None, num_workers=1):
        yield images.to(device, non_blocking=True), targets


def training(name: str, *, tiny: bool) -> Callable[[], None]:
    """One iteration of a job, synchronised."""
    import torch
    from gpt import Gpt, backward, train_step
    from torch import nn

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    if name in ("gpt", "ddp", *ACCUMULATING):
        model = Gpt(1, 32, 16, 256) if tiny else Gpt(24, 1024, 1024)
    else:
        made = {"vgg16": vgg16, "mobilenet": mobilenet}.get(name, resnet50)()
        model = made.to(memory_format=torch.channels_last)
    model = model.to(device).train()
    if name == "ddp":
        torch.distributed.init_process_group("nccl" if cuda else "gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
    data = batches(name, device, tiny)

    def iterate() -> None:
        if name == "fetched":
            time.sleep(FETCH_S)
        for _ in range(ACCUMULATED - 1 if name in ACCUMULATING else 0):
            backward(model, *next(data))
        train_step(model, optimizer, *next(data))
        if cuda:
            torch.cuda.synchronize()

    return iterate


def train(name: str, seconds: float, marks: Path, *, tiny: bool) -> None:
    iterate = training(name, tiny=tiny)
    iterate()
    ends = [time.monotonic()]
    if name == "ddp":  # all ranks do as many
        iterate()
        count = max(20, int(seconds / (time.monotonic() - ends[0])))
        import torch

        agreed = torch.tensor([count], device="cuda" if torch.cuda.is_available() else "cpu")
        torch.distributed.broadcast(agreed, 0)
        for _ in range(int(agreed.item())):
            iterate()
            ends.append(time.monotonic())
    while ends[-1] - ends[0] < seconds:
        iterate()
        ends.append(time.monotonic())
    if os.environ.get("RANK", "0") == "0":
        marks.write_text(json.dumps(ends))
    if name == "ddp":
        import torch

        torch.distributed.destroy_process_group()


# The rows ----------------------------------------------------------------------------------------


def class_row(name: str, seconds: float, out: Path, *, tiny: bool) -> dict[str, Any]:
    """What the report says of a job that was watched, and what its telemetry shows."""
    from kilter.app.report.build import build
    from kilter.device.find import find
    from kilter.model.period import detect, doubt, telemetry
    from kilter.observe.sampler import Sampler
    from kilter.session.watched_gpu import TICK_READINGS

    job = "ddp" if name == "ddp_sockets" else name
    run, marks = out / f"run-{name}", out / f"marks-{name}.json"
    command = [sys.executable, "-m", "kilter", "run", "--dry-run", "--max-slowdown", "5%"]
    command += ["--history", "off", "--out", str(run)]
    environment = dict(os.environ)
    if job == "ddp":
        command += ["--standalone", "--nproc-per-node", "2"]
        environment |= {
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_SOCKET_IFNAME": "lo",
        }
    command += [__file__, "--job", job, "--marks", str(marks), "--seconds", str(seconds)]
    # As `kilter watch` reads: without the counter nothing tells an alias from a period.
    device = find("auto", environ=os.environ)
    sampler = Sampler(device, counter_every_s=0.0, readings_per_tick=TICK_READINGS)
    sampler.start()
    done = subprocess.run(
        [*command, *(["--tiny"] if tiny else [])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds + 6 * START_S,
        check=False,
    )
    sampler.stop()
    row: dict[str, Any] = {"exit": done.returncode, "said": done.stderr[-1500:]}
    if done.returncode != 0 or not marks.exists():
        return row
    report = build(run)
    row |= {
        "device": report.device,
        "class": report.job.name.value,
        "evidence": report.job.evidence,
        "evidence_label": None if report.job.label is None else report.job.label.value,
        "idle": None if report.idle is None else dataclasses.asdict(report.idle),
        "blocks": len(report.blocks),
    }
    ends = json.loads(marks.read_text())
    begin = ends[len(ends) // 4]  # the first iterations hold the profiler's window
    steps = [after - before for before, after in itertools.pairwise(ends)]
    samples = [s for s in sampler.record.since(begin) if s.t_s <= ends[-1]]
    write_telemetry(samples, out / f"telemetry-{name}.csv")
    recorded_s = steps[len(steps) // 4 :]
    row |= {
        "marked_period_s": statistics.fmean(recorded_s),
        "marked_median_s": statistics.median(recorded_s),
    }
    if len(samples) >= 2:
        seen = telemetry(samples)
        found = detect(seen)
        why = doubt(seen, found)
        known_s = None if why else found.period_s
        row["period"] = {
            "detected_s": known_s,
            "relative_error": abs(known_s / row["marked_period_s"] - 1) if known_s else None,
            "reason": why or found.reason,
            "resolution_s": found.resolution_s,
            "readings": len(samples),
        }
    return row


def write_telemetry(samples: Sequence[Any], path: Path) -> None:
    """As `kilter bench period --telemetry` reads it."""
    lines = ["t_s,power_instant_w,energy_mj,gpu_util,mem_util,sm_mhz"]
    for sample in samples:
        found = (
            (sample.t_s, 1.0),
            (sample.power_w, 1.0),
            (sample.energy_j, 1e3),
            (sample.sm_utilisation, 100.0),
            (sample.memory_utilisation, 100.0),
            (sample.sm_clock_hz, 1e-6),
        )
        lines.append(",".join("" if x is None else f"{x * unit:.6f}" for x, unit in found))
    path.write_text("\n".join(lines) + "\n")


class SpinActuator:
    """Sets nothing: a "setting" makes iterations wait on the host. What the conductor asks of a
    device (`kilter.clocks.conductor.Actuator`), with the power that NVML tells."""

    def __init__(self, record: Any) -> None:
        self._record = record
        self.slowdown = 0.0

    def apply(self, setting: Any) -> None:
        self.slowdown = slowdown_of(setting)

    def check(self) -> None:
        pass

    def settled(self) -> bool:
        return True

    def mean_power_w(self, begin_s: float, end_s: float) -> float | None:
        power_w: float | None = self._record.mean_power_w(begin_s, end_s)
        return power_w

    def sustained(self) -> Any:
        from kilter.core.setting import Setting

        return Setting()


def arm(slowdown: float) -> Any:
    """The name of an arm, in the shape of a setting; nothing is ever asked of a device."""
    from kilter.core.setting import Setting

    return Setting(sm_clock_hz=1e9 * (1.0 - slowdown))


def slowdown_of(setting: Any) -> float:
    return 0.0 if setting.sm_clock_hz is None else round(1.0 - setting.sm_clock_hz / 1e9, 6)


Pairs = dict[float, list[tuple[float, float]]]
"""By slowdown: log ratios of time and of energy."""


def measured_pairs(seconds: float, *, tiny: bool) -> tuple[Pairs, dict[str, Any]]:
    """Rounds of pairs, by the governor's own draw, on blocks by the conductor."""
    from kilter.clocks.conductor import Conductor
    from kilter.clocks.plan.governor import BlockOutcome, Governor, Order, Phase
    from kilter.clocks.plan.job import Space
    from kilter.core.messages import LocalMessages
    from kilter.core.plan import Goal
    from kilter.core.setting import Setting
    from kilter.device.find import find
    from kilter.observe.end_times import Iteration
    from kilter.observe.sampler import Sampler

    iterate = training("gpt", tiny=tiny)
    # The counter with each reading, as `kilter watch` has it: without it nothing tells an alias.
    sampler = Sampler(find("auto", environ=os.environ), counter_every_s=0.0)
    sampler.start()
    times: list[float] = []
    for _ in range(10):
        begin = time.monotonic()
        iterate()
        times.append(time.monotonic() - begin)
    usual_s = statistics.median(times[3:])
    pairs: Pairs = {slowdown: [] for slowdown in SLOWDOWNS}
    governor = Governor(
        Space(found=Setting(), reference=Setting(sm_clock_hz=1e9), candidates=()), Goal(), seed=1
    )
    order = random.Random(2)
    events: list[Any] = []

    def orders() -> Generator[Order, BlockOutcome, None]:
        for _ in range(2):
            yield Order(
                phase=Phase.WARM, setting=Setting(), baseline=True, pair=None, reason="warm up"
            )
        while True:
            for slowdown in order.sample(SLOWDOWNS, len(SLOWDOWNS)):
                pair = yield from governor.pair(arm(slowdown), Phase.CONFIRM, "benchmark")
                pairs[slowdown].append(pair)

    actuator = SpinActuator(sampler.record)
    conductor = Conductor(
        actuator,
        LocalMessages(),
        found=Setting(),
        sensor_period_s=0.0,
        orders=orders(),
        record=events.append,
        clock=time.monotonic,
    )
    end_s, index = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        begin = time.monotonic()
        iterate()
        spin_until = time.monotonic() + actuator.slowdown * usual_s
        while time.monotonic() < spin_until:
            pass
        now, index = time.monotonic(), index + 1
        conductor.iteration(Iteration(index=index, end_s=now, duration_s=now - begin))
    sampler.stop()
    blocks = [event for event in events if type(event).__name__ == "Block"]
    return pairs, {
        "iteration_s": usual_s,
        "blocks": len(blocks),
        "blocks_done_again": sum(not block.clean for block in blocks),
        "iterations_of_a_block": statistics.median(block.iterations for block in blocks),
    }


def test_row(seconds: float, *, tiny: bool) -> dict[str, Any]:
    pairs, about = measured_pairs(seconds, tiny=tiny)
    same = pairs[0.0]
    if len(same) < WINDOW:
        return about | {"failed": f"only {len(same)} pairs of A/A in {seconds:.0f} s"}
    spread = [statistics.stdev(values) for values in zip(*same, strict=True)]
    rows = [found_row(slowdown, pairs[slowdown], spread[0]) for slowdown in sorted(pairs)]
    return about | {
        "aa_blocks": 2 * len(same),
        "spread_of_a_pair": {"time": spread[0], "energy": spread[1]},
        "aa": false_alarms(same),
        "slowdowns": rows,
        "pairs": {str(slowdown): values for slowdown, values in pairs.items()},
    }


def false_alarms(same: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Of every test that a run uses, on real pairs whose arms are the same. Which block of a pair
    was called the candidate was a coin's choice: other throws of that coin are as real."""
    from kilter.clocks.plan.guard import Contract, Verdict
    from kilter.model.stats import binomial_interval

    times, energies = [t for t, _ in same], [e for _, e in same]
    contract = Contract(max_slowdown=0.0)

    def alarms(signs: Sequence[int]) -> dict[str, bool]:
        t = [s * value for s, value in zip(signs, times, strict=True)]
        e = [s * value for s, value in zip(signs, energies, strict=True)]
        verdicts = [
            contract.saves(e[: n + 1], error_probability=0.05, most=len(e)) for n in range(len(e))
        ]
        first = next((v for v in verdicts if v is not Verdict.UNDECIDED), None)
        return {
            "slower": any(contract.broken(t[: n + 1]) for n in range(len(t))),
            "saves": first is Verdict.SAFE,
        }

    draw = random.Random(3)
    thrown = [alarms([draw.choice((-1, 1)) for _ in same]) for _ in range(SIMULATED)]
    fooled = sum(fooled_search(same, seed) for seed in range(SEARCHES))
    return {
        "pairs": len(same),
        "as_drawn": alarms([1] * len(same)),
        "judged_slower": statistics.fmean(a["slower"] for a in thrown),
        "judged_to_save": statistics.fmean(a["saves"] for a in thrown),
        "relabellings": len(thrown),
        "searches_fooled": fooled,
        "searches": SEARCHES,
        "searches_fooled_ci95": binomial_interval(fooled, SEARCHES),
    }


def fooled_search(same: Sequence[tuple[float, float]], seed: int) -> bool:
    """A whole search among 20 settings that are the default in disguise, fed with real pairs drawn
    at random; True if it holds one of them."""
    from kilter.clocks.plan.governor import BlockOutcome, Governor
    from kilter.clocks.plan.job import Space
    from kilter.core.plan import Goal
    from kilter.core.setting import Setting

    space = Space(
        found=Setting(),
        reference=Setting(sm_clock_hz=1e9),
        candidates=tuple(arm(0.025 * k) for k in range(1, 21)),
    )
    governor = Governor(space, Goal(max_slowdown=0.05), seed=seed)
    draw, search = random.Random(seed), governor.search()
    pair, number = (0.0, 0.0), None
    try:
        order = next(search)
        while True:
            if order.pair != number:
                number, sign = order.pair, draw.choice((-1, 1))
                pair = tuple(sign * value for value in draw.choice(same))  # type: ignore[assignment]
            t, e = (0.0, 0.0) if order.baseline else pair
            order = search.send(BlockOutcome(iteration_s=math.exp(t), energy_j=math.exp(e)))
    except StopIteration:
        return governor.choice.setting != Setting()


def found_row(
    slowdown: float, pairs: Sequence[tuple[float, float]], spread: float
) -> dict[str, Any]:
    """How often tests of `WINDOW` pairs find this slowdown, and how often a simulation does, with
    normal pairs of the spread of A/A."""
    draw = random.Random(4)
    times = [time for time, _ in pairs]
    whole = [times[i : i + WINDOW] for i in range(0, len(times) - WINDOW + 1, WINDOW)]
    again = [[draw.choice(times) for _ in range(WINDOW)] for _ in range(SIMULATED)]
    simulated = [
        [draw.gauss(math.log1p(slowdown), spread) for _ in range(WINDOW)] for _ in range(SIMULATED)
    ]
    return {
        "injected": slowdown,
        "pairs": len(times),
        "measured_slowdown": math.expm1(statistics.fmean(times)),
        "standard_error": statistics.stdev(times) / math.sqrt(len(times)),
        "pairs_of_a_test": WINDOW,
        "tests": len(whole),
        "real": verdicts(whole),
        "resampled": verdicts(again),
        "predicted": verdicts(simulated),
    }


def verdicts(tests: Sequence[Sequence[float]]) -> dict[str, float | None]:
    """Shares of tests: with evidence that the setting is slower at all (by more than the margin of
    "no slowdown"), as a held setting is judged; and "safe" at a bound, as a candidate is."""
    from kilter.clocks.plan.guard import Contract, Verdict

    def safe(times: Sequence[float], bound: float) -> bool:
        for n in range(2, WINDOW + 1):
            verdict = Contract(max_slowdown=bound).judge(
                times[:n], error_probability=0.05, most=WINDOW
            )
            if verdict is not Verdict.UNDECIDED:
                return verdict is Verdict.SAFE
        return False

    none = Contract(max_slowdown=0.0)
    shares = {
        "slower": [any(none.broken(times[:n]) for n in range(2, WINDOW + 1)) for times in tests]
    }
    for bound in (0.01, 0.02, 0.05):
        shares[f"safe_at_{bound:.0%}"] = [safe(times, bound) for times in tests]
    return {name: statistics.fmean(found) if found else None for name, found in shares.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of the results and of the runs")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of all rows (300)")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {ROWS} and ddp_sockets")
    parser.add_argument("--tiny", action="store_true", help="small models, without a GPU")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=JOB_S, help=argparse.SUPPRESS)
    parser.add_argument("--marks", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        train(args.job, args.seconds, args.marks, tiny=args.tiny)
        return 0
    if os.environ.get("KILTER_READ_ONLY") != "1" or args.out is None:
        print("set KILTER_READ_ONLY=1 (the GPU may not be ours to set) and --out", file=sys.stderr)
        return 2
    names = [name for name in args.rows.split(",") if name]
    if unknown := [name for name in names if name not in (*ROWS, "ddp_sockets")]:
        print(f"unknown rows {unknown}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + args.limit_s
    rows: dict[str, Any] = {}
    for name in names:
        begin, left_s = time.monotonic(), end_s - time.monotonic()
        if left_s < START_S:
            rows[name] = {"left_out": "no time left: give more by --limit-s"}
        elif name == "test":
            rows[name] = test_row(left_s - START_S, tiny=args.tiny)
        else:
            try:
                seconds = ACCUMULATED_S if name in ACCUMULATING else args.seconds
                rows[name] = class_row(name, seconds, args.out, tiny=args.tiny)
            except subprocess.TimeoutExpired as error:
                rows[name] = {"failed": str(error)}
        rows[name] = {"row": name, "label": "measured", **rows[name]}
        rows[name]["took_s"] = time.monotonic() - begin
        told = {key: value for key, value in rows[name].items() if key not in ("pairs", "said")}
        print(json.dumps(told, default=str), flush=True)
        (args.out / "energy.json").write_text(json.dumps(rows, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
