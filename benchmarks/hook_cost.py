"""What one iteration mark costs on this machine: `python benchmarks/hook_cost.py [--iterations N]`.

Measured side by side: the same optimizer steps with and without the hook, block by block in
random order, and the difference of the medians of all steps of each arm with a 95 % interval from
resampling blocks. The step is made as small as can be (one parameter), so that the cost stands
out. On a GPU the mark also records an event. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time

import numpy as np

from kilter.observe.iteration_clock import IterationClock

STEPS = 50
"""In one block."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=20_000, help="of each arm")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(json.dumps(measure(options.iterations, options.device, options.seed), indent=1))


def measure(iterations: int, device: str, seed: int) -> dict[str, object]:
    """Cost of a mark in microseconds, by difference and by the marks' own clock."""
    import torch

    torch.set_num_threads(1)
    chance = random.Random(seed)
    parameter = torch.nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    marks = IterationClock(lambda index, t_s: None)
    marks.start()
    marks.stop()
    blocks: dict[bool, list[float]] = {True: [], False: []}
    arms = [True, False] * (iterations // STEPS)
    chance.shuffle(arms)
    for _ in range(1000):
        optimizer.step()
    for hooked in arms:
        if hooked:
            marks.start()
        times = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - begin)
        if hooked:
            marks.stop()
            marks.finished()
        blocks[hooked].append(statistics.median(times[5:]) * 1e6)
    hooked_us, plain_us = np.array(blocks[True]), np.array(blocks[False])
    draw = np.random.default_rng(seed)
    differences = [
        np.median(draw.choice(hooked_us, len(hooked_us)))
        - np.median(draw.choice(plain_us, len(plain_us)))
        for _ in range(1000)
    ]
    low, high = np.percentile(differences, [2.5, 97.5])
    return {
        "schema": "kilter.bench.hook_cost/1",
        "label": "measured",
        "device": device,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "iterations_per_arm": len(hooked_us) * STEPS,
        "step_without_us": float(np.median(plain_us)),
        "mark_us": float(np.median(hooked_us) - np.median(plain_us)),
        "mark_us_ci95": [float(low), float(high)],
        "by_its_own_clock_us": marks.cost_s / marks.calls * 1e6,
    }


if __name__ == "__main__":
    main()
