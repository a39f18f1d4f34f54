"""Malformed files of ours, by the thousand, with fixed seeds: one clear line each, in bounded time.

`KILTER_TEST_FUZZ` says how many; a few hundred normally, 4,000 for the figure.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests import runs

from kilter.app.cli.main import main
from kilter.core.setting import Setting

COUNT = int(os.environ.get("KILTER_TEST_FUZZ", "160"))
HANG_CPU_S, HANG_S = 2.0, 10.0
"""Of processor time, which other work on the machine does not lengthen; and of time that passes,
for what waits."""
WORST: tuple[Any, ...] = (
    None, True, -1, 0, 1e308, -1e308, 2**53, 2**63, 10**400, "", "²", "x" * 5000, [], {}, [[]],
    "kilter.trace/²", "kilter.plan/99", float("nan"), float("inf"), "\ud800",
)  # fmt: skip


class Hung(BaseException):
    pass


@contextmanager
def bounded() -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise Hung

    limits = (
        (signal.SIGALRM, signal.ITIMER_REAL, HANG_S),
        (signal.SIGPROF, signal.ITIMER_PROF, HANG_CPU_S),
    )
    before = [signal.signal(number, ring) for number, _, _ in limits]
    for _, timer, limit_s in limits:
        signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(limits, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def paths_of(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value[:3])
        for key, part in items:
            yield from paths_of(part, (*at, key))


def with_part(chance: random.Random, raw: bytes) -> bytes:
    """One value of a JSON line is another one, or is gone."""
    lines = raw.rstrip(b"\n").split(b"\n")
    number = chance.randrange(len(lines))
    value = json.loads(lines[number])
    path = chance.choice([one for one in paths_of(value) if one] or [()])
    part = value
    for key in path[:-1]:
        part = part[key]
    if path and chance.random() < 0.2:
        del part[path[-1]]
    elif path:
        part[path[-1]] = chance.choice(WORST)
    lines[number] = json.dumps(value).encode("utf-8", "surrogatepass")
    return b"\n".join(lines) + b"\n"


def with_bytes(chance: random.Random, raw: bytes) -> bytes:
    at = chance.randrange(len(raw))
    return raw[:at] + chance.randbytes(chance.randrange(1, 8)) + raw[at + chance.randrange(8) :]


def cut(chance: random.Random, raw: bytes) -> bytes:
    return raw[: chance.randrange(len(raw))]


def nested(chance: random.Random, raw: bytes) -> bytes:
    at = chance.randrange(len(raw))
    return raw[:at] + chance.choice((b"[", b'{"a":')) * 20_000 + raw[at:]


CHANGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    with_part, with_part, with_part, with_bytes, cut, nested,
)  # fmt: skip
TABLE = b"""source,gpu,workload,core_mhz,mem_mhz,power_limit_w,time_s,power_w,energy_j
a,G,w,1400,877,,1.0,200.0,200.0
a,G,w,1200,877,,1.1,150.0,165.0
a,G,w,1000,877,,1.4,120.0,168.0
"""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good")
    run = runs.governed()
    run.stop()
    runs.write(root, run)
    runs.write_trace(root)
    runs.write_plan(root, Setting(sm_clock_hz=1.245e9), runs.WrittenJob())
    (root / "table.csv").write_bytes(TABLE)
    return root


VERBS: dict[str, str] = {
    "events-rank0.jsonl": "report {root} --json",
    "trace.json": "plan clocks {root}/trace.json --device sim:v100 --json",
    "plan.json": "rehearse {root}/plan.json --trace {root}/trace.json --device sim:v100 --pairs 2",
    "table.csv": "bench clocks --table {root}/table.csv --max-slowdown 0.05 --policies default "
    "--seeds 1 --json",
}


def outcome(arguments: list[str]) -> int:
    try:
        with bounded():
            return main(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1


@pytest.mark.parametrize("name", VERBS)
def test_malformed(
    good: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in good.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    arguments = VERBS[name].format(root=tmp_path).split()
    assert outcome(arguments) == 0, capsys.readouterr().err
    raw = (good / name).read_bytes()
    wrong: list[str] = []
    for seed in range(COUNT // len(VERBS)):
        chance = random.Random(f"{name} {seed}")
        change = chance.choice(CHANGES[3:] if name.endswith("csv") else CHANGES)
        (tmp_path / name).write_bytes(change(chance, raw))
        capsys.readouterr()
        try:
            code = outcome(arguments)
        except (Exception, Hung) as error:
            wrong.append(f"seed {seed}, {change.__name__}: {error!r}")
            continue
        told = capsys.readouterr().err.strip()
        if code not in (0, 1) or (code == 1 and not told):
            wrong.append(f"seed {seed}, {change.__name__}: code {code}, {told[:100]!r}")
    assert not wrong, f"{len(wrong)}: " + "\n".join(wrong[:12])


@pytest.mark.parametrize("name", VERBS)
def test_a_fifo_in_place_of_a_file(
    good: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in good.iterdir():
        if file.name != name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    os.mkfifo(tmp_path / name)
    assert outcome(VERBS[name].format(root=tmp_path).split()) == 1
    assert name in capsys.readouterr().err
