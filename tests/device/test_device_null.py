"""The null device passes the suite, and says why it is there."""

from kilter.device.null import NullDevice
from kilter.device.protocol import Device
from kilter.testing.device import DeviceConformance


class TestNullDevice(DeviceConformance):
    def make_device(self) -> Device:
        return NullDevice()


def test_the_reason_is_the_refusal() -> None:
    assert NullDevice("no driver; install one").info().refusal == "no driver; install one"
