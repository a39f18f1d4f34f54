"""Runs the ranks of a job as processes, for tests."""

import json
import signal
from pathlib import Path

HERE = Path(__file__).parent
TIMEOUT_S = 900
ENDED = "the script has ended"
"""On stderr, as a script's last act."""


def run(warm, world, out, plan, *arguments, script="script.py"):
    """What each rank wrote on stderr; `plan` is None for a run without kilter. A rank that fails
    or hangs fails the test."""
    command = [str(HERE / script), "--out", str(out), *arguments]
    if plan is not None:
        command = [str(HERE / "elastic_worker.py"), json.dumps(plan), *command]
    ranks = warm.run_ranks(world, command, cwd=Path.cwd(), timeout_s=TIMEOUT_S)
    told = [rank.stderr for rank in ranks]
    assert all(map(_right, ranks, told)), "\n".join(told)
    return told


def _right(rank, told):
    """Whether a rank ended well. Threads of gloo may hold tensors that Python knows while the
    interpreter ends, which takes the process down (pytorch/pytorch#179291, plain scripts too): that
    is let pass in a script that has said that all of it is done, and only with torch's sentence."""
    _, ended, rest = told.partition(ENDED)
    torch_at_exit = rank.returncode == -signal.SIGABRT and ended
    return rank.returncode == 0 or (
        torch_at_exit and "terminate called without an active exception" in rest
    )


def train(warm, world, out, plan, *arguments):
    """The results of all ranks, and what rank 0 said."""
    out.mkdir()
    told = run(warm, world, out, plan, *arguments)
    found = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world)]
    return found, told[0]


def changes(told):
    """The schedule that the ranks agreed on."""
    line = next(line for line in told.splitlines() if line.startswith("changes "))
    return json.loads(line.removeprefix("changes "))
