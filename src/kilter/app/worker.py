"""`python -m kilter.app.worker SCRIPT ARGS...`: what our torchrun starts for every rank.

The options come in the environment, so that all ranks have the same. The command stays on the
command line, where `ps` and `nvidia-smi` show whose process it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from dataclasses import replace

import msgspec

from kilter.app import strict
from kilter.app.config import factors_of
from kilter.app.listener import StderrListener
from kilter.connect.script import Program, find_program
from kilter.core.errors import KilterError, UsageError
from kilter.session.options import Options

_VARIABLE = "KILTER_RUN"


def worker_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """What follows `python` in a worker that is to run `command`."""
    # In one word with its -m, so that torchrun takes SCRIPT for the name of what failed.
    return (f"-m{__name__}", *command)


def worker_environment(options: Options) -> dict[str, str]:
    """What the environment of a worker has to have."""
    encoded = msgspec.json.encode(replace(options, command=()), enc_hook=str)
    return {_VARIABLE: encoded.decode()}


def received(
    command: tuple[str, ...], environ: MutableMapping[str, str]
) -> tuple[Program, Options]:
    """What a worker is to run, and how. The variable is taken away: the program is not told."""
    encoded = environ.pop(_VARIABLE, None)
    if encoded is None or not command:
        raise UsageError("a part of `kilter run`; try: torchrun ... -m kilter run SCRIPT")
    options = msgspec.json.decode(encoded, type=Options, dec_hook=lambda kind, value: kind(value))
    return find_program(command), replace(options, command=command)


if __name__ == "__main__":
    try:
        program, options = received(tuple(sys.argv[1:]), os.environ)
        listener = StderrListener(factors_of(options))
    except KilterError as error:
        if sys.stderr is not None:  # else `print` would take stdout
            print(f"kilter run: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    strict.run(program, options, listener)
