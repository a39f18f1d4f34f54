"""What is kept between runs about sections: read back, and nobody else's file is believed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kilter.clocks.plan.switching import Calibration, SwitchTimes
from kilter.clocks.section_card import card_of
from kilter.clocks.section_store import SectionStore
from kilter.core.errors import FileError
from kilter.core.label import Label
from kilter.core.section_record import SectionsFound
from kilter.core.setting import DeviceInfo
from kilter.device.sim.profile import load_profile

FOUND = SectionsFound(
    taken="sections", reason="r", keys=("a",), depths=((1, 0),), clocks_hz=(1e9, 5e8)
)
INFO = DeviceInfo(
    name="H200",
    uuid="GPU-1",
    backend="nvml",
    label=Label.MEASURED,
    can_set=True,
    driver="580.1",
    vbios="96.00",
)


def times(hz: float, *, down: bool, p50_s: float) -> SwitchTimes:
    return SwitchTimes(
        sm_clock_hz=hz, down=down, n=20, p50_s=p50_s, p95_s=1.2 * p50_s, p99_s=1.3 * p50_s
    )


SWITCHES = Calibration(
    uuid="GPU-1",
    driver="580.1",
    vbios="96.00",
    label=Label.MEASURED,
    switches=(times(1e9, down=True, p50_s=0.002), times(1e9, down=False, p50_s=0.004)),
)


@pytest.fixture
def store(tmp_path: Path) -> SectionStore:
    return SectionStore({"XDG_STATE_HOME": str(tmp_path)})


def test_settings_are_read_back_by_their_signature(store: SectionStore) -> None:
    assert store.load("abc") is None
    store.save("abc", FOUND)
    assert store.load("abc") == FOUND
    assert store.load("other") is None


def test_switch_times_are_those_of_device_driver_and_vbios(store: SectionStore) -> None:
    assert store.switches(INFO) is None
    store.keep_switches(INFO, SWITCHES)
    assert store.switches(INFO) == SWITCHES
    for change in ({"uuid": "GPU-2"}, {"driver": "590"}, {"vbios": None}):
        other = DeviceInfo(**({n: getattr(INFO, n) for n in INFO.__slots__} | change))
        assert store.switches(other) is None


def test_measured_switch_times_rule_the_plan() -> None:
    profile = load_profile("h200")
    card = card_of(profile, calibration=SWITCHES)
    assert card.break_even_s == pytest.approx(1.2 * (0.002 + 0.004))
    assert card.break_even_s < card_of(profile).break_even_s
    lowest = card.levels[-1]
    slow = SwitchTimes(
        sm_clock_hz=lowest.sm_clock_hz, down=True, n=20, p50_s=0.1, p95_s=0.2, p99_s=0.3
    )
    both = msgspec.structs.replace(SWITCHES, switches=(*SWITCHES.switches, slow))
    card = card_of(profile, calibration=both)
    assert card.break_even_of_s(card.levels[-1]) > 0.2 > 0.01 > card.break_even_s
    down, _ = card.switches(card.levels[-1])
    assert down.quantile(0.95) == pytest.approx(0.2)
    none = msgspec.structs.replace(SWITCHES, switches=())
    assert card_of(profile, calibration=none) == card_of(profile)


@pytest.mark.parametrize("raw", [b"", b"[", b"{}", b'{"schema":"kilter.plan/1"}', b"\xff\xfe"])
def test_a_file_that_is_none_of_ours_is_named(raw: bytes, store: SectionStore) -> None:
    store.save("abc", FOUND)
    store.path("abc").write_bytes(raw)
    with pytest.raises(FileError, match=r"abc\.json"):
        store.load("abc")
    kept = store.keep_switches(INFO, SWITCHES)
    kept.write_bytes(raw)
    with pytest.raises(FileError, match=kept.name):
        store.switches(INFO)


def test_a_file_that_others_may_write_is_not_believed(store: SectionStore) -> None:
    store.save("abc", FOUND)
    store.path("abc").chmod(0o666)
    with pytest.raises(FileError, match="writable by others"):
        store.load("abc")
