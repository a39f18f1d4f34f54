"""Batched gradients, forward-mode derivatives and a budget: the peak is within it."""

from __future__ import annotations

import sys
import warnings

import r15e_vmap_over_backward
import r15f_forward_ad
from seen import show

EXPECT = {"exit codes": [0, 0], "within the budget": [True, True]}
JOBS = {"vmap": r15e_vmap_over_backward.main, "forward AD": r15f_forward_ad.main}


def main() -> None:
    import jobs

    codes = []
    within = []
    for name in JOBS:
        jobs.OUT = jobs.OUT.with_name(f"out of {name}")
        done = jobs.governed(__file__, "--memory-budget", "60%", job=name)
        codes.append(done.returncode)
        memory = jobs.report()["memory"]
        within.append(
            memory["peak_bytes"] is not None and memory["peak_bytes"] <= memory["budget_bytes"]
        )
    show(**{"exit codes": codes, "within the budget": within})


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    JOBS[sys.argv[1]]() if sys.argv[1:] else main()
