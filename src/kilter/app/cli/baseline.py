"""`kilter baseline`: what each GPU of this machine should stand at when nobody governs it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from kilter.app.cli.output import print_json
from kilter.core.codec import write_atomically
from kilter.core.errors import DeviceError, FileError, UsageError
from kilter.core.label import Label
from kilter.core.units import MHZ
from kilter.device.nvidia import Gpu, NvidiaDevice, survey
from kilter.lease.baseline import (
    BASELINE,
    Baseline,
    GpuBaseline,
    as_toml,
    baseline_path,
    compared,
    load,
)
from kilter.lease.journal import JournalPlace, place_of

HELP = f"""\
Save, show or restore what each GPU should stand at when nobody governs it.

The baseline ({BASELINE}, written by root) makes two things certain that no
driver call tells: a lease begins only on a GPU whose power limit is the baseline's, so that no job
takes leftovers of another one for what was found; and a clock that the operator has capped is
capped again afterwards.
"""
EPILOG = """\
exit code: 0 if every GPU agrees with its baseline (show) or is back at it (restore), else 1

examples:
  kilter baseline save                         all GPUs as they are, with clocks that are free
  kilter baseline save --sm-clock-mhz 1410     and their SM clocks are capped at 1410 MHz
  kilter baseline show                         and where GPUs differ from it
  kilter baseline restore                      as root; GPUs under a live lease are left alone
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("save", "show", "restore"))
    parser.add_argument(
        "--gpu", action="append", metavar="I", help="only this GPU (index or UUID); may be repeated"
    )
    for name in ("sm", "memory"):
        parser.add_argument(
            f"--{name}-clock-mhz",
            type=float,
            metavar="MHZ",
            help=f"of save: the {name} clock that you have capped these GPUs at, which no driver "
            "call tells",
        )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU and its baseline."""

    index: int
    uuid: str
    name: str
    power_limit_w: float | None
    """The limit is this now."""
    baseline: GpuBaseline | None
    agrees: bool
    text: str


def run(arguments: argparse.Namespace) -> int:
    path = baseline_path(os.environ)
    gpus = _chosen(arguments.gpu)
    if arguments.action == "save":
        _save(path, gpus, arguments)
    if arguments.action == "restore":
        shown = list(_restore(load(path), gpus))
    else:
        shown = list(_show(load(path), gpus))
    if arguments.json:
        print_json("kilter.baseline/1", Label.MEASURED, {"gpus": shown, "file": str(path)})
    else:
        print("\n".join(f"GPU {one.index} ({one.uuid}): {one.text}" for one in shown))
    return int(not all(one.agrees for one in shown))


def _chosen(words: list[str] | None) -> list[Gpu]:
    gpus = [gpu for gpu in survey().gpus if gpu.uuid]
    unknown = set(words or ()) - {word for gpu in gpus for word in (gpu.uuid, str(gpu.index))}
    if unknown:
        raise UsageError(f"there is no GPU {sorted(unknown)[0]!r}: this machine has {len(gpus)}")
    return [gpu for gpu in gpus if not words or gpu.uuid in words or str(gpu.index) in words]


def _save(path: Path, gpus: list[Gpu], arguments: argparse.Namespace) -> None:
    before = load(path)
    saved = dict(before.gpu)
    for gpu in gpus:
        with closing(NvidiaDevice(gpu.uuid)) as device:
            _check_clock(device.supported().sm_clocks_hz, arguments.sm_clock_mhz)
            _check_clock(device.supported().memory_clocks_hz, arguments.memory_clock_mhz)
            saved[gpu.uuid] = GpuBaseline(
                name=gpu.name,
                power_limit_w=device.settings().power_limit_w,
                sm_clock_mhz=arguments.sm_clock_mhz,
                memory_clock_mhz=arguments.memory_clock_mhz,
                persistence=gpu.persistence,
            )
    write_atomically(path, as_toml(Baseline(saved)))
    path.chmod(0o644)  # jobs of other users compare with it


def _check_clock(clocks_hz: tuple[float, ...], mhz: float | None) -> None:
    if mhz is not None and mhz * MHZ not in clocks_hz:
        raise UsageError(f"{mhz:g} MHz is no clock of this GPU; `kilter doctor --json` lists them")


def _show(baseline: Baseline, gpus: list[Gpu]) -> Iterator[Shown]:
    for gpu in gpus:
        with closing(NvidiaDevice(gpu.uuid)) as device:
            now = device.settings()
        known = baseline.gpu.get(gpu.uuid)
        agrees, text = known is not None, "no baseline; as root: kilter baseline save"
        if known is not None:
            text = f"{known.setting}, as the baseline says"
            try:
                compared(gpu.uuid, now, known)
            except DeviceError as error:
                agrees, text = False, str(error)
        yield _shown(gpu, now.power_limit_w, known, agrees, text)


def _restore(baseline: Baseline, gpus: list[Gpu]) -> Iterator[Shown]:
    for gpu in gpus:
        known = baseline.gpu.get(gpu.uuid)
        text, now_w = "no baseline; left as it is", None
        agrees = known is None
        if known is not None:
            try:
                now_w = _put_back(gpu.uuid, known, place_of(gpu.uuid, os.environ))
                agrees, text = True, f"put back: {known.setting}"
            except (DeviceError, FileError) as error:
                text = f"not put back: {error}"
        yield _shown(gpu, now_w, known, agrees, text)


def _shown(
    gpu: Gpu, power_limit_w: float | None, baseline: GpuBaseline | None, agrees: bool, text: str
) -> Shown:
    return Shown(
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        power_limit_w=power_limit_w,
        baseline=baseline,
        agrees=agrees,
        text=text,
    )


def _put_back(uuid: str, known: GpuBaseline, place: JournalPlace) -> float | None:
    """The limit afterwards. Raises `Held` while somebody has the GPU."""
    lock = place.lock()
    try:
        with closing(NvidiaDevice(uuid)) as device:
            device.reset()
            device.set(known.setting)
            place.remove()  # what a dead run had found is of no interest any more
            return device.settings().power_limit_w
    finally:
        place.unlock(lock)
