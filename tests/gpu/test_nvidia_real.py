"""NVIDIA's back end on a real GPU, reading only: KILTER_READ_ONLY is set for every test here."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator

import pytest

from kilter.core.errors import DeviceError, ReadOnly
from kilter.core.setting import Setting
from kilter.device.find import find
from kilter.device.nvidia import NvidiaDevice
from kilter.device.protocol import Device
from kilter.testing.device import DeviceConformance

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KILTER_READ_ONLY", "1")


@pytest.fixture
def device() -> Iterator[Device]:
    found = real_device()
    yield found
    found.close()


def real_device() -> Device:
    try:
        found = find("nvml", environ=os.environ)
        found.info()
    except DeviceError as error:
        pytest.skip(f"no real GPU to read: {error}")
    return found


class TestRealGpu(DeviceConformance):
    sets = False

    def make_device(self) -> Device:
        return real_device()


def test_sensors_of_a_data_centre_gpu_are_all_there(device: Device) -> None:
    sample = device.sample(energy=True)
    assert sample.power_w is not None
    assert sample.sm_clock_hz is not None
    assert sample.temperature_c is not None
    assert sample.throttle is not None
    assert device.supported().sm_clocks_hz


def test_every_setter_is_refused(device: Device) -> None:
    before = device.settings()
    top_hz = device.supported().sm_clocks_hz[-1]
    with pytest.raises(ReadOnly):
        device.set(Setting(sm_clock_hz=top_hz))
    with pytest.raises(ReadOnly):
        device.reset()
    assert device.settings() == before


def test_counter_and_integral_of_power_agree(device: Device) -> None:
    """Both of the same board, over seconds: gains cancel, what is left is the counter's tick."""
    info = device.info()
    if not info.has_energy_counter or info.sensor_period_s is None:
        pytest.skip("this GPU has no energy counter")
    begin = device.sample(energy=True)
    samples = [begin]
    while samples[-1].t_s < begin.t_s + 5.0:
        time.sleep(info.sensor_period_s / 5)
        samples.append(device.sample())
    end = device.sample(energy=True)
    samples.append(end)
    known = [(s.t_s, s.power_w) for s in samples if s.power_w is not None]
    integral_j = sum((b - a) * (p + q) / 2 for (a, p), (b, q) in itertools.pairwise(known))
    assert begin.energy_j is not None
    assert end.energy_j is not None
    assert end.energy_j - begin.energy_j == pytest.approx(integral_j, rel=0.15)


def test_uuid_opens_the_same_gpu_again(device: Device) -> None:
    again = NvidiaDevice(device.info().uuid)
    assert again.info().index == device.info().index
    again.close()
