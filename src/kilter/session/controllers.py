"""Which capabilities a run has, and the device that they share. A new capability is a line here."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kilter.clocks.controller import ClocksController, mode_of
from kilter.clocks.job_history import JobHistory
from kilter.clocks.operation_controller import OperationsController
from kilter.clocks.section_controller import SectionsController
from kilter.controller import Controller, Run
from kilter.core.errors import UsageError
from kilter.core.history import default_file
from kilter.core.plan import Goal, Objective
from kilter.core.ranks import Ranks
from kilter.device.find import find
from kilter.device.protocol import Device
from kilter.device.sim.cards import names
from kilter.memory.controller import MemoryController
from kilter.memory.host_memory import default_limit_bytes
from kilter.session.options import HISTORY_AUTO, HISTORY_OFF, Options

__all__ = ["controllers_of", "goal_of", "mode_of", "open_device"]


def goal_of(options: Options) -> Goal:
    """What was asked for, with this machine's limit where a memory plan needs one."""
    goal = options.goal
    if goal.memory_budget is None or goal.host_memory_bytes is not None:
        return goal
    return replace(goal, host_memory_bytes=default_limit_bytes(os.environ))


def controllers_of(run: Run, options: Options) -> Sequence[Controller]:
    """The controllers of a run, in the order in which they settle: clocks are judged on a job whose
    memory plan is in force."""
    controllers: list[Controller] = []
    file = _history_file(options)
    history = JobHistory(run, file, options.predictor, options.command)

    def clocks() -> Controller:
        return ClocksController(run, rehearse_s=options.rehearsal_s, history=history)

    if run.goal.memory_budget is not None:
        controllers.append(
            MemoryController(
                run,
                run.goal.memory_budget,
                gradients=options.gradients,
                weights=options.weights,
                recompute=options.recompute,
                history=file,
                command=options.command,
            )
        )
    asked = options.sections
    if run.goal.max_slowdown is not None and options.operations:
        controllers.append(
            OperationsController(
                run,
                max_slowdown=run.goal.max_slowdown,
                otherwise=clocks,
                rehearse_s=options.rehearsal_s,
            )
        )
    elif run.goal.max_slowdown is not None and (asked or (asked is None and _may_pay(run))):
        controllers.append(
            SectionsController(
                run,
                max_slowdown=run.goal.max_slowdown,
                otherwise=clocks,
                asked=bool(asked),
                rehearse_s=options.rehearsal_s,
            )
        )
    else:
        controllers.append(clocks())
    return controllers


def _may_pay(run: Run) -> bool:
    """Whether a job is looked at for sections of which its user has said nothing: it communicates,
    and its devices are real (what one clock would save on a simulated one is rehearsed without the
    job's communication). A memory schedule changes the times that sections are planned from, and
    their search knows no objective but energy. The same on all ranks."""
    return (
        run.ranks.world_size > 1
        and run.info.backend != "sim"
        and not run.dry_run
        and run.goal.memory_budget is None
        and run.goal.objective is Objective.ENERGY
    )


def _history_file(options: Options) -> Path | None:
    if options.history == HISTORY_OFF:
        return None
    return default_file(os.environ) if options.history == HISTORY_AUTO else Path(options.history)


def open_device(spec: str, ranks: Ranks) -> Device:
    """`sim:NAME`, `replay:PATH`, or what `kilter.device.find` knows. Raises `UsageError`,
    `FileError` and device errors."""
    kind, _, name = spec.partition(":")
    if kind == "replay":
        from kilter.device.sim.replay import RecordedDevice, load_recording

        now_s = time.monotonic
        return RecordedDevice(load_recording(name), now_s, Path(name).name, begin_s=now_s())
    if kind != "sim":
        return find(spec, local_rank=ranks.local_rank, environ=os.environ)
    if name not in names():
        raise UsageError(f"device {spec!r}: choose sim:{', sim:'.join(names())}")
    from kilter.device.sim.gpu import SimGpu
    from kilter.device.sim.profile import load_profile

    return SimGpu(load_profile(name), seed=ranks.local_rank, index=ranks.local_rank)
