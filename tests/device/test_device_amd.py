"""An AMD GPU on a behaving fake: the conformance suite, and what could not be put back."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest
from tests.device.fake_amdsmi import AmdCard, FakeAmdSmi

from kilter.core.errors import Held, NoDevice, NotPermitted
from kilter.core.setting import Setting
from kilter.device.amd import AmdDevice, list_uuids
from kilter.device.find import find
from kilter.device.protocol import Device
from kilter.lease.journal import Journal, put_back
from kilter.testing.device import DeviceConformance

CALLS = sorted(name for name in vars(FakeAmdSmi) if name.startswith("amdsmi_"))


@pytest.fixture(autouse=True)
def _writable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KILTER_READ_ONLY", raising=False)


def open_device(fake: FakeAmdSmi) -> AmdDevice:
    return AmdDevice(fake.cards[0].uuid, amdsmi=fake, privileged=lambda: True)


class TestAmdOnAFake(DeviceConformance):
    @pytest.fixture(autouse=True)
    def _fake(self) -> None:
        self.fake = FakeAmdSmi()

    def make_device(self) -> Device:
        return open_device(self.fake)


class TestAmdWithoutAPowerCap(DeviceConformance):
    @pytest.fixture(autouse=True)
    def _fake(self) -> None:
        self.fake = FakeAmdSmi(AmdCard(lacks={"amdsmi_get_power_cap_info"}))

    def make_device(self) -> Device:
        return open_device(self.fake)


@pytest.mark.parametrize("level", ["DETERMINISM", "MANUAL", "HIGH", "STABLE_PEAK"])
def test_what_could_not_be_put_back_exactly_is_not_begun(level: str) -> None:
    device = open_device(FakeAmdSmi(AmdCard(level=level, determinism_mhz=1500)))
    info = device.info()
    assert not info.can_set
    assert level.lower() in (info.refusal or "")


def test_what_a_dead_job_has_set_is_put_back_by_another_object() -> None:
    fake = FakeAmdSmi(AmdCard(cap_uw=700_000_000))
    dead = open_device(fake)
    found = dead.settings()
    low = Setting(sm_clock_hz=1.2e9, power_limit_w=400.0)
    dead.set(low)
    assert (fake.cards[0].level, fake.cards[0].determinism_mhz) == ("DETERMINISM", 1200)
    journal = Journal(
        uuid=fake.cards[0].uuid,
        backend="amdsmi",
        boot_id="",
        pid=1,
        start_ticks=1,
        nonce="",
        found=found,
        before=found,
        last=low,
        written="",
    )
    outcome = put_back(open_device(fake), journal)
    assert outcome.restored
    assert (fake.cards[0].level, fake.cards[0].cap_uw) == ("AUTO", 700_000_000)


def test_a_lower_clock_lowers_power_and_a_divided_gpu_is_refused() -> None:
    fake = FakeAmdSmi()
    device = open_device(fake)
    before_w = device.sample().power_w or 0.0
    device.set(Setting(sm_clock_hz=1.2e9))
    assert (device.sample().power_w or 0.0) < before_w
    assert fake.cards[0].cap_uw == 750_000_000
    divided = open_device(FakeAmdSmi(AmdCard(partition="CPX")))
    with pytest.raises(NotPermitted, match="CPX"):
        divided.set(Setting(power_limit_w=400.0))


def test_a_cap_that_somebody_has_just_changed_is_left() -> None:
    fake = FakeAmdSmi()
    device = open_device(fake)
    device.settings()
    fake.cards[0].cap_uw = 500_000_000
    with pytest.raises(Held, match="500 W"):
        device.set(Setting(power_limit_w=400.0))
    assert fake.cards[0].cap_uw == 500_000_000


def test_without_the_right_nothing_is_set() -> None:
    fake = FakeAmdSmi(AmdCard(permitted=False))
    device = AmdDevice(fake.cards[0].uuid, amdsmi=fake, privileged=lambda: False)
    assert device.info().refusal == "only root sets AMD GPUs"
    with pytest.raises(NotPermitted):
        device.set(Setting(power_limit_w=400.0))
    assert fake.cards[0].setters == []


def test_without_the_library_the_reason_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("kilter.device.amd.importlib.import_module", missing)
    with pytest.raises(NoDevice, match=r"pip install kilter\[amd\]"):
        list_uuids()


@pytest.mark.parametrize("name", CALLS)
def test_call_has_the_parameters_of_the_package(name: str) -> None:
    """From its source: without the library of ROCm it cannot be imported."""
    spec = importlib.util.find_spec("amdsmi")
    if spec is None or spec.origin is None:
        pytest.skip("amdsmi is not installed")
    source = Path(spec.origin).with_name("amdsmi_interface.py").read_text()
    [real] = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    fake = list(inspect.signature(getattr(FakeAmdSmi, name)).parameters.values())[1:]
    assert [p.name for p in fake] == [argument.arg for argument in real.args.args]
    assert sum(p.default is not p.empty for p in fake) == len(real.args.defaults)


def test_which_of_several_gpus_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    fake = FakeAmdSmi(AmdCard(), AmdCard(uuid="another"))
    monkeypatch.setitem(sys.modules, "amdsmi", fake)  # type: ignore[arg-type]
    with pytest.raises(NoDevice, match="2 GPUs"):
        find("amdsmi", environ={})
    del fake.cards[1]
    assert isinstance(find("amdsmi", environ={}), AmdDevice)
