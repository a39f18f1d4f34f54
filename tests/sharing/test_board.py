"""What the daemon makes of reports, in virtual time."""

import msgspec
import pytest

from kilter.app.cli.share_live import table
from kilter.core.errors import FileError
from kilter.sharing.board import GONE_AFTER_S, STALLED_AFTER_S, Board
from kilter.sharing.history import load_alone, save_alone
from kilter.sharing.messages import (
    Facts,
    JobStatus,
    RankStatus,
    RatioTarget,
    Summary,
    signed,
    verified,
)
from kilter.sharing.plan.policies import SHARING_POLICIES
from kilter.sharing.plan.snapshot import shards
from kilter.sharing.probe import PROBE_S

SAMPLE_S = 0.001


def status(name="a", number=1, iteration=10, ratios=(5, 5), gpus=(0, 1), busy=1.0, **facts):
    """A job whose ranks take a millisecond a sample, and the slowest sets the step."""
    known = {"total_steps": None, "min_samples": 1, "may_idle": True} | facts
    samples = shards(100, ratios)
    step = max(samples) * SAMPLE_S
    ranks = tuple(
        RankStatus(iteration, b, 20, step, b * SAMPLE_S * busy, step - b * SAMPLE_S)
        if b
        else RankStatus(iteration, 0, 0, 0.0, 0.0, 0.0)
        for b in samples
    )
    facts = Facts(len(gpus), 100, **known)
    return JobStatus(
        name, gpus, ratios=ratios, number=number, pid=1, facts=facts, iteration=iteration,
        elapsed_s=5.0, ranks=ranks,
    )  # fmt: skip


def board(policy="maxmin"):
    return Board((0, 1), SHARING_POLICIES[policy], 2.0)


def run(board, until_s, reports, begin_s=0.0):
    """Report and tick twice a second; the targets that came of it, which the jobs obey."""
    made, now = {}, begin_s
    number = int(begin_s * 1000)
    while now < until_s:
        number += 1
        for slot, report in reports.items():
            board.report(
                slot, msgspec.structs.replace(report, number=number, iteration=number), now
            )
        for slot, target in board.tick(now).items():
            made[slot] = target
            reports[slot] = status(reports[slot].name, ratios=target.ratios)
        now += 0.5
    return made


def test_a_skewed_start_is_mended():
    reports = {1: status("a", ratios=(10, 0)), 2: status("b", ratios=(10, 0))}
    machine = board()
    made = run(machine, 9.0, reports)
    assert set(made) >= {1} or set(made) >= {2}
    after = [machine.snapshot(9.0).jobs[i].ratios for i in (0, 1)]
    loads = [sum(ratios[g] for ratios in after) for g in (0, 1)]
    assert max(loads) <= 11
    assert machine.stretches
    assert all(s.slowdowns.keys() <= {"a#1", "b#2"} for s in machine.stretches)


def test_a_job_of_the_other_order_of_gpus_gets_its_ratio_by_rank():
    machine = board("even")
    report = msgspec.structs.replace(status(ratios=(8, 2)), gpus=(1, 0))
    machine.report(1, report, 0.0)
    machine.tick(0.0)
    assert machine.snapshot(0.0).jobs[0].ratios == (2, 8)
    machine.report(1, msgspec.structs.replace(report, number=2), 2.5)
    assert machine.tick(2.5)[1].ratios == (5, 5)


def test_a_killed_job_is_forgotten_and_an_old_report_is_no_sign_of_life():
    machine = board()
    machine.report(1, status(), 0.0)
    machine.report(1, status(), GONE_AFTER_S)
    machine.tick(GONE_AFTER_S + 0.1)
    assert machine.summaries(GONE_AFTER_S + 0.1) == ()
    machine.report(1, status(), GONE_AFTER_S + 0.2)  # still in the store
    assert machine.summaries(GONE_AFTER_S + 0.2) == ()
    machine.report(1, status(number=2), GONE_AFTER_S + 0.3)  # it was only slow
    assert len(machine.summaries(GONE_AFTER_S + 0.3)) == 1


def test_a_job_that_hangs_does_not_count_until_it_moves_again():
    machine = board()
    later = STALLED_AFTER_S + 1.0
    machine.report(1, status(number=1), 0.0)
    for i in range(int(later)):
        machine.report(1, status(number=2 + i), float(i))
    assert [job.state for job in machine.summaries(later)] == ["stalled"]
    assert machine.snapshot(later).jobs == ()
    machine.report(1, status(number=1000, iteration=11), later)
    assert [job.state for job in machine.summaries(later)] == ["running"]


def test_a_report_of_gpus_that_are_not_shared_is_ignored():
    machine = board()
    machine.report(1, msgspec.structs.replace(status(), gpus=(0, 7)), 0.0)
    assert machine.summaries(0.0) == ()


def test_a_gpu_that_another_program_fills_gets_no_more_samples():
    def with_memory(free):
        report = status("a", ratios=(9, 1))
        ranks = tuple(
            msgspec.structs.replace(rank, reserved_bytes=rank.samples * 10, free_bytes=space)
            for rank, space in zip(report.ranks, free, strict=True)
        )
        return msgspec.structs.replace(report, ranks=ranks)

    def decided(free):
        machine = board()
        for i in range(6):
            report = msgspec.structs.replace(with_memory(free), number=i + 1, iteration=i)
            machine.report(1, report, i * 0.5)
            if made := machine.tick(i * 0.5):
                return made[1].ratios
        return None

    assert decided((10_000, 10_000)) == (5, 5)
    assert decided((10_000, 0)) is None


def test_the_run_alone_time_names_its_source():
    machine = board()
    run(machine, 1.0, {1: status()})
    (job,) = machine.summaries(1.0)
    assert (job.alone_source, job.alone_s) == ("model", pytest.approx(0.05, rel=0.01))
    given = msgspec.structs.replace(status(number=10**6), alone_step_s=0.025)
    machine.report(1, given, 1.0)
    (job,) = machine.summaries(1.0)
    assert (job.alone_source, job.slowdown) == ("given", pytest.approx(2.0, rel=0.01))


def test_a_run_alone_time_that_cannot_be_known_is_not_told():
    machine = board("fixed")
    run(machine, 1.0, {1: status(ratios=(10, 0)), 2: status("b", ratios=(10, 0))})
    for job in machine.summaries(1.0):
        assert (job.slowdown, job.alone_s, job.alone_source) == (None, None, None)
    # A policy goes by the guess, and learns from what comes of it.
    assert all(job.alone_s for job in machine.snapshot(1.0).jobs)
    run(machine, 2.0, {1: status(ratios=(4, 6))}, begin_s=1.0)
    assert machine.summaries(2.0)[0].alone_source == "model"


class ProbedJobs:
    """Two jobs that obey, in virtual time: alone a step takes 50 ms, beside the other 100 ms."""

    def __init__(self, *, obeys=True):
        self.machine, self.now_s, self.obeys = board("fixed"), 0.0, obeys
        self.ratios = {1: (7, 3), 2: (5, 5)}
        self.steps, self.paused_until_s = {1: 20.0, 2: 20.0}, {1: 0.0, 2: 0.0}
        self.targets = []

    def run(self, until_s, wanted=(1,)):
        while self.now_s < until_s:
            self.now_s += 0.25
            moving = [slot for slot in (1, 2) if self.paused_until_s[slot] <= self.now_s]
            for slot in (1, 2):
                step_s = 0.05 * len(moving)
                if slot in moving:
                    self.steps[slot] += 0.25 / step_s
                whole = int(self.steps[slot])
                ended_s = self.now_s - (self.steps[slot] - whole) * step_s
                report = status("ab"[slot - 1], ratios=self.ratios[slot], iteration=whole)
                ranks = tuple(
                    msgspec.structs.replace(rank, ended_s=ended_s) for rank in report.ranks
                )
                report = msgspec.structs.replace(
                    report, number=round(self.now_s * 4), ranks=ranks, probe=slot in wanted
                )
                self.machine.report(slot, report, self.now_s)
            for slot, target in self.machine.tick(self.now_s).items():
                self.targets.append((slot, target))
                if self.obeys or not target.pause_s:
                    self.ratios[slot] = target.ratios
                    self.paused_until_s[slot] = self.now_s + target.pause_s


def test_a_probe_measures_a_step_alone_while_the_others_pause_and_they_go_on(monkeypatch):
    monkeypatch.setattr("kilter.sharing.probe.REST", 4.0)
    jobs = ProbedJobs()
    jobs.run(8.0)
    found = {job.name: job for job in jobs.machine.summaries(jobs.now_s)}
    assert found["a#1"].alone_source == "probe"
    assert found["a#1"].alone_s == pytest.approx(0.05, rel=0.02)
    assert found["b#2"].alone_source != "probe"
    assert jobs.ratios == {1: (7, 3), 2: (5, 5)}  # as before
    assert jobs.paused_until_s[2] <= jobs.now_s
    assert "1 other jobs pause" in jobs.machine.probes.notes[0]
    assert "a step alone takes 50 ms" in jobs.machine.probes.notes[1]
    # Not again for the same job, and not soon for the other.
    count = len(jobs.targets)
    jobs.run(10.0, wanted=(1, 2))
    assert len(jobs.targets) == count
    jobs.run(40.0, wanted=(1, 2))
    assert {job.alone_source for job in jobs.machine.summaries(jobs.now_s)} == {"probe"}


def test_a_probe_ends_in_time_though_the_others_do_not_pause():
    jobs = ProbedJobs(obeys=False)
    jobs.run(PROBE_S + 2.0)
    assert "no run-alone time was measured: not alone" in jobs.machine.probes.notes[-1]
    assert not jobs.machine.probes.running
    assert {target.pause_s for slot, target in jobs.targets if slot == 1} == {0.0}
    jobs = ProbedJobs()
    jobs.run(2.0)
    assert jobs.machine.probes.running
    jobs.machine.forget(1)
    assert {t.pause_s for t in jobs.machine.tick(jobs.now_s).values()} == {0.0}
    assert "it has ended" in jobs.machine.probes.notes[-1]


def test_a_job_alone_on_the_machine_leaves_its_step_time_for_the_next_run():
    def steps(report, iteration, taken, step_s):
        ranks = tuple(
            msgspec.structs.replace(rank, steps=taken, step_s=step_s) for rank in report.ranks
        )
        return msgspec.structs.replace(report, ranks=ranks, number=iteration, iteration=iteration)

    machine = board("fixed")
    other = status("other")
    machine.report(1, steps(status(), 100, 90, 0.4), 0.0)
    machine.report(2, other, 0.0)
    machine.tick(0.0)
    machine.forget(2)
    machine.tick(0.1)
    machine.report(1, steps(status(), 150, 140, 0.2), 0.2)  # a mean over steps with the other job
    machine.tick(0.2)
    assert machine.history == {}
    machine.report(1, steps(status(), 320, 200, 0.06), 0.3)
    machine.tick(0.3)
    assert list(machine.history.values()) == [0.06]
    again = Board((0, 1), SHARING_POLICIES["fixed"], 2.0, machine.history)
    again.report(1, steps(status(), 5, 1, 0.12), 0.0)
    again.report(2, other, 0.0)
    found = {job.name: job for job in again.summaries(0.0)}
    assert (found["a#1"].alone_source, found["a#1"].slowdown) == ("history", pytest.approx(2.0))
    assert found["other#2"].alone_source != "history"


def test_a_history_is_kept_in_a_file_and_a_wrong_file_is_refused(tmp_path):
    path = tmp_path / "history.json"
    assert load_alone(path) == {}
    save_alone(path, {"a": 0.5})
    assert load_alone(path) == {"a": 0.5}
    for wrong in (b"", b"[1]", b'{"a": -1.0}', b'{"a": "x"}', b'{"a": 1e999}', b"\xff"):
        path.write_bytes(wrong)
        with pytest.raises(FileError, match="not a history"):
            load_alone(path)


def test_nothing_without_the_right_token_is_believed():
    target = RatioTarget(1, (10, 0), "because")
    raw = signed("secret", "job/1/target", target)
    assert verified("secret", "job/1/target", raw, RatioTarget) == target
    assert verified("other", "job/1/target", raw, RatioTarget) is None
    assert verified("secret", "job/2/target", raw, RatioTarget) is None
    assert verified("secret", "job/1/target", raw[:-1], RatioTarget) is None
    assert verified("secret", "job/1/target", b"", RatioTarget) is None


def test_what_a_user_should_know_of_the_gradients_of_a_job_is_shown():
    machine = board()
    machine.report(1, status("a", note="whether the loss is a mean cannot be seen"), 0.0)
    jobs = machine.summaries(0.0)
    text = table(Summary(1, 1, "even", 1.0, (0, 1), (0.0, 0.0), jobs, ()))
    assert "a#1: whether the loss is a mean cannot be seen" in text
