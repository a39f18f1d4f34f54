"""A replayed recording, which is only read, passes the suite of all devices."""

import pytest

from kilter.device.sim.replay import TELEMETRY, RecordedDevice, load_telemetry
from kilter.testing.device import DeviceConformance


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
