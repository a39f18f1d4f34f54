"""`kilter bench drift` and `kilter bench scale`: small, and their wrong usage."""

import math

import msgspec
import pytest
from tests.app.scale_virtual import drive_virtual

from kilter.app.bench.drift import most_events
from kilter.app.bench.scale import agreements
from kilter.app.bench.scale_ranks import RankSeen, RanksJob
from kilter.app.cli.main import main


def test_drift_notices_a_change_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "drift", "--blocks", "700", "--seeds", "3", "--json"]) == 0
    told = msgspec.json.decode(capsys.readouterr().out)
    assert (told["schema"], told["label"]) == ("kilter.bench.drift/1", "simulated")
    rows = {row["change"]: row for row in told["rows"]}
    assert all(row["false_alarms"] == 0 for name, row in rows.items() if "at the bound" not in name)
    assert rows["iterations become twice as long"]["noticed"] == 3
    assert rows["nothing changes"]["blocks"] == 3 * 700
    assert told["most_false_alarms_per_1000_h"] > 0.0


def test_an_upper_bound_of_events_is_that_of_poisson() -> None:
    assert most_events(0) == pytest.approx(-math.log(0.05), abs=1e-4)  # the rule of three
    mean = most_events(4)
    below = sum(mean**k * math.exp(-mean) / math.factorial(k) for k in range(5))
    assert below == pytest.approx(0.05, abs=1e-4)


def test_a_decision_lasts_from_the_last_result_to_the_last_order() -> None:
    def rank(ordered_s: tuple[float, ...], measured_s: tuple[float, ...]) -> RankSeen:
        return RankSeen(
            rank=0,
            ordered_s=ordered_s,
            measured_s=measured_s,
            notes=0,
            looks=0,
            blocks=0,
            longest_step_s=0.0,
        )

    ranks = [rank((0.0, 2.5, 9.0), (2.0, 8.0)), rank((0.1, 2.75, 8.5), (2.25,))]
    assert agreements(ranks) == [(2.25, 0.5)]


def test_ranks_with_a_core_each_agree_in_under_a_second_with_few_calls() -> None:
    job = RanksJob(
        port=0,
        world_size=200,
        ranks=(),
        seconds=6.0,
        iteration_s=0.1,
        sensor_period_s=0.05,
        silent=(),
    )
    ranks, store = drive_virtual(job, service_s=50e-6)
    agreed = [agreed_s for _, agreed_s in agreements(ranks)]
    assert len(agreed) >= 2
    assert max(agreed) < 1.0, "virtual seconds"
    assert store.calls < 25 * len(ranks) * (len(agreed) + 1)


@pytest.mark.parametrize(
    "words",
    [
        ["scale", "--ranks", "many"],
        ["scale", "--ranks", "1"],
        ["scale", "--seconds", "1"],
        ["drift", "--blocks", "5"],
    ],
)
def test_wrong_usage_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_count_below_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "drift", "--seeds", "0"])
    assert ended.value.code == 2
    assert "--seeds: '0' is not a number of at least 1" in capsys.readouterr().err


def test_a_few_ranks_agree_through_a_real_store(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    for seconds in (10, 60, 300):  # the ranks live in real time: longer on a busy machine
        arguments = ["--ranks", "2", "--seconds", str(seconds), "--json"]
        assert main(["bench", "scale", *arguments]) == 0
        (row,) = msgspec.json.decode(capsys.readouterr().out)["rows"]
        if row["decisions"]:
            break
    assert row["decisions"] > 0
    assert row["rank0_notes"] > 0
    assert row["all_notes"] > row["rank0_notes"]
