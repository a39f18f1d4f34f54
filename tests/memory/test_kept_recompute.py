"""A job that comes again begins with the way that its last run has chosen."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tests.memory.test_recompute_choice import losses

import kilter
from kilter.core.history import VERSION, History
from kilter.core.label import Label
from kilter.core.plan import Goal, MemoryBudget
from kilter.core.ranks import Ranks
from kilter.memory import iteration_times
from kilter.memory.engine import call_choice
from kilter.memory.host_time import HostTime
from kilter.memory.kept_recompute import KeptRecompute, RecomputeHistory, RecomputeWay
from kilter.memory.plan import problem
from kilter.memory.plan.segments import SegmentChoice, levels
from kilter.memory.way_comparison import WayComparison
from kilter.testing.stand_in import small_tensors

COMMAND = ("train.py", "--layers", "3")
CHOSEN = KeptRecompute(
    day="2026-11-26", way=RecomputeWay.CALLS, models="", events="1", share=1.0, each_s=1e-4
)


def run_of(budget: str = "60%", rank: int = 0, world_size: int = 1, name: str = "H100") -> Any:
    said: list[str] = []
    info = SimpleNamespace(name=name, driver="1", label=Label.MEASURED)
    log = SimpleNamespace(said=said, refuse=lambda what, why: said.append(f"{what}: {why}"))
    goal = Goal(memory_budget=MemoryBudget.parse(budget))
    return SimpleNamespace(goal=goal, info=info, log=log, ranks=Ranks(rank, world_size))


def looked_up(
    file: Path | None, run: Any, command: tuple[str, ...] = COMMAND, gradients: str = "auto"
) -> RecomputeHistory:
    history = RecomputeHistory(run, file, command, (gradients, "keep"))
    history.tick()
    assert history.known
    return history


def keep(file: Path, run: Any) -> None:
    history = looked_up(file, run)
    history.keep(CHOSEN)
    history.tick()


def test_the_same_job_is_recognised_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "history.sqlite"
    keep(file, run_of())
    assert looked_up(file, run_of()).last == CHOSEN
    assert looked_up(file, run_of(budget="61%")).last is None
    assert looked_up(file, run_of(name="H200")).last is None
    assert looked_up(file, run_of(world_size=2)).last is None
    assert looked_up(file, run_of(), (*COMMAND, "--wide")).last is None
    assert looked_up(file, run_of(), gradients="consume").last is None
    assert looked_up(None, run_of()).last is None
    monkeypatch.setattr(torch, "__version__", "2.99")
    assert looked_up(file, run_of()).last is None


def test_rank_0_alone_reads_and_writes(tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite"
    keep(file, run_of(rank=1, world_size=2))
    assert not file.exists()
    keep(file, run_of(world_size=2))
    assert looked_up(file, run_of(world_size=2)).last == CHOSEN
    assert looked_up(file, run_of(rank=1, world_size=2)).last is None


def test_a_file_of_an_earlier_kilter_is_gone_on_with(tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite"
    keep(file, run_of())
    with sqlite3.connect(file) as earlier:
        earlier.execute("DROP TABLE memory")
    earlier.close()
    run = run_of()
    assert looked_up(file, run).last is None
    keep(file, run)
    assert looked_up(file, run).last == CHOSEN
    assert History(file).runs(Label.MEASURED) == []
    assert run.log.said == []


def _overwritten(file: Path) -> None:
    file.write_bytes(b"x" * 9000)


def _newer(file: Path) -> None:
    with sqlite3.connect(file) as database:
        database.execute(f"PRAGMA user_version = {VERSION + 1}")
    database.close()


def _no_record(file: Path) -> None:
    with sqlite3.connect(file) as database:
        database.execute("UPDATE memory SET record = '{\"share\": 7.0}'")
    database.close()


def _no_text(file: Path) -> None:
    with sqlite3.connect(file) as database:
        database.execute("UPDATE memory SET record = x'ff00'")
    database.close()


def _closed(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("spoil", [_overwritten, _newer, _no_record, _no_text, _closed])
def test_what_is_wrong_with_the_file_is_said_once_and_costs_nothing_else(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    file = tmp_path / "history.sqlite"
    keep(file, run_of())
    spoil(file)
    run = run_of()
    history = looked_up(file, run)
    assert history.last is None
    history.keep(CHOSEN)
    history.tick()
    (said,) = run.log.said
    assert said.startswith(f"keeping the history of this job: {file}: ")


def test_a_locked_file_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilter.core.history.BUSY_S", 0.05)
    file = tmp_path / "history.sqlite"
    keep(file, run_of())
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    run = run_of()
    assert looked_up(file, run).last is None
    assert "cannot be used now" in run.log.said[0]
    other.close()


def is_kept(file: Path) -> bool:
    """By now, or when the session's thread has had its turn."""
    for _ in range(300):
        if file.exists():
            with sqlite3.connect(file) as database:
                tables = database.execute("SELECT name FROM sqlite_schema").fetchall()
            database.close()
            if ("memory",) in tables:
                return True
        time.sleep(0.1)
    return False


@pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"),
    reason="this PyTorch does not show what its nodes saved, so that nothing is recomputed here",
)
def test_the_second_run_of_a_job_compares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = dict.fromkeys(("to_host_bytes_per_s", "to_device_bytes_per_s"), 10000000.0)
    monkeypatch.setattr(problem, "H200_PCIE5", replace(problem.H200_PCIE5, **slow))
    monkeypatch.setattr(iteration_times, "MEASURED", 3)
    compared: list[str] = []
    compare = WayComparison._compared

    def noted(comparison: WayComparison) -> dict[RecomputeWay, float]:
        compared.append(out.name)
        # Whatever this machine is busy with.
        return {way: 2.0 - (way is RecomputeWay.CALLS) for way in compare(comparison)}

    searched: list[str] = []

    def largest(choices: list[SegmentChoice], *_: object) -> tuple[int, ...]:
        searched.append(out.name)
        return levels(choices)[0]

    monkeypatch.setattr(WayComparison, "_compared", noted)
    monkeypatch.setattr(HostTime, "_measure", lambda *_: None)
    monkeypatch.setattr(call_choice, "best_set", largest)
    monkeypatch.setattr(call_choice, "levels", lambda _: [])
    monkeypatch.setattr(call_choice, "AS_GOOD", 1e3)
    undo = small_tensors(512 * 64 * 4)
    file = tmp_path / "history.sqlite"
    said = {}
    plain = losses(90)
    for name, budget, history in (
        ("first", "60%", file),
        ("again", "60%", file),
        ("other budget", "55%", file),
        ("off", "60%", "off"),
    ):
        out = tmp_path / name
        with kilter.govern(
            memory_budget=budget, recompute="auto", device="null", out=out, history=history
        ):
            governed = losses(90)
            assert name != "first" or is_kept(file)  # a killed run leaves it as well
        assert all(map(torch.equal, plain, governed))
        memory = json.loads((out / "report.json").read_text())["memory"]
        assert memory["peak_bytes"] <= memory["budget_bytes"]
        said[name] = memory["recompute_choice"]
    undo()
    assert set(compared) == set(searched) == {"first", "other budget", "off"}
    calls = "calls of modules are recomputed where they pay: "
    assert said["first"].startswith(calls)
    assert "an iteration with" in said["first"]
    assert said["again"].startswith(f"{calls}an earlier run of this job chose that (")
    assert said["again"] in capsys.readouterr().err
    with sqlite3.connect(file) as database:
        records = database.execute("SELECT record FROM memory").fetchall()
    database.close()
    assert len(records) == 2
    for (record,) in records:
        kept = msgspec.json.decode(record, type=KeptRecompute)
        assert kept.way is RecomputeWay.CALLS
        assert any(kind.calls for kind in kept.calls)
