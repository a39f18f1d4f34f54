"""Two training jobs share two CPU cores that stand for GPUs; a third one joins and leaves.

Each job begins with all of its batch on one core or skewed; the daemon evens the slow-downs out.
Ends with the page of slow-downs and data ratios over time.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
KILTER = (sys.executable, "-m", "kilter", "share")
JOBS = {
    "wide": (0.0, "9,1", ["--width", "768", "--steps", "130"]),
    "narrow": (0.0, "9,1", ["--width", "384", "--steps", "250"]),
    "guest": (5.0, "5,5", ["--width", "512", "--steps", "64"]),
}
"""Name -> seconds after the first, data ratio to begin with, arguments."""


def main() -> int:
    out = HERE.parent / "runs" / f"share-{os.getpid()}"
    out.mkdir(parents=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core stands for one GPU
    endpoint = ["--endpoint", str(out / "endpoint.json")]
    options = ["--gpus", "0-1", "--policy", "maxmin", "--period", "2s", "--out", str(out)]
    print(f"$ kilter share serve {' '.join(options[:-2])}", flush=True)
    daemon = subprocess.Popen([*KILTER, "serve", *endpoint, *options])
    while not (out / "endpoint.json").exists():
        if daemon.poll() is not None:
            return 1
        time.sleep(0.1)
    begun = time.monotonic()
    jobs = []
    for name, (delay, ratios, arguments) in JOBS.items():
        time.sleep(max(0.0, begun + delay - time.monotonic()))
        command = ["run", "--name", name, "--ratios", ratios, "share_job.py", *arguments]
        print(f"$ kilter share {' '.join(command)}", flush=True)
        command[command.index("share_job.py")] = str(HERE / "share_job.py")
        jobs.append(subprocess.Popen([*KILTER, command[0], *endpoint, *command[1:]]))
    codes = [job.wait() for job in jobs]
    daemon.send_signal(signal.SIGINT)
    daemon.wait()
    print(f"page: {out / 'share.html'}  (label: measured)")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
