"""Replays pass the suite of all devices: a table's workload, and a recording that is only read."""

import pytest

from kilter.sim.replay import (
    COLUMNS,
    TELEMETRY,
    RecordedDevice,
    ReplayDevice,
    load_tables,
    load_telemetry,
)
from kilter.testing.device import DeviceConformance


class TestReplayDevice(DeviceConformance):
    @pytest.fixture(autouse=True)
    def _table(self, tmp_path):
        rows = [
            f"s,card,job,{core},{memory},{limit},{1e6 / core / memory},100,"
            for core in (800, 1000, 1200)
            for memory in (405, 877)
            for limit in (150, 200)
        ]
        path = tmp_path / "table.csv"
        path.write_text("\n".join([",".join(COLUMNS), *rows]) + "\n", encoding="utf-8")
        (self.workload,) = load_tables(path)

    def make_device(self):
        return ReplayDevice(self.workload)


class TestRecordedDevice(DeviceConformance):
    sets = False

    @pytest.fixture(autouse=True)
    def _recording(self, tmp_path):
        rows = [f"{10 + i / 10},{300 + i},{1000 * i},90,40,1980" for i in range(20)]
        path = tmp_path / "telemetry.csv"
        path.write_text("\n".join([",".join(TELEMETRY), *rows]) + "\n", encoding="utf-8")
        self.samples = load_telemetry(path)

    def make_device(self):
        ticks = iter(range(1000))
        return RecordedDevice(self.samples, lambda: next(ticks) / 10, "job")
