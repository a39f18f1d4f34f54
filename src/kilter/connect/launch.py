"""Ways to start a program: in a session, without us, or in the workers of our own torchrun."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from kilter.connect.script import Program, own_traceback, run_program
from kilter.core.errors import UsageError
from kilter.core.ranks import ranks
from kilter.session.children import SpawnedChildren
from kilter.session.fence import unheard
from kilter.session.lifecycle import Session
from kilter.session.listener import RunListener
from kilter.session.options import Options


def run_governed(program: Program, options: Options, listener: RunListener) -> None:
    """Run a program in this process, inside a session.

    The session ends as soon as the main code does, before the interpreter waits for threads that
    are still alive and before `atexit` handlers run: nothing of ours is at work after that.
    """
    with own_traceback():
        place = ranks(os.environ)
        # Those of a rank are the workers of its data loader.
        children = SpawnedChildren(options) if place.world_size == 1 else None
        session = Session(options, place, listener, children=children)
        session.__enter__()
        try:
            run_program(program)
        finally:
            unheard(session.__exit__, *sys.exc_info())


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


def check_numbers(arguments: argparse.Namespace) -> None:
    """`UsageError` for numbers of nodes or processes that are none. Torchrun says it with a
    traceback."""
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    for option, value, read in (
        ("--nnodes", arguments.nnodes, parse_min_max_nnodes),
        ("--nproc-per-node", arguments.nproc_per_node, determine_local_world_size),
    ):
        try:
            read(value)
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"{option} {value}: {error}") from error


def run_torchrun(
    arguments: argparse.Namespace, command: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Be torchrun's elastic agent, whose workers run `python -u COMMAND`.

    `arguments` come from a parser with `add_torchrun_options`. Raises what torchrun raises.
    """
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.run import run

    os.environ.update(environment)  # the agent hands its own environment down
    arguments.module = arguments.run_path = False
    arguments.training_script, *arguments.training_script_args = command
    with own_traceback():
        record(run)(arguments)


def run_shared(
    arguments: argparse.Namespace, command: Sequence[str], environment: Mapping[str, str]
) -> int:
    """The same for the ranks of a shared job. Where a signal ends it, it says so in one line, where
    torchrun raises its `SignalException`, and has the exit code of a shell."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    try:
        run_torchrun(arguments, command, environment)
    except SignalException as error:
        print(f"kilter share run: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + int(error.sigval)
    return 0
