"""Measures how long a device's clock takes to change, by effect: equal kernels change their length.

Runs on whatever can set a clock and time kernels on the device's own timeline (`KernelBench`).
Sensors are not asked: they show the past.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kilter.clocks.plan.switching import (
    Calibration,
    SeenSwitch,
    SwitchTimes,
    effect_s,
    switch_times,
)
from kilter.core.setting import DeviceInfo, Sample, Setting
from kilter.core.trace import IterationTrace
from kilter.device.sim.gpu import SimGpu
from kilter.observe.gpu_kernels import SpinKernels

REPETITIONS = 20
KERNELS_BEFORE = 20
LONGEST_SWITCH_S = 1.0
"""A switch that takes longer is not seen, on a device that does not say how long they take."""
LONGEST = 5.0
"""On a device that does say, a switch that takes longer than so many usual times is not seen."""


class SimulatedKernels:
    """As `SpinKernels`, on a simulated GPU in virtual time."""

    def __init__(self, gpu: SimGpu, kernel: IterationTrace) -> None:
        self._gpu = gpu
        self._work = gpu.work(kernel)

    def now_s(self) -> float:
        return self._gpu.now_s

    def kernel(self) -> tuple[float, float]:
        begin_s = self._gpu.now_s
        self._gpu.run(self._work)
        return begin_s, self._gpu.now_s


class KernelBench:
    """A device on which equal short kernels run one after the other. `set_` is that of the GPU's
    lease, or the GPU's own; a switch begins with the call, as it does for the conductor."""

    def __init__(
        self,
        info: Callable[[], DeviceInfo],
        kernels: SpinKernels | SimulatedKernels,
        set_: Callable[[Setting], None],
        sample: Callable[[], Sample],
    ) -> None:
        self.info = info
        self._sample = sample
        self.kernel = kernels.kernel
        self._now_s = kernels.now_s
        self._set = set_

    def set(self, setting: Setting) -> tuple[float, float | None]:
        """Set, and return the time of the command on the device's timeline, and how long the call
        took to return; None in virtual time, where it takes none."""
        commanded_s = self._now_s()
        self._set(setting)
        return commanded_s, (self._now_s() - commanded_s) or None

    def reasons(self) -> tuple[str, ...]:
        """What keeps the clock below what was asked, now."""
        return tuple(reason.value for reason in self._sample().throttle or ())


def calibrate(
    bench: KernelBench, sm_clocks_hz: Sequence[float], *, repetitions: int = REPETITIONS
) -> Calibration:
    """Both directions of every clock, from and to the device's own. Ends at the found setting."""
    switches: list[SwitchTimes] = []
    for hz in sm_clocks_hz:
        low = Setting(sm_clock_hz=hz)
        seen: dict[bool, list[SeenSwitch]] = {True: [], False: []}
        for _ in range(repetitions):
            for down in (True, False):
                seen[down].append(_switch(bench, low if down else Setting()))
        for down, switched in seen.items():
            found = switch_times(switched, hz, down=down)
            if found is not None:
                switches.append(found)
    info = bench.info()
    return Calibration(
        uuid=info.uuid,
        driver=info.driver,
        vbios=info.vbios,
        label=info.label,
        switches=tuple(switches),
    )


def _switch(bench: KernelBench, setting: Setting) -> SeenSwitch:
    kernels = [bench.kernel() for _ in range(KERNELS_BEFORE)]
    commanded_s, call_s = bench.set(setting)
    usual_s = bench.info().switch_latency_s
    longest_s = LONGEST_SWITCH_S if usual_s is None else LONGEST * usual_s
    while kernels[-1][1] < commanded_s + longest_s:
        kernels.append(bench.kernel())
    return SeenSwitch(
        effect_s=effect_s(kernels, commanded_s), call_s=call_s, reasons=bench.reasons()
    )
