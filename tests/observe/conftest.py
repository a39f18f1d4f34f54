"""A process that has imported torch and runs small programs in forks of itself (`observed.py`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def served():
    """Runs a program, observed or plain: its exit code, and what it wrote on stdout and stderr."""
    command = [sys.executable, str(Path(__file__).with_name("observed.py")), "serve"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    ) as server:

        def run(program, *, plain=False):
            server.stdin.write(json.dumps([program] if plain else program) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        yield run
        server.stdin.close()


@pytest.fixture(scope="module")
def observe(served):
    """What was seen of a program; it must be silent on stderr."""

    def ask(program):
        done = served(program)
        assert (done["code"], done["err"]) == (0, "")
        return json.loads(done["out"].splitlines()[-1])

    return ask
