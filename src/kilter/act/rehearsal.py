"""A rehearsal: the whole online loop on a simulated GPU that runs the traced iteration.

While the real script runs, each of its iterations drives one simulated one; after it has ended,
the rehearsal goes on with the trace alone until the evidence is in.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

from kilter.act.board import LocalBoard
from kilter.act.conductor import Conductor, Program
from kilter.core.events import AnyEvent, Sampled
from kilter.core.plan import Goal
from kilter.core.setting import Sample, Setting
from kilter.core.trace import IterationTrace
from kilter.plan.governor import Order, Outcome, Phase
from kilter.sim.gpu import SimGpu

HOLD_BLOCKS = 150
"""Blocks to hold at the end: three comparisons with the baseline, and room for drift to show."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One simulated iteration."""

    index: int
    end_s: float
    duration_s: float


class SimHands:
    """A simulated GPU as the conductor sees it. Power comes from its sensors, read at their own
    tick; the virtual clock only moves with iterations."""

    def __init__(self, gpu: SimGpu, apply: Callable[[Setting], None]) -> None:
        self._gpu = gpu
        self._apply = apply
        info = gpu.info()
        self._period_s = info.sensor_period_s or 0.1
        self._latency_s = info.switch_latency_s or 0.0
        self._settled_at_s = 0.0
        self._next_s = 0.0
        self._samples: deque[Sample] = deque(maxlen=5000)

    def apply(self, setting: Setting) -> None:
        if setting != self._gpu.settings():
            self._apply(setting)
            self._settled_at_s = self._gpu.now_s + self._latency_s

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


class Rehearsal:
    """The loop on one simulated GPU. `apply` sets it (through a lease)."""

    def __init__(
        self,
        gpu: SimGpu,
        trace: IterationTrace,
        goal: Goal,
        *,
        apply: Callable[[Setting], None],
        record: Callable[[AnyEvent], None],
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
    ) -> None:
        self._gpu = gpu
        self._work = gpu.work(trace)
        self._record = record
        self._clock = clock
        self._hands = SimHands(gpu, apply)
        self.program = Program(goal, gpu.settings(), gpu.supported(), self._hands, seed=seed)
        self._conductor = Conductor(
            self._hands,
            LocalBoard(),
            sensor_period_s=gpu.info().sensor_period_s or 0.1,
            orders=self.program.orders(),
            record=record,
            clock=clock,
        )
        self._held = 0
        self.iterations = 0
        self.iterations_alone = 0

    def iterate(self) -> None:
        """Run one simulated iteration and let the conductor take notice."""
        duration_s = self._gpu.run(self._work)
        blocks = self._conductor.blocks
        self.iterations += 1
        self.iterations_alone += self._conductor.rehearsed
        if sample := self._hands.tick():
            self._record(
                Sampled(
                    t_s=self._clock(),
                    device_t_s=sample.t_s,
                    power_w=sample.power_w,
                    sm_clock_hz=sample.sm_clock_hz,
                    memory_clock_hz=sample.memory_clock_hz,
                    sm_utilisation=sample.sm_utilisation,
                    temperature_c=sample.temperature_c,
                    throttle=tuple(t.value for t in sample.throttle or ()),
                )
            )
        self._conductor.iteration(
            Turn(index=self.iterations, end_s=self._gpu.now_s, duration_s=duration_s)
        )
        if self._conductor.phase is Phase.HOLD:
            self._held += self._conductor.blocks - blocks
        else:
            self._held = 0

    def finish(
        self, *, seconds: float, progress: Callable[[float], None] = lambda done: None
    ) -> bool:
        """Go on with the trace alone until the search is over and its choice has been held for
        a while, at most for these seconds of real time. True if it got that far."""
        self._conductor.rehearsed = True
        end = time.monotonic() + seconds
        while self._held < HOLD_BLOCKS:
            for _ in range(200):
                self.iterate()
            if time.monotonic() > end:
                return False
            progress(self._gpu.now_s)
        return True


def compare(
    gpu: SimGpu, trace: IterationTrace, setting: Setting, *, pairs: int, seed: int = 0
) -> list[tuple[Outcome, Outcome]]:
    """(baseline, candidate) outcomes of interleaved blocks under the found setting and another."""
    found = gpu.settings()
    done: list[tuple[Outcome, Outcome]] = []

    def orders() -> Generator[Order, Outcome, None]:
        yield Order(phase=Phase.WARM, setting=found, baseline=True, pair=None, reason="warm up")
        order = random.Random(seed)
        while True:
            arms = [True, False]
            order.shuffle(arms)
            outcomes: dict[bool, Outcome] = {}
            for baseline in arms:
                outcomes[baseline] = yield Order(
                    phase=Phase.CONFIRM,
                    setting=found if baseline else setting,
                    baseline=baseline,
                    pair=len(done),
                    reason="compare",
                )
            done.append((outcomes[True], outcomes[False]))

    hands = SimHands(gpu, gpu.set)
    conductor = Conductor(
        hands,
        LocalBoard(),
        sensor_period_s=gpu.info().sensor_period_s or 0.1,
        orders=orders(),
        record=lambda event: None,
        clock=lambda: gpu.now_s,
    )
    work = gpu.work(trace)
    index = 0
    while len(done) < pairs:
        duration_s = gpu.run(work)
        hands.tick()
        index += 1
        conductor.iteration(Turn(index=index, end_s=gpu.now_s, duration_s=duration_s))
    gpu.set(found)
    return done
