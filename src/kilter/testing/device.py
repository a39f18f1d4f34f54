"""What every device must do: a suite of tests for whoever writes a back end.

Subclass it in a test file, say how to make your device, and run pytest:

    from kilter.testing.device import DeviceConformance

    class TestMyDevice(DeviceConformance):
        def make_device(self):
            return MyDevice("card0")

The device must be idle or simulated and free to be set: the suite locks clocks and limits, and
releases them at the end. For a real card, set `sets = False`, or run with KILTER_READ_ONLY=1: then
only reading is tested, and that setting is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest

from kilter.core.errors import NotPermitted, NotSupported
from kilter.core.label import Label
from kilter.core.setting import DeviceInfo, Sample, Setting, Supported
from kilter.device.protocol import Device


class DeviceConformance:
    """Subclass and define `make_device`; fixtures of your own may fill attributes it uses."""

    sets = True
    """Whether the suite may change settings."""

    sparse = False
    """Whether values of different knobs are taken in some combinations only, as those of a replayed
    table are: then a supported value may be refused as long as others are not released."""

    def make_device(self) -> Device:
        """A new object; for the same device each time, if devices of this kind outlive objects."""
        raise NotImplementedError

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        device = self.make_device()
        yield device
        if self.sets and device.info().can_set:
            device.reset()
        device.close()

    @pytest.fixture
    def settable(self, device: Device) -> Device:
        if not self.sets:
            pytest.skip("this suite may not set")
        if not device.info().can_set:
            pytest.skip(f"this device cannot be set: {device.info().refusal}")
        return device

    # What it says ---------------------------------------------------------------------------

    def test_is_a_device(self, device: Device) -> None:
        assert isinstance(device, Device)

    def test_info_names_it_and_stays_the_same(self, device: Device) -> None:
        info = device.info()
        assert isinstance(info, DeviceInfo)
        assert info.name
        assert info.uuid
        assert isinstance(info.label, Label)
        assert device.info() == info

    def test_two_objects_of_one_device_have_one_uuid(self, device: Device) -> None:
        other = self.make_device()
        assert other.info().uuid == device.info().uuid
        other.close()

    def test_a_refusal_has_a_reason_and_only_a_refusal_has_one(self, device: Device) -> None:
        info = device.info()
        assert (info.refusal is None) == info.can_set
        assert info.refusal != ""

    def test_sample_is_in_si_units_and_unknown_is_none(self, device: Device) -> None:
        sample = device.sample()
        assert isinstance(sample, Sample)
        for value, low, high in (
            (sample.power_w, 0.0, 1e5),
            (sample.sm_clock_hz, 1e6, 1e11),
            (sample.memory_clock_hz, 1e6, 1e11),
            (sample.sm_utilisation, 0.0, 1.0),
            (sample.memory_utilisation, 0.0, 1.0),
            (sample.temperature_c, -60.0, 150.0),
            (sample.memory_used_bytes, 0.0, 1e15),
        ):
            assert value is None or low <= value <= high

    def test_energy_is_read_only_when_asked_for(self, device: Device) -> None:
        assert device.sample().energy_j is None

    def test_energy_counter_is_there_if_info_says_so(self, device: Device) -> None:
        energy_j = device.sample(energy=True).energy_j
        assert (energy_j is not None) == device.info().has_energy_counter

    def test_time_and_energy_never_go_back(self, device: Device) -> None:
        samples = [device.sample(energy=True) for _ in range(5)]
        for before, after in itertools.pairwise(samples):
            assert after.t_s >= before.t_s
            assert after.energy_j is None or after.energy_j >= (before.energy_j or 0.0)

    def test_supported_values_ascend_and_are_positive(self, device: Device) -> None:
        supported = device.supported()
        assert isinstance(supported, Supported)
        for values in _knobs(supported).values():
            assert list(values) == sorted(set(values))
            assert all(math.isfinite(value) and value > 0 for value in values)

    def test_a_device_that_can_be_set_has_a_knob(self, device: Device) -> None:
        if device.info().can_set:
            assert any(_knobs(device.supported()).values())

    def test_closing_twice_is_allowed(self, device: Device) -> None:
        device.close()
        device.close()

    # What it does ---------------------------------------------------------------------------

    def test_what_cannot_be_set_is_refused_and_stays(self, device: Device) -> None:
        if device.info().can_set and self.sets:
            pytest.skip("this device can be set")
        before = device.settings()
        with pytest.raises((NotPermitted, NotSupported)):
            device.set(Setting(sm_clock_hz=1e9))
        assert device.settings() == before

    def test_each_supported_value_is_taken_and_reported(self, settable: Device) -> None:
        for knob, values in _knobs(settable.supported()).items():
            for value in {values[0], values[len(values) // 2], values[-1]} if values else ():
                if self._take(settable, Setting(**{knob: value})):
                    assert getattr(settable.settings(), knob) == pytest.approx(value)

    def test_setting_all_knobs_and_then_the_found_setting_restores_it(
        self, settable: Device
    ) -> None:
        found = settable.settings()
        self._lower(settable)
        settable.set(found)
        assert settable.settings() == found

    def test_none_releases_a_knob(self, settable: Device) -> None:
        settable.reset()
        free = settable.settings()
        for knob, values in _knobs(settable.supported()).items():
            if values and self._take(settable, Setting(**{knob: values[0]})):
                settable.set(Setting())
                assert settable.settings() == free

    def test_setting_twice_is_the_same_as_once(self, settable: Device) -> None:
        wanted = self._lower(settable)
        once = settable.settings()
        settable.set(wanted)
        assert settable.settings() == once

    def test_reset_releases_what_another_object_has_set(self, settable: Device) -> None:
        """After a kill, the object that restores is not the one that has set."""
        settable.reset()
        free, free_sample = settable.settings(), settable.sample()
        dead = self.make_device()
        self._lower(dead)
        dead.close()
        settable.reset()
        assert settable.settings() == free
        assert settable.sample().sm_clock_hz == free_sample.sm_clock_hz

    def test_closing_leaves_settings_as_they_are(self, settable: Device) -> None:
        other = self.make_device()
        self._lower(other)
        wanted = other.settings().power_limit_w
        other.close()
        if settable.info().persistent:
            assert settable.settings().power_limit_w == wanted

    @pytest.mark.parametrize("knob", ["sm_clock_hz", "memory_clock_hz", "power_limit_w"])
    def test_an_unsupported_value_is_refused_and_changes_nothing(
        self, settable: Device, knob: str
    ) -> None:
        before = settable.settings()
        with pytest.raises(NotSupported):
            settable.set(Setting(**{knob: 1e12}))
        assert settable.settings() == before

    def test_read_only_environment_refuses_every_setter(
        self, settable: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only for devices whose settings outlive us: there is nothing to guard in the others."""
        if not settable.info().persistent:
            pytest.skip("settings of this device end with the process")
        before = settable.settings()
        monkeypatch.setenv("KILTER_READ_ONLY", "1")
        with pytest.raises(NotPermitted):
            self._lower(settable)
        with pytest.raises(NotPermitted):
            settable.reset()
        assert not settable.info().can_set
        monkeypatch.delenv("KILTER_READ_ONLY")
        assert settable.settings() == before

    # For the tests --------------------------------------------------------------------------

    def _take(self, device: Device, setting: Setting) -> bool:
        try:
            device.set(setting)
        except NotSupported:
            if not self.sparse:
                raise
            return False
        return True

    def _lower(self, device: Device) -> Setting:
        """Set each knob to its lowest value, or a sparse device's first one that it takes."""
        lowest = {k: values[0] for k, values in _knobs(device.supported()).items() if values}
        attempts = [lowest, *({knob: value} for knob, value in lowest.items())]
        for wanted in (Setting(**attempt) for attempt in attempts):
            if self._take(device, wanted):
                return wanted
        pytest.skip("this device takes none of its lowest values alone")


def _knobs(supported: Supported) -> dict[str, tuple[float, ...]]:
    """The supported values under the names that `Setting` has for them."""
    return {
        "sm_clock_hz": supported.sm_clocks_hz,
        "memory_clock_hz": supported.memory_clocks_hz,
        "power_limit_w": supported.power_limits_w,
    }
