"""How many passes run under a plan in jobs that leave out layers at random, take one of many tasks
in no order, or end in tensors of other sizes each time.

    PYTHONPATH=. python benchmarks/memory_left_out.py

The networks are those of `tests/memory/test_left_out.py`, on a stand-in for a device on whose clock
every operation takes the same time. One line per job, of the second half of its passes: simulated.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.memory.steady_stand_in import SteadyStandIn
from tests.memory.test_left_out import (
    BLOCK_BYTES,
    Detector,
    Dropped,
    Mixture,
    Tasks,
    Translator,
    trained,
)
from torch import nn

from kilter.memory.engine import Swapper
from kilter.memory.plan.problem import Link

LINK = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
DROPPED = [(6, 0.1, 0.6), (6, 0.2, 0.6), (12, 0.05, 0.6), (12, 0.1, 0.5), (24, 0.05, 0.6)]
DROPPED += [(24, 0.1, 0.6)]
"""Blocks of each of two stacks, the share that is left out, and the budget as a share of what the
blocks save."""
READING = [(6, 0.1), (12, 0.05), (12, 0.1)]
"""Blocks of each of an encoder and a decoder that reads its output, and the share left out."""
TASKS = [9, 12, 16]
FOUND = [(6, 2, 1, 0.0), (4, 4, 1, 0.0), (4, 4, 1, 0.15), (5, 3, 16, 0.0)]
"""Blocks for all rows, more for those that were found, the steps in which their number differs, and
how often they pass one more layer."""
EXPERTS = [(4, 4), (3, 8)]
"""Blocks, and experts behind each of them."""


def show(
    name: str,
    make: Callable[[], nn.Module],
    iterations: int,
    budget_bytes: int,
    min_bytes: int = 1024,
) -> None:
    with Swapper(
        SteadyStandIn(spoil=True), budget_bytes=budget_bytes, link=LINK, min_bytes=min_bytes
    ) as swapper:
        _, (half, end) = trained(make, iterations, swapper)
    passes, planned = end.passes - half.passes, end.planned - half.planned
    watched, on_demand = end.watched - half.watched, end.spilled - half.spilled
    print(
        f"{name}: {planned} of {passes} passes under a plan, {watched} watched, {on_demand} tensors"
        f" on demand, peak {end.highest_bytes / budget_bytes:.3f} of the budget [simulated]",
        flush=True,
    )


def main() -> None:
    for blocks, left_out, share in DROPPED:
        name = f"{blocks} and {blocks} blocks, {left_out:.0%} left out, {share:.0%}"
        budget_bytes = int(share * 2 * blocks * BLOCK_BYTES)
        show(name, lambda b=blocks, s=left_out: Dropped(b, s), 300, budget_bytes)
    for blocks, left_out in READING:
        name = f"{blocks} blocks, and {blocks} that read their output, {left_out:.0%} left out, 60%"
        budget_bytes = int(0.6 * 3 * blocks * BLOCK_BYTES)
        show(name, lambda b=blocks, s=left_out: Translator(b, s), 300, budget_bytes)
    for tasks in TASKS:
        budget_bytes = int(0.7 * 5 * BLOCK_BYTES)
        show(f"{tasks} tasks", lambda n=tasks: Tasks(n), 500, budget_bytes)
    for blocks, more, each, seldom in FOUND:
        name = f"{blocks} blocks and {more} for what was found, steps of {each}, {seldom:.0%}, 60%"
        budget_bytes = int(0.6 * (blocks + more) * BLOCK_BYTES)
        show(
            name,
            lambda b=blocks, m=more, e=each, s=seldom: Detector(b, m, e, s),
            300,
            budget_bytes,
        )
    for blocks, experts in EXPERTS:
        budget_bytes = int(0.6 * 2 * blocks * BLOCK_BYTES)
        name = f"{blocks} blocks with {experts} experts each, 60%"
        show(name, lambda b=blocks, e=experts: Mixture(b, e), 300, budget_bytes, min_bytes=256)


if __name__ == "__main__":
    main()
