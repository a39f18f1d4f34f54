"""`kilter sections` beside HolisticTraceAnalysis (HTA), which reads the same traces.

    pip install HolisticTraceAnalysis
    python benchmarks/sections_oracle.py TRACE...          all ranks of one run

Compared are computation, communication that computation covers, and what is neither, over the whole
of each trace. HTA counts copies as no computation, together with exposed communication. It rounds
times to whole microseconds unless HTA_DISABLE_NS_ROUNDING is set, which this script does. Exit code
1 if any differs by more than 0.5 % of the trace.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MOST_APART = 0.005


def main(paths: list[str]) -> int:
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    from hta.trace_analysis import TraceAnalysis

    command = [sys.executable, "-m", "kilter", "sections", *paths, "--json"]
    ours = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["ranks"]
    ours.sort(key=lambda rank: paths.index(rank["source"]))
    files = {number: Path(path).name for number, path in enumerate(paths)}
    hta = TraceAnalysis(trace_files=files, trace_dir=str(Path(paths[0]).parent))
    times = hta.get_temporal_breakdown(visualize=False).set_index("rank")
    overlap = hta.get_comm_comp_overlap(visualize=False).set_index("rank")
    worst = 0.0
    for number, rank in enumerate(ours):
        n, whole_s = rank["iterations"], times["kernel_time(us)"][number] * 1e-6
        theirs = {
            "compute_s": times["compute_time(us)"][number] * 1e-6,
            "idle_s": times["idle_time(us)"][number] * 1e-6,
            "exposed_s + copy_s": times["non_compute_time(us)"][number] * 1e-6,
            "overlapped_s": overlap["comp_comm_overlap_pctg"][number] / 100 * n * rank["comm_s"],
        }
        for name, value_s in theirs.items():
            own_s = n * sum(rank[part] for part in name.split(" + "))
            apart = abs(own_s - value_s) / whole_s
            worst = max(worst, apart)
            print(f"{files[number]}: {name} {own_s * 1e3:.3f} ms, HTA {value_s * 1e3:.3f} ms")
    print(f"At most {worst:.5%} of the trace apart.")
    return 0 if worst <= MOST_APART else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
