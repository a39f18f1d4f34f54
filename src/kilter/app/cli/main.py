"""The command line: finds the verb, runs it, turns our errors into one line and an exit code.

A verb is one file beside this one with `HELP`, `EPILOG`, `add_arguments(parser)` and
`run(args)`, which returns an exit code. A verb that runs the user's own code returns a function
instead; it is called outside of our error handling. `parse(parser, arguments)` is optional.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NoReturn

import kilter
from kilter.core.errors import KilterError
from kilter.core.ranks import ranks

VERBS: dict[str, str] = {
    "run": "run a script, unmodified: less energy, less GPU memory, or both",
    "watch": "govern a job that kilter did not start, by telemetry alone",
    "report": "what a run found, did and restored",
    "top": "a run while it is under way, from the files in its folder",
    "size": "what memory a training iteration takes, from shapes",
    "sections": "communication sections of Kineto traces, all ranks",
    "plan": "plan clocks or memory from an iteration trace",
    "rehearse": "try a plan on a simulated device",
    "share": "fair shares of one machine for several training jobs",
    "learn": "fit the predictor of clocks to tables and earlier runs, and show its errors",
    "doctor": "what is there, what is allowed, what to do about it",
    "restore": "put back whatever a dead run left",
    "baseline": "what each GPU should stand at when nobody governs it",
    "daemon": "set clocks for users who are not root, by the operator's policy",
    "bench": "every table of the README, re-run",
    "completion": "completion of this command line for bash, zsh or fish",
}
"""It maps a verb to its line in `kilter --help`. The module is imported only when the verb is
used."""


class _Parser(argparse.ArgumentParser):
    """Abbreviated options are off everywhere: they would eat the script's own. A value like `-5%`
    is a value, which is refused by what reads it, and not an option."""

    def __init__(self, **kwargs: object) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**kwargs, allow_abbrev=False)  # type: ignore[arg-type]
        self._negative_number_matcher = re.compile(r"-\.?\d.*")

    def error(self, message: str) -> NoReturn:
        """With the option that was probably meant."""
        if (wrong := re.search(r"(?:unrecognized arguments: |^)(--[\w-]+)", message)) is not None:
            options = (name for action in self._actions for name in action.option_strings)
            message += did_you_mean(wrong[1], options)
        super().error(message)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean run?`, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near and near[0] != word else ""


def _overview() -> _Parser:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {line}" for name, line in VERBS.items())
    parser = _Parser(
        prog="kilter",
        usage="kilter [--version] VERB ...",
        description="Makes PyTorch jobs cheaper without a change to their source: less energy "
        "under a proven\nslowdown contract, training within a GPU memory budget, fair shares of a "
        "busy machine and,\nfrom Python, parallel branches (kilter.parallel) and batches in "
        "pieces (kilter.divided).",
        epilog=f"verbs:\n{verbs}\n\nexamples:\n"
        "  kilter run --max-slowdown 2% train.py --epochs 3     less energy\n"
        "  kilter run --memory-budget 24GiB train.py            less GPU memory\n"
        "  kilter run --device sim:v100 train.py                without a GPU: rehearsed on one\n"
        "  kilter size train.py:make --memory-budget 24GiB      will it fit? asked beforehand\n"
        "\n`kilter VERB --help` shows the options and examples of a verb.",
    )
    parser.add_argument("--version", action="version", version=f"kilter {kilter.__version__}")
    return parser


def parser_of(verb: str) -> tuple[_Parser, ModuleType]:
    """The parser of a verb, and the verb's module."""
    module = importlib.import_module(f"kilter.app.cli.{verb}")
    parser = _Parser(prog=f"kilter {verb}", description=module.HELP, epilog=module.EPILOG)
    module.add_arguments(parser)
    return parser, module


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit code: the script's own, 2 for wrong usage, 1 for an error, as
    of a shell 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in VERBS:
        _without_verb(arguments)
    verb = arguments[0]
    _warn_of_variables()
    parser, module = parser_of(verb)
    parse = getattr(module, "parse", _Parser.parse_args)
    try:
        outcome = module.run(parse(parser, arguments[1:]))
        if not callable(outcome) and sys.stdout is not None:
            sys.stdout.flush()
    except KilterError as error:
        if sys.stderr is not None:  # else `print` would take stdout
            print(f"kilter {verb}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if sys.stderr is not None:
            print(f"\nkilter {verb}: ended by Ctrl-C", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or error.filename:
            raise
        print(f"kilter {verb}: standard output: {error.strerror}", file=sys.stderr)
        with contextlib.suppress(OSError):
            sys.stdout.close()  # else Python writes again at its end, and fails with its own words
        return 1
    # The user's own code: not even a BrokenPipeError of it is ours to report.
    return int((outcome() if callable(outcome) else outcome) or 0)


def _without_verb(arguments: Sequence[str]) -> NoReturn:
    parser = _overview()
    if not arguments:
        parser.print_help(sys.stderr)
        sys.exit(2)
    word = arguments[0]
    if word.startswith("-"):
        parser.parse_args(arguments)
    elif word.endswith(".py"):
        parser.error(f"{word!r} is not a verb; did you mean: kilter run {word}?")
    parser.error(f"{word!r} is not a verb{did_you_mean(word, VERBS)}")


def _warn_of_variables() -> None:
    if os.environ.get("KILTER") == "0" or not any(
        name.startswith("KILTER_") for name in os.environ
    ):
        return
    from kilter.app.config import unknown_variables

    if ranks(os.environ).rank == 0:
        for sentence in unknown_variables(os.environ):
            print(f"kilter: warning: {sentence}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
