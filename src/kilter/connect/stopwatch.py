"""`python -m kilter.connect.stopwatch FILE COMMAND...`: a program with a stopwatch.

For `kilter bench overhead`: COMMAND is a script, or `-m kilter run ... SCRIPT`; the same stopwatch
runs in both arms, so that their difference is what kilter costs. FILE receives one line per
optimizer step: the host's monotonic seconds.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from kilter.connect.script import find_program, run_program
from kilter.observe.imports import after_import


def main(file: str, command: list[str]) -> None:
    """Run the command; the times are written also when it raises or exits."""
    times: list[float] = []

    def watch() -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def stepped(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            times.append(time.monotonic())

        register_optimizer_step_post_hook(stepped)

    after_import("torch", watch).install()
    try:
        run_program(find_program(command))
    finally:
        with open(file, "w", encoding="ascii") as out:
            out.writelines(f"{t:.9f}\n" for t in times)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
