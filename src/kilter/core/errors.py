"""Every error kilter raises on purpose. The message says what happened and what to do about it.

`exit_code` is what the command line returns when the error ends a verb: 2 for wrong usage, 3 for an
error of the user's own code that a verb of ours has called, 1 for the rest. Inside a user's
training none of them escapes: the fail-open fence catches `KilterError` and everything else,
restores, says so once, and steps aside.
"""


class KilterError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1
    code = "error"
    """What a program compares; the text is for people."""


class UsageError(KilterError):
    """A flag, an argument or a value given by the user is wrong."""

    exit_code = 2
    code = "usage"


class UserCodeError(KilterError):
    """The user's own function or file, which a verb of ours has called, raised an error."""

    exit_code = 3
    code = "user_code"


class FileError(KilterError):
    """A file is missing, malformed, truncated, or written by a newer kilter."""

    code = "file"


class PlanError(KilterError):
    """A planner was given a problem that has no answer."""

    code = "no_plan"


class BudgetTooSmall(PlanError):
    """No plan reaches the budget, whatever it moves."""

    code = "budget_too_small"


class DeviceError(KilterError):
    """Base of what can go wrong with a device."""

    code = "device"


class NoDevice(DeviceError):
    """There is no such device, or no driver."""


class DriverMismatch(DeviceError):
    """The driver's library and kernel module have different versions, or lack a call."""


class NotSupported(DeviceError):
    """The device has no such knob or sensor."""


class NotPermitted(DeviceError):
    """The device could, but this user or container may not."""


class ReadOnly(NotPermitted):
    """`KILTER_READ_ONLY=1`: no setter reaches the vendor's library."""


class NotObeyed(DeviceError):
    """A setter reported success, but observation shows another value."""


class DeviceLost(DeviceError):
    """The device fell off the bus or needs a reset; nothing more can be read or set."""


class DeviceHung(DeviceError):
    """A vendor call did not return in time."""


class Held(DeviceError):
    """Another kilter, or another tool, controls this device."""
