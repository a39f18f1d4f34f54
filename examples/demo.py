"""`make demo`: unmodified training scripts under a simulated V100, and what came of it.

Each script trains for real, on this CPU. Each of its iterations drives one iteration of a simulated
card that runs the traced operations, so that clocks are probed, judged and held as on a real one.
The last one runs within 60 % of its memory, on a stand-in that counts what autograd keeps.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
KILTER = (sys.executable, "-m", "kilter")
CLOCKS = ["--device", "sim:v100", "--max-slowdown", "2%", "--rehearse", "60s"]
MEMORY = ["--device", "null", "--memory-budget", "60%"]
DEMOS = {
    "convnet": (CLOCKS, ["train_convnet.py", "--steps", "120"]),
    "gpt": (CLOCKS, ["train_gpt.py", "--steps", "80"]),
    "memory": (MEMORY, ["train_gpt.py", "--steps", "30", "--every", "10"]),
}


def main() -> int:
    for name, (options, (script, *arguments)) in DEMOS.items():
        out = HERE.parent / "runs" / f"demo-{name}-{os.getpid()}"
        command = ["kilter", "run", *options]
        print(f"\n$ {' '.join([*command, script, *arguments])}", flush=True)
        result = subprocess.run(
            [*KILTER, *command[1:], "--out", str(out), str(HERE / script), *arguments],
            check=False,
        )
        if result.returncode:
            return result.returncode
        report = json.loads((out / "report.json").read_bytes())
        label = (report["memory"] or report)["label"]
        print(f"report: {out / 'report.html'}  (label: {label})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
