"""Starts the ranks of a job as processes, for tests."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TIMEOUT_S = 240
ENDED = "the script has ended"
"""On stderr, as a script's last act."""


def start(world, out, plan, *arguments, script="script.py", **environment):
    """One process a rank; `plan` is None for a run without kilter."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable]
    if plan is not None:
        command += [str(HERE / "elastic_worker.py"), json.dumps(plan)]
    ranks = []
    for rank in range(world):
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
        }
        ranks.append(
            subprocess.Popen(
                [*command, str(HERE / script), "--out", str(out), *arguments],
                env=os.environ | environment | {key: str(value) for key, value in place.items()},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return ranks


def finish(ranks):
    """What each rank wrote on stderr. A rank that fails or hangs fails the test."""
    told = []
    try:
        told = [rank.communicate(timeout=TIMEOUT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
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


def train(world, out, plan, *arguments, **environment):
    """The results of all ranks, and what rank 0 said."""
    out.mkdir()
    told = finish(start(world, out, plan, *arguments, **environment))
    found = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world)]
    return found, told[0]


def changes(told):
    """The schedule that the ranks agreed on."""
    line = next(line for line in told.splitlines() if line.startswith("changes "))
    return json.loads(line.removeprefix("changes "))
