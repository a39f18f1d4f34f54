"""The `Device` protocol: something that is sampled and set.

A GPU, a simulated GPU, a recording, or nothing at all (`null`). Every back end passes the
conformance suite in `kilter.testing.device`; a new vendor is one file here and three lines of test.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from kilter.core.setting import DeviceInfo, Sample, Setting, Supported


@runtime_checkable
class Device(Protocol):
    """One device. Constructing one has no effect on it. Not thread-safe unless a back end says so.

    Every method may raise `DeviceLost`, `DeviceHung` or `DriverMismatch`.
    """

    def info(self) -> DeviceInfo:
        """What it is and what may be done with it. Cheap after the first call."""

    def sample(self, *, energy: bool = False) -> Sample:
        """What its sensors say now. `energy` also reads the energy counter, which may take
        milliseconds and must not be asked for in the path of an iteration."""

    def supported(self) -> Supported:
        """The values that each knob accepts; empty tuples for knobs that do not exist."""

    def settings(self) -> Setting:
        """What is requested now, as far as the vendor tells or this object has set it; `None` for
        a knob that is left to the device's own governor, or that nobody can ask about."""

    def set(self, setting: Setting) -> None:
        """Make `settings()` equal to `setting`: a knob that is `None` is released to the device's
        governor, a knob that already has its value is not touched. Where nobody can ask about a
        knob, one that this object has never set counts as `None` and is not touched either:
        somebody else may have set it.

        Raises `ReadOnly`, `NotPermitted`, `NotSupported` (no such knob or value). A partly applied
        setting is possible after an error: the caller restores. Success means that the request was
        taken, not that it is obeyed: observe.
        """

    def reset(self) -> None:
        """Release every knob: the vendor's defaults."""

    def close(self) -> None:
        """Let go of handles. Settings stay as they are. Calling it twice is allowed."""


@runtime_checkable
class KeptElsewhere(Protocol):
    """A device that another process sets for this one, and puts back when this one dies or lets a
    deadline pass: a lease on it needs neither a journal nor a watcher of its own."""

    def hold(self, hold_s: float) -> None:
        """Prolong what is set, and let what is set next hold for so long."""

    def lapsed(self) -> bool:
        """Whether what was found has been put back since the last call, because a deadline has
        passed or the other process has begun anew."""
