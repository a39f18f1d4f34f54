"""Whether plans of calls do what own checkpointing does, for architectures of transformers.

    python benchmarks/memory_checkpointing.py [--only bert,longt5] [--others] [--part 1/2]

Each architecture is built small, with eight layers, and one pass of it is recorded on the CPU; its
calls of modules are tried as `kilter run --memory-budget` tries them. Then the best plan is made
for what the model's own checkpointing keeps, its largest block and 1 %. The link is so slow that
everything has to be recomputed. Printed are what the plan takes over forward, forward and backward
as recorded, which is what checkpointing takes (simulated), and why calls were refused. The tensors
that autograd saves count, and what calls hold; what a program keeps of its own (a mask, a cache)
counts for calls alone. `--others` takes the architectures that are not in the list of
`memory_zoo.py`. Needs transformers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from math import inf

import torch
from memory_zoo import LARGEST, TOKENS, Case, batch, listed, others

from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.call_choice import CallChoice
from kilter.memory.engine.pass_record import PassRecord
from kilter.memory.plan.problem import Link

LAYERS = 8
ROWS, LENGTH = 6, 48
MIN_BYTES = 1024
UNLIMITED_BYTES = 2**50
PASSES = 7
"""Within these a trial comes, if there is one."""
LINK = Link(to_host_bytes_per_s=1e7, to_device_bytes_per_s=1e7, both_bytes_per_s=2e7)
ALONE_S = 1e-4
"""Counts for each tensor that is recomputed alone or offloaded."""
SPARE = 1.01
"""The budget is so many times what checkpointing takes."""


def step_of(model: torch.nn.Module, what: str) -> Callable[[], None]:
    """Forward and backward of one random batch."""

    def step() -> None:
        if what == "tokens":
            rows = torch.randint(3, TOKENS, (ROWS, LENGTH))
            given = {"input_ids": rows, "labels": rows.clone()}
        else:
            given = batch(model, what)
        model(**given).loss.backward()
        model.zero_grad()

    return step


def checkpointed_bytes(step: Callable[[], None]) -> int:
    """What checkpointing keeps at most. (What it makes again is not seen.)"""
    swapper = Swapper(CpuStandIn(), budget_bytes=UNLIMITED_BYTES, link=LINK, min_bytes=MIN_BYTES)
    with swapper:
        for _ in range(3):
            step()
    found = swapper.largest_pass()
    assert found is not None
    return found.peak_bytes


def tried(step: Callable[[], None]) -> tuple[PassRecord, list[str]]:
    """The largest pass with its calls, and why others are not among them."""
    swapper = Swapper(
        CpuStandIn(), budget_bytes=UNLIMITED_BYTES, link=LINK, min_bytes=MIN_BYTES, segments=True
    )
    with swapper:
        for _ in range(PASSES):
            step()
            if swapper.tried:
                step()
                break
        refused = [f"{one.subject}: {one.text}" for one in swapper.report().refused]
        return max(swapper.records(), key=lambda one: len(one.data)), refused


def ratio(case: Case) -> tuple[float, list[str]]:
    """The plan's time over checkpointing's (infinite: no plan), and what was refused."""
    build = partial(case.build.func, *case.build.args, layers=LAYERS)  # type: ignore[attr-defined]
    with torch.device("meta"):
        if sum(one.numel() for one in build().parameters()) > LARGEST:
            raise ValueError("too large")
    model = build().train()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # as checkpointing has it
    step = step_of(model, case.what)
    record, refused = tried(step)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    kept_bytes = checkpointed_bytes(step)
    sizes = [sum(record.data[n].size_bytes for n in one.members) for one in record.segments]
    budget_bytes = int(SPARE * (kept_bytes + max(sizes, default=0)))
    make_problem = partial(
        PassRecord.problem, link=LINK, budget_bytes=budget_bytes, min_bytes=MIN_BYTES
    )
    choice = CallChoice(record, make_problem, ALONE_S)
    kept = choice.kept(choice.best())
    forward_s = sum(record.operation_s[: record.backward_from])
    return kept.cost_s / (kept.plain_s + forward_s), refused


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="architectures, by their names in transformers")
    parser.add_argument("--others", action="store_true", help="those not in memory_zoo.py's list")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th, from the I-th on")
    args = parser.parse_args()
    only = set(args.only.split(",")) - {""}
    first, count = map(int, args.part.split("/"))
    cases = [one for one in (others() if args.others else listed()) if not only or one.name in only]
    for case in cases[first - 1 :: count]:
        torch.manual_seed(0)
        try:
            found, refused = ratio(case)
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            print(f"{case.name}: not tried, {type(error).__name__}: {error}", flush=True)
            continue
        text = "no plan" if found == inf else f"{found:.2f} of checkpointing's time [simulated]"
        print("; ".join([f"{case.name}: {text}", *refused]), flush=True)


if __name__ == "__main__":
    main()
