"""What a budget comes to on a card: `torch.cuda` says what a test wants, the engine is real."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from kilter.controller import Run
from kilter.core.errors import BudgetTooSmall, PlanError
from kilter.core.events import AnyEvent, Fitted, Moved, Refused
from kilter.core.label import Label
from kilter.core.messages import LocalMessages
from kilter.core.plan import Goal, MemoryBudget
from kilter.core.ranks import Ranks
from kilter.core.script_end import ScriptEnd, end_of
from kilter.core.setting import DeviceInfo
from kilter.core.units import GIB, MIB
from kilter.memory import controller, governed_job, messages
from kilter.memory.controller import ALLOCATOR, MemoryController
from kilter.memory.engine import CpuStandIn
from kilter.memory.first_tensor import FirstTensor
from kilter.memory.plan.problem import H200_PCIE5
from kilter.memory.plan_log import PlanLog
from kilter.memory.usable_bytes import card_memory
from kilter.session.fence import Fence

FINISHED = ScriptEnd()
INFO = DeviceInfo(name="a card", uuid="GPU-1", backend="nvml", label=Label.MEASURED, can_set=False)


class Card:
    """The memory of a card that holds nothing but our saved data."""

    def __init__(self, total: int, free: int, ours: int = 0, fraction: float = 1.0) -> None:
        self.total, self.free, self.ours, self.fraction = total, free, ours, fraction
        self.peak = 30 * MIB

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = torch.cuda
        answers = {
            "mem_get_info": (self.free, self.total),
            "memory_reserved": self.ours,
            "get_per_process_memory_fraction": self.fraction,
            "max_memory_allocated": self.peak,
            "reset_peak_memory_stats": None,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(cuda, name, lambda device, answer=answer: answer, raising=False)

        def first(waiting: Any, tensor: torch.Tensor) -> bool:
            waiting.device_type = "cuda"
            return tensor.numel() * tensor.element_size() >= MIB and not tensor.is_leaf

        monkeypatch.setattr(FirstTensor, "_governs", first)
        monkeypatch.setattr(controller, "card_memory", self.memory)
        fake = types.ModuleType("kilter.memory.engine.cuda")
        fake.Cuda = types.SimpleNamespace(open=lambda index, host: CpuStandIn(host=host))  # type: ignore[attr-defined]
        fake.measure_link = lambda backend, size_bytes: H200_PCIE5  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "kilter.memory.engine.cuda", fake)

    @staticmethod
    def memory(cuda: Any, device: torch.device, info: DeviceInfo) -> tuple[int | None, str]:
        return card_memory(cuda, torch.device("cuda", 0), info)


class Log:
    """Keeps the events."""

    def __init__(self, events: list[AnyEvent]) -> None:
        self._events = events

    def __call__(self, event: AnyEvent) -> None:
        self._events.append(event)

    def refuse(self, subject: str, reason: str, code: str | None = None) -> None:
        self._events.append(Refused(t_s=0.0, what=subject, reason=reason, code=code))

    def notice(self, text: str) -> None: ...

    def now_s(self) -> float:
        return 0.0


def run_of(fence: Fence, events: list[AnyEvent], ranks: Ranks) -> Run:
    """What the controller uses of a run, with nothing of a session."""
    given = types.SimpleNamespace(
        goal=Goal(),
        dry_run=False,
        info=INFO,
        ranks=ranks,
        fence=fence,
        log=Log(events),
        messages=LocalMessages,
        trace=types.SimpleNamespace(disturbs=lambda iteration: False),
        files=types.SimpleNamespace(save_memory=lambda trace, plan: None),
    )
    return cast(Run, given)


def fit(
    budget: MemoryBudget,
    steps: int = 26,
    outcome: ScriptEnd = FINISHED,
    at_end: Callable[[Any], None] = lambda fitter: None,
    gradients: str = "auto",
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> list[AnyEvent]:
    """A training under a fitter, with nothing of a session."""
    events: list[AnyEvent] = []

    def fail(where: str, error: str) -> None:
        raise AssertionError(f"{where}: {error}")

    fence = Fence(fail)
    fitter = MemoryController(run_of(fence, events, ranks), budget, gradients=gradients)
    fitter.begin()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(10)))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        model(torch.randn(4096, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        fence(fitter.iteration_ended)(step)
    fitter.script_ended()
    at_end(fitter)
    fitter.end((), outcome)
    assert not fence.down
    return events


def last(events: list[AnyEvent]) -> Moved:
    return [event for event in events if isinstance(event, Moved)][-1]


def test_auto_is_what_is_free_and_ours_less_the_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(total=80 * GIB, free=30 * GIB, ours=10 * GIB).install(monkeypatch)
    moved = last(fit(MemoryBudget(), 12))
    assert moved.backend == "cuda"
    assert moved.budget_bytes == int(0.9 * 40 * GIB)
    assert "40.0 GiB of 80.0 GiB (the rest is held by others and by the driver)" in moved.budget
    assert "less 10 % in reserve" in moved.budget
    assert moved.out_bytes == 0


def test_auto_keeps_to_the_programs_own_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(total=80 * GIB, free=79 * GIB, fraction=10 * MIB / (80 * GIB))
    card.install(monkeypatch)
    events = fit(MemoryBudget())
    moved = last(events)
    assert moved.budget_bytes is not None
    assert moved.budget_bytes <= int(0.9 * 10 * MIB) + 1
    assert "(the program's own cap)" in moved.budget
    assert any(isinstance(event, Fitted) and event.feasible for event in events)
    assert moved.planned > 0
    assert moved.spilled > 0
    assert not moved.plain_peak_seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_on_a_gpu_the_ranks_choose_how_to_recompute(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []

    def note(*given: object) -> None:
        made.append(given)

    card = Card(total=80 * GIB, free=79 * GIB)
    card.install(monkeypatch)
    monkeypatch.setattr(governed_job, "RecomputeChoice", note)
    fit(MemoryBudget(), 1, ranks=Ranks(0, world_size))
    assert len(made) == 1


def test_more_than_the_card_has_becomes_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(total=80 * GIB, free=10 * GIB).install(monkeypatch)
    moved = last(fit(MemoryBudget(size_bytes=24 * GIB), 10))
    assert moved.budget_bytes == int(0.9 * 10 * GIB)
    assert moved.budget.startswith("less than the 24.0 GiB asked for, to fit 10.0 GiB of 80.0 GiB")


def test_a_share_is_of_the_plain_peak_where_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(total=80 * GIB, free=79 * GIB)
    card.install(monkeypatch)
    moved = last(fit(MemoryBudget(share=0.5)))
    assert moved.plain_peak_bytes == card.peak  # the allocator's, of the iterations without us
    assert moved.budget_bytes == card.peak // 2
    assert moved.plain_peak_seen
    assert moved.peak_bytes == card.peak
    assert moved.planned > 0


def test_a_share_is_of_the_card_where_the_job_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(total=16 * MIB, free=16 * MIB).install(monkeypatch)
    moved = last(fit(MemoryBudget(share=0.5)))
    assert moved.budget_bytes == int(0.5 * int(0.9 * 16 * MIB))
    assert "of the card's" in moved.budget
    assert "since the job does not fit without a plan" in moved.budget


def test_below_the_floor_gradients_and_state_are_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Card(total=80 * GIB, free=79 * GIB).install(monkeypatch)
    moved = last(fit(MemoryBudget(size_bytes=MIB), 30, gradients="consume"))
    assert moved.state.startswith("gradients are used up as they arrive")
    assert moved.least_bytes is not None
    assert moved.least_bytes > MIB


def test_a_program_that_runs_out_of_memory_is_told_what_may_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Card(total=80 * GIB, free=79 * GIB).install(monkeypatch)
    events = fit(MemoryBudget(share=0.5), 3, end_of(torch.OutOfMemoryError()))
    (refused,) = (event for event in events if isinstance(event, Refused))
    assert refused.code == "out_of_memory"
    assert "ran out of memory before there was a plan" in refused.reason
    assert "expandable_segments:True" in refused.reason


def test_a_reason_is_told_once_with_the_number_of_its_data() -> None:
    events: list[AnyEvent] = []

    def fail(where: str, error: str) -> None:
        raise AssertionError(f"{where}: {error}")

    log = PlanLog(run_of(Fence(fail), events, Ranks()))
    few = [messages.recipe_differs(f"{number}: AddBackward0: (4,) float32") for number in range(3)]
    tangents = messages.tangents_stay(2**20)
    unreached = messages.of_error(BudgetTooSmall("the budget of 5 bytes is out of reach"))
    no_plan = messages.of_error(PlanError("the budget of an unknown kind"))
    for _ in range(2):
        log.refuse_new((few[0], tangents, few[1], unreached, no_plan, few[2]))
    told = [event for event in events if isinstance(event, Refused)]
    assert [(event.code, event.reason) for event in told] == [
        ("recipe_differs", "recomputed, it differs (3 tensors)"),
        ("forward_mode", tangents.text),
        ("no_plan", "the budget of an unknown kind"),
    ]


def test_a_bound_is_never_above_the_time_that_it_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(total=80 * GIB, free=79 * GIB).install(monkeypatch)

    def longer(fitter: Any) -> None:
        for record in fitter._job._swapper.records():
            record.operation_s = [2 * s for s in record.operation_s]

    def other(fitter: Any) -> None:
        """A larger kind of pass that was never planned."""
        kinds = fitter._job._swapper._kinds
        record = next(kind.record for kind in kinds if kind.plan is not None)
        larger = replace(
            record,
            events=(record.events[0] + 1, *record.events[1:]),
            operation_s=[9.0] * len(record.operation_s),
            level_bytes=[2 * level for level in record.level_bytes],
        )
        kinds.watched(larger, weighed=True)

    for change, known in ((lambda fitter: None, True), (longer, False), (other, True)):
        events = fit(MemoryBudget(share=0.5), at_end=change)
        plan = [event for event in events if isinstance(event, Fitted)][-1]
        bound_s = last(events).bound_s
        assert (bound_s is not None) == known
        assert bound_s is None or bound_s <= plan.iteration_s


@pytest.mark.parametrize("asked", [None, "backend:native"])
def test_segments_may_grow_unless_the_program_says_otherwise(
    asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes and goes in many sizes leaves fragments of fixed segments."""
    name = "PYTORCH_CUDA_ALLOC_CONF"
    for other in ALLOCATOR:
        monkeypatch.setenv(other, "")
        monkeypatch.delenv(other)
    if asked is not None:
        monkeypatch.setenv(name, asked)
    modules = {key: value for key, value in sys.modules.items() if key != "torch"}
    monkeypatch.setattr("kilter.memory.controller.sys", types.SimpleNamespace(modules=modules))
    seen = []
    monkeypatch.setattr(
        MemoryController, "iteration_ended", lambda self, index: seen.append(os.environ.get(name))
    )
    fit(MemoryBudget(size_bytes=GIB), 1)
    assert seen == [asked or "expandable_segments:True"]
    assert os.environ.get(name) == asked  # as it was found
