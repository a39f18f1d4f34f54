"""`kilter bench sections --scenario switch_times`: the calibrator, simulated or on a GPU."""

from __future__ import annotations

import os

import msgspec

from kilter.app.cli.output import print_json
from kilter.clocks.calibrator import KernelBench, SimulatedKernels, calibrate
from kilter.clocks.plan.switching import Calibration
from kilter.clocks.section_card import card_of
from kilter.clocks.section_store import SectionStore
from kilter.core.errors import DeviceError
from kilter.core.label import Label
from kilter.core.setting import DeviceInfo
from kilter.core.trace import IterationTrace, Kind, Operation
from kilter.core.units import show_clock, show_time
from kilter.device.find import find
from kilter.device.sim.cards import profile_of, stand_in_of
from kilter.device.sim.gpu import SimGpu
from kilter.device.sim.profile import Profile, load_profile
from kilter.lease.lease import Lease
from kilter.observe.gpu_kernels import spin_kernels

KERNEL_FLOPS = 5e11
"""A kernel takes a millisecond or so: a switch is seen at the beginning of the next kernel."""


def tell_switches(profile: Profile | None, *, seed: int, as_json: bool, keep: bool = False) -> int:
    """Measure, print the percentiles of each clock in both directions, and `keep` them for the runs
    on that device. Without a profile, the GPU of this process is set."""
    info, profile, found = measured_on_gpu() if profile is None else measured(profile, seed=seed)
    kept = SectionStore(os.environ).keep_switches(info, found) if keep else None
    if as_json:
        fields = {"scenario": "switch_times", "device": profile.name}
        print_json("kilter.bench.sections/1", found.label, fields | msgspec.to_builtins(found))
        return 0
    row = "{:<10} {:<5} {:>3} {:>9} {:>9} {:>9}  {:>9}  {}"
    print(row.format("clock", "to", "n", "p50", "p95", "p99", "call p95", "kept back by"))
    for s in found.switches:
        times = [show_time(t) for t in (s.p50_s, s.p95_s, s.p99_s)]
        call = "-" if s.call is None else show_time(s.call.p95_s)
        to = "low" if s.down else "found"
        why = ", ".join(s.reasons) or "-"
        print(row.format(show_clock(s.sm_clock_hz), to, s.n, *times, call, why))
    down, up = (found.latency(down=down) for down in (True, False))
    if down is not None and up is not None:
        even_s = down.quantile(0.95) + up.quantile(0.95)
        assumed = show_time(card_of(profile).break_even_s)
        print(f"\nBreak-even {show_time(even_s)}, by the profile {assumed} [{found.label.value}]")
    if kept is not None:
        print(f"Kept for runs on {info.uuid}: {kept}")
    return 0


Measured = tuple[DeviceInfo, Profile, Calibration]


def measured_on_gpu() -> Measured:
    """The same on the GPU of this process, with the kernels of PyTorch. Raises device errors."""
    device = find("nvml", environ=os.environ)
    info = device.info()
    name = profile_of(info.name) or stand_in_of(info.name)
    if name is None:
        raise DeviceError(f"the clocks of sections on {info.name} are not known: no profile of it")
    if not info.can_set:
        raise DeviceError(f"switch times need clocks to be set: {info.refusal or 'not allowed'}")
    profile = load_profile(name)
    clocks = [hz for level in card_of(profile).levels if (hz := level.sm_clock_hz)]
    kernels = spin_kernels(info.uuid)
    with Lease(device) as lease:
        bench = KernelBench(device.info, kernels, lease.set, device.sample)
        return info, profile, calibrate(bench, clocks)


def measured(profile: Profile, *, seed: int) -> Measured:
    """The clocks that sections are planned with, on a simulated GPU, under a lease."""
    kernel = Operation(
        name="matmul", kind=Kind.FORWARD, start_s=0.0, duration_s=1e-3, flops=KERNEL_FLOPS
    )
    trace = IterationTrace(
        iteration_s=kernel.duration_s,
        operations=(kernel,),
        timeline="gpu",
        device=profile.name,
        label=Label.SIMULATED,
    )
    gpu = SimGpu(profile, seed=seed, index=seed)  # that of the rank of this number
    clocks = [hz for level in card_of(profile).levels if (hz := level.sm_clock_hz)]
    with Lease(gpu) as lease:
        bench = KernelBench(gpu.info, SimulatedKernels(gpu, trace), lease.set, gpu.sample)
        return gpu.info(), profile, calibrate(bench, clocks)
