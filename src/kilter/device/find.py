"""Which device is this process's own: `--device` and the environment to one `Device`.

CUDA numbers the GPUs that `CUDA_VISIBLE_DEVICES` leaves visible; NVML knows all of them and has
numbers of its own. They meet in the UUID, and only a GPU that this process may use is ever opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kilter.core.daemon_protocol import SOCKET, SOCKET_VARIABLE
from kilter.core.errors import DeviceError, NoDevice, UsageError
from kilter.device.amd import AmdDevice, list_uuids
from kilter.device.daemon import DaemonDevice
from kilter.device.null import NullDevice
from kilter.device.nvidia import Gpu, NvidiaDevice, survey
from kilter.device.protocol import Device

CHOICES = ("auto", "nvml", "amdsmi", "null")


def find(
    spec: str,
    *,
    local_rank: int | None = None,
    uuid: str | None = None,
    environ: Mapping[str, str],
    nvml: Any | None = None,
) -> Device:
    """The device of this process.

    `auto` is the GPU if there is a usable one, else the null device, which tells the reason.
    `uuid` is what the framework itself says about its current GPU, and then nothing is guessed;
    without it the GPU is the visible one at `local_rank` (from `LOCAL_RANK` or `SLURM_LOCALID` if
    not given). `nvml` stands in for the module `pynvml`. `amdsmi` is the AMD GPU of a machine that
    has one.

    Raises `UsageError` for another `spec`; with `nvml` and `amdsmi` also `NoDevice`,
    `DriverMismatch` and `DeviceHung`.
    """
    if spec not in CHOICES:
        raise UsageError(f"device {spec!r} is not known here: {', '.join(CHOICES)}, or sim:NAME")
    if spec == "null":
        return NullDevice()
    if spec == "amdsmi":
        return _only_amd_gpu()
    try:
        if uuid is None:
            mine = _mine(environ, nvml)
            # Slurm and others give each process its own GPU, which CUDA then calls 0.
            uuid = _usable(mine, 0 if len(mine) == 1 else _rank(local_rank, environ))
        return _settable(NvidiaDevice(uuid, nvml=nvml), uuid, environ)
    except DeviceError as error:
        if spec == "auto":
            return NullDevice(str(error))
        raise


def _only_amd_gpu() -> Device:
    """Which of several GPUs HIP gives to this process is not known outside of it, and none is set
    by a guess."""
    uuids = list_uuids()
    if len(uuids) != 1:
        text = f"amdsmi knows {len(uuids)} GPUs: which of them this process uses cannot be told"
        raise NoDevice(text)
    return AmdDevice(uuids[0])


def daemon_socket(environ: Mapping[str, str]) -> Path | None:
    """Where `kilter daemon` listens, if it is installed here; `KILTER_SOCKET=` (empty): nowhere."""
    path = Path(environ.get(SOCKET_VARIABLE, SOCKET))
    return path if path.is_socket() else None


def _settable(device: NvidiaDevice, uuid: str, environ: Mapping[str, str]) -> Device:
    """The GPU by way of the daemon, which outlives this job and its container; or directly, where
    there is no daemon or it does not let us while the kernel does."""
    path = daemon_socket(environ)
    if path is None:
        return device
    by_daemon = DaemonDevice(uuid, reader=device, socket_path=path)
    return by_daemon if by_daemon.info().can_set or not device.info().can_set else device


def _mine(environ: Mapping[str, str], nvml: Any | None) -> tuple[Gpu, ...]:
    gpus = survey(nvml).gpus
    mine = visible(gpus, environ)
    if not mine:
        mask = environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if mask is None else f"; CUDA_VISIBLE_DEVICES={mask!r}"
        raise NoDevice(f"no GPU is visible to this process (the driver has {len(gpus)}{why})")
    return mine


def _usable(mine: Sequence[Gpu], index: int) -> str:
    if not 0 <= index < len(mine):
        raise NoDevice(f"no GPU number {index}: {len(mine)} are visible to this process")
    if mine[index].fault is not None:
        raise NoDevice(f"GPU {mine[index].index} cannot be used: {mine[index].fault}")
    return mine[index].uuid


def visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows to this process, in CUDA's order. `gpus` is in PCI order.

    The rules of the CUDA programming guide: entries are numbers or beginnings of UUIDs, all of the
    kind of the first; the list ends at the first entry that is not valid (-1 is the usual one); a
    repeated entry hides all.

    Raises `NoDevice` if numbers are used among unequal GPUs in CUDA's default order, which puts the
    "fastest" first by a rule that is not published.
    """
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    entries = None if mask is None else [entry.strip() for entry in mask.split(",")]
    if entries is None or _number(entries[0]) is not None:
        by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        unequal = len({gpu.name for gpu in gpus if gpu.fault is None}) > 1
        if unequal and not by_bus:
            raise NoDevice(
                "this machine has unequal GPUs, and CUDA's order of them is not known outside "
                "CUDA: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or UUIDs in CUDA_VISIBLE_DEVICES"
            )
    if entries is None:
        return tuple(gpus)
    chosen: list[tuple[str, Gpu]] = []
    for entry in entries:
        match = _match(entry, gpus) if _kind(entry) == _kind(entries[0]) else None
        if match is None:
            break
        if match in chosen:
            return ()
        chosen.append(match)
    return tuple(gpu for _, gpu in chosen)


def _match(entry: str, gpus: Sequence[Gpu]) -> tuple[str, Gpu] | None:
    """What one entry names (a GPU or a MIG instance, by its full name), and its GPU."""
    number = _number(entry)
    if number is not None:
        return (gpus[number].uuid or entry, gpus[number]) if number < len(gpus) else None
    if entry.startswith("MIG-GPU-"):  # the older form: MIG-<GPU UUID>/<gpu instance>/<compute>
        owner = entry.removeprefix("MIG-").partition("/")[0]
        owners = [gpu for gpu in gpus if gpu.uuid == owner]
        return (entry, owners[0]) if owners else None
    if _kind(entry) is None:
        return None
    named = [(gpu.uuid, gpu) for gpu in gpus] + [(m, gpu) for gpu in gpus for m in gpu.mig_uuids]
    matches = [(name, gpu) for name, gpu in named if name.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _kind(entry: str) -> str | None:
    if _number(entry) is not None:
        return "number"
    return next((kind for kind in ("GPU-", "MIG-") if entry.startswith(kind)), None)


def _number(entry: str) -> int | None:
    """A number as CUDA reads it: leading digits count, what follows them does not (`1x` is 1)."""
    digits = entry[: len(entry) - len(entry.lstrip("0123456789"))]
    return int(digits) if digits and entry.isascii() else None


def _rank(local_rank: int | None, environ: Mapping[str, str]) -> int:
    if local_rank is not None:
        return local_rank
    text = environ.get("LOCAL_RANK") or environ.get("SLURM_LOCALID") or "0"
    if not text.isdecimal():
        raise UsageError(f"LOCAL_RANK={text!r} is not a number")
    return int(text)
