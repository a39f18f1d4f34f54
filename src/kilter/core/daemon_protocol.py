"""What `kilter daemon` and its clients say to each other: values, their encoding, their limits.

One JSON object a line over a Unix socket. The client says `Hello` first and then one request at a
time; the daemon answers each of them once. Who the client is, the kernel tells the daemon: no
message carries a name, a token or a process number, so nothing that is recorded and sent again has
a meaning. Numbers of requests ascend, and a connection that repeats one is closed.
"""

from __future__ import annotations

import math

import msgspec

from kilter.core import errors
from kilter.core.errors import DeviceError
from kilter.core.setting import Setting

VERSION = 1
SOCKET = "/run/kilterd/kilter.sock"
SOCKET_VARIABLE = "KILTER_SOCKET"
MAX_MESSAGE_BYTES = 4096
MAX_TEXT = 256
"""A text that a client sends, for the audit log, has at most so many characters."""

Range = tuple[float, float]


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    pass


class Hello(_Message, frozen=True, kw_only=True):
    """The first message: which version the client speaks, and what it is, for the audit log."""

    version: int
    program: str = ""


class Look(_Message, frozen=True, kw_only=True):
    """What may this user set on this GPU? Sets nothing."""

    number: int
    uuid: str


class Ask(_Message, frozen=True, kw_only=True):
    """Set the GPU; a knob that is None is put back to what was found. The first request takes the
    lease, and the found setting comes back after `hold_s` without another request or `Hold`."""

    number: int
    uuid: str
    setting: Setting
    hold_s: float
    why: str = ""


class Hold(_Message, frozen=True, kw_only=True):
    """Prolong the lease. The answer says `held=False` if there is none any more."""

    number: int
    uuid: str
    hold_s: float


class Release(_Message, frozen=True, kw_only=True):
    """Put back what was found, and let the GPU go. Answered when that is done."""

    number: int
    uuid: str


DaemonRequest = Hello | Look | Ask | Hold | Release


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator allows a user on a GPU; a knob that is None may not be set."""

    sm_clock_hz: Range | None = None
    memory_clock_hz: Range | None = None
    power_limit_w: Range | None = None
    gpus_at_once: int = 1
    longest_hold_s: float = 600.0

    def refusal(self, setting: Setting) -> str | None:
        """Why this setting is outside, or None."""
        for knob, name, unit, scale in KNOB_NAMES:
            value, allowed = getattr(setting, knob), getattr(self, knob)
            if value is None:
                continue
            if allowed is None:
                return f"the operator's policy does not let you set the {name}"
            if not math.isfinite(value) or not allowed[0] <= value <= allowed[1]:
                return (
                    f"{name} {value / scale:g} {unit} is outside the operator's policy, "
                    f"{allowed[0] / scale:g} to {allowed[1] / scale:g} {unit}"
                )
        return None


KNOB_NAMES = (
    ("sm_clock_hz", "SM clock", "MHz", 1e6),
    ("memory_clock_hz", "memory clock", "MHz", 1e6),
    ("power_limit_w", "power limit", "W", 1.0),
)
"""Each has a field, its name for people, and its unit for people with the unit's size in SI."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    number: int = 0
    error: str | None = None
    """It is the name of one of our device errors."""
    text: str = ""
    version: int = VERSION
    grant: Grant | None = None
    found: Setting | None = None
    """What the GPU stood at when the lease was taken."""
    held: bool = False


def encode(message: DaemonRequest | Answer) -> bytes:
    return msgspec.json.encode(message) + b"\n"


_REQUESTS: msgspec.json.Decoder[DaemonRequest] = msgspec.json.Decoder(DaemonRequest)
_ANSWERS = msgspec.json.Decoder(Answer)


def read_request(line: bytes) -> DaemonRequest:
    """Raises `ValueError` for what is no request."""
    try:
        request = _REQUESTS.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if isinstance(request, Ask | Hold) and not (
        math.isfinite(request.hold_s) and request.hold_s > 0
    ):
        raise ValueError("hold_s must be a positive number of seconds")
    return request


def read_answer(line: bytes) -> Answer:
    """Raises `DeviceError` for what is no answer."""
    try:
        return _ANSWERS.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DeviceError(f"the daemon's answer cannot be understood ({error})") from error


def error_of(answer: Answer) -> DeviceError | None:
    """The error that an answer carries, as ours."""
    if answer.error is None:
        return None
    kind = getattr(errors, answer.error, DeviceError)
    known = isinstance(kind, type) and issubclass(kind, DeviceError)
    return (kind if known else DeviceError)(answer.text)
