"""A rehearsal: the whole online loop on a simulated GPU that runs the traced iteration.

While the real script runs, each of its iterations drives one simulated one; after it has ended,
the rehearsal goes on with the trace alone until the evidence is in.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial

from kilter.clocks.actuator import RECENT_S
from kilter.clocks.conductor import Conductor, GovernorProgram
from kilter.clocks.plan.governor import BlockOutcome, Order, Phase
from kilter.clocks.plan.predictor import Predictor
from kilter.core.events import AnyEvent, sampled
from kilter.core.messages import LocalMessages
from kilter.core.past_run import KnownSetting
from kilter.core.plan import Goal
from kilter.core.setting import Sample, Setting, over
from kilter.core.trace import IterationTrace
from kilter.device.sim.gpu import SimGpu
from kilter.observe.end_times import Iteration

HOLD_BLOCKS = 150
"""Blocks to hold at the end: three comparisons with the baseline, and room for drift to show."""

VERIFY_AFTER_S = 1.5
"""A clock that has not come down by then is not obeyed. Some switches take longer than is usual,
and sensors show the past."""


class SimulatedActuator:
    """A simulated GPU as the conductor sees it. Power comes from its sensors, read at their own
    tick; the virtual clock only moves with iterations. `apply` and `verify` are a lease's, or do
    the same."""

    def __init__(
        self,
        gpu: SimGpu,
        apply: Callable[[Setting], None],
        verify: Callable[[Sample], None] = lambda sample: None,
    ) -> None:
        self._gpu = gpu
        self._apply = apply
        self._verify = verify
        self._found = gpu.settings()
        info = gpu.info()
        self._period_s = info.sensor_period_s or 0.1
        self._latency_s = info.switch_latency_s or 0.0
        self._settled_at_s = 0.0
        self._next_s = 0.0
        self._samples: deque[Sample] = deque(maxlen=5000)
        self._verified: Sample | None = None

    def apply(self, setting: Setting) -> None:
        target = over(self._found, setting)
        if target != self._gpu.settings():
            self._apply(target)
            self._settled_at_s = self._gpu.now_s + self._latency_s

    def check(self) -> None:
        sample = self._samples[-1] if self._samples else None
        if sample is None or sample is self._verified:
            return
        if sample.t_s >= self._settled_at_s + VERIFY_AFTER_S:
            self._verified = sample
            self._verify(sample)

    def settled(self) -> bool:
        return self._gpu.now_s >= self._settled_at_s

    def tick(self) -> Sample | None:
        """Read the sensors if they have a new value."""
        if self._gpu.now_s < self._next_s:
            return None
        self._next_s = self._gpu.now_s + self._period_s
        sample = self._gpu.sample()
        self._samples.append(sample)
        return sample

    def mean_power_w(self, begin_s: float, end_s: float) -> float | None:
        inside = []
        for sample in reversed(self._samples):
            if sample.t_s < begin_s + self._period_s:  # earlier ones look back before the begin
                break
            if sample.t_s <= end_s and sample.power_w is not None:
                inside.append(sample.power_w)
        return sum(inside) / len(inside) if inside else None

    def sustained(self) -> Setting:
        last = self._samples[-1] if self._samples else self._gpu.sample()
        return Setting(sm_clock_hz=last.sm_clock_hz, memory_clock_hz=last.memory_clock_hz)

    def recent(self) -> Sequence[Sample]:
        return [s for s in self._samples if s.t_s >= self._gpu.now_s - RECENT_S]


class Rehearsal:
    """The loop on one simulated GPU, which repeats a trace, or whatever `job` runs on it: a
    function that runs one iteration and returns its (virtual) seconds. `apply` and `verify` are
    those of the GPU's lease; `known` and `predictor` are as for `GovernorProgram`."""

    def __init__(
        self,
        gpu: SimGpu,
        job: IterationTrace | Callable[[], float],
        goal: Goal,
        *,
        apply: Callable[[Setting], None],
        verify: Callable[[Sample], None] = lambda sample: None,
        record: Callable[[AnyEvent], None],
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
        known: KnownSetting | None = None,
        predictor: Predictor | None = None,
    ) -> None:
        self._gpu = gpu
        trace: IterationTrace | None = None
        if isinstance(job, IterationTrace):
            trace, job = job, partial(gpu.run, gpu.work(job))
        self._run = job
        self._record = record
        self._clock = clock
        self._actuator = SimulatedActuator(gpu, apply, verify)
        self.program = GovernorProgram(
            goal,
            gpu.settings(),
            gpu.supported(),
            self._actuator,
            seed=seed,
            known=known,
            predictor=predictor,
            trace=lambda: trace,
        )
        self._conductor = Conductor(
            self._actuator,
            LocalMessages(),
            found=gpu.settings(),
            sensor_period_s=gpu.info().sensor_period_s or 0.1,
            orders=self.program.orders(),
            record=record,
            clock=clock,
        )
        self._held = 0
        self.iterations = 0
        self.iterations_alone = 0

    @property
    def phase(self) -> Phase | None:
        """Of the order that is being executed."""
        return self._conductor.phase

    def iterate(self) -> None:
        """Run one simulated iteration and let the conductor take notice."""
        duration_s = self._run()
        blocks = self._conductor.blocks
        self.iterations += 1
        self.iterations_alone += self._conductor.rehearsed
        if sample := self._actuator.tick():
            self._record(sampled(sample, self._clock()))
        self._conductor.iteration(
            Iteration(index=self.iterations, end_s=self._gpu.now_s, duration_s=duration_s)
        )
        if self._conductor.phase is Phase.HOLD:
            self._held += self._conductor.blocks - blocks
        else:
            self._held = 0

    def finish(
        self, *, seconds: float, progress: Callable[[float], None] = lambda done: None
    ) -> bool:
        """Go on with the trace alone until the search is over and its choice has been held for
        a while, at most for these seconds of real time. True if the search is over."""
        self._conductor.rehearsed = True
        end_s = time.monotonic() + seconds
        while self._held < HOLD_BLOCKS and time.monotonic() < end_s:
            for _ in range(50):
                self.iterate()
            progress(self._gpu.now_s)
        return self._conductor.phase is Phase.HOLD


def compare(
    gpu: SimGpu, trace: IterationTrace, setting: Setting, *, pairs: int, seed: int = 0
) -> list[tuple[BlockOutcome, BlockOutcome]]:
    """(baseline, candidate) outcomes of interleaved blocks under the found setting and another."""
    found = gpu.settings()
    done: list[tuple[BlockOutcome, BlockOutcome]] = []

    def orders() -> Generator[Order, BlockOutcome, None]:
        yield Order(phase=Phase.WARM, setting=found, baseline=True, pair=None, reason="warm up")
        order = random.Random(seed)
        while True:
            arms = [True, False]
            order.shuffle(arms)
            outcomes: dict[bool, BlockOutcome] = {}
            for baseline in arms:
                outcomes[baseline] = yield Order(
                    phase=Phase.CONFIRM,
                    setting=found if baseline else setting,
                    baseline=baseline,
                    pair=len(done),
                    reason="compare",
                )
            done.append((outcomes[True], outcomes[False]))

    actuator = SimulatedActuator(gpu, gpu.set)
    conductor = Conductor(
        actuator,
        LocalMessages(),
        found=found,
        sensor_period_s=gpu.info().sensor_period_s or 0.1,
        orders=orders(),
        record=lambda event: None,
        clock=lambda: gpu.now_s,
    )
    work = gpu.work(trace)
    index = 0
    while len(done) < pairs:
        duration_s = gpu.run(work)
        actuator.tick()
        index += 1
        conductor.iteration(Iteration(index=index, end_s=gpu.now_s, duration_s=duration_s))
    gpu.set(found)
    return done
