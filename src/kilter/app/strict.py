"""`kilter run --strict`: a memory budget that was not kept is a failure of the run."""

from __future__ import annotations

import os
import sys

from kilter.app.listener import StderrListener
from kilter.connect.launch import run_governed
from kilter.connect.script import Program
from kilter.core.ranks import ranks
from kilter.session.options import Options


def run(program: Program, options: Options, listener: StderrListener) -> None:
    """Run a program in a session. With `strict`, where it would end with exit code 0, rank 0 ends
    with 1 if it is not known that the budget was kept."""
    try:
        run_governed(program, options, listener)
    except SystemExit as end:
        if not options.strict or end.code not in (None, 0):
            raise
    if options.strict and listener.why_not_kept and ranks(os.environ).rank == 0:
        listener.not_kept(options)
        sys.exit(1)
