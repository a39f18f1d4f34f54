"""`python -m kilter.connect.stopwatch FILE OPTIONS SCRIPT ARGS...`: a script with a stopwatch.

For `kilter bench overhead`: the same stopwatch runs in both arms, with and without a session, so
that their difference is what the session costs. OPTIONS is the JSON of `kilter run`'s options, or
`-` for no session. FILE receives one line per optimizer step: the host's monotonic seconds.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from kilter.connect.launch import WORKER_OPTIONS, run_governed, worker
from kilter.connect.script import find_program, run_program
from kilter.observe.imports import after_import


def main(file: str, options: str, command: list[str]) -> None:
    """Run the command; write the times also when it raises."""
    times: list[float] = []

    def watch() -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def stepped(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            times.append(time.monotonic())

        register_optimizer_step_post_hook(stepped)

    after_import("torch", watch).install()
    try:
        if options == "-":
            run_program(find_program(command))
        else:
            os.environ[WORKER_OPTIONS] = options
            run_governed(*worker(command, os.environ))
    finally:
        with open(file, "w", encoding="ascii") as out:
            out.writelines(f"{t:.9f}\n" for t in times)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
