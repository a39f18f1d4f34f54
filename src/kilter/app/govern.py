"""`kilter.govern`: the same session as `kilter run`, as a context manager."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from kilter.app.config import OPTIONS, options_of
from kilter.app.listener import StderrListener
from kilter.core.plan import Goal, Objective
from kilter.core.ranks import ranks
from kilter.session.lifecycle import Session
from kilter.session.options import HISTORY_AUTO


def govern(
    *,
    max_slowdown: float | None = None,
    memory_budget: str | int | None = None,
    gradients: str = "auto",
    weights: str = "keep",
    recompute: str | None = None,
    host_memory: str | int | None = None,
    objective: Objective | str = Objective.ENERGY,
    price_of_time: float = Goal().price_of_time,
    device: str = "auto",
    dry_run: bool = False,
    trace: bool = False,
    out: str | Path | None = None,
    history: str | Path | None = None,
) -> AbstractContextManager[Session]:
    """Save energy in the body of the `with`, at most `max_slowdown` (a fraction) slower; keep its
    training within a `memory_budget` (`"24GiB"`, bytes, `"75%"` of its peak, `"auto"`); or both.
    `gradients="consume"` lets a budget use them up as they arrive in backward, in a program that
    never clips them, reads them or skips a step; `auto` and `keep` keep them for the step.
    `weights="offload"` (experimental) lets weights be on the host between forward and backward.
    `recompute` is `"operations"` (single ones), `"segments"` (what calls of modules saved, whole or
    in part, as well), or `"auto"` (the default on a GPU): the fastest of these and the model's own
    checkpointing.
    A setting is taken only if it saves at least `price_of_time` times as large a fraction of the
    energy as it is slower.
    `host_memory` (`"16GiB"`, bytes) limits what is offloaded to the host; the default is this
    process's part of half of what is free.

    With neither given: energy, at 2 %. With a memory budget alone, clocks are left alone.

    Iterations end where an optimizer steps. A loop without one, or one that knows better, says so
    itself, and then only it does:

        with kilter.govern(max_slowdown=0.01) as job:
            for batch in batches:
                infer(batch)
                job.mark()

    `device` is `auto`, `nvml`, `sim:NAME`, `replay:PATH` or `null`; `dry_run` sets nothing;
    `trace` records the operations of one iteration also on a real device; `out` is the directory
    of the run's files (default: `runs/ID`); `history` is the file of earlier runs,
    `auto` or `off` (default: `KILTER_HISTORY`, else `auto`).
    `KILTER=0` in the environment switches it off. Raises
    `UsageError` for a wrong argument; the `with` raises it for a device or a directory that cannot
    be had and `FileError` for a broken recording, and nothing else of its own.
    """
    texts = {
        "memory-budget": memory_budget,
        "gradients": gradients,
        "weights": weights,
        "recompute": recompute,
        "host-memory": host_memory,
        "objective": getattr(objective, "value", objective),
        "price-of-time": price_of_time,
        "history": history or os.environ.get("KILTER_HISTORY") or HISTORY_AUTO,
    }
    given = {n: OPTIONS[n].parse(str(value)) for n, value in texts.items() if value is not None}
    given |= {"device": device, "dry-run": dry_run, "trace": trace}
    given |= {} if max_slowdown is None else {"max-slowdown": max_slowdown}
    given |= {} if out is None else {"out": Path(out).absolute()}
    options = options_of(given, tuple(sys.argv), None)
    session = Session(options, ranks(os.environ), StderrListener())
    return nullcontext(session) if os.environ.get("KILTER") == "0" else session
