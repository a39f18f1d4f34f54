"""Replayed recordings: their own numbers come out, and nothing else."""

import pytest
from tests import runs

from kilter.core.errors import FileError, NotPermitted
from kilter.core.label import Label
from kilter.core.setting import Setting
from kilter.core.units import MHZ
from kilter.device.sim.replay import (
    TELEMETRY,
    RecordedDevice,
    load_recording,
    load_telemetry,
)


@pytest.fixture
def recording(tmp_path):
    path = tmp_path / "telemetry.csv"
    rows = [f"{100 + i / 10},{300 + i},{5000 * i},90,40,1980" for i in range(10)]
    path.write_text("\n".join([",".join(TELEMETRY), *rows]) + "\n", encoding="utf-8")
    return path


def test_a_recording_is_read_at_its_own_pace_in_si_units(recording):
    now = 0.0
    device = RecordedDevice(load_telemetry(recording), lambda: now, "job")
    assert device.sample().power_w == 300
    now = 0.55
    sample = device.sample(energy=True)
    assert sample.power_w == 305
    assert sample.energy_j == 25.0
    assert sample.sm_clock_hz == 1980 * MHZ
    assert sample.sm_utilisation == 0.9
    now = 99.0
    assert device.sample().power_w == 309


def test_a_recorded_run_is_played_on_the_clock_of_the_job(tmp_path):
    """Blocks are timed on the host's clock, so that is where the samples have to lie."""
    run = runs.governed()
    run.stop()
    samples = load_recording(runs.write(tmp_path / "run", run))
    now = 5000.0
    device = RecordedDevice(samples, lambda: now, "job", begin_s=5000.0)
    assert device.sample().t_s == 5000.0
    now += samples[-1].t_s / 2
    sample = device.sample()
    assert 5000.0 < sample.t_s <= now
    assert sample.power_w in {s.power_w for s in samples}
    assert device.info().label is Label.REPLAYED


def test_a_run_without_readings_cannot_be_replayed(tmp_path):
    run = runs.RunWriter(runs.WrittenJob())
    run.start()
    with pytest.raises(FileError, match="holds no reading"):
        load_recording(runs.write(tmp_path / "run", run))


def test_a_recording_cannot_be_set(recording):
    device = RecordedDevice(load_telemetry(recording), lambda: 0.0, "job")
    assert not device.info().can_set
    with pytest.raises(NotPermitted):
        device.set(Setting(sm_clock_hz=1e9))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("101.2,1,1,1,1,nan", ":12: sm_mhz=nan"),
        ("100.9,1,1,1,1,1", ":12: t_s=100.9 does not follow"),
        (",1,1,1,1,1", ":12: t_s is blank"),
        ("101.2,1", ":12: 2 fields"),
    ],
)
def test_a_broken_recording_is_named_by_line(recording, line, said):
    with recording.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(FileError, match=said):
        load_telemetry(recording)


def test_unknown_values_stay_unknown(recording):
    with recording.open("a", encoding="utf-8") as file:
        file.write("101.2,,,,,\n")
    last = load_telemetry(recording)[-1]
    assert last.power_w is None
    assert last.energy_j is None
