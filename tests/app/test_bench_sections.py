"""`kilter bench sections`: its JSON and its table."""

import json

import pytest

from kilter.app.cli.main import main


def test_json_has_the_promised_keys(capsys):
    assert main(["bench", "sections", "--scenario", "ddp_sockets_2", "--seeds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["label"]) == ("kilter.bench.sections/1", "simulated")
    keys = "scenario policy seed saving slowdown accepted_harmful found_step_error iterations"
    assert set(found["rows"][0]) == set(keys.split())
    assert {row["policy"] for row in found["rows"]} == {"kilter", "stepwise", "oracle"}
    figures = found["summary"]["ddp_sockets_2"]["oracle"]
    assert figures["within_one_step"] == 1.0
    assert figures["mean_saving"] > 0.0


def test_the_same_seed_gives_the_same_row(capsys):
    command = ["bench", "sections", "--scenario", "straggler_16", "--seeds", "1", "--json"]
    main(command)
    first = capsys.readouterr().out
    main(command)
    assert capsys.readouterr().out == first


def test_the_table_and_wrong_usage(capsys):
    assert main(["bench", "sections", "--scenario", "ddp_nvlink_2", "--seeds", "1"]) == 0
    assert "[simulated]" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "sections", "--seeds", "0"])
    with pytest.raises(SystemExit):
        main(["bench", "sections", "--scenario", "no_such_job"])


def test_the_calibrators_table_and_json(capsys):
    assert main(["bench", "sections", "--scenario", "switch_times"]) == 0
    assert "[simulated]" in capsys.readouterr().out
    command = ["bench", "sections", "--scenario", "switch_times", "--device", "sim:a100", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["label"], found["device"]) == ("simulated", "a100")
    assert {s["down"] for s in found["switches"]} == {True, False}
    assert all(s["p50_s"] <= s["p95_s"] <= s["p99_s"] for s in found["switches"])


def test_a_gpus_clocks_are_set_by_the_calibrator_alone(capsys):
    assert main(["bench", "sections", "--scenario", "fsdp_8", "--device", "nvml"]) == 2
    assert "--scenario switch_times alone" in capsys.readouterr().err
