"""What is kept from one run to the next about sections: settings by the signature of the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kilter.core import codec
from kilter.core.files import read_file
from kilter.core.section_record import SectionsFound

MOST_BYTES = 1 << 24


class SectionStore:
    """In `$XDG_STATE_HOME/kilter/sections`, by default `~/.local/state`: other than the journals of
    leases it outlives a reboot. Every call may raise `FileError`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        state = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        self._directory = Path(state, "kilter", "sections")

    def path(self, signature: str) -> Path:
        """The file of a job."""
        return self._directory / f"{signature}.json"

    def load(self, signature: str) -> SectionsFound | None:
        """What the last run of this job has found, or None. Only our own file is believed."""
        path = self.path(signature)
        try:
            raw = read_file(path, max_bytes=MOST_BYTES, owners={os.geteuid()})
        except FileNotFoundError:
            return None
        return codec.decode(raw, SectionsFound, where=str(path))

    def save(self, signature: str, found: SectionsFound) -> None:
        """For the next run."""
        codec.save(self.path(signature), found)
