"""`kilter report`: JSON that others build on, one page that opens offline, one line per error."""

import json
import os
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import msgspec
import pytest
from tests import runs

from kilter.app.cli.main import main
from kilter.app.report import build as report
from kilter.app.report import summary
from kilter.app.report.words import start_line
from kilter.core.events import Decided
from kilter.core.label import Label
from kilter.core.setting import Setting
from kilter.core.units import MHZ

KEYS = {
    *("schema", "label", "run", "device", "devices", "iterations", "baseline", "governed"),
    *("saving", "saving_ci95", "slowdown", "slowdown_ci95", "contract", "within_contract"),
    *("kept", "restored", "refused", "energy_method", "energy_disagreement"),
    *("interval_method", "goal", "found", "memory", "footprint"),
    *("after", "choice", "evidence", "rehearsed_iterations", "rehearsed_share", "mode"),
    *("mode_reason", "outcome", "ranks", "command", "kilter", "wall_time", "config", "duration_s"),
    *("overhead", "probes", "decisions", "errors", "prediction", "memory", "sections", "blocks"),
    *("series", "operations", "operations_method", "operation_clocks"),
    *("host", "torch", "driver", "energy_j", "features", "idle", "job", "unseen", "no_trace"),
    "unread",
}

HOSTILE = '"><img src=x onerror=alert(1)>&\x1b[31m\x00</title></svg>'


@pytest.fixture
def run_dir(tmp_path):
    run = runs.governed()
    run.stop()
    directory = runs.write(tmp_path / "runs" / "one", run)
    runs.write_trace(directory)
    runs.write_plan(directory, Setting(sm_clock_hz=1245 * MHZ), run.job)
    return directory


@pytest.fixture
def hostile_dir(tmp_path):
    """A run in which every text that a run may choose is an attack."""
    run = runs.governed()
    start = run.events[0]
    run.events[0] = msgspec.structs.replace(
        start,
        command=(HOSTILE, HOSTILE),
        device=replace(start.device, name=HOSTILE),
        mode_reason=HOSTILE,
        kilter=HOSTILE,
        wall_time=HOSTILE,
    )
    run.events = [
        msgspec.structs.replace(e, reason=HOSTILE) if isinstance(e, Decided) else e
        for e in run.events
    ]
    run.refuse(HOSTILE, HOSTILE)
    run.fail(HOSTILE, HOSTILE)
    run.stop(HOSTILE)
    directory = runs.write(tmp_path / "hostile", run)
    runs.write_trace(directory, name=HOSTILE)
    return directory


class Page(HTMLParser):
    """Tags and attributes of a page; fails on tags that are not closed in order."""

    VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.open = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page_of(directory, tmp_path):
    file = tmp_path / "page.html"
    assert main(["report", str(directory), "--html", str(file)]) == 0
    return file.read_text(encoding="utf-8")


def test_json_keys_stay(run_dir, capsysbinary):
    assert main(["report", str(run_dir), "--json"]) == 0
    raw = capsysbinary.readouterr().out
    assert raw.count(b"\n") == 1
    found = json.loads(raw)
    assert found.keys() == KEYS
    assert found["schema"] == "kilter.report/1"
    assert found["label"] == "simulated"
    assert found["baseline"].keys() == {"iteration_s", "energy_j"}
    assert found["governed"].keys() == {"iteration_s", "energy_j"}
    assert found["contract"] == 0.02
    assert found["refused"][0].keys() >= {"what", "reason"}
    low, high = found["saving_ci95"]
    assert low < found["saving"] < high
    assert found["probes"][0].keys() >= {"setting", "time_ratio", "energy_ratio", "blocks"}
    assert found["evidence"].keys() >= {"iterations", "blocks", "pairs"}


def test_json_of_an_interval_without_end_is_null(tmp_path, capsysbinary):
    run = runs.RunWriter(runs.WrittenJob())
    run.start()
    run.pairs("confirm", Setting(sm_clock_hz=1245 * MHZ), 1)
    run.decide("hold", Setting(sm_clock_hz=1245 * MHZ), "safe")
    runs.write(tmp_path, run)
    assert main(["report", str(tmp_path), "--json"]) == 0
    found = json.loads(capsysbinary.readouterr().out, parse_constant=pytest.fail)
    assert found["saving_ci95"] is None
    assert found["restored"] is None


def test_latest_is_the_run_written_last(run_dir, tmp_path, monkeypatch, capsys):
    old = runs.write(tmp_path / "runs" / "zzz", runs.governed(seed=9))
    os.utime(old / "events-rank0.jsonl", (1, 1))
    monkeypatch.chdir(tmp_path)
    assert main(["report", "latest"]) == 0
    out = capsys.readouterr().out
    assert "run      one: train.py --epochs 3" in out
    assert "[simulated]" in out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("latest", "no run in here yet"),
        ("missing", "no such run"),
        ("empty", "not a run"),
        ("file", "no such run"),
    ],
)
def test_no_run_is_one_line_and_exit_code_1(name, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert main(["report", name]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("words", [["doctor", "--device", "null"], ["report", "RUN", "--json"]])
def test_output_for_which_there_is_no_room_is_one_line(words, run_dir, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115 - main closes it
        assert main([str(run_dir) if word == "RUN" else word for word in words]) == 1
    assert capsys.readouterr().err == (
        f"kilter {words[0]}: standard output: No space left on device\n"
    )


def test_page_that_cannot_be_written_is_one_line(run_dir, capsys):
    assert main(["report", str(run_dir), "--html", "/dev/full"]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(("apart", "warned"), [(0.12, True), (-0.12, True), (0.02, False)])
def test_energy_that_two_witnesses_disagree_on_is_doubted(apart, warned, tmp_path, capsys):
    run = runs.governed()
    run.stop(energy_disagreement=apart)
    runs.write(tmp_path / "run", run)
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "run")]) == 0
    assert main(["report", str(tmp_path / "run"), "--html", str(page)]) == 0
    told = f"the integral of power is {apart:+.1%} off the energy counter"
    assert (told in capsys.readouterr().out) == warned
    assert (told in page.read_text()) == warned
    assert (told in summary.summary(report.build(tmp_path / "run"), tmp_path)) == warned


def test_json_and_html_exclude_each_other(run_dir, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["report", str(run_dir), "--json", "--html", "x.html"])
    assert caught.value.code == 2


def test_page_fetches_nothing_and_runs_nothing(run_dir, tmp_path):
    text = page_of(run_dir, tmp_path)
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "base", "use", "image"} & {*page.tags}
    names = {name for name, _ in page.attributes}
    assert not names & {"src", "href", "xlink:href", "srcset", "action", "data", "background"}
    assert not any(name.startswith("on") for name in names)
    assert not re.search(r"url\(|@import|https?://", text)
    assert "default-src 'none'" in text


def test_page_has_every_plot_twice_with_words_for_each(run_dir, tmp_path):
    page = Page(page_of(run_dir, tmp_path))
    drawings = [dict(page.attributes)["role"] for tag in page.tags if tag == "svg"]
    assert len(drawings) == 2 * 3 + 2
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for name, value in page.attributes:
        if name == "aria-labelledby":
            assert set(value.split()) <= set(ids)


def test_page_of_a_shadow_run_says_that_its_plan_is_predicted(tmp_path):
    run = runs.RunWriter(mode="shadow", label=Label.MEASURED)
    run.start("setting clocks needs root")
    run.block("hold", Setting(), arm="baseline")
    chosen = Setting(sm_clock_hz=1245 * MHZ)
    run.decide("predicted", chosen, "safe on the simulated device")
    run.stop()
    directory = runs.write(tmp_path / "run", run)
    runs.write_plan(directory, chosen, run.job)
    text = page_of(directory, tmp_path)
    heading = text[text.index("<h1>") : text.index("</h1>")]
    assert "Nothing was set" in heading
    assert "predicted, simulated" in heading
    assert "setting clocks needs root" in text


def test_hostile_names_stay_text(hostile_dir, tmp_path):
    text = page_of(hostile_dir, tmp_path)
    page = Page(text)
    assert "img" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    assert "\x1b" not in text
    assert "\x00" not in text


def test_hostile_names_reach_a_terminal_as_ascii(hostile_dir, capsys):
    assert main(["report", str(hostile_dir)]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    assert "\x1b" not in out
    assert "\\x1b[31m" in out


@pytest.mark.parametrize("mode", ["govern", "shadow", "observe"])
def test_start_is_one_line(mode):
    run = runs.RunWriter(runs.WrittenJob(), mode=mode, world_size=2)
    run.start("because\nof \u00e4 reason")
    line = start_line(run.events[0])
    assert line.isascii()
    assert line.isprintable()
    assert line.startswith("kilter 0.1.0: ")
    assert "[simulated]" in line
    assert ("because" in line) == (mode != "govern")


def test_summary_is_a_few_lines_each_ours(run_dir):
    lines = summary.summary(report.build(run_dir), run_dir).splitlines()
    assert all(line.startswith("kilter: ") and line.isascii() for line in lines)
    assert len(lines) <= 6
    assert lines[0].startswith("kilter: would save ")
    assert "slowdown" in lines[0]
    assert "[simulated]" in lines[0]
    assert "refused: memory clock" in lines[3]
    assert str(run_dir) in lines[-1]
