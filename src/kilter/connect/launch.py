"""Starts a program under a session: here, or in the workers of a torchrun of our own."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import NoReturn

import msgspec

from kilter.act.session import Options, Session
from kilter.connect.script import Program, find_program, own_traceback, run_program
from kilter.core.errors import UsageError
from kilter.core.ranks import ranks

WORKER_OPTIONS = "KILTER_RUN"
"""Environment variable that hands `Options` as JSON to the workers of our torchrun."""


def run_governed(program: Program, options: Options) -> None:
    """Run a program in this process, inside a session.

    The session ends as soon as the main code does, before the interpreter waits for threads that
    are still alive and before `atexit` handlers run: nothing of ours is at work after that.
    """
    with Session(options, ranks(os.environ)):
        run_program(program)


def run_without_kilter(command: Sequence[str]) -> NoReturn:
    """Become `python COMMAND`, in the same process and with the same interpreter flags."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    os.execv(sys.executable, [sys.executable, *flags, *command])


def add_torchrun_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the installed torchrun: its own actions, from its own parser."""
    try:
        from torch.distributed.run import get_args_parser
    except ImportError as error:
        raise UsageError(f"torchrun's options need torch ({error}): pip install torch") from error
    group = parser.add_argument_group("options of torchrun")
    for action in get_args_parser()._actions:
        if action.option_strings and action.dest not in ("help", "module"):
            group._add_action(action)


def run_torchrun(
    arguments: argparse.Namespace, command: Sequence[str], options: Options | None
) -> None:
    """Start torchrun's elastic agent in this process; every worker runs the command.

    `arguments` come from a parser with `add_torchrun_options`; without `options` the workers run
    without kilter. Raises what torchrun raises.
    """
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.run import run

    if options is not None:
        os.environ[WORKER_OPTIONS] = _encode(options)
        # In one word with its -m, so that torchrun takes SCRIPT for the name of what failed.
        command = ("-mkilter.connect.entry", *command)
    arguments.module = arguments.run_path = False
    arguments.training_script, *arguments.training_script_args = command
    with own_traceback():
        record(run)(arguments)


def worker(command: Sequence[str], environ: MutableMapping[str, str]) -> tuple[Program, Options]:
    """What a worker of our torchrun is to run: `command`, under the options in the environment.

    The command stays on the command line, where `ps` and `nvidia-smi` show whose process it is.
    The variable is taken out of the environment: the program does not see it.
    """
    encoded = environ.pop(WORKER_OPTIONS, None)
    if encoded is None or not command:
        raise UsageError("a part of `kilter run`; try: torchrun ... -m kilter run SCRIPT")
    return find_program(command), replace(_decode(encoded), command=tuple(command))


def _encode(options: Options) -> str:
    return msgspec.json.encode(replace(options, command=()), enc_hook=str).decode()


def _decode(text: str) -> Options:
    return msgspec.json.decode(text, type=Options, dec_hook=lambda kind, value: kind(value))
