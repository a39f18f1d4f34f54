"""`python -m kilter.app.share_worker SCRIPT ARGS...`: one rank of `kilter share run`."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kilter.connect.script import find_program, run_program
from kilter.core.errors import KilterError, UsageError
from kilter.core.ranks import ranks
from kilter.observe.imports import after_import
from kilter.session.fence import Fence

if TYPE_CHECKING:
    from kilter.sharing.elastic.job import ElasticJob

_VARIABLE = "KILTER_SHARE"


class ShareOptions(msgspec.Struct, frozen=True):
    """What the launcher tells every rank."""

    endpoint: str
    name: str
    gpus: tuple[int, ...]
    idle_ranks: bool = False
    total_steps: int | None = None
    alone_step_s: float | None = None
    max_slowdown: float | None = None
    probe: bool = False
    min_samples: int | None = None
    ratios: tuple[int, ...] | None = None


def worker_command(command: tuple[str, ...]) -> tuple[str, ...]:
    """What follows `python` in a worker that is to run `command`."""
    return ("-mkilter.app.share_worker", *command)


def worker_environment(options: ShareOptions) -> dict[str, str]:
    """What the environment of a worker has to have."""
    return {_VARIABLE: msgspec.json.encode(options).decode()}


def received(environ: MutableMapping[str, str]) -> ShareOptions:
    """The options. The variable is taken away: the script is not told."""
    encoded = environ.pop(_VARIABLE, None)
    if encoded is None:
        raise UsageError("a part of `kilter share run`; try: kilter share run SCRIPT")
    return msgspec.json.decode(encoded, type=ShareOptions)


def say(text: str) -> None:
    """One line on stderr, from rank 0."""
    if ranks(os.environ).rank == 0 and sys.stderr is not None:
        print(f"kilter share: {text}", file=sys.stderr, flush=True)


def _find(options: ShareOptions) -> None:
    """Once torch is there: wait for the job in the script."""
    from kilter.sharing.elastic.job import ElasticJob
    from kilter.sharing.elastic.scripts import find_in_script
    from kilter.sharing.link import DaemonLink
    from kilter.sharing.messages import Identity

    def attached(job: ElasticJob) -> None:
        if job.share is not None and job.facts is not None and job.share.rank == 0:
            identity = Identity(
                options.name,
                options.gpus,
                options.alone_step_s,
                options.max_slowdown,
                options.ratios,
                options.probe,
            )
            endpoint = Path(options.endpoint)
            DaemonLink(endpoint, job.share, job.facts, identity, job.guard, say).start()

    find_in_script(
        ElasticJob(
            guard=Fence,
            may_idle=options.idle_ranks,
            release=options.idle_ranks,
            min_samples=options.min_samples,
            total_steps=options.total_steps,
            attached=attached,
            say=say,
        )
    )


def main() -> None:
    """Run the script in this process."""
    try:
        options = received(os.environ)
        program = find_program(tuple(sys.argv[1:]))
    except KilterError as error:
        print(f"kilter share: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    after_import("torch", lambda: _find(options)).install()
    run_program(program)


if __name__ == "__main__":
    # By its name: the module `__main__` is emptied for the script.
    from kilter.app import share_worker

    share_worker.main()
