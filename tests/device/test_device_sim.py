"""Every simulated card passes the suite of all devices."""

import pytest

from kilter.core.label import Label
from kilter.device.sim.cards import names
from kilter.device.sim.gpu import SimGpu
from kilter.device.sim.profile import load_profile
from kilter.testing.device import DeviceConformance


@pytest.mark.parametrize("profile", names(), scope="class")
class TestSimGpu(DeviceConformance):
    @pytest.fixture(autouse=True)
    def _profile(self, profile):
        self.profile = load_profile(profile)

    def make_device(self):
        return SimGpu(self.profile, seed=1)


def test_a_simulated_card_says_that_it_is_one():
    info = SimGpu(load_profile("v100")).info()
    assert info.label is Label.SIMULATED
    assert info.backend == "sim"
    assert not info.persistent
    assert "simulated" in info.name
