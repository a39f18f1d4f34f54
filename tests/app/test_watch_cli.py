"""`kilter watch`: which GPU is meant, and one clear line for what cannot be watched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kilter.app.cli.main import main
from kilter.testing.fake_card import Card
from kilter.testing.fake_nvml import FakeNvml

KILTER = str(Path(sys.executable).with_name("kilter"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--for", "soon"), "--for: 'soon' is not a time"),
        (("--for", "0s"), "longer than nothing"),
        (("--max-slowdown", "-5%"), "--max-slowdown"),
        (("--device", "null"), "only a GPU or sim:NAME"),
        (("--device", "sim:none"), "--device"),
        (("--device", "sim:v100", "--gpu", "0"), "brings its own"),
        (("--pid", "999999999"), "no such process"),
        (("--objective", "speed"), "not an objective"),
    ],
)
def test_wrong_usage_is_said_in_one_line(tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *arguments]) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert out == ""
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_pid_that_is_no_number_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["watch", "--pid", "train.py"])
    assert raised.value.code == 2
    assert "--pid" in capsys.readouterr().err


def test_switched_off_it_does_nothing(monkeypatch, capsys):
    monkeypatch.setenv("KILTER", "0")
    assert main(["watch", "--device", "sim:v100"]) == 2
    assert "KILTER=0" in capsys.readouterr().err


def test_a_simulated_dry_run_answers_in_json(tmp_path, capsys):
    out = tmp_path / "run"
    arguments = ("--device", "sim:h200", "--max-slowdown", "5%", "--dry-run", "--json")
    assert main(["watch", *arguments, "--out", str(out)]) == 0
    text, err = capsys.readouterr()
    document = json.loads(text)
    assert document["schema"] == "kilter.watch/1"
    assert document["label"] == "simulated"
    assert document["detected"] is True
    assert document["code"] == "periodic"
    assert document["period_s"] == pytest.approx(1.15, rel=0.05)
    assert document["would_try"]
    assert document["report"]["schema"] == "kilter.report/1"
    assert "would try first" in err
    assert (out / "report.html").exists()


@pytest.fixture
def cards(tmp_path):
    """Two fake cards, and a command that sees them."""
    fake = FakeNvml.create(tmp_path / "cards.json", Card(), Card(), virtual_time=False)
    environ = fake.environ() | {"KILTER_STATE_DIR": str(tmp_path / "state")}

    def watch(*arguments):
        done = subprocess.run(
            [KILTER, "watch", "--out", str(tmp_path / "run"), *arguments],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=900,
        )
        return done.returncode, done.stdout, done.stderr

    return fake, watch


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_which_gpu_is_meant(cards):
    fake, watch = cards
    own = os.getpid()
    code, _, err = watch()
    assert code == 2
    assert "GPUs 0, 1: choose one with --gpu" in err
    code, _, err = watch("--gpu", "7")
    assert code == 2
    assert "--gpu 7" in err
    code, _, err = watch("--pid", str(own))
    assert code == 2
    assert "computes on any GPU yet" in err
    with fake.edit() as state:
        for card in state.cards:
            card.pids = (own,)
    code, _, err = watch("--pid", str(own))
    assert code == 2
    assert f"--pid {own}: computes on GPUs 0, 1" in err
    uuid = fake.state().cards[1].uuid
    for gpu in ("1", uuid):
        code, out, err = watch("--pid", str(own), "--gpu", gpu, "--for", "1s", "--json")
        assert code == 0, err
        assert json.loads(out)["report"]["devices"][0]["uuid"] == uuid
        assert "its time is over" in json.loads(out)["ended"]
        for file in (fake.path.parent / "run").iterdir():
            file.unlink()
    assert fake.setters() == []


def test_no_permission_and_mig_are_said_and_nothing_is_set(cards):
    fake, watch = cards
    with fake.edit() as state:
        state.permitted = False
        state.cards[1].mig = True
    for gpu, why in (("0", "not permitted"), ("1", "MIG is on")):
        code, out, err = watch("--gpu", gpu, "--for", "1s", "--json")
        assert code == 0, err
        document = json.loads(out)
        assert why in document["report"]["mode_reason"]
        assert why in err
        for file in (fake.path.parent / "run").iterdir():
            file.unlink()
    assert fake.setters() == []


def test_without_a_driver_the_reason_is_given(cards):
    fake, watch = cards
    with fake.edit() as state:
        state.init_error = fake.NVML_ERROR_DRIVER_NOT_LOADED
    code, _, err = watch("--gpu", "0")
    assert code == 1
    assert "not loaded" in err
    assert len(err.splitlines()) == 1
