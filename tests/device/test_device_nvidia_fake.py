"""NVIDIA's back end on fake cards: the suite, and every way in which a real card disappoints."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilter.core.errors import (
    DeviceHung,
    DeviceLost,
    DriverMismatch,
    Held,
    NoDevice,
    NotPermitted,
    NotSupported,
    ReadOnly,
)
from kilter.core.setting import Activity, Setting, Throttle
from kilter.device import gpm
from kilter.device.nvidia import Library, NvidiaDevice, missing_privilege, survey
from kilter.device.protocol import Device
from kilter.testing.device import DeviceConformance
from kilter.testing.fake_card import Card, Rule
from kilter.testing.fake_nvml import FakeNvml

MakeFake = Callable[..., FakeNvml]


@pytest.fixture(autouse=True)
def _writable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake cards may be set wherever the tests run."""
    monkeypatch.delenv("KILTER_READ_ONLY", raising=False)


@pytest.fixture
def make_fake(tmp_path: Path) -> MakeFake:
    return lambda *cards, **options: FakeNvml.create(tmp_path / "cards.json", *cards, **options)


def open_device(fake: FakeNvml, card: int = 0, *, timeout_s: float = 30.0) -> NvidiaDevice:
    uuid = fake.state().cards[card].uuid
    return NvidiaDevice(
        uuid, nvml=FakeNvml(fake.path), privilege=fake.missing_privilege, timeout_s=timeout_s
    )


class TestNvidiaOnFakeCards(DeviceConformance):
    @pytest.fixture(autouse=True)
    def _cards(self, make_fake: MakeFake) -> None:
        self.fake = make_fake(Card(load=1.0))

    def make_device(self) -> Device:
        return open_device(self.fake)


class TestOldCard(DeviceConformance):
    """Volta: no memory lock, no power field, no MIG; and an old driver without the newer names."""

    @pytest.fixture(autouse=True)
    def _cards(self, make_fake: MakeFake) -> None:
        card = Card(
            architecture=5,
            memory_clocks_mhz=(877,),
            memory_lockable=False,
            default_limit_mw=300_000,
            power_limits_mw=(150_000, 300_000),
            sm_clocks_mhz=(135, 1530, 15),
        )
        self.fake = make_fake(card)
        with self.fake.edit() as state:
            state.missing = [
                "nvmlDeviceGetCurrentClocksEventReasons",
                "nvmlDeviceGetFieldValues",
                "nvmlDeviceGetTotalEnergyConsumption",
            ]

    def make_device(self) -> Device:
        return open_device(self.fake)

    def test_falls_back_to_the_older_calls(self) -> None:
        device = self.make_device()
        sample = device.sample(energy=True)
        assert sample.power_w == self.fake.state().cards[0].power_w
        assert sample.throttle == (Throttle.IDLE,)
        assert sample.energy_j is None
        assert device.info().has_energy_counter is False
        assert device.info().sensor_period_s == 0.02
        assert device.supported().memory_clocks_hz == ()

    def test_asks_for_a_missing_call_only_once(self) -> None:
        device = self.make_device()
        for _ in range(3):
            device.sample(energy=True)
        assert len(self.fake.calls("nvmlDeviceGetFieldValues")) == 1
        assert len(self.fake.calls("nvmlDeviceGetTotalEnergyConsumption")) == 1


# Requests and what becomes of them -----------------------------------------------------------


def test_a_lower_clock_is_a_cap_that_lowers_power(make_fake: MakeFake) -> None:
    fake = make_fake(Card(load=1.0))
    device = open_device(fake)
    before_w = device.sample().power_w
    device.set(Setting(sm_clock_hz=1200e6))
    after = device.sample()
    assert before_w is not None
    assert after.power_w is not None
    assert after.power_w < before_w
    assert after.sm_clock_hz == 1200e6
    with fake.edit() as state:
        state.cards[0].load = 0.0
    assert device.sample().sm_clock_hz == 345e6, "a waiting GPU may still go below the cap"


def test_only_knobs_that_differ_are_touched(make_fake: MakeFake) -> None:
    fake = make_fake()
    device = open_device(fake)
    device.set(Setting(sm_clock_hz=1200e6, memory_clock_hz=2201e6, power_limit_w=500.0))
    before = len(fake.setters())
    device.set(Setting(sm_clock_hz=1200e6, memory_clock_hz=2201e6, power_limit_w=500.0))
    assert fake.setters()[before:] == []
    device.set(Setting(sm_clock_hz=1200e6, memory_clock_hz=2201e6, power_limit_w=450.0))
    assert [call.name for call in fake.setters()[before:]] == ["nvmlDeviceSetPowerManagementLimit"]


@pytest.mark.parametrize(
    ("next_call", "lost"),
    [(None, 1), ("PowerManagementLimit", 0), ("PowerManagementDefaultLimit", 0)],
    ids=["set at once", "looked again", "another call between"],
)
def test_the_fake_counts_limits_lost_between_a_look_and_the_next_call(
    make_fake: MakeFake, next_call: str | None, lost: int
) -> None:
    fake = make_fake(Card(limit_mw=600_000))
    fake.nvmlInit()
    handle = fake.nvmlDeviceGetHandleByIndex(0)
    fake.nvmlDeviceGetPowerManagementLimit(handle)
    with fake.edit() as state:
        state.cards[0].limit_mw = 500_000
    if next_call is not None:
        getattr(fake, f"nvmlDeviceGet{next_call}")(handle)
    fake.nvmlDeviceSetPowerManagementLimit(handle, 400_000)
    assert fake.state().cards[0].limits_lost == lost


def test_a_limit_set_by_the_administrator_is_found_and_put_back(make_fake: MakeFake) -> None:
    fake = make_fake(Card(limit_mw=600_000))
    device = open_device(fake)
    found = device.settings()
    assert found == Setting(power_limit_w=600.0)
    device.set(Setting(sm_clock_hz=1200e6, power_limit_w=400.0))
    device.set(found)
    card = fake.state().cards[0]
    assert (card.sm_lock_mhz, card.limit_mw) == (None, 600_000)


def test_a_limit_that_somebody_changes_between_look_and_set_is_not_overwritten(
    make_fake: MakeFake,
) -> None:
    fake = make_fake(Card())
    device = open_device(fake)
    device.set(Setting(power_limit_w=650.0))  # also once this object has set one itself
    found = device.settings()
    with fake.edit() as state:
        state.cards[0].limit_mw = 500_000
    device.set(replace(found, sm_clock_hz=1.2e9))  # nothing is asked of the limit
    assert fake.state().cards[0].limit_mw == 500_000
    with pytest.raises(Held, match="500 W"):
        device.set(Setting(power_limit_w=400.0))
    assert fake.state().cards[0].limit_mw == 500_000
    assert device.settings().power_limit_w == 500.0
    device.set(Setting(power_limit_w=400.0))
    assert fake.state().cards[0].limit_mw == 400_000


def test_a_lock_that_this_object_has_not_made_is_left_alone_until_reset(
    make_fake: MakeFake,
) -> None:
    """The site may have locked the memory clock; a plan for the limit must not undo that."""
    fake = make_fake()
    open_device(fake).set(Setting(sm_clock_hz=1200e6))
    other = open_device(fake)
    other.set(Setting(power_limit_w=650.0))
    assert fake.state().cards[0].sm_lock_mhz is not None
    other.reset()
    assert fake.state().cards[0].sm_lock_mhz is None


def test_an_unobeyed_request_shows_in_the_sample_not_in_the_settings(make_fake: MakeFake) -> None:
    fake = make_fake(Card(load=1.0, clips_sm_mhz=(1500, 1980)))
    device = open_device(fake)
    device.set(Setting(sm_clock_hz=1200e6))
    assert device.settings().sm_clock_hz == 1200e6
    assert device.sample().sm_clock_hz == 1500e6


def test_a_success_that_does_nothing_shows_in_the_sample(make_fake: MakeFake) -> None:
    fake = make_fake(Card(load=1.0))
    with fake.edit() as state:
        state.rules.append(Rule(call="nvmlDeviceSetGpuLockedClocks", pretend=True))
    device = open_device(fake)
    device.set(Setting(sm_clock_hz=1200e6))
    assert device.sample().sm_clock_hz == 1980e6


def test_another_tool_changes_the_clock_and_the_limit(make_fake: MakeFake) -> None:
    fake = make_fake(Card(load=1.0))
    device = open_device(fake)
    device.set(Setting(sm_clock_hz=1500e6))
    with fake.edit() as state:
        state.cards[0].sm_lock_mhz = (345, 900)
        state.cards[0].limit_mw = 300_000
    assert device.sample().sm_clock_hz == 900e6
    assert device.settings().power_limit_w == 300.0


def test_an_idle_gaming_card_tells_the_clocks_it_will_have_under_load(make_fake: MakeFake) -> None:
    card = Card(memory_clocks_mhz=(405, 9501), sm_clocks_mhz=(210, 2100, 15), sm_top_mhz={405: 420})
    device = open_device(make_fake(card))
    assert device.sample().memory_clock_hz == 405e6
    assert device.supported().sm_clocks_hz[-1] == 2100e6
    with pytest.raises(NotSupported, match="420"):
        device.set(Setting(sm_clock_hz=2100e6, memory_clock_hz=405e6))
    device.set(Setting(memory_clock_hz=405e6))
    assert device.supported().sm_clocks_hz[-1] == 420e6
    device.set(Setting(sm_clock_hz=2100e6))
    assert device.supported().sm_clocks_hz[-1] == 2100e6


def test_power_limit_pulls_the_clock_down_and_is_named_as_the_reason(make_fake: MakeFake) -> None:
    fake = make_fake(Card(load=1.0))
    device = open_device(fake)
    device.set(Setting(power_limit_w=500.0))
    sample = device.sample()
    assert sample.power_w is not None
    assert sample.power_w <= 500.0
    assert sample.sm_clock_hz is not None
    assert sample.sm_clock_hz < 1980e6
    assert sample.throttle == (Throttle.POWER_CAP,)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x00, ()),
        (0x02, (Throttle.CLOCK_SETTING,)),
        (0x20, (Throttle.THERMAL,)),
        (0x60, (Throttle.THERMAL,)),
        (0x88, (Throttle.HARDWARE,)),
        (0x44, (Throttle.POWER_CAP, Throttle.THERMAL)),
    ],
)
def test_event_reasons_are_told_in_our_words(
    make_fake: MakeFake, bits: int, expected: tuple[Throttle, ...]
) -> None:
    assert open_device(make_fake(Card(load=1.0, event_reasons=bits))).sample().throttle == expected


SETTINGS = st.builds(
    Setting,
    sm_clock_hz=st.sampled_from([None, 345e6, 1200e6, 1980e6]),
    memory_clock_hz=st.sampled_from([None, 2201e6, 3201e6]),
    power_limit_w=st.sampled_from([None, 200.0, 437.5, 700.0]),
)
SETTERS = ["nvmlDeviceSet*", "nvmlDeviceReset*", "*MemoryLocked*", "*GpuLocked*", "*SetPower*"]


@settings(deadline=None, max_examples=60)
@given(
    limit_mw=st.sampled_from([700_000, 600_000]),
    wanted=st.lists(st.tuples(SETTINGS, st.none() | st.sampled_from(SETTERS)), max_size=6),
)
def test_whatever_was_refused_on_the_way_the_last_setting_taken_is_the_cards(
    limit_mw: int, wanted: list[tuple[Setting, str | None]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        fake = FakeNvml.create(Path(directory, "cards.json"), Card(limit_mw=limit_mw))
        device = open_device(fake)
        found = device.settings()
        for setting, refused in wanted:
            with fake.edit() as state:
                state.rules = [Rule(call=refused, error=4)] if refused else []
            try:
                device.set(setting)
            except NotPermitted:
                assert refused
                continue
            assert card_as_setting(fake) == replace(
                setting, power_limit_w=setting.power_limit_w or 700.0
            )
        with fake.edit() as state:
            state.rules = []
        device.set(found)
        assert card_as_setting(fake) == found
        device.close()


def card_as_setting(fake: FakeNvml) -> Setting:
    """What is really locked, in the words of a setting."""
    card = fake.state().cards[0]
    return Setting(
        sm_clock_hz=card.sm_lock_mhz[1] * 1e6 if card.sm_lock_mhz else None,
        memory_clock_hz=card.memory_lock_mhz[1] * 1e6 if card.memory_lock_mhz else None,
        power_limit_w=card.enforced_limit_mw * 1e-3,
    )


# Refusals ------------------------------------------------------------------------------------


def test_lack_of_permission_is_found_without_trying(make_fake: MakeFake) -> None:
    fake = make_fake(permitted=False)
    info = open_device(fake).info()
    assert not info.can_set
    assert info.refusal
    assert fake.setters() == []


@pytest.mark.parametrize(
    ("capabilities", "user_map", "may"),
    [
        ("000001ffffffffff", "0 0 4294967295", True),
        ("0000000000200000", "0 0 4294967295", True),
        ("00000000a80425fb", "0 0 4294967295", False),  # root of a plain container
        ("0000000000000000", "0 0 4294967295", False),
        ("000001ffffffffff", "0 1000 1", False),  # root of a rootless container
    ],
)
def test_privilege_is_cap_sys_admin_of_the_machine(
    tmp_path: Path, capabilities: str, user_map: str, may: bool
) -> None:
    (tmp_path / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    (tmp_path / "uid_map").write_text(f"         {user_map}\n")
    refusal = missing_privilege(tmp_path)
    assert (refusal is None) is may
    assert refusal is None or "SYS_ADMIN" in refusal


def test_an_unforeseen_refusal_says_what_to_do_and_is_remembered(make_fake: MakeFake) -> None:
    fake = make_fake()
    with fake.edit() as state:
        state.rules.append(Rule(call="nvmlDeviceSet*", error=fake.NVML_ERROR_NO_PERMISSION))
    device = open_device(fake)
    assert device.info().can_set
    with pytest.raises(NotPermitted, match="cap-add SYS_ADMIN"):
        device.set(Setting(sm_clock_hz=1200e6))
    assert not device.info().can_set
    assert device.settings().sm_clock_hz is None


@pytest.mark.parametrize("passed", [0, 1, 2])
def test_a_refusal_at_any_knob_leaves_no_false_belief(make_fake: MakeFake, passed: int) -> None:
    """At start, in the middle, at the end: afterwards the found setting is put back for real."""
    fake = make_fake()
    device = open_device(fake)
    found = device.settings()
    with fake.edit() as state:
        state.rules.append(
            Rule(call="nvmlDeviceSet*", error=fake.NVML_ERROR_UNKNOWN, skip=passed, times=1)
        )
    with pytest.raises(Exception, match="999"):
        device.set(Setting(sm_clock_hz=1200e6, memory_clock_hz=2201e6, power_limit_w=500.0))
    device.set(found)
    card = fake.state().cards[0]
    assert (card.sm_lock_mhz, card.memory_lock_mhz) == (None, None)
    assert card.enforced_limit_mw == card.default_limit_mw


def test_a_refusal_at_restore_does_not_stop_the_other_knobs(make_fake: MakeFake) -> None:
    fake = make_fake()
    device = open_device(fake)
    found = device.settings()
    device.set(Setting(sm_clock_hz=1200e6, memory_clock_hz=2201e6, power_limit_w=500.0))
    rule = Rule(call="nvmlDeviceResetMemory*", error=fake.NVML_ERROR_NO_PERMISSION, times=1)
    with fake.edit() as state:
        state.rules.append(rule)
    with pytest.raises(NotPermitted):
        device.set(found)
    card = fake.state().cards[0]
    assert card.memory_lock_mhz is not None
    assert card.sm_lock_mhz is None
    assert card.enforced_limit_mw == card.default_limit_mw
    device.set(found)
    assert fake.state().cards[0].memory_lock_mhz is None


def test_mig_is_refused_before_any_setter(make_fake: MakeFake) -> None:
    fake = make_fake(Card(mig=True, mig_uuids=("MIG-1", "MIG-2")))
    device = open_device(fake)
    assert "MIG" in (device.info().refusal or "")
    with pytest.raises(NotPermitted, match="MIG"):
        device.set(Setting(sm_clock_hz=1200e6))
    with pytest.raises(NotPermitted, match="MIG"):
        device.reset()
    assert fake.setters() == []


@pytest.mark.parametrize(("mode", "may_set"), [(0, True), (1, True), (2, False), (3, False)])
def test_a_vgpu_is_refused_and_a_passed_through_gpu_is_not(
    make_fake: MakeFake, mode: int, may_set: bool
) -> None:
    device = open_device(make_fake(Card(virtualization=mode)))
    assert device.info().can_set is may_set


def test_a_memory_lock_on_a_card_without_one_is_not_supported(make_fake: MakeFake) -> None:
    device = open_device(make_fake(Card(architecture=5, memory_lockable=False)))
    with pytest.raises(NotSupported, match="memory"):
        device.set(Setting(memory_clock_hz=2201e6))


# Read-only -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["1", "true", "no", " "])
def test_read_only_refuses_before_any_vendor_call(
    make_fake: MakeFake, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    fake = make_fake()
    monkeypatch.setenv("KILTER_READ_ONLY", value)
    device = open_device(fake)
    for change in (device.reset, lambda: device.set(Setting(sm_clock_hz=1200e6))):
        with pytest.raises(ReadOnly):
            change()
    assert fake.calls() == []
    assert not device.info().can_set
    assert "KILTER_READ_ONLY" in (device.info().refusal or "")


def test_read_only_is_seen_at_the_time_of_the_call(
    make_fake: MakeFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = make_fake()
    device = open_device(fake)
    device.set(Setting(sm_clock_hz=1200e6))
    before = len(fake.setters())
    monkeypatch.setenv("KILTER_READ_ONLY", "1")
    with pytest.raises(ReadOnly):
        device.set(Setting())
    assert len(fake.setters()) == before
    monkeypatch.setenv("KILTER_READ_ONLY", "0")
    device.set(Setting())
    assert fake.state().cards[0].sm_lock_mhz is None


def test_read_only_is_inherited_by_a_child_process(make_fake: MakeFake) -> None:
    fake = make_fake()
    code = (
        "from kilter.device.nvidia import NvidiaDevice; from kilter.core.setting import Setting\n"
        f"NvidiaDevice({fake.state().cards[0].uuid!r}).set(Setting(sm_clock_hz=1200e6))"
    )
    environ = fake.environ()
    free = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True)
    assert free.returncode == 0, free.stderr
    assert fake.state().cards[0].sm_lock_mhz == (345, 1200)
    before = len(fake.setters())
    environ["KILTER_READ_ONLY"] = "1"
    refused = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True)
    assert b"ReadOnly" in refused.stderr
    assert len(fake.setters()) == before


# Losses --------------------------------------------------------------------------------------


def test_a_gpu_lost_midway_says_so_from_then_on(make_fake: MakeFake) -> None:
    fake = make_fake()
    device = open_device(fake)
    device.sample()
    with fake.edit() as state:
        state.rules.append(Rule(call="nvmlDevice*", error=fake.NVML_ERROR_GPU_IS_LOST, skip=2))
    for _ in range(2):
        with pytest.raises(DeviceLost, match="Xid"):
            device.sample()
    with pytest.raises(DeviceLost):
        device.set(Setting(sm_clock_hz=1200e6))
    device.close()


@pytest.mark.parametrize(
    ("code", "kind", "advice"),
    [
        ("LIBRARY_NOT_FOUND", NoDevice, "install the NVIDIA driver"),
        ("DRIVER_NOT_LOADED", NoDevice, "not loaded"),
        ("LIB_RM_VERSION_MISMATCH", DriverMismatch, "reboot"),
    ],
)
def test_a_driver_that_does_not_start_says_what_to_do(
    make_fake: MakeFake, code: str, kind: type[Exception], advice: str
) -> None:
    fake = make_fake()
    with fake.edit() as state:
        state.init_error = getattr(fake, f"NVML_ERROR_{code}")
    with pytest.raises(kind, match=advice):
        open_device(fake).sample()
    with pytest.raises(kind, match=advice):
        survey(fake)


def test_an_unknown_uuid_is_no_device(make_fake: MakeFake) -> None:
    with pytest.raises(NoDevice, match="nvidia-smi -L"):
        NvidiaDevice("GPU-nobody", nvml=make_fake()).info()


def test_the_wrong_pynvml_package_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text("def nvmlInit(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    with pytest.raises(NoDevice, match="pip uninstall pynvml"):
        survey()
    sys.modules.pop("pynvml", None)


# Hangs ---------------------------------------------------------------------------------------


def test_a_hanging_call_is_left_behind_and_later_calls_fail_at_once(make_fake: MakeFake) -> None:
    fake = make_fake()
    device = open_device(fake, timeout_s=0.2)
    device.info()
    with fake.edit() as state:
        state.rules.append(Rule(call="nvmlDeviceSetGpuLockedClocks", hang_s=5.0))
    with pytest.raises(DeviceHung, match="nvmlDeviceSetGpuLockedClocks"):
        device.set(Setting(sm_clock_hz=1200e6))
    count = len(fake.calls())
    for _ in range(3):
        with pytest.raises(DeviceHung, match="left alone"):
            device.sample()
    assert len(fake.calls()) == count, "nothing more is asked of a driver that hangs"
    device.close()


def test_a_hanging_call_does_not_keep_the_process_alive(make_fake: MakeFake) -> None:
    fake = make_fake()
    with fake.edit() as state:
        state.rules.append(Rule(call="nvmlDeviceGetUtilizationRates", hang_s=3600.0))
    code = (
        "from kilter.core.errors import DeviceHung\n"
        "from kilter.device.nvidia import NvidiaDevice\n"
        f"device = NvidiaDevice({fake.state().cards[0].uuid!r}, timeout_s=0.2)\n"
        "device.info()\n"
        "try: device.sample()\n"
        "except DeviceHung: print('hung')\n"
        "device.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=fake.environ(), capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, b"hung\n"), done.stderr


# Sensors -------------------------------------------------------------------------------------


def test_power_is_of_the_gpu_while_the_counter_is_of_the_module(make_fake: MakeFake) -> None:
    """Grace Hopper: the disagreement is visible, so whoever adds energy up can notice it."""
    fake = make_fake(Card(load=1.0, module_w=150.0))
    device = open_device(fake)
    before = device.sample(energy=True)
    fake.advance(10.0)
    after = device.sample(energy=True)
    assert before.energy_j is not None
    assert after.energy_j is not None
    assert after.power_w == fake.state().cards[0].power_w
    assert after.energy_j - before.energy_j == pytest.approx((after.power_w + 150.0) * 10.0)


def test_a_stuck_counter_is_reported_as_it_is(make_fake: MakeFake) -> None:
    fake = make_fake(Card(load=1.0, counter_stuck=True))
    device = open_device(fake)
    before = device.sample(energy=True).energy_j
    fake.advance(10.0)
    assert device.sample(energy=True).energy_j == before


def test_a_missing_counter_is_unknown_not_zero(make_fake: MakeFake) -> None:
    device = open_device(make_fake(Card(has_energy_counter=False)))
    assert device.info().has_energy_counter is False
    assert device.sample(energy=True).energy_j is None


# Several GPUs, several processes -------------------------------------------------------------


def test_eight_unequal_gpus_each_answer_for_themselves(make_fake: MakeFake) -> None:
    tops = [1410, 1530, 1590, 1710, 1755, 1890, 1980, 2520]
    cards = [Card(name=f"GPU {top}", load=1.0, sm_clocks_mhz=(300, top, 30)) for top in tops]
    fake = make_fake(*cards)
    devices = [open_device(fake, card) for card in range(8)]
    devices[3].set(Setting(sm_clock_hz=900e6))
    observed = [device.sample().sm_clock_hz for device in devices]
    assert observed == [900e6 if top == 1710 else top * 1e6 for top in tops]
    assert {call.card for call in fake.setters()} == {3}


def test_a_lost_gpu_does_not_hide_the_others(make_fake: MakeFake) -> None:
    fake = make_fake(Card(), Card(), Card())
    with fake.edit() as state:
        state.rules.append(
            Rule(call="nvmlDeviceGetUUID", card=1, error=fake.NVML_ERROR_GPU_IS_LOST)
        )
    gpus = survey(fake).gpus
    assert [gpu.fault is None for gpu in gpus] == [True, False, True]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_a_session_of_its_own(make_fake: MakeFake) -> None:
    """As DataLoader workers are: the parent's thread does not exist in the child."""
    device = open_device(make_fake())
    device.sample()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if device.sample().power_w else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_killed_process_leaves_its_settings_behind(make_fake: MakeFake, when: str) -> None:
    """What the lease has to repair; the fake must show it as a real card would."""
    fake = make_fake()
    with fake.edit() as state:
        state.rules.append(Rule(call="nvmlDeviceSetPowerManagementLimit", sigkill=when))
    code = (
        "from kilter.device.nvidia import NvidiaDevice; from kilter.core.setting import Setting\n"
        f"device = NvidiaDevice({fake.state().cards[0].uuid!r})\n"
        "device.set(Setting(sm_clock_hz=1200e6, power_limit_w=500.0))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=fake.environ(), capture_output=True)
    assert done.returncode == -9
    card = fake.state().cards[0]
    assert card.sm_lock_mhz == (345, 1200)
    assert card.enforced_limit_mw == (500_000 if when == "after" else 700_000)


# Performance monitoring ---------------------------------------------------------------------


@pytest.fixture
def _monitored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reading is one of the monitor, whatever the real clock says."""
    monkeypatch.setattr(gpm, "EVERY_S", 0.0)


def activities(fake: FakeNvml, device: NvidiaDevice, count: int = 3) -> list[Activity | None]:
    """Of readings half a second of the cards apart."""
    found = []
    for _ in range(count):
        found.append(device.sample().activity)
        fake.advance(0.5)
    return found


@pytest.mark.usefixtures("_monitored")
def test_the_units_of_a_hopper_gpu_are_told_as_means_between_readings(make_fake: MakeFake) -> None:
    fake = make_fake(Card(load=1.0, sm_active=0.8, dram_active=0.6, tensor_active=0.2))
    device = open_device(fake)
    assert activities(fake, device) == [
        None,  # there is nothing to compare the first one with
        *2 * [Activity(sm=pytest.approx(0.8), dram=pytest.approx(0.6), tensor=pytest.approx(0.2))],
    ]
    with fake.edit() as state:
        state.cards[0].load = 0.0
    fake.advance(0.5)
    after = device.sample().activity
    assert after is not None
    assert after.dram == pytest.approx(0.3), "half of the time since the last reading was idle"
    device.close()
    assert len(fake.calls("nvmlGpmSampleFree")) == len(fake.calls("nvmlGpmSampleAlloc")) == 2
    assert not fake.setters()
    assert device.sample().activity is None, "opened again, it begins anew"
    device.close()


def test_the_units_are_read_once_a_second_at_most(make_fake: MakeFake) -> None:
    fake = make_fake(Card(load=1.0))
    monitor = gpm.UnitMonitor(library := Library(FakeNvml(fake.path)), handle_of(library, fake))
    at_s = (0.0, 0.4, 0.9, 1.0, 1.5)
    found = []
    for before_s, now_s in zip((0.0, *at_s), at_s, strict=False):
        fake.advance(now_s - before_s)
        found.append(monitor.read(now_s) is not None)
    assert found == [False, False, False, True, True]
    assert len(fake.calls("nvmlGpmSampleGet")) == 2


def handle_of(library: Library, fake: FakeNvml) -> object:
    library.open()
    return library.handle_of(fake.state().cards[0].uuid)


@pytest.mark.usefixtures("_monitored")
@pytest.mark.parametrize(
    "call",
    ["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"],
)
@pytest.mark.parametrize("error", ["NO_PERMISSION", "NOT_SUPPORTED", "INVALID_ARGUMENT", "UNKNOWN"])
def test_a_refused_monitor_is_asked_no_more_and_nothing_else_is_lost(
    make_fake: MakeFake, call: str, error: str
) -> None:
    fake = make_fake(Card(load=1.0))
    with fake.edit() as state:
        state.rules.append(Rule(call=call, error=getattr(fake, f"NVML_ERROR_{error}")))
    device = open_device(fake)
    assert activities(fake, device, 4) == [None] * 4
    assert len(fake.calls(call)) == 1
    assert device.sample().power_w is not None
    device.close()
    assert len(fake.calls("nvmlGpmSampleFree")) == len(
        [c for c in fake.calls("nvmlGpmSampleAlloc") if c.error is None]
    )


@pytest.mark.usefixtures("_monitored")
def test_gpus_and_drivers_without_a_monitor_are_read_as_ever(make_fake: MakeFake) -> None:
    fake = make_fake(Card(load=1.0, architecture=7), Card(load=1.0))
    old = open_device(fake)
    assert activities(fake, old) == [None] * 3
    assert len(fake.calls("nvmlGpm*")) == 1
    old.close()
    with fake.edit() as state:
        state.missing = ["nvmlGpmQueryDeviceSupport"]
    device = open_device(fake, 1)
    assert activities(fake, device) == [None] * 3
    assert device.info().can_set
    device.close()


@pytest.mark.usefixtures("_monitored")
def test_a_metric_that_the_gpu_does_not_tell_is_unknown(make_fake: MakeFake) -> None:
    fake = make_fake(Card(load=1.0))
    device = open_device(fake)
    first, second = device.sample(), device.sample()  # no time has passed between the two
    assert first.activity is None
    assert second.activity == Activity()
    device.close()


@pytest.mark.usefixtures("_monitored")
def test_a_gpu_lost_at_its_monitor_is_lost(make_fake: MakeFake) -> None:
    fake = make_fake(Card(load=1.0))
    device = open_device(fake)
    device.sample()
    with fake.edit() as state:
        state.rules.append(Rule(call="nvmlGpmSampleGet", error=fake.NVML_ERROR_GPU_IS_LOST))
    with pytest.raises(DeviceLost, match="Xid"):
        device.sample()
    device.close()
