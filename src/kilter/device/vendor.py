"""What the back ends of real GPUs share: calls with a time-out, power limits, refused values.

Every vendor call runs in one daemon thread per device, and the caller waits for it only so long:
vendors' libraries are known to hang for ever (NVML: open-gpu-kernel-modules#1333), and neither the
training nor its end may wait for them. One hop to that thread covers all reads of a sample, and
costs about as much as they do: tens of microseconds. A forked child gets a thread and a session of
its own.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from kilter.core.errors import DeviceError, Held, NotPermitted, NotSupported, ReadOnly
from kilter.core.setting import DeviceInfo, Sample
from kilter.core.units import MHZ
from kilter.device.worker import Worker

T = TypeVar("T")

READ_ONLY_VARIABLE = "KILTER_READ_ONLY"
READ_ONLY_REFUSAL = f"{READ_ONLY_VARIABLE} is set in the environment; unset it to allow changes"
LIMIT_STEPS = 20
"""Power limits are nearly continuous: this many steps between the smallest and the largest."""
CALL_TIMEOUT_S = 5.0
INIT_TIMEOUT_S = 60.0
"""Without persistence mode the first call wakes every GPU of the machine, seconds for each."""


def read_only() -> bool:
    """Whether the environment forbids every setter: `KILTER_READ_ONLY` not empty and not 0."""
    return os.environ.get(READ_ONLY_VARIABLE, "") not in ("", "0")


def forbid_if_read_only() -> None:
    if read_only():
        raise ReadOnly(READ_ONLY_REFUSAL)


class VendorLibrary(ABC):
    """A vendor's Python binding, with its errors in our words."""

    raises: str
    """What the binding calls the class of its errors."""
    package: str
    """Where its calls come from, and how to get a newer one."""

    def __init__(self, binding: Any | None, where: str) -> None:
        """`binding` is used in place of the vendor's module; `where` begins every message. Nothing
        is loaded yet."""
        self._binding = binding
        self._where = where
        self._calling = "nothing"

    @abstractmethod
    def open(self) -> None:
        """Load the library and connect to the driver. Raises `NoDevice` or `DriverMismatch`."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect once; other users of the library in this process are not affected."""

    @abstractmethod
    def handle_of(self, uuid: str) -> Any:
        """The vendor's handle of a GPU. Raises `NoDevice`."""

    @abstractmethod
    def explained(self, name: str, error: Any) -> DeviceError:
        """Our error for one that a call has raised."""

    def call(self, name: str, *arguments: Any) -> Any:
        """One vendor call. A call that the binding or the driver lacks is `NotSupported`."""
        function = getattr(self._binding, name, None)
        if function is None:
            raise NotSupported(f"{name} is not in this {self.package}")
        self._calling = name
        try:
            return function(*arguments)
        except getattr(self._binding, self.raises) as error:
            raise self.explained(name, error) from error

    def describe(self) -> str:
        """The call that runs now, for whoever waits for it."""
        return f"{self._where}: {self._calling}"

    def once(self, act: Callable[[], T]) -> T:
        """Connect, `act`, and disconnect, in a thread of its own. Raises `DeviceHung`, too."""
        worker = Worker(self.describe)

        def connected() -> T:
            self.open()
            try:
                return act()
            finally:
                self.close()

        try:
            return worker.do(connected, INIT_TIMEOUT_S)
        finally:
            worker.stop()


class VendorDevice(ABC):
    """One GPU by its UUID. Thread-safe after the first call. Opens again if used when closed."""

    def __init__(self, uuid: str, library: VendorLibrary, timeout_s: float) -> None:
        self._uuid = uuid
        self._library = library
        self._timeout_s = timeout_s
        self._worker: Worker | None = None
        self._pid = 0
        self._handle: Any = None
        self._info: DeviceInfo | None = None
        self._told_limit_w: float | None = None
        """It is the power limit that `settings` has told, or that this object has set since."""

    def info(self) -> DeviceInfo:
        if self._info is None:
            self._info = self._do(self._read_info)
        if read_only():
            return replace(self._info, can_set=False, refusal=READ_ONLY_REFUSAL)
        return self._info

    def sample(self, *, energy: bool = False) -> Sample:
        return self._do(lambda handle: self._read_sample(handle, energy))

    def close(self) -> None:
        worker, handle = self._worker, self._handle
        if worker is None or self._pid != os.getpid():
            return
        self._worker, self._handle = None, None
        if handle is not None:
            with suppress(DeviceError):
                worker.do(lambda: self._let_go(handle), self._timeout_s)
        worker.stop()

    def _do(self, act: Callable[[Any], T]) -> T:
        """Run `act` on the GPU's handle in the worker; opens first if needed, also after a fork."""
        if self._worker is None or self._pid != os.getpid():
            self._worker = Worker(self._library.describe)
            self._handle, self._pid = None, os.getpid()
        timeout_s = INIT_TIMEOUT_S if self._handle is None else self._timeout_s
        return self._worker.do(lambda: act(self._opened()), timeout_s)

    # In the worker's thread -----------------------------------------------------------------

    @abstractmethod
    def _read_info(self, handle: Any) -> DeviceInfo: ...

    @abstractmethod
    def _read_sample(self, handle: Any, energy: bool) -> Sample: ...

    def _let_go(self, handle: Any) -> None:
        """Close the library; `handle` is the last that it gave."""
        self._library.close()

    def _opened(self) -> Any:
        if self._handle is None:
            self._library.open()
            try:
                self._handle = self._library.handle_of(self._uuid)
            except DeviceError:
                self._library.close()
                raise
        return self._handle

    def _optional(self, name: str, *arguments: Any) -> Any:
        """A reading, or `None` if the GPU or driver lacks it or forbids it."""
        try:
            return self._library.call(name, *arguments)
        except (NotSupported, NotPermitted):
            return None

    def _change_limit(
        self,
        value_w: float | None,
        *,
        now: int | None,
        default: int | None,
        unit_w: float,
        change: Callable[[int], None],
    ) -> None:
        """Put a power limit in force by `change`, in the vendor's unit, as are `now` and `default`.

        A limit that is to stay as `settings` has told it is left as it is, even if it is another
        by now: whoever has changed it since wants it so. One that is to change is compared once
        more; if it is another by now, that is somebody's wish, too, and `Held` is raised.
        """
        told_w = self._told_limit_w
        if value_w is not None and value_w == told_w:
            return
        wanted = default if value_w is None else round(value_w / unit_w)
        if wanted is None:
            return
        if wanted != now:
            if value_w is not None and told_w is not None and now != round(told_w / unit_w):
                raise Held(
                    f"{self._uuid}: somebody else has just changed the power limit to "
                    f"{(now or 0) * unit_w:g} W; left as it is"
                )
            change(wanted)
        self._told_limit_w = wanted * unit_w

    def _setter(self, name: str, *arguments: Any) -> None:
        """The only place that calls a setter of the vendor."""
        forbid_if_read_only()
        self._library.call(name, *arguments)


def try_all(*steps: Callable[[], None]) -> None:
    """Each step even if another one fails, so that a restore gets as far as it can; then the first
    error is raised."""
    errors: list[DeviceError] = []
    for step in steps:
        try:
            step()
        except DeviceError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def limit_ladder(lowest_w: float, highest_w: float) -> tuple[float, ...]:
    """The ends of a range of power limits, and whole watts between them; empty for no range."""
    if lowest_w >= highest_w:
        return ()
    step_w = (highest_w - lowest_w) / LIMIT_STEPS
    inner = {float(round(lowest_w + k * step_w)) for k in range(1, LIMIT_STEPS)}
    return tuple(sorted({lowest_w, highest_w} | {w for w in inner if lowest_w < w < highest_w}))


def check_clock(knob: str, value_hz: float | None, accepted_hz: tuple[float, ...]) -> None:
    if value_hz is None or value_hz in accepted_hz:
        return
    if not accepted_hz:
        raise NotSupported(f"this GPU has no {knob} clock to lock")
    below = max((hz for hz in accepted_hz if hz < value_hz), default=accepted_hz[0])
    above = min((hz for hz in accepted_hz if hz > value_hz), default=accepted_hz[-1])
    raise NotSupported(
        f"{knob} clock {value_hz / MHZ:g} MHz is not supported; nearest are "
        f"{below / MHZ:g} and {above / MHZ:g} MHz"
    )


def check_limit(value_w: float | None, accepted_w: tuple[float, ...]) -> None:
    if value_w is None:
        return
    if not accepted_w:
        raise NotSupported("this GPU has no power limit to set")
    if not accepted_w[0] <= value_w <= accepted_w[-1]:
        raise NotSupported(
            f"power limit {value_w:g} W is outside {accepted_w[0]:g} to {accepted_w[-1]:g} W"
        )
