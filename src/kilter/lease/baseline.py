"""What the operator wants each GPU to stand at when nobody governs it.

NVML cannot tell a locked clock, and a limit that a dead run has left looks like an administrator's.
With a baseline both are known: a lease begins only where what is found agrees with it, so that no
job ever takes the last one's leftovers for what was found, and a lock is put back that nobody can
read. A TOML file that root writes, by UUID:

    [gpu."GPU-5f0c..."]
    name = "NVIDIA H200"
    power-limit-w = 600.0
    sm-clock-mhz = 1410.0        # only where the operator has capped it
    persistence = true
"""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kilter.core.errors import FileError, Held
from kilter.core.files import read_file
from kilter.core.setting import Setting, Throttle
from kilter.core.units import MHZ
from kilter.device.protocol import Device

BASELINE = Path("/etc/kilter/baseline.toml")
BASELINE_VARIABLE = "KILTER_BASELINE"
MAX_BASELINE_BYTES = 2**20
LIMIT_TOLERANCE_W = 1.0
BUSY_UTILISATION = 0.9
"""From this SM utilisation on a low clock needs a reason."""


class GpuBaseline(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"
):
    """One GPU. A clock that is None is left to the device's own governor."""

    name: str = ""
    power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    persistence: bool | None = None

    @property
    def setting(self) -> Setting:
        sm, memory = self.sm_clock_mhz, self.memory_clock_mhz
        return Setting(
            sm_clock_hz=None if sm is None else sm * MHZ,
            memory_clock_hz=None if memory is None else memory * MHZ,
            power_limit_w=self.power_limit_w,
        )


class Baseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file: GPUs by UUID."""

    gpu: dict[str, GpuBaseline] = {}


def baseline_path(environ: Mapping[str, str]) -> Path:
    return Path(environ.get(BASELINE_VARIABLE) or BASELINE)


def load(path: Path) -> Baseline:
    """The operator's baseline, empty if there is none. Raises `FileError`: the file must belong to
    root (or this user) and be writable by its owner alone."""
    try:
        raw = read_file(path, max_bytes=MAX_BASELINE_BYTES, owners={0, os.geteuid()})
        return msgspec.convert(tomllib.loads(raw.decode()), Baseline)
    except FileNotFoundError:
        return Baseline()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{path}: not a TOML file ({error})") from error
    except msgspec.ValidationError as error:
        raise FileError(f"{path}: malformed baseline ({error})") from error


def of_gpu(uuid: str, environ: Mapping[str, str]) -> GpuBaseline | None:
    """Raises `FileError`."""
    return load(baseline_path(environ)).gpu.get(uuid)


def as_toml(baseline: Baseline) -> bytes:
    parts = ["# What each GPU should stand at when nobody governs it: kilter baseline --help"]
    for uuid, gpu in sorted(baseline.gpu.items()):
        parts.append(f"\n[gpu.{msgspec.json.encode(uuid).decode()}]")
        for key, value in msgspec.to_builtins(gpu).items():
            if value is not None:
                parts.append(f"{key} = {msgspec.json.encode(value).decode()}")
    return ("\n".join(parts) + "\n").encode()


LOOKS, LOOK_EVERY_S = 6, 0.1
"""A clock that a power limit or heat keeps down moves meanwhile; a locked one does not."""


def refuse_unknown_lock(device: Device, uuid: str, baseline: GpuBaseline | None) -> None:
    """Raises `Held` if somebody seems to have locked the SM clock: busy, steady below the highest
    clock, and the driver tells no reason but a setting. No call tells the value, so it could not be
    put back. With a baseline there is nothing to guess."""
    clocks_hz = device.supported().sm_clocks_hz
    if baseline is not None or not clocks_hz:
        return
    seen: set[float] = set()
    for look in range(LOOKS):
        time.sleep(LOOK_EVERY_S if look else 0.0)
        sample = device.sample()
        clock_hz, reasons = sample.sm_clock_hz, sample.throttle
        busy = (sample.sm_utilisation or 0.0) >= BUSY_UTILISATION
        if clock_hz is None or reasons is None or clock_hz >= clocks_hz[-1] or not busy:
            return
        seen.add(clock_hz)
        if len(seen) > 1 or not set(reasons) <= {Throttle.CLOCK_SETTING}:
            return
    raise Held(
        f"{uuid}: somebody seems to have locked the SM clock at {seen.pop() / MHZ:.0f} MHz, which "
        "no driver call tells, so that it could not be put back. As root: kilter baseline save "
        "--sm-clock-mhz MHZ if it is to stay locked, else nvidia-smi -rgc and kilter baseline save"
    )


def compared(uuid: str, found: Setting, baseline: GpuBaseline | None) -> Setting:
    """What is found, with the locks that only the baseline tells. Raises `Held` if the power limit
    is another one than the baseline's: what is wrong then is for the operator to say."""
    if baseline is None:
        return found
    limit_w, wanted_w = found.power_limit_w, baseline.power_limit_w
    if limit_w is not None and wanted_w is not None and abs(limit_w - wanted_w) > LIMIT_TOLERANCE_W:
        raise Held(
            f"{uuid}: the power limit is {limit_w:g} W, and the operator's baseline says "
            f"{wanted_w:g} W: left by a run that nobody knows of, or changed by hand. As root: "
            "kilter baseline restore puts it back, kilter baseline save makes it the baseline"
        )
    wanted = baseline.setting
    return found.with_(sm_clock_hz=wanted.sm_clock_hz, memory_clock_hz=wanted.memory_clock_hz)
