"""The closed loop on the period: a simulated job governed from outside, and the same from inside.

Both run the same governor on the same simulated card with the same noise. From inside each
iteration is timed exactly; from outside there are only the sensors. What was chosen is scored on a
card without noise, when its temperature has settled. All figures are *simulated*.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import msgspec

from kilter.app.bench.workloads import OPERATION_WORKLOADS
from kilter.app.simulated_training import training_job
from kilter.clocks.actuator import DeviceActuator
from kilter.clocks.job_telemetry import JobTelemetry
from kilter.clocks.outside import IdleGpu, Observer, OutsideConductor
from kilter.clocks.plan.governor import Choice, Phase
from kilter.clocks.rehearsal import Rehearsal
from kilter.core.plan import Goal
from kilter.core.setting import Setting
from kilter.device.sim.noise import QUIET, Noise
from kilter.lease.lease import Lease
from kilter.session.simulated_job import SimulatedSource

MOST_S = 7200.0
"""Of the job: a search that takes longer has not come to an end."""
SETTLE_S, SCORED = 250.0, 30
"""Before the iterations that are scored, and how many they are."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One search."""

    way: str
    """`outside` or `inside`."""
    card: str
    workload: str
    seed: int
    setting: str
    saving: float
    """Of energy, true."""
    slowdown: float
    """True."""
    violated: bool
    search_s: float | None
    """Until the search was over; None: it was not, and what stood then is scored."""
    iterations: int
    period_error: float | None
    """Of the period that the search was done on, relative to the true one; None from inside."""


def closed_loop(
    cards: Sequence[str], *, seeds: int, noise: float, max_slowdown: float
) -> Iterator[Row]:
    """Both ways on each card, with each workload, so many times."""
    goal = Goal(max_slowdown=max_slowdown)
    for card in cards:
        for workload in OPERATION_WORKLOADS:
            default = _true(card, workload, Setting())
            for seed in range(seeds):
                print(f"{card}, {workload}, seed {seed} ...", file=sys.stderr)
                for search in (_outside, _inside):
                    found = search(card, workload, seed, noise, goal)
                    period_s, energy_j = _true(card, workload, found.choice.setting)
                    slowdown = period_s / default[0] - 1.0
                    seen_s = found.period_s
                    yield Row(
                        way=search.__name__.removeprefix("_"),
                        card=card,
                        workload=workload,
                        seed=seed,
                        setting=str(found.choice.setting),
                        saving=1.0 - energy_j / default[1],
                        slowdown=slowdown,
                        violated=slowdown > max_slowdown,
                        search_s=found.search_s,
                        iterations=found.iterations,
                        period_error=None if seen_s is None else abs(seen_s / default[0] - 1.0),
                    )


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    choice: Choice
    search_s: float | None
    iterations: int
    period_s: float | None = None


def _noise(noise: float) -> Noise:
    return Noise(white=noise, power=noise)


def _outside(card: str, workload: str, seed: int, noise: float, goal: Goal) -> _Found:
    gpu, job = training_job(card, workload, seed=seed, noise=_noise(noise))
    source = SimulatedSource(gpu, job, seconds=MOST_S)
    telemetry = JobTelemetry(source.sensors.record)
    actuator = DeviceActuator(source.sensors, gpu.info(), _Paced(), clock=source.clock)
    idle = IdleGpu(telemetry, actuator, None, goal)
    observer = Observer(telemetry, idle, goal, lambda text: None)
    conductor: OutsideConductor | None = None
    period_s: float | None = None

    with Lease(gpu) as lease:
        actuator.lease = lease

        def flow() -> Iterator[None]:
            nonlocal conductor, period_s
            while True:
                steady = yield from observer.observe(once=False)
                if steady is None:
                    continue
                period_s = steady.pace.iteration_s
                conductor = OutsideConductor(
                    telemetry,
                    actuator,
                    idle,
                    steady,
                    goal,
                    found=lease.found,
                    supported=gpu.supported(),
                    record=lambda event: None,
                    clock=source.clock,
                    seed=seed,
                )
                yield from conductor.run()
                telemetry.forget()

        steps = flow()

        def step() -> bool:
            next(steps)
            return conductor is None or conductor.phase is not Phase.HOLD

        why = source.drive(step)
    no_choice = Choice(setting=Setting(), reason="no period")
    return _Found(
        choice=no_choice if conductor is None else conductor.program.choice,
        search_s=gpu.now_s if why == "" else None,
        iterations=job.iterations,
        period_s=period_s,
    )


class _Paced:
    usual_s = None


def _inside(card: str, workload: str, seed: int, noise: float, goal: Goal) -> _Found:
    gpu, job = training_job(card, workload, seed=seed, noise=_noise(noise))
    with Lease(gpu) as lease:
        rehearsal = Rehearsal(
            gpu,
            job.iterate,
            goal,
            apply=lease.set,
            record=lambda event: None,
            clock=lambda: gpu.now_s,
            seed=seed,
        )
        while rehearsal.phase is not Phase.HOLD and gpu.now_s < MOST_S:
            rehearsal.iterate()
    over = rehearsal.phase is Phase.HOLD
    return _Found(
        choice=rehearsal.program.choice,
        search_s=gpu.now_s if over else None,
        iterations=job.iterations,
    )


def _true(card: str, workload: str, setting: Setting) -> tuple[float, float]:
    """Time and energy of one iteration under a setting, without noise."""
    gpu, job = training_job(card, workload, noise=QUIET)
    gpu.set(setting)
    while gpu.now_s < SETTLE_S:
        job.iterate()
    begin_s, begin_j = gpu.now_s, gpu.energy_j
    for _ in range(SCORED):
        job.iterate()
    return (gpu.now_s - begin_s) / SCORED, (gpu.energy_j - begin_j) / SCORED


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, float | int | None]]:
    """By way: mean saving and slowdown, violations, and how long the search took."""
    result: dict[str, dict[str, float | int | None]] = {}
    for way in dict.fromkeys(row.way for row in rows):
        own = [row for row in rows if row.way == way]
        took = [row.search_s for row in own if row.search_s is not None]
        result[way] = {
            "n": len(own),
            "mean_saving": sum(row.saving for row in own) / len(own),
            "mean_slowdown": sum(row.slowdown for row in own) / len(own),
            "worst_slowdown": max(row.slowdown for row in own),
            "violations": sum(row.violated for row in own),
            "finished": len(took),
            "mean_search_s": sum(took) / len(took) if took else None,
        }
    return result
