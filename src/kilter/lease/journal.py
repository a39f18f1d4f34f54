"""What a lease has found on a GPU, written down, so that whoever comes later can put it back.

One directory, three files a GPU: `<uuid>.lock` (held with `flock` on an open file, so it dies with
the processes that have it open and never goes stale), `<uuid>.json` (the journal; it exists only
while something of ours is set), and `watcher.log`. Journals are replaced, never rewritten in place.
With it goes a lock that all users of the machine share (`lease/machine.py`).

The settings of a GPU vanish with a reboot, and so a journal of another boot is only thrown away.
That is also why the directory belongs on a file system that a reboot clears.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import pwd
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

import msgspec

from kilter.core.errors import DeviceError, FileError, Held, NotObeyed, NotPermitted, NotSupported
from kilter.core.files import flaw_of, read_file
from kilter.core.own_file import OwnFile, identity
from kilter.core.setting import CLOCKS, KNOBS, Knob, Sample, Setting
from kilter.core.units import MHZ
from kilter.device.protocol import Device
from kilter.lease.machine import POLL_S, GpuLock, lock_of_machine, machine_directory

STATE_VARIABLE = "KILTER_STATE_DIR"
PATIENCE_S = 5.0
"""How long a lock is waited for whose holder is dead: its watcher is just putting things back."""
MAX_JOURNAL_BYTES = 64 * 2**10
"""A journal has at most this size; a kilter's own has a hundredth of it."""
CLOCK_STEP_HZ = 16 * MHZ
"""It is a little more than a step of an observed clock (15 MHz on NVIDIA)."""
BUSY = 0.5
"""From this utilisation on an observed clock says something about a cap: an idle GPU is slow."""

TOLERANCE: Mapping[Knob, float] = {
    "sm_clock_hz": 0.5 * MHZ,
    "memory_clock_hz": 0.5 * MHZ,
    "power_limit_w": 1.0,
}
"""A request that is read back may differ by this: clocks are counted in MHz, and some boards round
to a watt."""


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """All that is needed to put a GPU back: by the watcher, the next job, or `kilter restore`."""

    schema: Literal["kilter.lease/1"] = "kilter.lease/1"
    uuid: str
    backend: str
    """It is what it takes, with the UUID, to open the device in another process."""
    boot_id: str
    pid: int
    start_ticks: int
    """With the pid it names one process, and no later one of that number."""
    nonce: str
    """It names one watcher: where another one stands here, the job no longer counts on it."""
    found: Setting
    before: Setting
    """It was in force until `last` was asked for: a kill may come before it was."""
    last: Setting
    obeyed: bool = False
    """`last` was seen to act; a clock above it later is somebody else's doing."""
    deadline_s: float | None = None
    """It was this on the machine's monotonic clock, when `last` was asked for; renewals are not
    written."""
    written: str
    """It is local time, for people."""


def announced(
    uuid: str, backend: str, found: Setting, *, before: Setting, last: Setting, nonce: str
) -> Journal:
    """What this process writes down before it asks for `last`."""
    pid = os.getpid()
    return Journal(
        uuid=uuid,
        backend=backend,
        boot_id=boot_id(),
        pid=pid,
        start_ticks=start_ticks(pid) or 0,
        nonce=nonce,
        found=found,
        before=before,
        last=last,
        written=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


RestoreState = Literal["restored", "held", "failed", "discarded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOutcome:
    """What became of the settings of one GPU."""

    uuid: str
    state: RestoreState
    reason: str
    found: Setting | None = None
    after: Setting | None = None
    """The vendor may not say all of it."""
    left: tuple[Knob, ...] = ()
    """Somebody else has changed these knobs since, and so they were left alone."""
    pid: int | None = None
    """This job wrote the journal, or holds the GPU."""

    @property
    def restored(self) -> bool:
        """Nothing of ours is left on the GPU."""
        return self.state in ("restored", "discarded")


def state_directory(environ: Mapping[str, str]) -> Path:
    """Where locks and journals are, made if need be; `FileError` if it cannot be used.

    `KILTER_STATE_DIR` if set. For root `/run/kilter`: the same for all jobs of the machine and for
    an epilog, and cleared by a reboot as the settings are. Else the user's own
    `$XDG_RUNTIME_DIR/kilter`, or a directory under the system's temporary one that must be ours
    alone, since others may write there, too. Containers that share a GPU need to share one.
    """
    chosen = environ.get(STATE_VARIABLE)
    runtime = environ.get("XDG_RUNTIME_DIR")
    if chosen:
        path = Path(chosen)
    elif os.geteuid() == 0 and os.access("/run", os.W_OK):
        path = Path("/run/kilter")
    elif runtime and os.access(runtime, os.W_OK):
        path = Path(runtime, "kilter")
    else:
        path = Path(tempfile.gettempdir(), f"kilter-{os.geteuid()}")
        if path.is_symlink() or (path.exists() and path.stat().st_uid != os.geteuid()):
            # Somebody else was there first: that must block neither setting nor restoring.
            path = _in_home()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat() if chosen else path.lstat()
    except OSError as error:
        raise FileError(
            f"{path}: cannot hold the journal ({error.strerror}); without one nothing is set. "
            f"Choose another directory with {STATE_VARIABLE}"
        ) from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise FileError(
            f"{path}: belongs to somebody else or is open to others; "
            f"choose another directory with {STATE_VARIABLE}"
        )
    exposed = _exposed_parent(path) if os.geteuid() == 0 else None
    if exposed is not None:
        raise FileError(
            f"{path}: {exposed} belongs to another user or is open to others, who could put "
            f"another directory in its place; choose another one with {STATE_VARIABLE}"
        )
    return path


def _exposed_parent(path: Path) -> Path | None:
    """A directory above that somebody else than root may rename entries of. What is sticky, as
    `/tmp`, keeps root's own."""
    for parent in path.resolve().parents:
        status = parent.stat()
        sticky = status.st_mode & stat.S_ISVTX
        if status.st_uid != 0 or (status.st_mode & 0o022 and not sticky):
            return parent
    return None


def _in_home() -> Path:
    """A directory of this boot in the user's own home, which other hosts may share."""
    return Path(pwd.getpwuid(os.geteuid()).pw_dir, ".local/state/kilter", boot_id() or "boot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """What stands in a lock."""

    pid: int
    start_ticks: int
    deadline_s: float
    """It is on this machine's monotonic clock, renewals included; infinite: none."""
    kept_s: float
    """At this deadline the watcher has put the found setting back last; NaN: none."""
    ending: bool = False
    """It is just putting things back, and lets the GPU go then."""

    @property
    def alive(self) -> bool:
        return start_ticks(self.pid) == self.start_ticks

    @property
    def late(self) -> bool:
        """The deadline has passed and nobody has put anything back yet."""
        return time.monotonic() > self.deadline_s and not self.kept_s >= self.deadline_s

    @property
    def overdue(self) -> bool:
        """The same for so long that the watcher, which keeps the deadline within `PATIENCE_S`, must
        be frozen as well."""
        return self.late and time.monotonic() > self.deadline_s + PATIENCE_S


_LINE = 64
"""One line in a lock has so many bytes."""
_ENDING = "ending"
_ORPHANS = "the watcher or a child of a dead process"


def _write_line(lock: OwnFile, text: str, *, at: int) -> None:
    number = lock.number
    if number is not None:
        os.pwrite(number, text.ljust(_LINE - 1).encode() + b"\n", at)


def _holder(raw: bytes) -> Holder | None:
    """What a lock tells; it is empty for a moment after it was taken."""
    try:
        pid, ticks, deadline_s, kept_s = (words := (*raw.split(), b"inf", b"nan"))[:4]
        return Holder(
            pid=int(pid),
            start_ticks=int(ticks),
            deadline_s=float(deadline_s),
            kept_s=float(kept_s),
            ending=_ENDING.encode() in words,
        )
    except ValueError:
        return None


class JournalPlace:
    """The lock and the journal of one GPU. Constructing one touches nothing."""

    def __init__(
        self,
        directory: Path,
        uuid: str,
        *,
        machine: Path | None = None,
        owner: int | None = None,
    ) -> None:
        """`machine`: where the locks of all users are; None: the lock is that of `directory`.
        `owner`: the user whose files these are; None: this process's."""
        self.directory = directory
        self.machine = machine
        self._owner = owner
        self.uuid = uuid
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", uuid)
        self.lock_path = directory / f"{stem}.lock"
        self.journal_path = directory / f"{stem}.json"
        self.machine_path = None if machine is None else machine / f"{stem}.lock"

    def lock(self, *, patience_s: float = PATIENCE_S) -> GpuLock:
        """Take the GPU; the open files to keep. `Held` names the holder, or `FileError`.

        A live holder is not waited for, unless it is just ending. A dead one has a watcher that
        holds the lock until it has put things back, and that is waited for.
        """
        until_s = time.monotonic() + patience_s
        try:
            lock = self._lock_own(until_s)
            while not self.names(lock):  # another one was put in its place meanwhile
                lock.close()
                lock = self._lock_own(until_s)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            os.ftruncate(lock.numbers[0], 0)
            self.note_deadline(lock, math.inf)
            self.note_kept(lock, math.nan)
            if self.machine_path is not None:
                lock = GpuLock(lock.own, lock_of_machine(self.machine_path, until_s))
        except OSError as error:
            lock.close()
            raise self._unusable(error) from error
        except (DeviceError, FileError):
            lock.close()
            raise
        return lock

    def names(self, lock: GpuLock) -> bool:
        """Whether the names still lead to the open files."""
        return lock.named_by(self.lock_path, self.machine_path)

    def _lock_own(self, until_s: float) -> GpuLock:
        lock = self._open_lock()
        self._wait_for(lock, until_s)
        return GpuLock(lock)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Set, or judge what is set, while the job or its watcher does neither. A holder of the
        turn that is frozen is not waited for longer than `PATIENCE_S`. This lock (POSIX) is of
        another kind than the one that holds the GPU, and a forked child does not have it."""
        try:
            handle = os.open(self.lock_path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # the file is gone, and so is who could have the turn
            yield
            return
        until_s = time.monotonic() + PATIENCE_S
        try:
            while time.monotonic() < until_s:
                try:
                    fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    time.sleep(POLL_S / 10)
            yield
        finally:
            if identity(handle) is not None:
                os.close(handle)

    def _open_lock(self) -> OwnFile:
        """Raises `OSError` or `FileError`: a planted link must not lead us to another file."""
        make = os.O_CREAT if self._owner is None else 0
        lock = OwnFile.open(self.lock_path, os.O_RDWR | make | os.O_NOFOLLOW)
        assert lock.number is not None
        flaw = flaw_of(os.fstat(lock.number), owners=self._owners)
        if flaw is not None:
            lock.close()
            raise FileError(f"{self.lock_path}: {flaw}; nothing is set")
        return lock

    @property
    def _owners(self) -> set[int]:
        return {os.geteuid() if self._owner is None else self._owner}

    def unlock(self, lock: GpuLock) -> None:
        """Let the GPU go, also for other processes that have the same open files."""
        if lock.own.number is not None:
            os.ftruncate(lock.own.number, 0)
        lock.unlock()

    def note_deadline(self, lock: GpuLock, deadline_s: float) -> None:
        """Write into the lock who holds it and until when, for `kilter restore`. Not synced: it
        matters while the holder is frozen, and after a reboot nothing is set. Raises `OSError`."""
        me = os.getpid()
        _write_line(lock.own, f"{me} {start_ticks(me)} {deadline_s!r}", at=0)

    def note_kept(self, lock: GpuLock, deadline_s: float) -> None:
        """The watcher's line in the lock, beside the holder's: the found setting is back since this
        deadline has passed. Raises `OSError`."""
        _write_line(lock.own, repr(deadline_s), at=_LINE)

    def note_ending(self, lock: GpuLock) -> None:
        """The holder is about to let the GPU go, so that the next job waits. Raises `OSError`."""
        _write_line(lock.own, _ENDING, at=2 * _LINE)

    def holder(self) -> Holder | None:
        """Who holds the lock, as the lock itself says; None if nobody does, or nobody has said."""
        try:
            return _holder(read_file(self.lock_path, max_bytes=MAX_JOURNAL_BYTES, follow=False))
        except (OSError, FileError):
            return None

    def _wait_for(self, lock: OwnFile, until_s: float) -> None:
        while (number := lock.number) is not None:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                holder = _holder(os.pread(number, 3 * _LINE, 0))
            alive = holder is not None and holder.alive
            stays = holder is not None and alive and not holder.ending
            if stays or time.monotonic() > until_s:
                lock.close()
                who = f"process {holder.pid}" if holder and alive else _ORPHANS
                raise Held(f"{self.uuid}: {who} controls this GPU; one kilter per GPU")
            time.sleep(POLL_S)

    def read(self) -> Journal | None:
        """The journal, `None` if nothing of ours is set, `FileError` if it cannot be understood, or
        is not this user's own: whoever obeys a journal sets what it says."""
        try:
            raw = read_file(
                self.journal_path, max_bytes=MAX_JOURNAL_BYTES, owners=self._owners, follow=False
            )
            return msgspec.json.decode(raw, type=Journal)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FileError(
                f"{self.journal_path}: cannot be understood ({error}); compare `nvidia-smi -q -d "
                "CLOCK,POWER` with what you expect, then remove the file"
            ) from error

    def write(self, journal: Journal) -> None:
        """Replace the journal; it is on the disk, and so is its name, when this returns.

        Only the holder of the lock writes, so the part has a fixed name and never piles up.
        """
        part = self.journal_path.with_suffix(".part")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            handle = os.open(part, flags, 0o600)
            try:
                raw = msgspec.json.encode(journal) + b"\n"
                if os.write(handle, raw) != len(raw):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(handle)
            finally:
                os.close(handle)
            os.replace(part, self.journal_path)
            self._sync_directory()
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise self._unusable(error) from error

    def remove(self) -> None:
        """There is nothing to put back any more."""
        try:
            self.journal_path.unlink(missing_ok=True)
        except OSError as error:
            raise self._unusable(error) from error

    def _sync_directory(self) -> None:
        handle = os.open(self.directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _unusable(self, error: OSError) -> FileError:
        where = error.filename or self.journal_path
        return FileError(f"{where}: {error.strerror}; without lock and journal nothing is set")


def boot_id() -> str:
    """Of this boot of the machine; empty where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


_EXITING = 0x4
"""It is PF_EXITING of the kernel: a killed process that has much memory to give back takes
seconds."""


def start_ticks(pid: int) -> int | None:
    """When a process started, in ticks since the boot; `None` if there is no such live process, or
    if it is just exiting."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name is in parentheses and may hold any character; the state is the first word after it.
    words = status.rpartition(b")")[2].split()
    gone = words[0] in (b"Z", b"X") or int(words[6]) & _EXITING
    return None if gone else int(words[19])


def lower(setting: Setting, found: Setting) -> bool:
    """Whether some knob is below what was found, so that a hanging job would stay slow."""
    pairs = ((getattr(setting, knob), getattr(found, knob)) for knob in KNOBS)
    return any(a is not None and (b is None or a < b) for a, b in pairs)


def near(knob: Knob, a: float | None, b: float | None) -> bool:
    """The same request, as far as a device can tell."""
    if a is None or b is None:
        return a is b
    return abs(a - b) <= TOLERANCE[knob]


def check_taken(uuid: str, asked: Setting, target: Setting, now: Setting) -> None:
    """Raises `NotObeyed` where the device has taken another value for a knob that was asked for."""
    knobs = [knob for knob in KNOBS if getattr(asked, knob) is not None]
    if not all(near(knob, getattr(now, knob), getattr(target, knob)) for knob in knobs):
        raise NotObeyed(f"{uuid}: asked for {target}, but it has {now}")


def changed_by_others(journal: Journal, now: Setting, sample: Sample) -> tuple[Knob, ...]:
    """Knobs that no longer have a value of ours. A limit can be read. A clock can only be observed:
    above a cap that had been obeyed, so somebody has released or replaced it since."""
    ours = (journal.found, journal.before, journal.last)
    limit_w = now.power_limit_w
    changed: list[Knob] = list(above_caps(journal.last, sample)) if journal.obeyed else []
    if limit_w is not None and not any(
        near("power_limit_w", limit_w, setting.power_limit_w) for setting in ours
    ):
        changed.append("power_limit_w")
    return tuple(changed)


def above_caps(setting: Setting, sample: Sample) -> tuple[Knob, ...]:
    """Clocks that are observed above their cap, which is therefore not in force."""
    return tuple(
        knob
        for knob in CLOCKS
        if (cap_hz := getattr(setting, knob)) is not None
        and (observed_hz := getattr(sample, knob)) is not None
        and observed_hz > cap_hz + CLOCK_STEP_HZ
    )


def put_back(device: Device, journal: Journal) -> RestoreOutcome:
    """Make the device as it was found, but for what somebody else has changed since, and check.

    May be repeated. `device` may be another object than the one that has set. Raises what
    `Device.set` raises, and `NotObeyed`.
    """
    try:
        return _put_back(device, journal)
    except Held:  # somebody has changed the limit at this moment, which is left then
        return _put_back(device, journal)


def _put_back(device: Device, journal: Journal) -> RestoreOutcome:
    now = device.settings()
    left = changed_by_others(journal, now, device.sample())
    target = replace(journal.found, **{knob: getattr(now, knob) for knob in left})
    asked = {
        knob: value
        for knob in KNOBS
        if knob not in left
        for setting in (journal.before, journal.last)
        if not near(knob, value := getattr(setting, knob), getattr(journal.found, knob))
    }
    unknown = {knob: v for knob, v in asked.items() if getattr(now, knob) is None and v is not None}
    if unknown:
        # Set by another object, in a process that is dead: this one is told by asking again, and
        # then knows what to release. It does so with no knob that the dead had not touched.
        with suppress(NotSupported, NotPermitted):  # then the dead had asked in vain, too
            device.set(replace(target, **unknown))
    if asked:
        device.set(target)
    after = device.settings()
    for knob in KNOBS:
        if not near(knob, getattr(after, knob), getattr(target, knob)):
            raise NotObeyed(f"{journal.uuid}: asked for {target} at restore, but it has {after}")
    reason = f"put back: {journal.found}"
    if left:
        names = " and ".join(_NAMES[knob] for knob in left)
        reason = f"somebody else has changed the {names} since, left as it is; {reason}"
    return RestoreOutcome(
        uuid=journal.uuid,
        state="restored",
        reason=reason,
        found=journal.found,
        after=after,
        left=left,
        pid=journal.pid,
    )


_NAMES: Mapping[Knob, str] = {
    "sm_clock_hz": "SM clock",
    "memory_clock_hz": "memory clock",
    "power_limit_w": "power limit",
}


def recover(place: JournalPlace, journal: Journal, device: Device) -> RestoreOutcome:
    """Undo a dead job's lease. The caller holds the lock. The journal goes when all is back.

    Raises `DeviceError` or `FileError`, after which the journal is still there.
    """
    if journal.boot_id != boot_id():
        place.remove()
        return RestoreOutcome(
            uuid=journal.uuid,
            state="discarded",
            reason="the machine has rebooted since, which has cleared the settings",
            found=journal.found,
            pid=journal.pid,
        )
    outcome = put_back(device, journal)
    place.remove()
    return outcome


def open_journalled(journal: Journal) -> Device:
    """The device of a journal, opened anew by its UUID."""
    from kilter.device.amd import AmdDevice
    from kilter.device.nvidia import NvidiaDevice

    if journal.backend == "nvml":
        return NvidiaDevice(journal.uuid)
    if journal.backend == "amdsmi":
        return AmdDevice(journal.uuid)
    raise DeviceError(f"{journal.uuid}: no way to open a device of kind {journal.backend!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One GPU with a journal."""

    uuid: str
    journal: Journal | None
    """It is `None` if the journal is damaged."""
    fault: str | None = None
    """What is wrong with it."""
    alive: bool
    """Somebody holds the lock: the job, or its watcher, which is about to put things back."""


def place_of(uuid: str, environ: Mapping[str, str]) -> JournalPlace:
    """Where the lock and the journal of a GPU are for this process. Raises `FileError`."""
    machine = machine_directory(environ)
    return JournalPlace(state_directory(environ), uuid, machine=machine)


def journals(directory: Path) -> Iterator[Entry]:
    """What is there, in order of the UUID."""
    for place in _places(directory):
        try:
            journal = place.read()
        except FileError as error:
            yield Entry(uuid=place.uuid, journal=None, fault=str(error), alive=_locked(place))
        else:
            if journal is not None:
                yield Entry(uuid=place.uuid, journal=journal, alive=_locked(place))


def _places(
    directory: Path, machine: Path | None = None, owner: int | None = None
) -> list[JournalPlace]:
    found = sorted(directory.glob("*.json"))
    return [JournalPlace(directory, path.stem, machine=machine, owner=owner) for path in found]


def _locked(place: JournalPlace) -> bool:
    """Looks without leaving a trace: a shared lock taken and let go at once."""
    try:
        handle = os.open(place.lock_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def restore_all(
    directory: Path,
    *,
    machine: Path | None = None,
    uuids: frozenset[str] | None = None,
    owner: int | None = None,
    force: bool = False,
    open_device: Callable[[Journal], Device] = open_journalled,
    trusted: Callable[[Journal], Journal] = lambda journal: journal,
) -> Iterator[RestoreOutcome]:
    """Put back what dead jobs have left, on these GPUs (`None`: all). Live holders are left alone.
    `owner` is the user whose journals these are, `trusted` what is to be obeyed of one.

    Where the lock is still held although the job is dead, or has let its deadline pass, nothing is
    done without `force`.

    Nothing is raised for one GPU that would keep the next one from its turn.
    """
    for place in _places(directory, machine, owner):
        if uuids is not None and place.uuid not in uuids:
            continue
        outcome = _restore_one(place, open_device, trusted, force=force)
        if outcome is not None:
            yield outcome


def _restore_one(
    place: JournalPlace,
    open_device: Callable[[Journal], Device],
    trusted: Callable[[Journal], Journal],
    *,
    force: bool,
) -> RestoreOutcome | None:
    journal = None
    try:
        journal = place.read()
        lock = _lock_or_force(place, force=force)
        try:
            journal = place.read()
            if journal is None:
                return None
            journal = trusted(journal)
            with closing(open_device(journal)) as device:
                return recover(place, journal, device)
        finally:
            if lock is not None:
                lock.close()
    except (DeviceError, FileError) as error:
        return RestoreOutcome(
            uuid=place.uuid,
            state="held" if isinstance(error, Held) else "failed",
            reason=str(error),
            found=None if journal is None else journal.found,
            pid=None if journal is None else journal.pid,
        )


def _lock_or_force(place: JournalPlace, *, force: bool) -> GpuLock | None:
    """The lock; None if it is held by what will not put anything back, and is not waited for.

    Raises `Held` if the job is alive and within its deadline, and says why not else.
    """
    try:
        return place.lock()
    except Held as error:
        holder = place.holder()
        while holder is not None and holder.alive and holder.late and not holder.overdue:
            time.sleep(POLL_S)  # the watcher is just putting things back, or frozen
            holder = place.holder()
        if holder is not None and holder.alive and not holder.overdue:
            raise
        now_s, deadline_s = time.monotonic(), math.inf if holder is None else holder.deadline_s
        if force and (deadline_s < now_s or deadline_s == math.inf):
            return None
        who = "its run" if holder is None else f"its run (process {holder.pid})"
        if holder is not None and holder.alive:
            why = f"{who} has let its deadline pass, and neither it nor its watcher acts: frozen?"
        else:
            why = f"{who} is dead or in another container, and somebody still holds the lock: "
            why += "its watcher, if that is frozen, or a process that the run has forked"
        advice = "to put it back all the same: kilter restore --force"
        if now_s < deadline_s < math.inf:
            advice += f", in {deadline_s - now_s:.0f} s, when its deadline has passed"
        raise DeviceError(f"{place.uuid}: not put back: {why}; {advice}") from error
