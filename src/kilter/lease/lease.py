"""The lease: the right to change a device's settings, with what must be restored and until when.

    with Lease(device) as lease:
        lease.set(Setting(sm_clock_hz=1.2e9), hold_s=30)
        ...
        lease.renew(hold_s=30)          # while the job makes progress
        lease.verify(device.sample())   # is it obeyed?
    lease.outcome.restored

What a GPU is set to outlives the process, so each effect has a way back before it happens:

1. one holder per GPU: a lock on an open file, which dies with its processes;
2. what a dead holder has left is put back first;
3. what was found is written down and synced before the first set, and again before each one;
4. a watcher, a small process of its own, is there before the first set. It puts everything back
   when the job dies, however it dies, and when a deadline passes without renewal;
5. if the watcher is gone, the journal is still there for the next job, or for `kilter restore`.

So no signal handler and no `atexit` is needed, and none is installed. The job and its watcher have
the lock in common (one open file): between the death of the job and the restore nobody can come in.
A device whose settings vanish with the process (a simulated one) needs none of this, and takes the
same way through `set`, `verify` and `restore` otherwise.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import msgspec

from kilter.core.errors import (
    DeviceError,
    DeviceHung,
    FileError,
    Held,
    KilterError,
    NotObeyed,
    NotPermitted,
)
from kilter.core.files import flaw_of
from kilter.core.forks import in_forked_children
from kilter.core.own_file import OwnFile, OwnStream
from kilter.core.setting import Sample, Setting, over
from kilter.device.own_socket import as_socket
from kilter.device.protocol import Device, KeptElsewhere
from kilter.lease.baseline import GpuBaseline, compared, of_gpu, refuse_unknown_lock
from kilter.lease.beside import start_beside
from kilter.lease.journal import (
    BUSY,
    PATIENCE_S,
    Journal,
    JournalPlace,
    RestoreOutcome,
    RestoreState,
    above_caps,
    announced,
    changed_by_others,
    check_taken,
    lower,
    place_of,
    put_back,
    recover,
    start_ticks,
)
from kilter.lease.machine import POLL_S, GpuLock
from kilter.lease.watcher import GOODBYE, MESSAGE

HOLD_S = 60.0
"""A lower setting has this deadline by default. A job that hangs is back at the found setting by
then."""
SWITCH_LATENCY_S = 1.0
"""How long a set may take to act on a device that does not say."""
WATCHER_START_S = 60.0
"""As long as the first call to a GPU may take; normally 0.2 s."""


class Lease:
    """A context manager for one device; constructing it has no effect. Thread-safe.

    Every error out of `set`, `renew` and `verify` ends the lease: what was found is back, or
    `outcome` says why not, and who will try again. In a forked child a lease does nothing.
    Its many attributes are one transaction under one lock: lock file, watcher, journal and settings
    change together or not at all.
    """

    def __init__(self, device: Device, *, directory: Path | None = None) -> None:
        """`directory` stands in for `state_directory(os.environ)`, and has no lock of the machine
        beside it."""
        self._device = device
        self._elsewhere = device if isinstance(device, KeptElsewhere) else None
        self._directory = directory
        self._turn = threading.RLock()
        self._pid = 0
        self._uuid = self._backend = ""
        self._place: JournalPlace | None = None
        self._lock: GpuLock | None = None
        self._watcher: _Watcher | None = None
        self._journal: Journal | None = None
        self._found = Setting()
        self._setting = Setting()
        self._tried = self._taken = self._refused = False
        self._since_s: float | None = None
        self._baseline: GpuBaseline | None = None
        self._latency_s = SWITCH_LATENCY_S
        self._outcome: RestoreOutcome | None = None
        self.recovered: RestoreOutcome | None = None
        """What a dead holder had left, if any, and what became of it."""

    def __enter__(self) -> Lease:
        """Take the device. Raises `NotPermitted` if it may not be set, `Held`, `FileError`, or
        what keeps a dead holder's settings from being put back."""
        info = self._device.info()
        if not info.can_set:
            raise NotPermitted(info.refusal or f"{info.name} cannot be set")
        self._uuid, self._backend = info.uuid, info.backend
        self._latency_s = info.switch_latency_s or SWITCH_LATENCY_S
        if info.persistent:
            if self._directory is not None:
                self._place = JournalPlace(self._directory, info.uuid)
            else:
                self._place = place_of(info.uuid, os.environ)
            self._lock = self._place.lock()
            in_forked_children(self._forget)
        self._pid = os.getpid()
        taken = False
        try:
            stale = self._place and self._place.read()
            if self._place and stale:
                self.recovered = recover(self._place, stale, self._device)
            self._baseline = of_gpu(self._uuid, os.environ) if self._place else None
            self._found = self._setting = self._settings_now()
            taken = True
        finally:
            if not taken:
                self._let_go(unlock=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()

    @property
    def found(self) -> Setting:
        """What was requested before, and will be again."""
        return self._found

    @property
    def setting(self) -> Setting:
        """What is in force, as far as this lease knows."""
        return self._setting

    @property
    def outcome(self) -> RestoreOutcome | None:
        """How it ended; `None` as long as it is held."""
        return self._outcome

    # While it is held -----------------------------------------------------------------------

    def set(self, setting: Setting, *, hold_s: float = HOLD_S) -> None:
        """Ask for a setting; knobs left open stay as they were found. A setting lower than that
        is put back after `hold_s` unless `set` or `renew` comes before.

        Raises `Held` if somebody else has changed what this lease had set, `FileError` if no
        journal can be written (nothing is set then), `NotObeyed` if the device reports another
        value than was asked for, and what `Device.set` raises.
        """
        with self._turn:
            self._check_held()
            with self._undone_on_error(), self._alone():
                self._check_open()
                self._notice_deadline()
                self._look_before()
                target = over(self._found, setting)
                if target != self._setting:
                    self._change(setting, hold_s)
                elif lower(target, self._found):
                    self._arm(hold_s)

    def renew(self, *, hold_s: float = HOLD_S) -> bool:
        """Prolong the present setting. False: the deadline had passed, and the found setting is
        in force again; what was measured meanwhile belongs to neither."""
        with self._turn:
            self._check_held()
            with self._undone_on_error(), self._alone():
                self._check_open()
                if self._notice_deadline():
                    return False
                if lower(self._setting, self._found):
                    self._arm(hold_s)
                return True

    def verify(self, sample: Sample) -> None:
        """Look whether the clocks are what was asked for, once that had time to act. A lower clock
        is fine: power, heat and idleness have a say, too.

        Raises `NotObeyed` if the clock stays above the cap, and `Held` if it was below and no
        longer is: then somebody else has changed it.
        """
        with self._turn:
            self._check_held()
            with self._undone_on_error():
                self._check_open()
                if not self._notice_deadline():
                    self._judge(sample)

    def restore(self) -> RestoreOutcome:
        """Put back what was found, check, and let the device go. Final, may be called again, and
        raises no `DeviceError`: if it fails, the outcome says so and the journal stays."""
        with self._turn:
            if self._outcome is None:
                self._outcome = self._end()
            return self._outcome

    # Steps ----------------------------------------------------------------------------------

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Whatever goes wrong while the device is changed: put back what was found, then say it."""
        try:
            yield
        except KilterError:
            self.restore()
            raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The watcher does not put anything back meanwhile: it would take a newer setting of ours
        for somebody else's."""
        if self._place is None:
            yield
            return
        with self._place.turn():
            yield

    def _check_held(self) -> None:
        if self._pid != os.getpid():
            raise Held("this lease belongs to another process, or was never entered")
        if self._outcome is not None:
            raise Held(f"this lease has ended ({self._outcome.reason})")

    @property
    def _closed_by_program(self) -> bool:
        """The program has closed a descriptor of ours, as daemons do. The watcher takes that for
        the end of the job: it puts the GPU back and lets others have it."""
        lock, watcher = self._lock, self._watcher
        return lock is not None and (
            not lock.whole or (watcher is not None and not watcher.connected)
        )

    def _check_open(self) -> None:
        if self._closed_by_program:
            raise Held(f"{self._uuid}: the program has closed the files that this lease relies on")
        if self._place is not None and self._lock is not None and not self._place.names(self._lock):
            raise Held(
                f"{self._place.lock_path}: somebody has removed the lock, a cleaner of temporary "
                "files perhaps, so that another job could take this GPU; nothing is set any more"
            )

    def _settings_now(self) -> Setting:
        """What the device stands at, as far as vendor and baseline tell."""
        return compared(self._uuid, self._device.settings(), self._baseline)

    def _look_before(self) -> None:
        """Until our first set, what is found may still change; after it, nobody else should."""
        if self._journal is None:
            self._found = self._setting = self._settings_now()
            return
        now = self._device.settings()
        if changed_by_others(self._journal, now, Sample(t_s=0.0)):
            raise Held(
                f"{self._uuid}: somebody else has changed the power limit to {now}; left as it is"
            )

    def _change(self, setting: Setting, hold_s: float) -> None:
        first = self._journal is None
        if first and self._place is not None and setting.sm_clock_hz is not None:
            refuse_unknown_lock(self._device, self._uuid, self._baseline)
        journal, number = self._announce(over(self._found, setting), hold_s)
        now = self._settings_now() if first else self._found  # a watcher takes its time to start
        if first and now != self._found:
            self._found = self._setting = now
            target = over(now, setting)
            journal = msgspec.structs.replace(journal, found=now, before=now, last=target)
            self._write(journal)
        elif not first:
            self._look_before()
        target = journal.last
        self._tried = True
        try:
            self._device.set(target)
        except NotPermitted:
            self._refused = True
            raise
        self._taken = True
        self._journal = msgspec.structs.replace(journal, before=target)
        self._setting, self._since_s = target, None
        check_taken(self._uuid, setting, target, self._device.settings())
        passed = [] if self._watcher is None else self._watcher.passed()
        if number in passed:
            raise DeviceHung(f"{self._uuid}: setting {target} took longer than {hold_s:g} s")
        if passed:  # an earlier deadline, at the last moment: its restore may have come after us
            self._device.set(self._found)
            self._device.set(target)

    def _announce(self, target: Setting, hold_s: float) -> tuple[Journal, int]:
        """Make sure that whatever happens from here on is undone. The order is what counts:
        journal, watcher, deadline."""
        deadline_s = time.monotonic() + hold_s if lower(target, self._found) else None
        nonce = self._journal.nonce if self._journal else secrets.token_hex(8)
        journal = announced(
            self._uuid, self._backend, self._found, before=self._setting, last=target, nonce=nonce
        )
        self._write(msgspec.structs.replace(journal, deadline_s=deadline_s))
        number = self._arm(hold_s)
        assert self._journal is not None
        return self._journal, number

    def _write(self, journal: Journal) -> None:
        if self._place is not None:
            self._place.write(journal)
        self._journal = journal

    def _arm(self, hold_s: float) -> int:
        """Tell the watcher the deadline of the journal's setting; start one if there is none."""
        if self._journal is None:
            return 0
        hold_s = hold_s if lower(self._journal.last, self._found) else float("inf")
        if self._elsewhere is not None:
            self._elsewhere.hold(hold_s)
        if self._place is None:
            return 0
        assert self._lock is not None
        deadline_s = time.monotonic() + hold_s
        with suppress(OSError):  # it is only for `kilter restore` to read
            self._place.note_deadline(self._lock, deadline_s)
        if self._watcher is not None:
            number = self._watcher.tell(deadline_s)
            if number is not None:
                return number
            # It is gone, or does not read. With another nonce it will not act if it wakes up.
            self._watcher.close()
            self._watcher = None
            self._write(msgspec.structs.replace(self._journal, nonce=secrets.token_hex(8)))
        self._watcher = _Watcher.start(self._place, self._lock, self._journal)
        number = self._watcher.tell(deadline_s)
        if number is None:
            raise DeviceError(f"{self._uuid}: the watcher died at once; nothing is set without it")
        return number

    def _notice_deadline(self) -> bool:
        """Whether the watcher has put the found setting back. The device object does not know
        that another process has changed the clocks, and is told by setting the same again; a limit
        it can read, and that may be somebody else's by now."""
        if self._journal is None or not self._deadline_passed():
            return False
        limit_w = self._device.settings().power_limit_w
        self._device.set(dataclasses.replace(self._found, power_limit_w=limit_w))
        self._setting = self._found
        self._journal = msgspec.structs.replace(
            self._journal, before=self._found, last=self._found, obeyed=False
        )
        return True

    def _deadline_passed(self) -> bool:
        if self._elsewhere is not None:
            return self._elsewhere.lapsed()
        return self._watcher is not None and bool(self._watcher.passed())

    def _judge(self, sample: Sample) -> None:
        journal = self._journal
        if journal is None:
            return
        if self._since_s is None:
            self._since_s = sample.t_s
        if sample.t_s < self._since_s + self._latency_s:
            return
        above = above_caps(journal.last, sample)
        if above and journal.obeyed:
            raise Held(f"{self._uuid}: somebody else has changed its clocks; they are left alone")
        if above:
            now = Setting(sm_clock_hz=sample.sm_clock_hz, memory_clock_hz=sample.memory_clock_hz)
            raise NotObeyed(f"{self._uuid}: has accepted {journal.last}, but runs at {now}")
        if not journal.obeyed and (sample.sm_utilisation or 0.0) >= BUSY:
            self._write(msgspec.structs.replace(journal, obeyed=True))

    def _end(self) -> RestoreOutcome:
        if self._pid != os.getpid():
            reason = "left to the process that holds it"
            return RestoreOutcome(uuid=self._uuid, state="held", reason=reason)
        if self._closed_by_program:
            return self._leave_to_watcher()
        if self._place is not None and self._lock is not None:
            with suppress(OSError):
                self._place.note_ending(self._lock)
        try:
            with self._alone():
                outcome = self._undo()
                if self._place is not None:
                    self._place.remove()
        except (DeviceError, FileError) as error:
            # The lock stays with the watcher, which now sees the connection end and tries again.
            self._let_go(unlock=False)
            advice = "; the watcher tries again; later: kilter restore" if self._place else ""
            return RestoreOutcome(
                uuid=self._uuid,
                state="failed",
                reason=f"{error}{advice}",
                found=self._found,
                pid=self._pid,
            )
        self._let_go(unlock=True)
        self._setting = outcome.after or self._found
        return outcome

    def _leave_to_watcher(self) -> RestoreOutcome:
        """Without the lock neither the device nor the journal may be touched: by now both may be
        somebody else's."""
        journal, place = self._journal, self._place
        self._let_go(unlock=False)
        state: RestoreState = "restored"
        reason = "the program has closed our files; the watcher has put back what was set"
        end_s = time.monotonic() + PATIENCE_S
        while journal is not None and place is not None and _still_set(place, journal):
            if time.monotonic() > end_s:
                state, reason = "failed", f"{reason}? not yet; later: kilter restore"
                break
            time.sleep(POLL_S)
        return RestoreOutcome(
            uuid=self._uuid,
            state=state,
            reason=reason,
            found=self._found,
            after=self._found if state == "restored" else None,
            pid=self._pid,
        )

    def _undo(self) -> RestoreOutcome:
        self._notice_deadline()
        if self._journal is not None and self._tried:
            try:
                return put_back(self._device, self._journal)
            except NotPermitted:
                # Where setting and releasing are refused alike, there is nothing to put back.
                if self._taken or not self._refused:
                    raise
        return RestoreOutcome(
            uuid=self._uuid,
            state="restored",
            reason="nothing was set",
            found=self._found,
            after=self._found,
        )

    def _let_go(self, *, unlock: bool) -> None:
        lock, self._lock = self._lock, None
        if self._place is not None and lock is not None:
            if unlock:
                if self._watcher is not None:
                    self._watcher.tell(GOODBYE)
                self._place.unlock(lock)
            lock.close()
        if self._watcher is not None:
            self._watcher.close()

    def _forget(self) -> None:
        """In a forked child: what is open here must not keep the lock, or the watcher waiting;
        and a thread that is not here any more must not keep us waiting."""
        self._turn = threading.RLock()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self._watcher is not None:
            self._watcher.close()


def _still_set(place: JournalPlace, journal: Journal) -> bool:
    try:
        now = place.read()
    except FileError:
        return True
    return now is not None and now.nonce == journal.nonce


class _Watcher:
    """The job's end of the connection to its watcher."""

    def __init__(self, connection: OwnFile, pid: int) -> None:
        self._connection = connection
        self._number = 0
        self._pid, self._ticks = pid, start_ticks(pid)
        """The connection alone does not tell that the watcher is dead, if a child was forked while
        it was made and has the other end open, too."""

    @classmethod
    def start(cls, place: JournalPlace, lock: GpuLock, journal: Journal) -> _Watcher:
        """Returns when the watcher is able to restore."""
        try:
            ours = _spawn(place, lock, journal)
            pids = _received(ours, WATCHER_START_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DeviceError(f"no watcher could be started: {error}") from error
        if not pids:
            ours.close()
            raise DeviceError(
                f"the watcher did not come up; see {place.directory / 'watcher.log'}. "
                "Nothing is set without it"
            )
        return cls(ours, pids[0])

    @property
    def connected(self) -> bool:
        """Our end is open still: the program has not closed it."""
        return self._connection.number is not None

    def tell(self, deadline_s: float) -> int | None:
        """Number of the deadline; `None` if nobody is there to hear it."""
        if start_ticks(self._pid) != self._ticks:
            return None
        self._number += 1
        try:
            with as_socket(self._connection) as connection:
                # MSG_NOSIGNAL: a script may have put SIGPIPE back to its deadly default.
                message = MESSAGE.pack(self._number, deadline_s)
                connection.send(message, socket.MSG_NOSIGNAL)
        except OSError:
            return None
        return self._number

    def passed(self) -> list[int]:
        """Numbers of deadlines that have passed since the last call."""
        return _received(self._connection, 0.0)

    def close(self) -> None:
        self._connection.close()


def _spawn(place: JournalPlace, lock: GpuLock, journal: Journal) -> OwnFile:
    """Start the watcher; our end of the connection. Raises `OSError` or `TimeoutExpired`."""
    arguments = (place.directory, place.uuid, journal.nonce)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = OwnFile.open(place.directory / "watcher.log", flags)
    with OwnStream(file) as log:
        if flaw_of(os.fstat(log.fileno()), owners={os.geteuid()}) is not None:
            raise OSError(errno.EPERM, "watcher.log is not this user's own file")
        return start_beside(
            "kilter.lease.watcher",
            arguments,
            lock.numbers,
            timeout_s=WATCHER_START_S,
            stderr=log.fileno(),
        )


def _received(file: OwnFile, timeout_s: float) -> list[int]:
    """The numbers that have come from the watcher."""
    try:
        with as_socket(file) as connection:
            connection.settimeout(timeout_s)
            raw = connection.recv(64 * MESSAGE.size)
    except (BlockingIOError, TimeoutError, ConnectionResetError):
        return []
    whole = len(raw) - len(raw) % MESSAGE.size
    return [number for number, _ in MESSAGE.iter_unpack(raw[:whole])]
