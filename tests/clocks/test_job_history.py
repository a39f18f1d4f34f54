"""The history as one run uses it, on a simulated GPU and without a session."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kilter.clocks.job_history import JobHistory
from kilter.clocks.plan.governor import Phase
from kilter.clocks.rehearsal import Rehearsal
from kilter.core.label import Label
from kilter.core.plan import Goal
from kilter.core.trace import IterationTrace, Kind, Operation
from kilter.device.sim.gpu import SimGpu
from kilter.device.sim.profile import load_profile

GOAL = Goal(max_slowdown=0.05)
MEMORY_BOUND = IterationTrace(
    iteration_s=0.05,
    operations=(
        Operation(
            name="layer",
            kind=Kind.FORWARD,
            start_s=0.0,
            duration_s=0.05,
            flops=2e10,
            bytes_moved=3e10,
            kernels=3,
        ),
    ),
    timeline="gpu",
    device="test",
    label=Label.MEASURED,
)


class Refusals:
    def __init__(self) -> None:
        self.said: list[str] = []

    def refuse(self, subject: str, reason: str, code: str | None = None) -> None:
        self.said.append(f"{subject}: {reason}")


def run_on(gpu: SimGpu, **changes: Any) -> Any:
    """What a history asks of a run."""
    run = {
        "goal": GOAL,
        "info": gpu.info(),
        "ranks": SimpleNamespace(rank=0, world_size=1),
        "lease": SimpleNamespace(found=gpu.settings()),
        "log": Refusals(),
    }
    return SimpleNamespace(**run | changes)


def rehearse(gpu: SimGpu, history: JobHistory) -> Rehearsal:
    found = gpu.settings()
    rehearsal = Rehearsal(
        gpu,
        MEMORY_BOUND,
        GOAL,
        apply=gpu.set,
        record=lambda event: None,
        clock=lambda: gpu.now_s,
        known=history.known(),
    )
    while rehearsal.phase is not Phase.HOLD and rehearsal.iterations < 20_000:
        rehearsal.iterate()
    gpu.set(found)
    return rehearsal


def test_the_second_run_of_a_job_confirms_what_the_first_has_found(tmp_path: Path) -> None:
    file, command = tmp_path / "history.sqlite", ("train.py", "--lr", "1")
    iterations, choices = [], []
    for seed in (1, 2, 3):
        gpu = SimGpu(load_profile("v100"), seed=seed)
        run = run_on(gpu)
        history = JobHistory(run, file, None, command)
        rehearsal = rehearse(gpu, history)
        history.remember(rehearsal.program, held=True)
        iterations.append(rehearsal.iterations)
        choices.append(rehearsal.program.choice)
        assert run.log.said == []
    assert choices[0].setting == choices[1].setting == choices[2].setting != gpu.settings()
    assert "confirmed by 3 pairs" in choices[1].reason
    assert "confirmed by 3 pairs" in choices[2].reason, "a run that only confirms is enough"
    assert iterations[1] < iterations[0] / 2
    other = run_on(gpu, goal=Goal(max_slowdown=0.02))
    assert JobHistory(run_on(gpu), file, None, command).known() is not None
    assert JobHistory(other, file, None, command).known() is None
    assert JobHistory(run_on(gpu), file, None, ("other.py",)).known() is None
    measured = run_on(gpu, info=gpu.info().__class__(**_fields(gpu) | {"label": Label.MEASURED}))
    assert JobHistory(measured, file, None, command).known() is None


def _fields(gpu: SimGpu) -> dict[str, Any]:
    info = gpu.info()
    return {name: getattr(info, name) for name in info.__dataclass_fields__}


@pytest.mark.parametrize("raw", [b"", b"x" * 9000])
def test_a_broken_history_or_predictor_is_said_and_costs_nothing_else(
    raw: bytes, tmp_path: Path
) -> None:
    file, predictor = tmp_path / "history.sqlite", tmp_path / "predictor.json"
    file.write_bytes(raw or b"y" * 9000)
    predictor.write_bytes(raw)
    gpu = SimGpu(load_profile("v100"), seed=1)
    run = run_on(gpu)
    history = JobHistory(run, file, predictor, ("train.py",))
    assert history.known() is None
    assert history.predictor() is None
    history.remember(rehearse(gpu, JobHistory(run, None, None, ())).program, held=True)
    subjects = [line.partition(":")[0] for line in run.log.said]
    assert set(subjects) == {
        "keeping the history of this job",
        "ordering the probes by the predictor",
    }
    assert all(str(tmp_path) in line for line in run.log.said)
