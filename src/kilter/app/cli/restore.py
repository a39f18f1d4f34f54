"""`kilter restore`: put back whatever a dead run has left on the GPUs of this machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from kilter.app.cli.output import print_json
from kilter.core.label import Label
from kilter.device.find import visible
from kilter.device.nvidia import survey
from kilter.lease.journal import RestoreOutcome, journals, restore_all, state_directory
from kilter.lease.machine import machine_directory
from kilter.lease.others import restore_of_user, user_directories

HELP = """\
Put back whatever a dead run left: the clocks and the power limit that it had found.

Normally there is nothing to do: a small watcher process puts a GPU back as soon as its run dies.
This is for the rest: the watcher was killed, too, or the GPU did not answer. A GPU whose run is
alive is left alone, and so is a value that somebody else has changed since. It may be repeated.

A frozen watcher, or a process that a dead run has forked, keeps a GPU locked. Then nothing is put
back, and the exit code is 1, unless --force says so: which acts once the run's deadline has passed.
"""
EPILOG = """\
exit code: 0 if nothing of a dead run is left, 1 if something is (and why)

examples:
  kilter restore                 the GPUs that this process may use (CUDA_VISIBLE_DEVICES)
  kilter restore --all           all GPUs of this machine
  kilter restore --all --json    in a Slurm epilog: one line to log

The journals are in KILTER_STATE_DIR, or /run/kilter for root, or a directory of the user's own:
run it as the user whose run has died. As root, --all looks into the directories of other users as
well. Root believes no other user's journal: such a GPU is put to the baseline that the operator has
saved (kilter baseline), and without one it is named, and the exit code is 1.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all",
        action="store_true",
        help="all GPUs of this machine, not only the visible ones; live runs are left alone still",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="also where a dead or frozen run's lock is still held, once its deadline has passed",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    directory, machine = state_directory(os.environ), machine_directory(os.environ)
    left = {entry.uuid for entry in journals(directory)}
    chosen = frozenset(left if args.all else left & _visible(left, os.environ))
    outcomes = list(restore_all(directory, machine=machine, uuids=chosen, force=args.force))
    if args.all and os.geteuid() == 0:
        for other in user_directories():
            outcomes += restore_of_user(
                other, machine=machine, environ=os.environ, force=args.force
            )
    others = sorted(left - chosen)
    if args.json:
        found = {"state_directory": str(directory), "gpus": outcomes, "not_visible": others}
        print_json("kilter.restore/1", Label.MEASURED, found)
    else:
        print(_as_text(outcomes, others))
    return int(any(outcome.state == "failed" for outcome in outcomes))


def _visible(left: set[str], environ: Mapping[str, str]) -> set[str]:
    """UUIDs of the GPUs this process may use. The driver is asked only if there is a journal."""
    return {gpu.uuid for gpu in visible(survey().gpus, environ)} if left else set()


def _as_text(outcomes: list[RestoreOutcome], others: list[str]) -> str:
    lines = [f"{outcome.uuid}: {outcome.state}: {outcome.reason}" for outcome in outcomes]
    lines += [f"{uuid}: not visible to this process; to include it: --all" for uuid in others]
    return "\n".join(lines) or "nothing to restore"
