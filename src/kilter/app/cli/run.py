"""`kilter run`: a script, unmodified, under a goal."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from kilter.app import strict
from kilter.app.config import OPTIONS, factors_of, here, resolve
from kilter.app.listener import StderrListener
from kilter.app.worker import worker_command, worker_environment
from kilter.connect.launch import (
    add_torchrun_options,
    check_numbers,
    run_torchrun,
    run_without_kilter,
)
from kilter.connect.script import find_program
from kilter.core.errors import UsageError
from kilter.core.ranks import ranks
from kilter.session.run_directory import check_out, make_out

HELP = """\
Run a Python script, unmodified, and make it cheaper: less energy under a proven slowdown contract
(--max-slowdown; the default, at 2%), training within a GPU memory budget by offload, recomputation
and smaller pieces of the batch (--memory-budget), or both. Without a GPU, --device sim:NAME shows
what a simulated one would save.
"""

EPILOG = """\
Everything after SCRIPT belongs to the script. Its standard output, signals and (but for --strict)
exit code are its own; kilter writes a line at the start, a summary at the end, and in between what
you would not want to wait for, to stderr, from rank 0.

torchrun's options are accepted before SCRIPT and start its workers; under torchrun or srun, ranks
come from the environment. Every option is also KILTER_MAX_SLOWDOWN, KILTER_DEVICE, ... in the
environment, and max-slowdown, device, ... in kilter.toml or [tool.kilter] of pyproject.toml.

environment:
  KILTER=0             switch everything off: run the script as python would
  KILTER_READ_ONLY=1   never change a setting of a GPU, whatever else is asked for

examples:
  kilter run train.py --epochs 3
  kilter run --max-slowdown 1% -m package.train --epochs 3
  kilter run --memory-budget 75% train.py
  kilter run --device sim:v100 train.py
  kilter run --standalone --nproc-per-node 8 train.py
  srun kilter run train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "kilter run [options] SCRIPT|-m MODULE [ARGS...]"
    for option in OPTIONS.values():
        option.add_to(parser)
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="read options from this file instead of the nearest kilter.toml or pyproject.toml",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is the name of a module"
    )
    parser.add_argument(
        "command",
        nargs=argparse.PARSER,
        metavar="SCRIPT",
        help="file, directory, zip file, or - for standard input",
    )
    parser.set_defaults(torchrun=False)


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Ask torchrun's parser too, but import torch only if our own leaves an option over."""
    _need_values(parser, arguments)
    namespace, unknown = parser.parse_known_args(arguments)
    if not unknown:
        return namespace
    try:
        add_torchrun_options(parser)
    except UsageError as error:
        parser.error(f"{unknown[0]} is not an option of kilter run, and {error}")
    parser.set_defaults(torchrun=True)
    return parser.parse_args(arguments)


def _need_values(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """`kilter run --memory-budget train.py` has forgotten the value, not the script."""
    examples = {f"--{name}": o.metavar for name, o in OPTIONS.items() if o.metavar is not None}
    for option, value in pairwise(arguments):
        if not option.startswith("-"):
            return  # the script, or what torchrun's options take
        if option in examples and option != "--out" and value.endswith(".py"):
            example = examples[option].partition("|")[0]
            parser.error(f"{option} lacks its value; did you mean: {option} {example} {value}?")


def run(arguments: argparse.Namespace) -> Callable[[], None]:
    command = tuple(arguments.command)
    if command[0] == "--":  # `kilter run -- SCRIPT`; later versions of argparse drop it
        command = command[1:]
    if arguments.module:
        command = ("-m", *command)
    if os.environ.get("KILTER") == "0":
        if arguments.torchrun:
            return functools.partial(run_torchrun, arguments, command, {})
        return functools.partial(run_without_kilter, command)
    flags = {name: getattr(arguments, name.replace("-", "_")) for name in OPTIONS}
    options = resolve(flags, os.environ, here(), command, arguments.config)
    check_out(options.out, ranks(os.environ))
    if not arguments.torchrun:
        program = find_program(command)
        if options.out is not None:
            make_out(options.out)
        listener = StderrListener(factors_of(options))
        return functools.partial(strict.run, program, options, listener)
    if arguments.no_python:
        raise UsageError("--no-python starts a program that is not Python: there is no way in")
    if command[0] == "-":
        raise UsageError("a script from standard input cannot be handed to several workers")
    check_numbers(arguments)
    find_program(command)  # so that a missing file is said once, and not by every worker
    return functools.partial(
        run_torchrun, arguments, worker_command(command), worker_environment(options)
    )
