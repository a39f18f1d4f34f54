"""One GPU as the daemon holds it: the lock, the journal and the settings, without a watcher.

The daemon is the watcher: it outlives its clients, and after a death of its own the journal is
there for its successor. Everything in here runs in the GPU's own thread, so that a driver that
hangs on one GPU delays nobody on another.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kilter.core.errors import DeviceError, FileError, Held
from kilter.core.setting import Sample, Setting, over
from kilter.device.nvidia import NvidiaDevice
from kilter.lease.baseline import GpuBaseline, compared, of_gpu, refuse_unknown_lock
from kilter.lease.journal import (
    BUSY,
    Journal,
    JournalPlace,
    RestoreOutcome,
    above_caps,
    announced,
    changed_by_others,
    check_taken,
    put_back,
    recover,
)
from kilter.lease.machine import GpuLock


@dataclass(slots=True)
class Holding:
    """Constructing one touches nothing. Not thread-safe."""

    uuid: str
    device: NvidiaDevice
    directory: Path
    machine: Path | None = None
    found: Setting = field(default_factory=Setting)
    energy_j: float | None = None
    """The GPU has used this since it was taken; None: it has no counter."""
    _counter_j: float | None = None
    _lock: GpuLock | None = None
    _journal: Journal | None = None
    _baseline: GpuBaseline | None = None

    @property
    def held(self) -> bool:
        return self._lock is not None

    @property
    def setting(self) -> Setting:
        """What is in force, as far as this object has set it."""
        return self.found if self._journal is None else self._journal.last

    def take(self) -> None:
        """Take the GPU, put back what a dead holder has left, and note what is found. Raises
        `Held`, `FileError`, or what keeps a dead holder's settings from being put back."""
        place = self._place
        lock = place.lock()
        try:
            stale = place.read()
            if stale is not None:
                recover(place, stale, self.device)
            self._baseline = of_gpu(self.uuid, os.environ)
            self.found = self._settings_now()
        except (DeviceError, FileError):
            lock.close()
            raise
        self._lock, self._journal = lock, None
        self._counter_j = self.energy_j = None
        self._count_energy()

    def _count_energy(self) -> None:
        """Add what the counter has counted since the last look; one that jumps back began anew."""
        with suppress(DeviceError):
            now_j = self.device.sample(energy=True).energy_j
            if now_j is None:
                return
            used_j = 0.0 if self._counter_j is None else max(0.0, now_j - self._counter_j)
            self.energy_j, self._counter_j = (self.energy_j or 0.0) + used_j, now_j

    def set(self, setting: Setting) -> None:
        """Set what is asked for; the knobs that are left open are as they were found. Raises
        `Held` if somebody else has changed them meanwhile, `FileError` if no journal can be
        written, and what `Device.set` raises."""
        now = self.device.settings()
        if self._journal is None:
            if setting.sm_clock_hz is not None:
                refuse_unknown_lock(self.device, self.uuid, self._baseline)
            self.found = self._settings_now()
        elif changed_by_others(self._journal, now, Sample(t_s=0.0)):
            raise Held(f"{self.uuid}: somebody else has changed the power limit to {now}")
        before = self.found if self._journal is None else self._journal.last
        target = over(self.found, setting)
        nonce = secrets.token_hex(8)
        journal = announced(self.uuid, "nvml", self.found, before=before, last=target, nonce=nonce)
        self._place.write(journal)
        self._journal = journal
        self.device.set(target)
        check_taken(self.uuid, setting, target, self.device.settings())

    def look(self) -> None:
        """Notice somebody else's change of a clock that had been obeyed. Raises `Held`."""
        journal = self._journal
        if journal is None:
            return
        self._count_energy()
        sample = self.device.sample()
        if changed_by_others(journal, self.device.settings(), sample):
            raise Held(f"{self.uuid}: somebody else has changed its settings; they are left alone")
        busy = (sample.sm_utilisation or 0.0) >= BUSY
        if busy and not journal.obeyed and not above_caps(journal.last, sample):
            self._journal = msgspec.structs.replace(journal, obeyed=True)
            self._place.write(self._journal)

    def put_back(self) -> RestoreOutcome:
        """Put back what was found, and let the GPU go. Raises `DeviceError`; may be repeated."""
        self._count_energy()
        if self._journal is None:
            outcome = RestoreOutcome(uuid=self.uuid, state="restored", reason="nothing was set")
        else:
            outcome = put_back(self.device, self._journal)
        with suppress(FileError):  # the next holder finds the GPU as the journal wants it
            self._place.remove()
        lock, self._lock, self._journal = self._lock, None, None
        if lock is not None:
            self._place.unlock(lock)
        return outcome

    def _settings_now(self) -> Setting:
        return compared(self.uuid, self.device.settings(), self._baseline)

    @property
    def _place(self) -> JournalPlace:
        return JournalPlace(self.directory, self.uuid, machine=self.machine)
