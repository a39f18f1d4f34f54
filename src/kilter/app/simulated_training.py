"""A simulated training job whose telemetry has a period, for `kilter watch` and its benchmark.

Forward, backward and the optimizer's step from the shapes of a known network, and a wait for data:
parts of unequal power, as a GPU's sensors show them.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from kilter.app.bench.workloads import OPERATION_WORKLOADS, iteration
from kilter.core.trace import IterationTrace, Kind, Operation
from kilter.device.sim.gpu import STEADY, SimGpu
from kilter.device.sim.noise import QUIET, Noise
from kilter.device.sim.phased_job import PhasedJob
from kilter.device.sim.profile import load_profile
from kilter.session.simulated_job import SimulatedSource

WAIT_S = 0.15
"""An iteration waits this long for data at its end."""
COMPUTE_S = 1.0
"""An iteration takes this at the default clocks; the batch is made as large as that takes."""


def training_trace(workload: str, wait_s: float = WAIT_S) -> IterationTrace:
    """One iteration of a network of `OPERATION_WORKLOADS`."""
    trace = iteration(OPERATION_WORKLOADS[workload](), element_bytes=4, training=True)
    wait = Operation(name="loader", kind=Kind.DATA_WAIT, start_s=0.0, duration_s=wait_s)
    return replace(trace, operations=(*trace.operations, wait))


def training_job(
    card: str,
    workload: str,
    *,
    seed: int = 0,
    noise: Noise = STEADY,
    compute_s: float = COMPUTE_S,
    wait_s: float = WAIT_S,
) -> tuple[SimGpu, PhasedJob]:
    """The job on a fresh card, with iterations of `compute_s` and the wait."""
    profile, trace = load_profile(card), training_trace(workload, wait_s)
    once_s = PhasedJob(SimGpu(profile, noise=QUIET), trace).iterate() - wait_s
    gpu = SimGpu(profile, seed=seed, noise=noise)
    job = PhasedJob(gpu, trace)
    job.scale(compute_s / once_s)
    return gpu, job


def simulated_training(card: str, *, stop: threading.Event, seconds: float) -> SimulatedSource:
    """What `kilter watch --device sim:NAME` watches."""
    gpu, job = training_job(card, "gpt")
    return SimulatedSource(gpu, job, seconds=seconds, stop=stop)
