"""The figures of the main job on one GPU, read-only: run it as a whole, once.

    KILTER_READ_ONLY=1 python benchmarks/h200_main.py OUT_DIR

Overhead of three unmodified jobs (alternating runs), iteration time against the script's own
clock, and energy against the card's counter as an independent process reads it.
"""

import json
import os
import subprocess
import sys
import time
from bisect import bisect_left
from pathlib import Path

HERE = Path(__file__).parent
KILTER = (sys.executable, "-m", "kilter")
STEPS = {"gpt": 130, "resnet50": 220, "mobilenet": 320}
WATCH = """
import sys, time, pynvml
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
while True:
    e = pynvml.nvmlDeviceGetTotalEnergyConsumption(card)
    print(f"{time.monotonic():.6f} {e / 1e3:.3f}", flush=True)
    time.sleep(0.05)
"""


def main() -> int:
    if os.environ.get("KILTER_READ_ONLY") != "1":
        print("set KILTER_READ_ONLY=1: the card may not be ours to set", file=sys.stderr)
        return 2
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    result = {"label": "measured", "date": time.strftime("%Y-%m-%d"), "overhead": {}}
    doctor = subprocess.run([*KILTER, "doctor", "--json"], capture_output=True, text=True)
    result["doctor"] = json.loads(doctor.stdout) if doctor.stdout.startswith("{") else doctor.stderr
    for model, steps in STEPS.items():
        script = [str(HERE / "train_gpu.py"), "--model", model, "--steps", str(steps)]
        done = subprocess.run(
            [*KILTER, "bench", "overhead", "--json", "--repeats", "2", *script],
            capture_output=True,
            text=True,
        )
        print(model, done.stderr[-1500:], flush=True)
        if done.returncode == 0:
            row = result["overhead"][model] = json.loads(done.stdout)
            row.pop("runs_detail", None)
            print({k: v for k, v in row.items() if k not in ("runs", "command")}, flush=True)
        (out / "main.json").write_text(json.dumps(result, indent=1))
    for model, steps in (("gpt", 220), ("resnet50", 450)):
        result[f"energy_{model}"] = energy(model, steps, out)
        print(model, result[f"energy_{model}"], flush=True)
        (out / "main.json").write_text(json.dumps(result, indent=1))
    return 0


def energy(model: str, steps: int, out: Path) -> dict:
    """One watched run; its blocks' energy against an independent reading of the counter."""
    run = out / f"run-{model}"
    script = [str(HERE / "train_gpu.py"), "--model", model, "--steps", str(steps)]
    with open(out / "counter.txt", "w") as file:
        watch = subprocess.Popen([sys.executable, "-c", WATCH], stdout=file)
    begin = time.monotonic()
    done = subprocess.run(
        [*KILTER, "run", "--dry-run", "--out", str(run), *script],
        capture_output=True,
        text=True,
    )
    watch.terminate()
    print(done.stdout, done.stderr[-3000:], flush=True)
    lines = (out / "counter.txt").read_text().splitlines()
    points = [tuple(map(float, line.split())) for line in lines if " " in line]
    times = [t for t, _ in points]

    def counter(t: float) -> float:
        i = min(max(bisect_left(times, t), 1), len(points) - 1)
        (t0, e0), (t1, e1) = points[i - 1], points[i]
        return e0 + (e1 - e0) * (t - t0) / (t1 - t0)

    events = [json.loads(line) for line in (run / "events-rank0.jsonl").read_text().splitlines()]
    blocks = [e for e in events if e["event"] == "block" and e["energy_j"]]
    first, last = blocks[0]["device_begin_s"], blocks[-1]["device_end_s"]
    ours = sum(b["energy_j"] * b["iterations"] for b in blocks)
    theirs = sum(counter(b["device_end_s"]) - counter(b["device_begin_s"]) for b in blocks)
    script_ms = float(done.stdout.split("iteration")[1].split()[0])
    return {
        "exit": done.returncode,
        "blocks": len(blocks),
        "window_s": last - first,
        "wall_s": time.monotonic() - begin,
        "energy_j": ours,
        "counter_j": theirs,
        "difference": ours / theirs - 1,
        "script_iteration_s": script_ms / 1e3,
        "kilter_iteration_s": sorted(b["iteration_s"] for b in blocks)[len(blocks) // 2],
        "trace_operations": len(json.loads((run / "trace.json").read_text())["operations"])
        if (run / "trace.json").exists()
        else None,
        "stderr": done.stderr[-2000:],
    }


if __name__ == "__main__":
    sys.exit(main())
