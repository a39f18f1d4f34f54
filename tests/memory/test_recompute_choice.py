"""`--recompute auto`: what is measured to be faster stays, and is said."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kilter
from kilter.memory.iteration_times import IterationTimes
from kilter.memory.plan import problem
from kilter.memory.recompute_choice import HOST_EACH_S, MEASURED, PATIENCE, RecomputeChoice
from kilter.testing.stand_in import small_tensors


@dataclass
class Engine:
    """Notes what it is asked for."""

    recomputes_calls: bool = False
    planned: bool = True
    recomputed: int = 1
    asked: list[bool] = field(default_factory=list)
    each_s: list[float] = field(default_factory=list)
    worth: bool = True

    def report(self) -> Any:
        plan = SimpleNamespace(iteration_s=0.1, compute_s=0.08, peak_before_bytes=9, recomputed=200)
        return SimpleNamespace(recomputed=self.recomputed, plans=(plan,))

    def recompute(self, *, calls: bool, each_s: float) -> None:
        self.asked.append(calls)
        self.each_s.append(each_s)
        self.recomputes_calls = calls and self.worth


def chosen(engine: Engine, *durations_s: float) -> RecomputeChoice:
    """After enough iterations of each duration in turn."""
    times = IterationTimes()
    choice = RecomputeChoice(engine, times)  # type: ignore[arg-type]
    for duration_s in durations_s:
        for _ in range(MEASURED):
            choice.iteration_ended(settled=True)
            times.planned_s.append(duration_s)
    choice.iteration_ended(settled=True)
    return choice


@pytest.mark.parametrize(
    ("calls_s", "asked", "words"),
    [
        (0.092, [True], "whole calls of modules where they pay are recomputed: 92 ms an iteration"),
        (0.130, [True, False], "single operations are recomputed: 130 ms an iteration"),
        (0.150, [True, False], "single operations are recomputed: 150 ms an iteration"),
    ],
    ids=["faster", "hardly faster", "slower"],
)
def test_the_faster_way_stays(calls_s: float, asked: list[bool], words: str) -> None:
    engine = Engine()
    choice = chosen(engine, 0.131, calls_s)
    assert engine.asked == asked
    assert choice.decided
    assert choice.words.startswith(words)
    assert choice.words.endswith("131 ms with single operations [measured]")


def test_what_the_host_took_beyond_the_plan_counts_for_each_tensor() -> None:
    times = IterationTimes()
    times.planned_s.extend([0.131] * MEASURED)
    unknown, known = Engine(), Engine()
    RecomputeChoice(unknown, times).iteration_ended(settled=True)  # type: ignore[arg-type]
    assert unknown.each_s == [HOST_EACH_S]
    times.planned_s.extend([0.131] * MEASURED)
    times.plain_s.append(0.091)
    RecomputeChoice(known, times).iteration_ended(settled=True)  # type: ignore[arg-type]
    assert known.each_s == [pytest.approx((0.131 - 0.091 - 0.02) / 200)]


def test_nothing_is_tried_where_nothing_is_recomputed_or_the_budget_does_not_stand() -> None:
    engine = Engine(recomputed=0)
    assert not chosen(engine, 0.1, 0.1).decided
    times = IterationTimes()
    times.planned_s.extend([0.1] * MEASURED)
    RecomputeChoice(engine, times).iteration_ended(settled=False)  # type: ignore[arg-type]
    assert engine.asked == []


def test_without_a_call_that_is_worth_it_operations_stay() -> None:
    engine = Engine(worth=False)
    choice = chosen(engine, 0.1)
    choice.iteration_ended(settled=True)
    assert engine.asked == [True, False]
    assert choice.words.endswith("no whole call of a module is worth recomputing")


def test_where_no_plan_comes_operations_come_back() -> None:
    engine = Engine(planned=False)
    choice = chosen(engine, 0.1)
    for _ in range(PATIENCE):
        assert choice.words == ""
        choice.iteration_ended(settled=True)
    assert engine.asked == [True, False]
    assert choice.words.endswith("got no plan in time")


def test_durations_of_the_way_before_do_not_count() -> None:
    """They become known later than the iteration ends."""
    times = IterationTimes()
    before = times.planned_s
    times.begin_plan()
    before.append(1.0)
    assert list(times.planned_s) == []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x.sin()).cos()


def losses(iterations: int) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(6)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    found = []
    for _ in range(iterations):
        loss = net(torch.randn(512, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def test_a_run_chooses_and_says_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = replace(
        problem.H200_PCIE5,
        to_host_bytes_per_s=1e7,
        to_device_bytes_per_s=1e7,
        both_bytes_per_s=1e7,
    )
    monkeypatch.setattr(problem, "H200_PCIE5", slow)
    iterations = 2 * MEASURED + 40
    plain = losses(iterations)
    out = tmp_path / "run"
    undo = small_tensors(512 * 64 * 4)
    with kilter.govern(memory_budget="60%", recompute="auto", device="null", out=out):
        governed = losses(iterations)
    undo()
    assert all(torch.equal(a, b) for a, b in zip(plain, governed, strict=True))
    memory = json.loads((out / "report.json").read_text())["memory"]
    words = memory["recompute_choice"]
    assert "are recomputed: " in words
    assert words in capsys.readouterr().err
    assert memory["peak_bytes"] <= memory["budget_bytes"]
