"""Batched gradients, forward-mode derivatives, a budget: the peak is within, or it is told why."""

import sys
import warnings

import r15e_vmap_over_backward
import r15f_forward_ad
from seen import show

EXPECT = {
    "exit codes": [0, 0],
    "data offloaded": [True, True],
    "within the budget": [True, "or it is told that tangents stay"],
}
JOBS = {"vmap": r15e_vmap_over_backward.main, "forward AD": r15f_forward_ad.main}


def main() -> None:
    import jobs

    codes = []
    offloaded = []
    within: list[object] = []
    for name in JOBS:
        jobs.OUT = jobs.OUT.with_name(f"out of {name}")
        done = jobs.governed(__file__, "--memory-budget", "60%", job=name)
        codes.append(done.returncode)
        report = jobs.report()
        memory = report["memory"]
        offloaded.append(memory["out_bytes"] > 0)
        if any(refusal["code"] == "forward_mode" for refusal in report["refused"]):
            within.append("or it is told that tangents stay")
        else:
            within.append(memory["within"])
    show(**{"exit codes": codes, "data offloaded": offloaded, "within the budget": within})


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    JOBS[sys.argv[1]]() if sys.argv[1:] else main()
