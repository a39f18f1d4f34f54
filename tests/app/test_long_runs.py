"""The record of a run of weeks, and the report at its end: inside the job, so neither may grow."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests import runs

from kilter.app.report.build import build
from kilter.clocks.plan.governor import Order, Phase
from kilter.clocks.search_leader import HeldLines
from kilter.core.events import AnyEvent, Block, Sampled, Stopped
from kilter.core.pace import LINES, Pace
from kilter.core.setting import Setting
from kilter.session.live import RECORD_EVERY_S

DAY_S = 86_400.0
LOW = Setting(sm_clock_hz=1.245e9)
BLOCK_S = 2.0
REFERENCE_EVERY = 50


@cache
def samples(days: float) -> list[AnyEvent]:
    """Those of each rank: a month is looked through once."""
    return list(_samples(days))


def _samples(days: float) -> Iterator[AnyEvent]:
    pace = Pace(RECORD_EVERY_S)
    for tick in range(int(days * DAY_S / RECORD_EVERY_S)):
        t_s = tick * RECORD_EVERY_S
        if pace.due(t_s):
            yield Sampled(
                t_s=t_s, device_t_s=t_s, power_w=250.0, sm_clock_hz=1.245e9, sm_utilisation=0.9
            )


def held(days: float) -> Iterator[AnyEvent]:
    """The blocks of a hold, with a pair now and then: 3 % faster and 20 % cheaper."""
    lines = HeldLines()
    for number in range(REFERENCE_EVERY, int(days * DAY_S / BLOCK_S)):
        pair = number // REFERENCE_EVERY if number % REFERENCE_EVERY < 2 else None
        baseline = pair is not None and number % REFERENCE_EVERY == 0
        setting = Setting() if baseline else LOW
        order = Order(phase=Phase.HOLD, setting=setting, baseline=baseline, pair=pair, reason="")
        left_out = lines.left_out
        if lines.due(order, 20, number * BLOCK_S):
            yield Block(
                t_s=number * BLOCK_S,
                number=number,
                pair=pair,
                phase="hold",
                arm="baseline" if baseline else "candidate",
                setting=setting,
                iterations=20,
                iteration_s=0.100 if baseline else 0.097,
                energy_j=25.0 if baseline else 20.0,
                device_begin_s=(number - 1) * BLOCK_S,
                device_end_s=number * BLOCK_S,
                clean=True,
                left_out=left_out,
            )


def write(root: Path, days: float, ranks: int, *, ended: bool = True) -> Path:
    root.mkdir()
    for rank in range(ranks):
        writer = runs.RunWriter(rank=rank, world_size=ranks, uuid=f"SIM-{rank}")
        writer.start()
        writer.decide("hold", LOW, "it is 20 % cheaper")
        [*_, begun] = events = list(writer.events)
        events += [*samples(days), *(held(days) if rank == 0 else ())]
        if ended:
            writer.stop()
            end = writer.events[-1]
            assert isinstance(end, Stopped)
            events.append(msgspec.structs.replace(end, t_s=days * DAY_S))
        assert begun.t_s == 0.0
        raw = b"".join(msgspec.json.encode(event, enc_hook=str) + b"\n" for event in events)
        (root / f"events-rank{rank}.jsonl").write_bytes(raw)
    return root


REPORT = """
import json, sys, time
from pathlib import Path
from kilter.app.report import build, html

def peak_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

before = peak_kib()
begin = time.process_time()
found = build.build(sys.argv[1])
size = len(build.to_json(found)) + len(html.page(found, None))
took_s, mib = time.process_time() - begin, (peak_kib() - before) / 1024
print(json.dumps({"mib": mib, "s": took_s, "bytes": size}))
"""


def cost(run: Path) -> dict[str, float]:
    """Of the report, in a process of its own."""
    command = [sys.executable, "-c", REPORT, str(run)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=900)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def test_thirty_days_of_four_ranks_take_little_memory_and_disk(tmp_path: Path) -> None:
    run = write(tmp_path / "month", 30.0, 4)
    found = cost(run)
    on_disk = sum(file.stat().st_size for file in run.iterdir())
    print(f"30 days, 4 ranks: {on_disk / 2**20:.1f} MiB of events, {found}")
    assert on_disk < 16 * 2**20
    assert found["mib"] < 200.0
    report = build(run)
    assert report.saving is not None
    assert abs(report.saving - 0.2) < 1e-9
    assert report.evidence.pairs > LINES
    assert report.duration_s == 30.0 * DAY_S


def test_the_iterations_of_a_killed_run_are_all_counted(tmp_path: Path) -> None:
    report = build(write(tmp_path / "killed", 3.0, 1, ended=False))
    whole = 20 * (int(3.0 * DAY_S / BLOCK_S) - REFERENCE_EVERY)
    assert len(report.blocks) < whole / 200
    assert 0.99 * whole < report.iterations <= whole


@given(st.lists(st.floats(0.0, 1e7), min_size=1, max_size=400).map(sorted), st.floats(0.0, 10.0))
def test_a_pace_keeps_its_distance_and_never_stops(times: list[float], least_s: float) -> None:
    pace = Pace(least_s)
    kept = [t for t in times if pace.due(t)]
    assert kept[0] == times[0]
    for before, t in itertools.pairwise(kept):
        assert t - before >= max(least_s, t / LINES)
    for t in times:
        last = max(k for k in kept if k <= t)
        assert t - last < max(least_s, t / LINES) or t == last


def test_a_young_run_has_every_line_and_an_old_one_grows_by_the_logarithm() -> None:
    young = len(samples(LINES * RECORD_EVERY_S / DAY_S))
    assert young == LINES
    month = len(samples(30.0))
    assert month < LINES * (2 + math.log(30.0 * DAY_S / (LINES * RECORD_EVERY_S)))


def test_a_pair_has_both_its_lines_or_none() -> None:
    arms: dict[int, int] = {}
    for event in held(3.0):
        if isinstance(event, Block) and event.pair is not None:
            arms[event.pair] = arms.get(event.pair, 0) + 1
    assert set(arms.values()) == {2}
    assert len(arms) < 3.0 * DAY_S / BLOCK_S / REFERENCE_EVERY
