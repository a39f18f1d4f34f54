"""Children that a script starts under `kilter run`: ranks if they train, else left alone.

Those with two ranks and cards are in `tests/session/test_session_nvml.py`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kilter.core.events import Started, Stopped, read_events
from kilter.core.plan import Goal
from kilter.session import children
from kilter.session.children import (
    ChildMessage,
    SpawnedChildren,
    claim,
    directory_of,
    launcher_events,
    make_way,
)
from kilter.session.options import Options
from kilter.testing.warm_python import WarmPython

OPTIONS = Options(goal=Goal(max_slowdown=0.02), out=Path("out"), command=("train.py", "--lr", "1"))

# One import of torch, and of what an optimizer imports, for all children: they are forked from a
# process that has them.
SCRIPT = """
import multiprocessing, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

def never():
    print("nothing", sys.argv, flush=True)

def train(code):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    print("trained", sys.argv, flush=True)
    sys.exit(code)

def fail(number):
    try:
        train(0)
    except SystemExit:
        raise ValueError("the child's own")

if __name__ == "__main__":
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(["torch", "torch._dynamo"])
    data = TensorDataset(torch.ones(4, 2))
    workers = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    print([x.sum().item() for (x,) in DataLoader(data, **workers)], flush=True)
    for target, arguments in ((never, ()), (train, (0,)), (train, (3,))):
        child = start.Process(target=target, args=arguments)
        child.start()
        child.join()
        print(child.exitcode, flush=True)
    torch.multiprocessing.start_processes(fail, nprocs=1, start_method="forkserver")
"""


def plain(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if not line.startswith("kilter")]
    return [re.sub(r"0x\w+|\d{4,}", "N", line) for line in lines]


def test_children_end_as_ever_and_those_that_train_are_observed(
    warm: WarmPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    for name in [name for name in os.environ if name.startswith("KILTER_RUN")]:
        monkeypatch.delenv(name)

    def run(*before: str) -> subprocess.CompletedProcess[str]:
        return warm.run([*before, "job.py", "-x"], cwd=tmp_path)

    reference = run()
    assert "ProcessRaisedException" in reference.stderr
    done = run("-m", "kilter", "run", "--device", "null", "--out", "run")
    assert plain(done.stdout) == plain(reference.stdout)
    assert plain(done.stderr) == plain(reference.stderr)
    assert done.returncode == reference.returncode == 1

    out = tmp_path / "run"
    files = sorted(out.rglob("events-rank*.jsonl"), key=lambda file: file.stat().st_mtime_ns)
    assert files[0].parent == out, "the first group has the directory of the run"
    assert {file.parent.parent for file in files[1:]} == {out}, "and each later one its own"
    ends = []
    for file in files:
        events = list(read_events(file))
        ends += [(e.outcome, e.iterations) for e in events if isinstance(e, Stopped)]
        (started,) = (event for event in events if isinstance(event, Started))
        assert (started.rank, started.world_size) == (0, 1)
        assert started.command == ("job.py", "-x")
        assert (file.parent / "report.json").exists()
    assert ends == [("finished", 2), ("exit 3", 2), ("raised ValueError", 2)]
    assert launcher_events(out).exists()
    assert "no iteration seen" not in done.stderr


def test_children_that_do_not_train_leave_the_run_to_the_script(
    warm: WarmPython, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(
        "import multiprocessing, time\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=time.sleep, args=(0,))\n"
        "    child.start(); child.join()\n"
    )
    done = warm.run(
        ["-m", "kilter", "run", "--device", "null", "--out", "run", "job.py"], cwd=tmp_path
    )
    assert done.returncode == 0
    assert "no iteration seen" in done.stderr
    assert done.stderr.count("report: ") == 1
    assert [file.name for file in (tmp_path / "run").glob("events*")] == ["events-rank0.jsonl"]


# What a child is told ---------------------------------------------------------------------------


def test_the_message_comes_back_as_it_was() -> None:
    message = ChildMessage(Path("/runs/one two"), 3, OPTIONS)
    assert ChildMessage.of(message.encoded()) == message


@pytest.fixture
def trained() -> list[int]:
    """Iterations of the program itself."""
    return []


@pytest.fixture
def spawned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained: list[int]
) -> Iterator[tuple[Any, list[str]]]:
    """What `multiprocessing` gets for a child of this name, and the names of those that live."""
    import multiprocessing.spawn as spawn

    living: list[str] = []
    alive = lambda: [SimpleNamespace(name=name) for name in living]  # noqa: E731
    monkeypatch.setattr(children.multiprocessing, "active_children", alive)
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", False, raising=False)
    original = spawn.get_preparation_data
    ours = SpawnedChildren(OPTIONS)
    ours.install(tmp_path, lambda: bool(trained))
    yield spawn, living
    ours.remove()
    ours.remove()
    assert spawn.get_preparation_data is original


def group_of(data: dict[str, Any]) -> int:
    _, (code, namespace) = data["kilter"].__reduce__()
    found: list[str] = []
    assert namespace == {}
    exec(code.replace("from kilter.app.spawned import enter", "pass"), {"enter": found.append})
    return ChildMessage.of(found[0]).group


def test_children_that_run_at_the_same_time_are_one_group(spawned: tuple[Any, list[str]]) -> None:
    spawn, living = spawned
    groups = []
    for name, alive in (("a", []), ("b", ["a"]), ("c", ["b"]), ("d", []), ("e", ["x"])):
        living[:] = alive
        assert "kilter" not in spawn.get_preparation_data("ignore"), "the fork server's own"
        groups.append(group_of(spawn.get_preparation_data(name)))
    assert groups == [1, 1, 1, 2, 3]


def test_a_program_that_trains_itself_keeps_its_run(
    spawned: tuple[Any, list[str]], trained: list[int]
) -> None:
    trained.append(0)
    assert "kilter" not in spawned[0].get_preparation_data("a")


def test_a_child_without_kilter_is_started_as_ever(
    spawned: tuple[Any, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = pickle.dumps(spawned[0].get_preparation_data("a")["kilter"])
    monkeypatch.setitem(sys.modules, "kilter.app.spawned", None)
    assert pickle.loads(sent) is None


# Where its ranks write --------------------------------------------------------------------------


def test_the_first_group_has_the_runs_directory(tmp_path: Path) -> None:
    assert directory_of(tmp_path, 2) == directory_of(tmp_path, 2) == tmp_path
    assert directory_of(tmp_path, 3) == tmp_path / "spawn-3"


def test_one_child_of_several_that_begin_at_once_is_rank_0(tmp_path: Path) -> None:
    assert [claim(tmp_path / "run", rank) for rank in (0, 0, 1, 0)] == [True, False, True, False]


def test_the_launcher_writes_on_under_another_name(tmp_path: Path) -> None:
    events = tmp_path / "events-rank0.jsonl"
    make_way(events)
    assert not launcher_events(tmp_path).exists()
    with events.open("a") as launcher:
        make_way(events)
        launcher.write("line\n")
    assert launcher_events(tmp_path).read_text() == "line\n"
    events.write_text("of rank 0\n")
    make_way(events)
    assert events.read_text() == "of rank 0\n", "somebody else's by now"
