"""A GPU that `kilter daemon` sets for us: read through NVML, set over the daemon's socket.

For users who may read a GPU and not set it. The connection is the lease: the daemon puts back what
it has found when this process dies, hangs past its deadline, or closes the device. So `persistent`
is false here, and the lease needs neither a journal nor a watcher of its own.
"""

from __future__ import annotations

import errno
import math
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kilter.core.daemon_protocol import (
    MAX_MESSAGE_BYTES,
    MAX_TEXT,
    VERSION,
    Answer,
    Ask,
    DaemonRequest,
    Grant,
    Hello,
    Hold,
    Look,
    Range,
    Release,
    encode,
    error_of,
    read_answer,
)
from kilter.core.errors import DeviceError, DeviceHung
from kilter.core.forks import in_forked_children
from kilter.core.own_file import OwnFile
from kilter.core.setting import DeviceInfo, Sample, Setting, Supported
from kilter.device.own_socket import as_socket
from kilter.device.protocol import Device
from kilter.device.vendor import (
    READ_ONLY_REFUSAL,
    check_clock,
    check_limit,
    forbid_if_read_only,
    read_only,
)

DAEMON_ANSWER_S = 30.0
"""A set takes milliseconds; the first call to a sleeping GPU may take much longer."""
HOLD_S = 60.0


class DaemonDevice:
    """Thread-safe. Connects when it is first asked for something, and again if the daemon was
    restarted: the found setting is in force then, as after a deadline that has passed."""

    def __init__(self, uuid: str, *, reader: Device, socket_path: Path) -> None:
        """`reader` is the same GPU, as this process may read it."""
        self._uuid = uuid
        self._reader = reader
        self._path = socket_path
        self._turn = threading.RLock()
        self._connection: OwnFile | None = None
        self._number = 0
        self._hold_s = HOLD_S
        self._deadline_s: float | None = None
        """When the lease in force ends without renewal, on this machine's monotonic clock."""
        self._lapsed = False
        self._found = Setting()
        self._asked = Setting()
        self._info: DeviceInfo | None = None
        self._grant = Grant()
        in_forked_children(self._forget)

    # Reading --------------------------------------------------------------------------------

    def info(self) -> DeviceInfo:
        if self._info is None:
            refusal = None
            try:
                answer = self._call(Look(number=self._next(), uuid=self._uuid))
                self._grant = answer.grant or Grant()
            except DeviceError as error:
                refusal = str(error)
            self._info = replace(
                self._reader.info(), persistent=False, can_set=refusal is None, refusal=refusal
            )
        if read_only():
            return replace(self._info, can_set=False, refusal=READ_ONLY_REFUSAL)
        return self._info

    def sample(self, *, energy: bool = False) -> Sample:
        return self._reader.sample(energy=energy)

    def supported(self) -> Supported:
        """What the GPU accepts and the operator allows."""
        self.info()
        has, may = self._reader.supported(), self._grant
        return Supported(
            sm_clocks_hz=_within(has.sm_clocks_hz, may.sm_clock_hz),
            memory_clocks_hz=_within(has.memory_clocks_hz, may.memory_clock_hz),
            power_limits_w=_within(has.power_limits_w, may.power_limit_w),
        )

    def settings(self) -> Setting:
        with self._turn:
            return replace(self._asked, power_limit_w=self._reader.settings().power_limit_w)

    # Setting --------------------------------------------------------------------------------

    def set(self, setting: Setting) -> None:
        forbid_if_read_only()
        with self._turn:
            self._notice_lapse()
            found = self._found if self._deadline_s is not None else self.settings()
            asked = Setting(
                sm_clock_hz=_other(setting.sm_clock_hz, found.sm_clock_hz),
                memory_clock_hz=_other(setting.memory_clock_hz, found.memory_clock_hz),
                power_limit_w=_other(setting.power_limit_w, found.power_limit_w),
            )
            if asked == Setting():
                self._release()
                return
            self._check_supported(asked)
            ask = Ask(
                number=self._next(),
                uuid=self._uuid,
                setting=asked,
                hold_s=self._hold_s,
                why=" ".join(sys.argv)[:MAX_TEXT],
            )
            self._forget_lease()  # in force again only when the daemon says so
            answer = self._call(ask)
            self._asked = replace(asked, power_limit_w=None)
            self._found = answer.found or found
            self._deadline_s = time.monotonic() + self._hold_s

    def reset(self) -> None:
        """Put back what the daemon has found. What somebody else has set is not released."""
        forbid_if_read_only()
        with self._turn:
            self._release()

    def close(self) -> None:
        with self._turn:
            with suppress(DeviceError):
                self._release()
            self._disconnect()
            self._reader.close()

    # The deadline ---------------------------------------------------------------------------

    def hold(self, hold_s: float) -> None:
        """As in `KeptElsewhere`."""
        with self._turn:
            # The daemon has no use for an infinite time, and grants no longer one than its own.
            self._hold_s = hold_s = min(hold_s, 1e9)
            self._notice_lapse()
            if self._deadline_s is None:
                return
            try:
                answer = self._call(Hold(number=self._next(), uuid=self._uuid, hold_s=hold_s))
            except DeviceError:
                self._forget_lease()
                raise
            if answer.held:
                self._deadline_s = time.monotonic() + hold_s
            else:
                self._forget_lease()
                self._lapsed = True

    def lapsed(self) -> bool:
        """As in `KeptElsewhere`."""
        with self._turn:
            self._notice_lapse()
            lapsed, self._lapsed = self._lapsed, False
            return lapsed

    def _notice_lapse(self) -> None:
        if self._deadline_s is None:
            return
        if time.monotonic() >= self._deadline_s or not self._connected():
            self._forget_lease()
            self._lapsed = True

    def _forget_lease(self) -> None:
        self._deadline_s = None
        self._asked = Setting()

    def _release(self) -> None:
        if self._deadline_s is not None:
            self._forget_lease()
            self._call(Release(number=self._next(), uuid=self._uuid))

    def _check_supported(self, asked: Setting) -> None:
        has = self._reader.supported()
        check_clock("SM", asked.sm_clock_hz, has.sm_clocks_hz)
        check_clock("memory", asked.memory_clock_hz, has.memory_clocks_hz)
        check_limit(asked.power_limit_w, has.power_limits_w)

    # The connection -------------------------------------------------------------------------

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _call(self, request: DaemonRequest) -> Answer:
        """The daemon's answer. Raises the error that it carries, or `DeviceError`."""
        with self._turn:
            if not self._connected():
                self._connect()
            try:
                answer = self._exchange(request)
            except TimeoutError:
                self._disconnect()
                raise DeviceHung(
                    f"kilter daemon at {self._path} does not answer; it puts the GPU back when it "
                    "runs again"
                ) from None
            except OSError as error:
                self._disconnect()
                raise DeviceError(f"kilter daemon at {self._path}: {error.strerror}") from error
            refusal = error_of(answer)
            if refusal is not None:
                raise refusal
            return answer

    def _connect(self) -> None:
        self._disconnect()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as opened:
            opened.settimeout(DAEMON_ANSWER_S)
            try:
                opened.connect(str(self._path))
            except OSError as error:
                why = error.strerror or "no answer"
                raise DeviceError(f"kilter daemon at {self._path}: {why}") from error
            self._connection = OwnFile(opened.detach())
        hello = Hello(version=VERSION, program=Path(sys.argv[0]).name[:MAX_TEXT])
        try:
            answer = self._exchange(hello)
        except OSError as error:
            self._disconnect()
            raise DeviceError(f"kilter daemon at {self._path}: it hung up") from error
        refusal = error_of(answer)
        if refusal is not None:
            self._disconnect()
            raise refusal

    def _connected(self) -> bool:
        """Our end is open still, and so is the daemon's, as far as the kernel knows."""
        if self._connection is None or self._connection.number is None:
            return False
        with as_socket(self._connection) as opened:
            try:
                return opened.recv(1, socket.MSG_PEEK) != b""
            except BlockingIOError:
                return True
            except OSError:
                return False

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _exchange(self, request: DaemonRequest) -> Answer:
        """Raises `OSError`; `TimeoutError` is one."""
        deadline_s = time.monotonic() + DAEMON_ANSWER_S
        assert self._connection is not None
        with as_socket(self._connection) as opened:
            opened.settimeout(DAEMON_ANSWER_S)
            # MSG_NOSIGNAL: a script may have put SIGPIPE back to its deadly default.
            opened.send(encode(request), socket.MSG_NOSIGNAL)
            line = b""
            while not line.endswith(b"\n"):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                opened.settimeout(left_s)
                part = opened.recv(MAX_MESSAGE_BYTES)
                if not part or len(line) > MAX_MESSAGE_BYTES:
                    raise ConnectionResetError(errno.ECONNRESET, "it hung up")
                line += part
        return read_answer(line)

    def _forget(self) -> None:
        """In a forked child: the connection is the parent's lease."""
        self._turn = threading.RLock()
        self._disconnect()
        self._forget_lease()
        self._lapsed = False


def _within(values: tuple[float, ...], allowed: Range | None) -> tuple[float, ...]:
    if allowed is None:
        return ()
    return tuple(value for value in values if allowed[0] <= value <= allowed[1])


def _other(value: float | None, found: float | None) -> float | None:
    """A knob to ask for: None where it is as it was found."""
    if value is None or (found is not None and math.isclose(value, found, rel_tol=1e-9)):
        return None
    return value
