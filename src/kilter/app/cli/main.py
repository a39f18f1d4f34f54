"""The command line: finds the verb, runs it, turns our errors into one line and an exit code.

A verb is one file beside this one with `HELP`, `EPILOG`, `add_arguments(parser)` and
`run(args)`, which returns an exit code. A verb that runs the user's own code returns a function
instead; it is called outside of our error handling. `parse(parser, arguments)` is optional.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import kilter
from kilter.core.errors import KilterError

VERBS: dict[str, str] = {
    "run": "run a script, unmodified, under a goal",
    "report": "what a run found, did and restored",
    "size": "what memory a training iteration takes, from shapes",
    "plan": "plan clocks or memory from an iteration trace",
    "rehearse": "try a plan on a simulated device",
    "doctor": "what is there, what is allowed, what to do about it",
    "restore": "put back whatever a dead run left",
    "bench": "every table of the README, re-run",
}
"""Verb -> its line in `kilter --help`. The module is imported only when the verb is used."""


class _Parser(argparse.ArgumentParser):
    """Abbreviated options are off everywhere: they would eat the script's own."""

    def __init__(self, **kwargs: object) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**kwargs, allow_abbrev=False)  # type: ignore[arg-type]


def _overview() -> _Parser:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {line}" for name, line in VERBS.items())
    parser = _Parser(
        prog="kilter",
        usage="kilter [--version] VERB ...",
        description="Less energy for a PyTorch job, under a proven slowdown contract.",
        epilog=f"verbs:\n{verbs}\n\nexample:\n  kilter run --max-slowdown 2% train.py --epochs 3\n"
        "\n`kilter VERB --help` shows the options and examples of a verb.",
    )
    parser.add_argument("--version", action="version", version=f"kilter {kilter.__version__}")
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit code: the script's own, 2 for wrong usage, 1 for an error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in VERBS:
        parser = _overview()
        if not arguments:
            parser.print_help(sys.stderr)
            return 2
        parser.parse_args(arguments)
    verb = arguments[0]
    module = importlib.import_module(f"kilter.app.cli.{verb}")
    parser = _Parser(prog=f"kilter {verb}", description=module.HELP, epilog=module.EPILOG)
    module.add_arguments(parser)
    parse = getattr(module, "parse", _Parser.parse_args)
    try:
        outcome = module.run(parse(parser, arguments[1:]))
    except KilterError as error:
        if sys.stderr is not None:  # else `print` would take stdout
            print(f"kilter {verb}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    # The user's own code: not even a BrokenPipeError of it is ours to report.
    return int((outcome() if callable(outcome) else outcome) or 0)


if __name__ == "__main__":
    sys.exit(main())
