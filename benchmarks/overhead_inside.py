"""What a session costs, measured inside one process, where two stretches of a job are alike.

    KILTER_READ_ONLY=1 python benchmarks/overhead_inside.py [MODEL ...]

Processes of the same job differ by several percent (autotuned kernels, where memory lies, what
else the host does), more than the 0.5 % that is to be shown. So here a dry-run session runs in a
training loop, and its two threads are paused and let go in turn, in short stretches and random
order: the ratio of neighbours, with its 95 % interval, is what they cost. The hook at the border of
an iteration cannot be paused; its time is measured and added. What the profiler leaves behind shows
in stretches before the session against stretches of the same process after its window, all paused;
that comparison is as good as the host is steady. Needs a GPU.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time

WARM = 60
SETTLE = 40
"""Iterations of a session before its steady state; the window is over by 20."""
WINDOW = slice(9, 29)
"""The twenty iterations from the one before the window opens."""
STRETCH = 6
PAIRS = {"gpt": 50, "resnet50": 100, "mobilenet": 140}


def measure(model_name: str) -> dict:
    import torch
    from gpt import train_step
    from train_gpu import job

    import kilter

    torch.manual_seed(0)
    model, inputs, targets = job(model_name, None)
    model = model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def iterate(count: int) -> list[float]:
        """Times of iterations, on the host's clock, each synchronised."""
        ends = [time.perf_counter()]
        for _ in range(count):
            train_step(model, optimizer, inputs, targets)
            torch.cuda.synchronize()
            ends.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(ends)]

    iterate(WARM)
    before = iterate(WARM)
    with (
        tempfile.TemporaryDirectory() as out,
        kilter.govern(max_slowdown=0.02, dry_run=True, out=out) as session,
    ):
        inside = iterate(SETTLE)
        pause = Pause(session)
        ratios = []
        paused: list[float] = []
        hook_s, iteration_ends = session.iterations.cost_s, session.iterations.index
        for _ in range(PAIRS[model_name]):
            times = {}
            for on in random.sample((True, False), 2):
                pause.on = not on
                times[on] = iterate(STRETCH)
            ratios.append(statistics.fmean(times[True]) / statistics.fmean(times[False]))
            paused += times[False]
        hook_s = (session.iterations.cost_s - hook_s) / (session.iterations.index - iteration_ends)
        pause.on = False
        window = session._live._run.trace._window
        costs, state = dict(window.costs_s), window.state.value
    plain = statistics.median(before)
    logs = [math.log(r) for r in ratios]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    trimmed = sorted(logs)[len(logs) // 10 : -(len(logs) // 10)]
    return {
        "model": model_name,
        "iteration_s": statistics.fmean(paused),
        "threads": mean,
        "threads_interval": [mean - 1.98 * error, mean + 1.98 * error],
        "threads_trimmed": statistics.fmean(trimmed),
        "hook": hook_s / statistics.fmean(paused),
        "left_behind": statistics.median(paused) / plain - 1,
        "window": sum(inside[WINDOW]) / 20 / plain - 1,
        "first_iteration_s": inside[0] - plain,
        "window_state": state,
        "window_costs_s": costs,
    }


class Pause:
    """Holds the work of a session's threads; they still wake up."""

    def __init__(self, session) -> None:
        self.on = False
        live = session._live
        sampler = live._run.sampler
        pulse, poll = live._tick, sampler.poll
        live._tick = lambda: None if self.on else pulse()
        sampler.poll = lambda: sampler.record.latest if self.on else poll()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("models", nargs="*", default=list(PAIRS))
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one)))
        return 0
    for name in args.models:
        done = subprocess.run(
            [sys.executable, __file__, "--one", name], capture_output=True, text=True, check=False
        )
        print(done.stdout.strip() or done.stderr[-2000:], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
