"""The clocks of GPUs that several jobs share, under the strictest of their contracts.

The same governor as for one job (`clocks/plan/governor`) decides what to try and what to keep. A
block is a stretch of time in which every job makes some steps; what the governor is told of a pair
of blocks is the time of the job that is closest to its contract, and the energy of the same work.
Jobs, ratios or contracts that change end the search: the setting as found is back at once, and
another search begins when they have stayed as they are for a while.

All GPUs get the same setting, because the jobs have a rank on each.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

from kilter.clocks.plan.governor import BlockOutcome, Governor, Order, Phase
from kilter.clocks.plan.job import space
from kilter.core.errors import KilterError, NotSupported
from kilter.core.plan import Goal
from kilter.core.setting import Setting, changes, over
from kilter.core.units import show_fraction
from kilter.device.protocol import Device
from kilter.lease.lease import Lease
from kilter.sharing.plan.contracts import (
    ContractedJob,
    StepTimes,
    bounds,
    slowest,
    step_times,
    work_ratio,
)

SHARED_BLOCK_S = 4.0
BLOCK_STEPS = 8
"""A block is over when it has lasted so long and each job has made so many steps."""
SETTLE_S = 1.0
"""After a setting is in force: steps that began before belong to neither."""
MOST_SHARED_BLOCK_S = 300.0
"""A job without steps for that long is nothing to compare with."""
HOLD_S = 60.0
"""A lower setting has this deadline; it is renewed while the daemon runs."""
RENEW_S = 10.0

_Jobs = tuple[ContractedJob, ...]
_Wait = Generator[None, None, None]


class _Changed(Exception):
    """Other jobs, ratios or contracts than the search began with."""


class SharedClocks:
    """Governs while `tick` is called. `said` is the sentence for the user, empty while nobody has a
    contract; `setting` is what stands.

    `quiet_s` is for how long jobs and ratios have to stay as they are before a search begins."""

    def __init__(self, devices: Sequence[Device], default: float | None, quiet_s: float) -> None:
        self._devices, self._default, self._quiet_s = tuple(devices), default, quiet_s
        self._leases: list[Lease] = []
        self._now_s = 0.0
        self._renewed_s = 0.0
        self._jobs: _Jobs = ()
        self.said = ""
        self._flow = self._govern()

    @property
    def setting(self) -> Setting | None:
        """What is in force; None while the GPUs are not held."""
        return self._leases[0].setting if self._leases else None

    def tick(self, now_s: float, jobs: Sequence[ContractedJob]) -> None:
        """To be called some times a second. Never raises a device's error: the clocks are then as
        found, and `said` tells why."""
        self._now_s, self._jobs = now_s, tuple(jobs)
        try:
            self._check()
            next(self._flow, None)
        except KilterError as error:
            self._end(f"clocks stay as found: {error}")

    def close(self) -> None:
        """Put back what was found."""
        self._end("")

    def _end(self, said: str) -> None:
        self._flow.close()
        self.said = said
        self._let_go()

    def _let_go(self) -> None:
        for lease in self._leases:
            lease.restore()
        self._leases = []

    def _check(self) -> None:
        if not self._leases or self._now_s - self._renewed_s < RENEW_S:
            return
        self._renewed_s = self._now_s
        for lease, device in zip(self._leases, self._devices, strict=True):
            lease.verify(device.sample())
            lease.renew(hold_s=HOLD_S)

    # The search.

    def _govern(self) -> _Wait:
        while True:
            jobs = yield from self._quiet()
            allowed = bounds(jobs, self._default)
            if isinstance(allowed, str):
                self._let_go()
                asked = any(job.max_slowdown is not None for job in jobs)
                self.said = f"clocks stay as found: {allowed}" if asked else ""
                while _key(self._jobs) == _key(jobs):
                    yield
                continue
            try:
                yield from self._search(jobs, allowed)
            except _Changed:
                self._set(Setting())
                self.said = "clocks are as found: jobs or ratios have changed"

    def _quiet(self) -> Generator[None, None, _Jobs]:
        """Until there are jobs that have stayed as they are."""
        seen, since_s = self._jobs, self._now_s
        while True:
            if not self._jobs:
                self._let_go()
                self.said = ""
            if _key(self._jobs) != _key(seen):
                seen, since_s = self._jobs, self._now_s
            elif seen and self._now_s - since_s >= self._quiet_s:
                return seen
            yield

    def _search(self, jobs: _Jobs, allowed: dict[str, float]) -> _Wait:
        self._take()
        strictest = min(allowed, key=allowed.__getitem__)
        bound = math.expm1(allowed[strictest])
        contract = f"the strictest contract is that of {strictest}, {show_fraction(bound)}"
        found = self._leases[0].found
        clocks = [device.sample().sm_clock_hz for device in self._devices]
        sustained = Setting(sm_clock_hz=max((clock for clock in clocks if clock), default=None))
        supported = self._devices[0].supported()
        if any(device.supported() != supported for device in self._devices):
            raise NotSupported("the GPUs are of different kinds, and all get one setting")
        settings = space(found, sustained, supported)
        governor = Governor(settings, Goal(max_slowdown=bound), shares=False)
        pairs = _Pairs(allowed)
        orders = governor.run()
        order = next(orders)
        while True:
            if order.phase is Phase.HOLD:
                kept, why = governor.choice.setting, governor.choice.reason
                clocks_now = "as found" if kept == found else str(kept)
                self.said = f"clocks held: {clocks_now} ({why}); {contract}"
            else:
                self.said = f"clocks: settings are tried; {contract}"
            times, power_w = yield from self._block(jobs, changes(found, order.setting))
            order = orders.send(pairs.outcome(order, times, power_w))

    def _take(self) -> None:
        if not self._leases:
            self._leases = [Lease(device) for device in self._devices]
            for lease in self._leases:
                lease.__enter__()

    def _set(self, setting: Setting) -> None:
        for lease in self._leases:
            lease.set(setting, hold_s=HOLD_S)

    def _block(
        self, jobs: _Jobs, setting: Setting
    ) -> Generator[None, None, tuple[StepTimes, float | None]]:
        """Step times of all jobs and power of all GPUs in a stretch under a setting."""
        if any(lease.setting != over(lease.found, setting) for lease in self._leases):
            self._set(setting)
            yield from self._wait(jobs, SETTLE_S)
            yield from self._steps(jobs, self._jobs, 1)
        before, begun_s, energy_j = self._jobs, self._now_s, self._energy_j()
        yield from self._wait(jobs, SHARED_BLOCK_S)
        times = yield from self._steps(jobs, before, BLOCK_STEPS)
        after_j, length_s = self._energy_j(), self._now_s - begun_s
        if energy_j is None or after_j is None or after_j <= energy_j:
            return times, None
        return times, (after_j - energy_j) / length_s

    def _wait(self, jobs: _Jobs, seconds: float) -> _Wait:
        end_s = self._now_s + seconds
        while self._now_s < end_s:
            yield
            if _key(self._jobs) != _key(jobs):
                raise _Changed

    def _steps(
        self, jobs: _Jobs, before: _Jobs, steps: int
    ) -> Generator[None, None, dict[str, float]]:
        end_s = self._now_s + MOST_SHARED_BLOCK_S
        while (times := step_times(before, self._jobs, steps)) is None:
            yield from self._wait(jobs, 0.1)
            if self._now_s > end_s:
                raise _Changed
        return times

    def _energy_j(self) -> float | None:
        read = [device.sample(energy=True).energy_j for device in self._devices]
        known = [energy_j for energy_j in read if energy_j is not None]
        return sum(known) if len(known) == len(read) else None


class _Pairs:
    """Turns what was seen of blocks into what the governor compares. The first block of a pair
    counts 1; the second is told by how much it differs."""

    def __init__(self, allowed: dict[str, float]) -> None:
        self._allowed = allowed
        self._pair: int | None = None
        self._first: tuple[StepTimes, float | None] = ({}, None)
        self._level: StepTimes | None = None

    def outcome(self, order: Order, times: StepTimes, power_w: float | None) -> BlockOutcome:
        if order.pair is None:
            self._level = self._level or times
            longer = math.exp(work_ratio(times, self._level))
            return BlockOutcome(iteration_s=longer, energy_j=power_w and power_w * longer)
        if order.pair != self._pair:
            self._pair, self._first = order.pair, (times, power_w)
            return BlockOutcome(iteration_s=1.0, energy_j=power_w)
        first, first_w = self._first
        arms = (first, times) if order.baseline else (times, first)
        sign = -1.0 if order.baseline else 1.0
        late = sign * slowest(*arms, self._allowed)
        energy_j = power_w and power_w * math.exp(work_ratio(times, first))
        return BlockOutcome(iteration_s=math.exp(late), energy_j=first_w and energy_j)


def _key(jobs: _Jobs) -> tuple[object, ...]:
    """What may not change while blocks are compared."""
    return tuple((job.name, job.ratios, job.max_slowdown) for job in jobs)
