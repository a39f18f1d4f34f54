"""Joules of shared GPUs: the jobs' parts sum to the meter."""

import os

from hypothesis import given
from hypothesis import strategies as st

from kilter.app.cli.share_live import _meters, lacking
from kilter.app.share_page import page
from kilter.core.label import Label
from kilter.device.nvidia import NvidiaDevice
from kilter.sharing.board import Board
from kilter.sharing.daemon import _read
from kilter.sharing.messages import Facts, JobStatus, JobSummary, RankStatus, Summary
from kilter.sharing.plan.attribution import EnergyAccount, split_mj
from kilter.sharing.plan.policies import SHARING_POLICIES
from kilter.testing.fake_card import Card
from kilter.testing.fake_nvml import FakeNvml

busy = st.dictionaries(st.sampled_from("abcd"), st.floats(0, 1), min_size=1)


@given(energy=st.integers(0, 10**9), idle=st.integers(0, 10**9), busy=busy)
def test_the_parts_sum_to_the_meter_and_none_is_negative(energy, idle, busy):
    parts = split_mj(energy, idle, busy)
    assert parts.keys() == busy.keys()
    assert sum(parts.values()) == energy
    assert min(parts.values()) >= 0
    if any(busy.values()):
        most = min(idle, energy) // len(busy) + 1  # a share of idle, and what does not divide
        assert all(parts[name] <= most for name, time in busy.items() if time == 0.0)
    for one in busy:
        for other in busy:
            assert busy[one] < busy[other] or parts[one] >= parts[other] - 2


readings = st.lists(
    st.tuples(
        st.floats(0.01, 5),
        st.lists(st.none() | st.floats(0, 500), min_size=2, max_size=2),
        st.dictionaries(
            st.sampled_from("abc"),
            st.lists(st.none() | st.floats(0, 1), min_size=2, max_size=2),
        ),
    ),
    max_size=20,
)


@given(readings=readings)
def test_an_account_is_even_whatever_joins_leaves_and_fails(readings):
    account, now_s, counters = EnergyAccount(2), 0.0, [1e6, 5.0]
    for length_s, used, presence in readings:
        now_s += length_s
        counters = [c + (u or 0.0) for c, u in zip(counters, used, strict=True)]
        seen = [None if u is None else c for c, u in zip(counters, used, strict=True)]
        account.read(now_s, seen, presence)
    metered = sum(round(j * 1000) for j in account.metered_j() if j is not None)
    jobs = sum(round(j * 1000) for j in account.jobs_j().values())
    assert jobs + account.unshared_mj == metered


def test_idle_power_is_what_the_gpu_drew_without_a_job():
    account = EnergyAccount(1)
    account.read(0.0, [0.0], {})
    account.read(1.0, [100.0], {})  # 100 W without a job
    account.read(2.0, [500.0], {"works": [0.9], "waits": [0.0], "elsewhere": [None]})
    assert account.jobs_j() == {"works": 350.0, "waits": 50.0}
    assert account.of_job("elsewhere") is None
    account.read(3.0, [50.0], {"works": [1.0]})  # the counter began anew
    account.read(4.0, [250.0], {"works": [1.0]})
    assert account.of_job("works") == 550.0
    assert account.metered_j() == (700.0,)
    assert account.unshared_mj == 100_000


def report(name, number, work_s, reserved_bytes):
    ranks = tuple(RankStatus(number, 8, 20, 0.1, w, 0.0, reserved_bytes) for w in work_s)
    facts = Facts(2, 16, None, 1, False)
    return JobStatus(
        name, (0, 1), ratios=(5, 5), number=number, pid=1, facts=facts, iteration=number,
        elapsed_s=5.0, ranks=ranks,
    )  # fmt: skip


def test_the_meters_of_a_shared_machine_are_split_among_its_jobs(tmp_path):
    fake = FakeNvml.create(tmp_path / "cards.json", Card(load=0.0), Card(load=0.0))
    devices = [NvidiaDevice(card.uuid, nvml=fake) for card in fake.state().cards]
    board = Board((0, 1), SHARING_POLICIES["fixed"], 2.0)
    begun = [_read(device)[0] for device in devices]
    for second in range(5):
        if second > 1:
            with fake.edit() as state:
                state.cards[0].load, state.cards[1].load = 1.0, 0.5
            board.report(1, report("busy", second, (0.08, 0.02), 10**9), float(second))
            board.report(2, report("light", second, (0.02, 0.02), 10**9), float(second))
            board.report(3, report("cpu", second, (0.1, 0.1), None), float(second))
        board.meter(float(second), [_read(device)[0] for device in devices])
        fake.advance(1.0)
    used = sum(round(m * 1000) for m in board.energy.metered_j())
    jobs = board.energy.jobs_j()
    assert used > 0
    assert sum(round(j * 1000) for j in jobs.values()) + board.energy.unshared_mj == used
    assert jobs["busy#1"] > jobs["light#2"] > 0
    assert "cpu#3" not in jobs
    assert {j.name: j.energy_j for j in board.summaries(5.0)} == jobs | {"cpu#3": None}
    assert None not in begun
    shown = page("t", (), [], [], Label.MEASURED, energy=board.energy)
    assert "busy#1" in shown
    assert "while no job was there" in shown


def test_a_lost_gpu_and_a_machine_without_one_count_nothing(tmp_path, monkeypatch):
    fake = FakeNvml.create(tmp_path / "cards.json", Card())
    device = NvidiaDevice(fake.state().cards[0].uuid, nvml=fake)
    with fake.edit() as state:
        state.cards.clear()
    assert _read(device) == (None, None)
    assert [d.info().backend for d in _meters((0, 7), os.environ)] == ["null", "null"]
    account = EnergyAccount(2)
    account.read(0.0, [_read(d)[0] for d in _meters((0, 7), {})], {"a": [1.0, 1.0]})
    assert account.metered_j() == (None, None)
    assert "Energy" not in page("t", (), [], [], Label.MEASURED, energy=account)


def summary(free, jobs=()):
    return Summary(1, 1, "maxmin", 20.0, (0, 3), (0.0, 0.0), jobs, (), free_bytes=free)


def test_a_job_waits_for_the_memory_that_it_asks_for(tmp_path):
    fake = FakeNvml.create(tmp_path / "cards.json", Card(memory_bytes=80 * 2**30))
    device = NvidiaDevice(fake.state().cards[0].uuid, nvml=fake)
    _, free = _read(device)
    assert 0 < free <= 80 * 2**30
    there = JobSummary("resnet50#1", 1, "running", 5, 0.1, None, None, None, (5, 5))
    full = lacking(summary((free, 2**30), (there,)), 20 * 2**30)
    assert full == "GPU 3 has 1.0 GiB free beside resnet50#1, and the job needs 20.0 GiB on each"
    assert lacking(summary((free, free)), free) is None
    assert lacking(summary((None, None)), 2**50) is None
    assert lacking(summary(()), 2**50) is None
