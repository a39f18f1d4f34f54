"""`kilter share rehearse` and `kilter bench share`, as a user runs them."""

import contextlib
import io
import json

import pytest

from kilter.app.cli.main import main
from kilter.sharing.placements import NAMES
from kilter.sharing.plan.policies import SHARING_POLICIES

JOB = {"name": "a", "global_batch": 64, "total_steps": 100, "cost": {"sample_s": 0.001}}


def write(tmp_path, jobs, **more):
    path = tmp_path / "machine.json"
    document = {"schema": "kilter.sharing/1", "gpus": 2, "jobs": jobs, "period_s": 2.0, **more}
    path.write_text(json.dumps(document))
    return str(path)


def rehearse(capsys, *arguments):
    assert main(["share", "rehearse", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def skewed():
    """What each policy makes of the skewed machine."""
    found = {}
    for policy in SHARING_POLICIES:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(["share", "rehearse", "p5", "--policy", policy, "--json"]) == 0
        found[policy] = json.loads(printed.getvalue())
    return found


def test_keys_that_others_build_on(capsys, tmp_path):
    file = write(tmp_path, [JOB | {"ratios": [10, 0]}, JOB | {"name": "b", "ratios": [10, 0]}])
    found = rehearse(capsys, file, "--policy", "maxmin")
    assert found["schema"] == "kilter.share/1"
    assert found["label"] == "simulated"
    assert {"name", "slowdown", "finish_s"} <= found["jobs"][0].keys()
    assert 0 < found["utilisation"] <= 1
    assert found["decisions"][0]["after"] != [10, 0]
    assert found["makespan_s"] == max(job["finish_s"] for job in found["jobs"])
    assert found["max_slowdown"] == max(job["slowdown"] for job in found["jobs"])


def test_a_job_alone_on_all_gpus_is_not_slowed_down(capsys, tmp_path):
    found = rehearse(capsys, write(tmp_path, [JOB]))
    assert found["max_slowdown"] == pytest.approx(1.0)
    assert found["jobs"][0]["finish_s"] == pytest.approx(3.2)  # 100 steps of 32 samples each
    assert found["decisions"] == []


def test_a_run_alone_time_that_is_given_is_named(capsys, tmp_path):
    found = rehearse(capsys, write(tmp_path, [JOB | {"alone_step_s": 0.016}]))
    assert found["jobs"][0]["alone_source"] == "given"
    assert found["max_slowdown"] == pytest.approx(2.0)


@pytest.mark.parametrize("policy", SHARING_POLICIES)
def test_every_policy_ends_every_job_on_the_skewed_machine(skewed, policy):
    assert len(skewed[policy]["jobs"]) == 3


def test_maxmin_beats_the_skewed_start_and_does_not_lose_to_even(skewed):
    worst = {policy: found["max_slowdown"] for policy, found in skewed.items()}
    assert worst["maxmin"] < 0.47 * worst["fixed"]
    assert worst["maxmin"] < 1.03 * worst["even"]


def test_the_same_seed_gives_the_same_rehearsal(capsys, skewed):
    assert rehearse(capsys, "p5", "--policy", "maxmin") == skewed["maxmin"]


def test_jobs_wait_until_there_is_memory(capsys, tmp_path):
    memory = {"memory": {"replica_bytes": 60, "sample_bytes": 0}}
    file = write(tmp_path, [JOB | memory, JOB | memory | {"name": "b"}], gpu_memory_bytes=100)
    first, second = rehearse(capsys, file)["jobs"]
    assert second["finish_s"] == pytest.approx(2 * first["finish_s"])


def test_the_page(capsys, tmp_path):
    page = tmp_path / "share.html"
    assert main(["share", "rehearse", "p5", "--policy", "even", "--html", str(page)]) == 0
    text = page.read_text()
    assert "resnet50" in text
    assert "simulated" in text
    assert "<script" not in text


@pytest.mark.parametrize(
    ("jobs", "more", "complaint"),
    [
        ([], {}, "there are no jobs"),
        ([JOB, JOB], {}, "same name"),
        ([JOB | {"name": "a\x1b[31m"}], {}, "can be printed"),
        ([JOB | {"ratios": [5, 4]}], {}, "sum to 10"),
        ([JOB | {"ratios": [10]}], {}, "2 numbers"),
        ([JOB | {"ratios": [10, 0], "may_idle": False}], {}, "needs may_idle"),
        ([JOB | {"cost": {"sample_s": 0}}], {}, "sample_s above 0"),
        ([JOB | {"global_batch": 0}], {}, "at least 1"),
        ([JOB | {"cost": {"sample_s": "x"}}], {}, "Expected `float`"),
        ([JOB | {"colour": 1}], {}, "unknown field `colour`"),
        ([JOB], {"gpus": 0}, "gpus is 0"),
        ([JOB], {"schema": "kilter.trace/1"}, "expected 'kilter.sharing/1'"),
        ([JOB], {"period_s": 0}, "period_s"),
        (
            [JOB | {"memory": {"replica_bytes": 9, "sample_bytes": 0}}],
            {"gpu_memory_bytes": 5},
            "more memory than the empty machine",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_one_line(capsys, tmp_path, jobs, more, complaint):
    assert main(["share", "rehearse", write(tmp_path, jobs, **more)]) == 1
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_wrong_usage_names_the_command(capsys):
    with pytest.raises(SystemExit):
        main(["share", "rehearse"])
    assert "kilter share rehearse: error" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"\xff\xfe", b'{"schema": "kilter.sharing/1"']
)
def test_a_missing_or_broken_file(capsys, tmp_path, content):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    assert main(["share", "rehearse", str(path)]) == 1
    assert str(path) in capsys.readouterr().err


def test_the_bench(capsys, tmp_path):
    file = write(tmp_path, [JOB | {"ratios": [10, 0]}, JOB | {"name": "b", "ratios": [10, 0]}])
    arguments = ["bench", "share", "--placements", file, "--policies", "fixed,even", "--json"]
    assert main(arguments) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["policy"] for row in rows] == ["fixed", "even"]
    assert rows[1]["max_slowdown"] < rows[0]["max_slowdown"]


def test_all_shipped_placements_can_be_read():
    from kilter.app.cli.share import placement

    for name in NAMES:
        assert placement(name).gpus == 4
