"""`kilter bench clocks`: the JSON contract, on a table made here, and clear errors."""

import json
import math

import pytest

from kilter.app.bench import clocks
from kilter.app.cli.main import main
from kilter.clocks.plan.governor import SEARCH_PAIRS
from kilter.core.plan import Goal
from kilter.device.sim.replay import load_tables

HEADER = "source,gpu,workload,core_mhz,mem_mhz,power_limit_w,time_s,power_w,energy_j"


def table(tmp_path, name="t.csv", sensitivity=(0.1, 0.5, 0.9)):
    """Jobs of different sensitivity to the core clock; power falls with the clock's square."""
    lines = [HEADER]
    for s in sensitivity:
        for mhz in range(1500, 800, -75):
            f = mhz / 1500
            time, power = 1 - s + s / f, 60 + 190 * f**2.5
            lines.append(f"synthetic,Card,job{s},{mhz},,,{time},{power},{time * power}")
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return path


def bench(capsys, *arguments):
    code = main(["bench", "clocks", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_keeps_its_keys(tmp_path, capsys):
    code, out, _ = bench(capsys, "--table", table(tmp_path), "--seeds", 2, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["schema"] == "kilter.bench.clocks/1"
    assert document["label"] == "replayed"
    assert set(document["rows"][0]) >= {
        "policy",
        "gpu",
        "workload",
        "seed",
        "saving",
        "slowdown",
        "violated",
        "iterations",
        "probe_energy_j",
    }
    left_out = {"kilter-classed", "kilter-learned", "kilter-recurring"}
    assert set(document["summary"]) == set(clocks.POLICIES) - left_out
    assert set(document["summary"]["kilter"]) >= {
        "mean_saving",
        "mean_slowdown",
        "worst_slowdown",
        "violations",
        "n",
        "of_oracle",
    }
    assert document["summary"]["oracle"]["of_oracle"] == 1.0
    assert document["summary"]["default"]["mean_saving"] == 0.0


def test_scores_are_the_tables_true_values(tmp_path, capsys):
    path = table(tmp_path)
    _, out, _ = bench(capsys, "--table", path, "--seeds", 3, "--json", "--max-slowdown", "5%")
    workloads = {w.name: w for w in load_tables(path)}
    for row in json.loads(out)["rows"]:
        workload = workloads[row["workload"]]
        match = [r for r in workload.rows if str(r.setting) == row["setting"]]
        assert len(match) == 1
        assert row["saving"] == pytest.approx(1 - match[0].energy_j / workload.default.energy_j)
        assert row["slowdown"] == pytest.approx(match[0].time_s / workload.default.time_s - 1)
        assert row["violated"] == (row["slowdown"] > 0.05 + 1e-9)


def test_ours_beats_doing_nothing_and_keeps_the_bound(tmp_path, capsys):
    _, out, _ = bench(capsys, "--table", table(tmp_path), "--seeds", 5, "--json")
    ours = json.loads(out)["summary"]["kilter"]
    assert ours["mean_saving"] > 0.05
    assert ours["violations"] == 0


def test_same_seed_same_result(tmp_path, capsys):
    arguments = ("--table", table(tmp_path), "--seeds", 2, "--json", "--policies", "kilter")
    assert bench(capsys, *arguments)[1] == bench(capsys, *arguments)[1]


def test_a_time_budget_is_kept_and_its_end_is_no_accident(tmp_path):
    (workload, *_) = load_tables(table(tmp_path))
    goal = Goal(max_slowdown=0.05)
    for budget_s in (1.0, 50.0, 400.0):
        run = clocks.Replay(workload, noise=0.01, seed=0, budget_s=budget_s, placebo=False)
        setting = clocks.kilter(run, goal, 0, [])
        assert workload.at(setting) is not None
        assert run.iterations <= math.ceil(budget_s / 0.95) + 2 * clocks.BLOCK


def test_arms_that_are_equal_fool_it_rarely(tmp_path, capsys):
    path = table(tmp_path, sensitivity=tuple(0.05 * k for k in range(1, 13)))
    code, out, _ = bench(
        capsys, "--table", path, "--aa", "--seeds", 8, "--policies", "kilter", "--json"
    )
    assert code == 0
    assert json.loads(out)["summary"]["kilter"]["chose_default"] >= 0.93


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        (HEADER, "no measurements"),
        (f"{HEADER}\ns,C,w,1000,,,nan,1,1", "is not finite"),
        (f"{HEADER}\ns,C,w,1000,,,1.0,1", "fields"),
        (HEADER.replace("time_s", "time"), "missing columns: time_s"),
    ],
)
def test_bad_tables_are_one_line_and_exit_code_1(tmp_path, capsys, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    code, out, err = bench(capsys, "--table", path)
    assert (code, out) == (1, "")
    assert message in err
    assert str(path) in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["memory", "--operations", "many"],
        ["memory", "--ratios", "-1"],
        ["memory", "--budgets", "nan"],
        ["memory", "--planners", "magic", "--operations", "32"],
        ["overhead", "missing.py"],
        ["overhead", "--repeats", "0", "missing.py"],
    ],
)
def test_other_tables_refuse_wrong_flags_too(capsys, arguments):
    try:
        code = main(["bench", *arguments])
    except SystemExit as stop:
        code = stop.code
    _, err = capsys.readouterr()
    assert code == 2
    assert "Traceback" not in err
    assert err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--policies", "magic"],
        ["--seeds", "0"],
        ["--max-slowdown", "5"],
        ["--noise", "lots"],
        ["--time-budget-s", "-1"],
    ],
)
def test_wrong_flags_are_exit_code_2(tmp_path, capsys, arguments):
    try:
        code, _, err = bench(capsys, "--table", table(tmp_path), *arguments)
    except SystemExit as stop:
        code, err = stop.code, capsys.readouterr().err
    assert code == 2
    assert err


def test_random_cards_are_simulated_and_say_where_the_saving_went(capsys):
    """Two cards that nobody has measured: the same ones each time; what is lost adds up."""
    arguments = ("--random", 2, "--half", 0, "--seeds", 1, "--policies", "kilter,oracle", "--json")
    code, out, _ = bench(capsys, *arguments)
    assert code == 0
    document = json.loads(out)
    assert document["label"] == "simulated"
    ours, best = (document["summary"][name] for name in ("kilter", "oracle"))
    assert sum(ours["lost"].values()) == pytest.approx(1 - ours["of_oracle"])
    assert set(ours["lost"]) <= {"none", "price", "test", "probe", "unseen", "bound"}
    assert ours["violation_rate_ci95"][0] <= ours["violation_rate"]
    assert ours["n"] == best["n"]
    assert ours["most_iterations"] <= 2 * clocks.BLOCK * SEARCH_PAIRS
    again = json.loads(bench(capsys, *arguments)[1])
    assert again["rows"] == document["rows"]


def test_figures_of_several_random_cards_are_called_simulated(capsys):
    code, out, _ = bench(capsys, "--random", 2, "--half", 0, "--policies", "oracle")
    assert code == 0
    assert out.count("(simulated)") == 3
    assert "all tables (simulated)" in out


def test_nothing_to_replay_is_said(capsys):
    code, _, err = bench(capsys)
    assert code == 2
    assert "--table CSV, or --random N" in err
