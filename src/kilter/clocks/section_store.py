"""What is kept from one run to the next about sections: settings by the signature of the job, and
the times of a device's switches by device, driver and VBIOS."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Literal

import msgspec

from kilter.clocks.plan.switching import Calibration
from kilter.core import codec
from kilter.core.errors import FileError
from kilter.core.files import read_file, state_home
from kilter.core.section_record import SectionsFound
from kilter.core.setting import DeviceInfo


class KeptSwitches(msgspec.Struct, frozen=True, kw_only=True):
    """The file of a calibration."""

    calibration: Calibration
    schema: Literal["kilter.switches/1"] = "kilter.switches/1"


_SWITCHES = msgspec.json.Decoder(KeptSwitches)
MOST_FILE_BYTES = 1 << 24


class SectionStore:
    """In `$XDG_STATE_HOME/kilter/sections`, by default `~/.local/state`: other than the journals of
    leases it outlives a reboot. Every call may raise `FileError`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._directory = state_home(environ) / "sections"

    def path(self, signature: str) -> Path:
        return self._directory / f"{signature}.json"

    def load(self, signature: str) -> SectionsFound | None:
        """What the last run of this job has found, or None. Only our own file is believed."""
        path = self.path(signature)
        raw = _own(path)
        return None if raw is None else codec.decode(raw, SectionsFound, where=str(path))

    def switches(self, info: DeviceInfo) -> Calibration | None:
        """Of this device with this driver and VBIOS, or None."""
        path = self._switches_path(info)
        raw = _own(path)
        if raw is None:
            return None
        try:
            found = _SWITCHES.decode(raw).calibration
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise FileError(f"{path}: not the times of a device's switches ({error})") from error
        same = (found.uuid, found.driver, found.vbios) == (info.uuid, info.driver, info.vbios)
        return found if same else None

    def keep_switches(self, info: DeviceInfo, calibration: Calibration) -> Path:
        """For all runs on this device; where that is."""
        path = self._switches_path(info)
        codec.write_atomically(path, msgspec.json.encode(KeptSwitches(calibration=calibration)))
        return path

    def _switches_path(self, info: DeviceInfo) -> Path:
        of = f"{info.uuid}|{info.driver}|{info.vbios}"
        return self._directory.parent / "switches" / f"{sha256(of.encode()).hexdigest()[:16]}.json"

    def save(self, signature: str, found: SectionsFound) -> None:
        """For the next run."""
        codec.save(self.path(signature), found)


def _own(path: Path) -> bytes | None:
    """The bytes of a file that nobody else may write; None: there is none."""
    try:
        return read_file(path, max_bytes=MOST_FILE_BYTES, owners={os.geteuid()})
    except FileNotFoundError:
        return None
