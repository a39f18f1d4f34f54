"""As `test_malformed_files`, for what else may come from other hands: recordings, traces of ranks,
machines, configurations, journals. Only errors of ours come out of a reader, in bounded time."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_malformed_files import CHANGES, COUNT, Hung, bounded, cut, nested, with_bytes

from kilter.app.cli.main import main
from kilter.app.config import resolve
from kilter.core.errors import KilterError
from kilter.core.setting import Setting
from kilter.device.sim.replay import load_recording
from kilter.lease import baseline
from kilter.lease.daemon.main import load_policy
from kilter.lease.journal import Journal, JournalPlace, journals

DATA = Path(__file__).parents[1] / "data"
JOB = {"name": "a", "global_batch": 64, "total_steps": 100, "cost": {"sample_s": 0.001}}
MACHINE = {"schema": "kilter.sharing/1", "gpus": 2, "jobs": [JOB], "period_s": 2.0}
JOURNAL = Journal(
    uuid="GPU-1",
    backend="nvml",
    boot_id="of another boot",
    pid=1,
    start_ticks=1,
    nonce="1",
    found=Setting(power_limit_w=600.0),
    before=Setting(),
    last=Setting(power_limit_w=400.0, sm_clock_hz=1.2e9),
    written="2026-01-01T00:00:00+00:00",
)


def telemetry() -> bytes:
    rows = ["t_s,power_instant_w,energy_mj,gpu_util,mem_util,sm_mhz"]
    for tick in range(300):
        power_w = 300.0 + 100.0 * (tick % 20 < 8)
        rows.append(f"{tick / 10:.1f},{power_w},{tick * 30_000},{90 - tick % 7},40,1980")
    return ("\n".join(rows) + "\n").encode()


def kineto() -> bytes:
    raw = gzip.decompress((DATA / "ddp2_nvlink_resnet50.kineto.json.gz").read_bytes())
    trace = json.loads(raw)
    trace["traceEvents"] = trace["traceEvents"][:300]
    return json.dumps(trace).encode()


def verb(line: str) -> Callable[[Path], object]:
    """A verb says what is wrong in one line; its exit code is 1."""

    def run(path: Path) -> None:
        told = io.StringIO()
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
            code = main(line.format(path).split())
        assert code in (0, 1), code
        assert code == 0 or told.getvalue().strip()

    return run


READERS: dict[str, tuple[bytes, Callable[[Path], object]]] = {
    "telemetry.csv": (telemetry(), verb("bench period --telemetry {} --json")),
    "recording.csv": (telemetry(), load_recording),
    "rank0.json": (kineto(), verb("sections {} --json")),
    "machine.json": (json.dumps(MACHINE).encode(), verb("share rehearse {} --json")),
    "kilter.toml": (
        b"max-slowdown = '3%'\njson = true\n",
        lambda path: resolve({}, {}, path.parent, ()),
    ),
    "baseline.toml": (b'[gpu."GPU-1"]\npower-limit-w = 600.0\n', baseline.load),
    "daemon.toml": (
        b"longest-hold-s = 60\n[[allow]]\nusers = [0]\nsm-clock-mhz = [600, 1980]\n",
        load_policy,
    ),
    "GPU-1.json": (
        msgspec.json.encode(JOURNAL),
        lambda path: (list(journals(path.parent)), JournalPlace(path.parent, "GPU-1").read()),
    ),
}
RAW = (with_bytes, cut, nested)


@pytest.mark.parametrize("name", READERS)
def test_malformed(tmp_path: Path, name: str) -> None:
    raw, read = READERS[name]
    path = tmp_path / name
    path.write_bytes(raw)
    path.chmod(0o600)
    read(path)
    wrong: list[str] = []
    for seed in range(max(4, COUNT // len(READERS))):
        chance = random.Random(f"{name} {seed}")
        change = chance.choice(CHANGES if name.endswith("json") else RAW)
        path.write_bytes(change(chance, raw))
        try:
            with bounded():
                read(path)
        except KilterError as error:
            if not str(error):
                wrong.append(f"seed {seed}, {change.__name__}: an error without a word")
        except (Exception, Hung, AssertionError) as error:
            wrong.append(f"seed {seed}, {change.__name__}: {error!r}"[:300])
    assert not wrong, f"{len(wrong)}: " + "\n".join(wrong[:12])


@pytest.mark.parametrize("name", READERS)
def test_a_fifo_in_place_of_a_file(tmp_path: Path, name: str) -> None:
    """A reader may refuse it; one that waits for a writer is ended by `bounded`, with an error."""
    os.mkfifo(tmp_path / name)
    with bounded(), contextlib.suppress(KilterError):
        READERS[name][1](tmp_path / name)
