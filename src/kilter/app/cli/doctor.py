"""`kilter doctor`: what is there, what is allowed, what to do about the rest. Changes nothing."""

from __future__ import annotations

import argparse
import enum
import itertools
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec

import kilter
from kilter.app.fields import taken
from kilter.core.errors import (
    DeviceError,
    DeviceHung,
    DeviceLost,
    DriverMismatch,
    FileError,
    NoDevice,
    UsageError,
)
from kilter.core.label import Label
from kilter.core.setting import DeviceInfo, Sample, Supported, Throttle
from kilter.core.units import MHZ, show_time
from kilter.device.daemon import DaemonDevice
from kilter.device.find import daemon_socket, visible
from kilter.device.nvidia import Gpu, NvidiaDevice, Survey, survey
from kilter.device.protocol import Device
from kilter.lease.baseline import BUSY_UTILISATION
from kilter.lease.journal import journals, state_directory
from kilter.lease.risks import risks
from kilter.observe import torch_internals
from kilter.observe.imports import torch_version
from kilter.observe.torch_internals import Internal

HELP = "What is there, what is allowed, and what to do about the rest. Sets nothing."

EPILOG = """\
Looks at the GPUs that this process may use (CUDA_VISIBLE_DEVICES), for about a second.

exit codes, as health checkers have them:
  0 fine   1 warning (kilter works, with limits)   2 critical (repair first)   3 unknown

examples:
  kilter doctor
  kilter doctor --json | jq '.checks[] | select(.status != "fine")'
"""

DOCTOR_CHOICES = ("auto", "nvml", "null")
IMPORT_S = 60.0
"""An import of torch that takes longer counts as hung."""
WATCH_S = 1.0
"""How long the energy counter is compared with the power readings."""
SAMPLE_EVERY_S = 0.02
POWER_DISAGREEMENT = 0.25
"""Counter and integral of power may differ by this. The counter moves every 0.1 s, so a second
alone gives 10 %."""

WITHOUT_GPU = "without a GPU, --device sim:v100 rehearses on a simulated one"

OPERATOR = """the administrator lets users set clocks without root, on the host, as root, by
                kilter daemon --help                   (shows a policy: /etc/kilter/daemon.toml)
                kilter daemon units /etc/systemd/system
                systemctl daemon-reload && systemctl enable --now kilter.service"""

CONTROLLERS: Mapping[str, str] = {
    "nv-hostengine": "DCGM; its profiling and its power policies use what kilter uses",
    "dcgm-exporter": "DCGM's exporter; only its profiling metrics disturb",
    "nvidia-pstated": "it sets clocks; stop it, or let kilter observe only",
    "lactd": "LACT may set clocks and limits; stop it, or let kilter observe only",
    "zeusd": "zeus may set clocks and limits; stop it, or let kilter observe only",
    "geopmd": "GEOPM may set clocks and limits; stop it, or let kilter observe only",
}
"""It says, by the name of a process, who that is. Only processes of this container can be seen."""


class Status(enum.IntEnum):
    """A finding's weight; the value is the exit code."""

    FINE = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


WORST_FIRST = (Status.CRITICAL, Status.WARNING, Status.UNKNOWN, Status.FINE)


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One finding."""

    name: str
    status: str
    found: str
    advice: str | None = None


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU; only `index`, `uuid` and `name` are known of those that are not ours. Its
    many attributes are what `kilter doctor --json` prints."""

    index: int
    uuid: str | None
    name: str
    visible: bool
    can_set: bool | None = None
    refusal: str | None = None
    sm_clocks_hz: tuple[float, ...] | None = None
    memory_clocks_hz: tuple[float, ...] | None = None
    power_limits_w: tuple[float, ...] | None = None
    power_limit_w: float | None = None
    power_w: float | None = None
    sm_clock_hz: float | None = None
    sm_utilisation: float | None = None
    energy_method: str | None = None
    """It is the one to trust here, `counter` or `power integral`."""
    sensor_period_s: float | None = None
    memory_bytes: int | None = None
    persistence: bool | None = None


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    schema: str = "kilter.doctor/1"
    label: str = Label.MEASURED.value
    status: str
    kilter: str
    python: str
    torch: str | None
    driver: str | None
    gpus: tuple[GpuReport, ...]
    checks: tuple[Check, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="one JSON object, SI units, null unknown"
    )
    parser.add_argument(
        "--device", default="auto", metavar="auto|nvml|null", help="where to look (default: auto)"
    )


def run(arguments: argparse.Namespace) -> int:
    found = examine(arguments.device, os.environ)
    print(msgspec.json.encode(found).decode() if arguments.json else show(found))
    return int(Status[found.status.upper()])


def examine(spec: str, environ: Mapping[str, str]) -> Examination:
    """Look at everything once. Raises `UsageError` for an unknown `spec`."""
    if spec not in DOCTOR_CHOICES:
        raise UsageError(f"--device {spec!r}: choose one of {', '.join(DOCTOR_CHOICES)}")
    torch = torch_version()
    checks = [_torch_check(torch), *_internals(torch), *_journals(environ), *_controllers()]
    seen: Survey | None = None
    gpus: tuple[GpuReport, ...] = ()
    if spec != "null":
        try:
            seen = survey()
            mine = visible(seen.gpus, environ)
            if not mine:
                checks.append(_check("gpus", Status.WARNING, "no GPU is visible to this process"))
            look = partial(_gpu_report, mine=mine)
            with ThreadPoolExecutor(max_workers=max(1, len(mine))) as pool:
                looks = list(pool.map(look, seen.gpus))
            gpus = tuple(report for report, _ in looks)
            checks.extend(check for _, found in looks for check in found)
            checks.extend(_ways(gpus, environ))
        except NoDevice as error:
            checks.append(_check("driver", Status.WARNING, str(error), WITHOUT_GPU))
        except DeviceError as error:
            checks.append(_check("driver", _gravity(error), str(error)))
    status = next(s for s in WORST_FIRST if any(c.status == s.name.lower() for c in checks))
    return Examination(
        status=status.name.lower(),
        kilter=kilter.__version__,
        python=platform.python_version(),
        torch=torch,
        driver=None if seen is None else seen.driver,
        gpus=gpus,
        checks=tuple(checks),
    )


def show(found: Examination) -> str:
    """For people: what was found, and a line of advice below what is not fine."""
    lines = [
        f"kilter {found.kilter}, Python {found.python}, torch {found.torch or 'not installed'}, "
        f"driver {found.driver or 'unknown'}"
    ]
    for check in found.checks:
        lines.append(f"  {check.status:<9}{check.name}: {check.found}")
        if check.advice is not None:
            lines.append(f"  {'':<9}-> {check.advice}")
    return "\n".join([*lines, f"{found.status}"])


def _gpu_report(gpu: Gpu, mine: Sequence[Gpu]) -> tuple[GpuReport, list[Check]]:
    """One GPU of the machine; opened only if it is ours."""
    name = f"gpu {gpu.index}"
    known = GpuReport(index=gpu.index, uuid=gpu.uuid or None, name=gpu.name, visible=gpu in mine)
    if not known.visible:
        return known, []
    if gpu.fault is not None:
        return known, [_check(name, Status.CRITICAL, gpu.fault)]
    with closing(NvidiaDevice(gpu.uuid)) as device:
        try:
            return _examine(name, gpu, device)
        except DeviceError as error:
            return known, [_check(name, _gravity(error), str(error))]


def _examine(name: str, gpu: Gpu, device: Device) -> tuple[GpuReport, list[Check]]:
    """One GPU of ours."""
    info, supported, limit_w = device.info(), device.supported(), device.settings().power_limit_w
    samples = _watch(device)
    now = samples[-1]
    method, energy_check = _energy_method(name, info, samples)
    checks = [
        _setting_check(name, info, supported),
        energy_check,
        *_held(name, now, supported, limit_w),
    ]
    if gpu.persistence is False:
        text = "persistence mode is off: clocks and limits are forgotten between jobs"
        advice = "as root: nvidia-smi -pm 1, or run nvidia-persistenced"
        checks.append(_check(name, Status.WARNING, text, advice))
    report = GpuReport(
        index=gpu.index,
        visible=True,
        power_limit_w=limit_w,
        energy_method=method,
        persistence=gpu.persistence,
        **taken(info, _OF_INFO),
        **taken(supported, ("sm_clocks_hz", "memory_clocks_hz", "power_limits_w")),
        **taken(now, ("power_w", "sm_clock_hz", "sm_utilisation")),
    )
    return report, checks


_OF_INFO = ("uuid", "name", "can_set", "refusal", "sensor_period_s", "memory_bytes")


def _ways(gpus: Sequence[GpuReport], environ: Mapping[str, str]) -> Iterator[Check]:
    """Which way settings take, and what makes sure that they come back."""
    mine = [gpu for gpu in gpus if gpu.visible and gpu.uuid and gpu.can_set is not None]
    path = daemon_socket(environ)
    for gpu in mine:
        name = f"way to gpu {gpu.index}"
        refusal = None if path is None else _refused_by_daemon(str(gpu.uuid), path)
        if path is not None and refusal is None:
            text = f"kilter daemon sets it for you, and puts it back ({path})"
            yield _check(name, Status.FINE, text)
        elif gpu.can_set:
            text = "this process sets it, and a watcher process puts it back"
            if refusal is not None:
                text = f"{text}; {refusal}"
            dangers = risks(environ)
            status = Status.WARNING if dangers else Status.FINE
            yield _check(name, status, "; ".join([text, *dangers]), OPERATOR if dangers else None)
        else:
            text = f"none: {refusal or 'no kilter daemon here, and this process may not set it'}"
            yield _check(name, Status.WARNING, text, None if path else OPERATOR)


def _refused_by_daemon(uuid: str, path: Path) -> str | None:
    """Why the daemon would not set this GPU for us; asks, and sets nothing."""
    with closing(DaemonDevice(uuid, reader=NvidiaDevice(uuid), socket_path=path)) as device:
        return device.info().refusal


def _watch(device: Device) -> list[Sample]:
    """Samples over `WATCH_S`; the first and the last one with the energy counter."""
    samples = [device.sample(energy=True)]
    while samples[-1].t_s < samples[0].t_s + WATCH_S:
        time.sleep(SAMPLE_EVERY_S)
        samples.append(device.sample())
    return [*samples, device.sample(energy=True)]


def _energy_method(
    name: str, info: DeviceInfo, samples: Sequence[Sample]
) -> tuple[str | None, Check]:
    """Which way to measure energy can be trusted here: counter and power integral of one second
    are compared, since a counter may be stuck, or count the CPU of the same module."""
    known = [(s.t_s, s.power_w) for s in samples if s.power_w is not None]
    integral_j = sum((b - a) * (p + q) / 2 for (a, p), (b, q) in itertools.pairwise(known))
    first_j, last_j = samples[0].energy_j, samples[-1].energy_j
    if first_j is None or last_j is None:
        if not known:
            return None, _check(name, Status.WARNING, "no power sensor: energy stays unknown")
        text = "no energy counter: energy is the integral of power"
        return "power integral", _check(name, Status.FINE, text)
    counted_j = last_j - first_j
    period = "unknown" if info.sensor_period_s is None else show_time(info.sensor_period_s)
    text = (
        f"energy counter {counted_j:.1f} J, power integral {integral_j:.1f} J over one second; "
        f"sensors change every {period}"
    )
    if known and abs(counted_j - integral_j) > POWER_DISAGREEMENT * integral_j:
        advice = "the counter is stuck or counts the whole module: trust the integral of power"
        return "power integral", _check(name, Status.WARNING, text, advice)
    return "counter", _check(name, Status.FINE, text)


def _setting_check(name: str, info: DeviceInfo, supported: Supported) -> Check:
    sm, memory, limits = (
        supported.sm_clocks_hz,
        supported.memory_clocks_hz,
        supported.power_limits_w,
    )
    knobs = [f"SM clock {sm[0] / MHZ:.0f}-{sm[-1] / MHZ:.0f} MHz ({len(sm)})"] if sm else []
    if memory:
        knobs.append(
            f"memory clock {memory[0] / MHZ:.0f}-{memory[-1] / MHZ:.0f} MHz ({len(memory)})"
        )
    if limits:
        knobs.append(f"limit {limits[0]:.0f}-{limits[-1]:.0f} W")
    text = f"{info.name}: {', '.join(knobs) or 'no knob'}"
    if info.can_set:
        return _check(name, Status.FINE, f"{text}; may be set")
    advice = "kilter run --dry-run does all but setting, and says what it would set"
    return _check(name, Status.WARNING, f"{text}; may not be set: {info.refusal}", advice)


def _held(
    name: str, sample: Sample, supported: Supported, limit_w: float | None
) -> Iterator[Check]:
    """Signs that somebody else controls this GPU: there is no call that tells a clock lock."""
    largest_w = max(supported.power_limits_w, default=None)
    if limit_w is not None and largest_w is not None and limit_w < largest_w:
        text = f"power limit {limit_w:.0f} W is below the largest, {largest_w:.0f} W"
        yield _check(name, Status.FINE, f"{text}: kept, and restored, as found")
    busy = (sample.sm_utilisation or 0.0) >= BUSY_UTILISATION
    clock_hz, clocks_hz = sample.sm_clock_hz, supported.sm_clocks_hz
    if busy and clock_hz is not None and clocks_hz and clock_hz < clocks_hz[-1]:
        reasons = [reason.value for reason in sample.throttle or ()]
        if not reasons or reasons == [Throttle.CLOCK_SETTING.value]:
            yield _check(
                name,
                Status.WARNING,
                f"busy at {clock_hz / MHZ:.0f} of {clocks_hz[-1] / MHZ:.0f} MHz without a reason",
                "somebody may have locked its clocks; if nobody should: nvidia-smi -rgc, as root",
            )


def _journals(environ: Mapping[str, str]) -> Iterator[Check]:
    """Settings that a run has written down to put back: of a live one, or left by a dead one."""
    try:
        for entry in journals(state_directory(environ)):
            journal = entry.journal
            if journal is None:
                yield _check("lease", Status.CRITICAL, entry.fault or f"{entry.uuid}: damaged")
                continue
            text = f"{entry.uuid}: process {journal.pid} has set {journal.last}"
            if entry.alive:
                yield _check("lease", Status.FINE, f"{text}; it is held, and will be put back")
            else:
                text = f"{text} and is dead; found was {journal.found}"
                yield _check("lease", Status.CRITICAL, text, "kilter restore")
    except FileError as error:
        yield _check("lease", Status.CRITICAL, str(error))


def _controllers() -> Iterator[Check]:
    """Other programs that set clocks or own the counters, by process name."""
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            process = comm.read_text().strip()
        except OSError:  # it has ended meanwhile
            continue
        if process in CONTROLLERS:
            text = f"{process} is running (process {comm.parent.name})"
            yield _check("controllers", Status.WARNING, text, CONTROLLERS[process])


def _torch_check(version: str | None) -> Check:
    if version is None:
        return _check("torch", Status.WARNING, "not installed in this Python", "pip install torch")
    if version.endswith("+cpu"):
        text = f"{version} has no GPU support"
        return _check("torch", Status.WARNING, text, "install a CUDA build to use the GPU")
    return _check("torch", Status.FINE, version)


def _internals(version: str | None) -> Iterator[Check]:
    """Private names of torch that kilter builds on and that the installed one does not have. Torch
    is imported in a process of its own: it takes a while, and may be broken."""
    if version is None:
        return
    command = [sys.executable, "-m", torch_internals.__name__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S)
        gone = msgspec.json.decode(done.stdout, type=list[Internal])
    except (OSError, subprocess.TimeoutExpired) as error:
        yield _check("torch", Status.WARNING, f"{version} could not be looked at: {error}")
        return
    except msgspec.MsgspecError:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield _check("torch", Status.WARNING, f"{version} cannot be imported: {why}")
        return
    for entry in gone:
        text = f"{version} has no {entry.path}: {entry.without}"
        yield _check("torch", Status.WARNING, text, f"use a PyTorch of {torch_internals.SUPPORTED}")


def _gravity(error: DeviceError) -> Status:
    broken = isinstance(error, DriverMismatch | DeviceLost | DeviceHung)
    return Status.CRITICAL if broken else Status.UNKNOWN


def _check(name: str, status: Status, found: str, advice: str | None = None) -> Check:
    return Check(name=name, status=status.name.lower(), found=found, advice=advice)
