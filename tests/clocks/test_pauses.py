"""An idle GPU goes to its lowest clock in long pauses, and comes back within the contract."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.clocks.plan.pauses import GIVE_UP_S, PausePlan, PauseWatch, pause_plan
from kilter.core.setting import Sample, Supported

LOW_HZ, TOP_HZ = 0.4e9, 2.0e9
PLAN = PausePlan(sm_clock_hz=LOW_HZ, after_s=5.0, return_s=0.4)
SLACK = 0.02


class Gpu:
    """A GPU that is read ten times a second, and switches its clock `latency_s` after a command."""

    def __init__(self, watch, *, latency_s=0.1, sleeps=False, slack=SLACK):
        self.watch, self.slack, self.sleeps = watch, slack, sleeps
        self.latency_s = latency_s
        self.t_s, self.clock_hz, self.pending = 0.0, TOP_HZ, None
        self.lost_s = 0.0
        """Work that was not done for the low clock."""
        self.commands = []

    def run(self, seconds, *, works, resting=True):
        for _ in range(round(seconds / 0.1)):
            self.t_s += 0.1
            if self.pending is not None and self.t_s >= self.pending[0]:
                self.clock_hz = self.pending[1]
                self.pending = None
            if works:
                self.lost_s += 0.1 * (1.0 - self.clock_hz / TOP_HZ)
            clock_hz = LOW_HZ if self.sleeps and not works else self.clock_hz
            sample = Sample(t_s=self.t_s, sm_utilisation=float(works), sm_clock_hz=clock_hz)
            self.watch.budget.fill(self.t_s, self.slack)
            act = self.watch.read(sample, resting=resting)
            if act is not None:
                self.commands.append((round(self.t_s, 1), act))
                self.pending = (self.t_s + self.latency_s, LOW_HZ if act == "down" else TOP_HZ)


def test_a_long_pause_is_spent_at_the_low_clock_and_the_return_is_measured():
    gpu = Gpu(watch := PauseWatch(PLAN))
    gpu.run(100.0, works=True)
    gpu.run(30.0, works=False)
    ((at_s, act),) = gpu.commands
    assert (at_s, act) == (pytest.approx(105.1, abs=0.2), "down")
    assert gpu.clock_hz == LOW_HZ
    assert not watch.works
    gpu.run(0.1, works=True)
    assert gpu.commands[1:] == [(130.1, "up")]
    assert not watch.works, "the clock is not back"
    gpu.run(1.0, works=True)
    assert watch.works
    assert watch.ended is None
    (cost_s,) = watch.returns_s
    assert gpu.lost_s <= cost_s <= 0.4
    assert "in 1 long pause; coming back cost at most" in str(watch)


def test_a_short_pause_and_one_in_which_the_clock_is_used_are_left_alone():
    gpu = Gpu(watch := PauseWatch(PLAN))
    gpu.run(100.0, works=True)
    for _ in range(5):
        gpu.run(4.5, works=False)
        gpu.run(10.0, works=True)
    gpu.run(60.0, works=False, resting=False)
    assert not gpu.commands
    assert not watch.returns_s


def test_a_gpu_that_lowers_its_clock_by_itself_is_left_alone():
    gpu = Gpu(PauseWatch(PLAN), sleeps=True)
    gpu.run(100.0, works=True)
    gpu.run(100.0, works=False)
    assert not gpu.commands


def test_a_gpu_that_has_shown_no_work_yet_is_left_alone():
    gpu = Gpu(PauseWatch(PLAN))
    gpu.run(100.0, works=False)
    assert not gpu.commands


@pytest.mark.parametrize("field", ["sm_utilisation", "sm_clock_hz"])
def test_sensors_that_do_not_tell_never_lower_the_clock(field):
    watch = PauseWatch(PLAN)
    for i in range(2000):
        told = {"sm_utilisation": float(i < 1000), "sm_clock_hz": TOP_HZ, field: None}
        watch.budget.fill(0.1 * i, SLACK)
        assert watch.read(Sample(t_s=0.1 * i, **told)) is None


def test_without_slack_the_clock_stays_up():
    gpu = Gpu(PauseWatch(PLAN), slack=0.0)
    gpu.run(1000.0, works=True)
    gpu.run(1000.0, works=False)
    assert not gpu.commands


@pytest.mark.parametrize("latency_s", [5.0, 1e9])
def test_a_return_that_costs_more_than_the_contract_leaves_is_the_last(latency_s):
    gpu = Gpu(watch := PauseWatch(PLAN))
    gpu.run(100.0, works=True)
    gpu.run(30.0, works=False)
    gpu.latency_s = latency_s
    gpu.run(30.0, works=True)
    assert watch.works, "it is not waited for without end"
    assert watch.ended is not None
    assert "took" in watch.ended
    assert "the clock stays up in pauses from now on" in watch.ended
    assert watch.returns_s[0] <= GIVE_UP_S
    count = len(gpu.commands)
    for _ in range(5):
        gpu.run(500.0, works=True)
        gpu.run(100.0, works=False)
    assert len(gpu.commands) == count


@given(
    st.lists(st.tuples(st.floats(0.1, 60.0), st.floats(0.1, 60.0)), max_size=12),
    st.floats(0.0, 0.4),
    st.floats(0.0, 0.1),
)
def test_what_returns_lose_stays_within_the_contract(stretches, latency_s, slack):
    """Whatever the pauses: if the clock is back as soon as it was expected to be."""
    gpu = Gpu(watch := PauseWatch(PLAN), latency_s=min(latency_s, PLAN.return_s - 0.2), slack=slack)
    for works_s, pause_s in stretches:
        gpu.run(works_s, works=True)
        gpu.run(pause_s, works=False)
    gpu.run(20.0, works=True)
    assert watch.works
    assert watch.ended is None
    assert gpu.clock_hz == TOP_HZ
    assert gpu.lost_s <= sum(watch.returns_s) + 1e-6
    assert sum(watch.returns_s) <= slack * gpu.t_s + 1e-6
    acts = [act for _, act in gpu.commands]
    assert acts == ["down", "up"] * (len(acts) // 2)


def test_a_plan_waits_longer_where_a_return_takes_longer():
    card = Supported(sm_clocks_hz=(LOW_HZ, TOP_HZ))
    quick = pause_plan(card, sensor_period_s=0.1, switch_latency_s=0.1)
    slow = pause_plan(card, sensor_period_s=0.1, switch_latency_s=None)
    slower = pause_plan(card, sensor_period_s=0.1, switch_latency_s=2.0)
    assert quick == slow == PausePlan(sm_clock_hz=LOW_HZ, after_s=5.0, return_s=0.4)
    assert slower.after_s == pytest.approx(42.0)
    assert pause_plan(Supported(), sensor_period_s=0.1, switch_latency_s=0.1) is None
