"""`kilter report RUN --trace FILE`: what a viewer of Chrome traces shows is in the record."""

import json
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import runs

from kilter.app.cli.main import main
from kilter.app.report import build as report
from kilter.app.report.chrome import chrome_of_run
from kilter.core.events import Block, Decided, Sampled
from kilter.core.label import Label
from kilter.core.setting import Setting

REAL_CLOCK_S = 86_400.0
"""What a real device's clock is ahead of the run's."""


def on_a_real_clock(run):
    """The record of a device whose clock began long before the run."""
    moved = []
    for event in run.events:
        if isinstance(event, Sampled):
            event = msgspec.structs.replace(event, device_t_s=event.device_t_s + REAL_CLOCK_S)
        elif isinstance(event, Block):
            event = msgspec.structs.replace(
                event,
                device_begin_s=event.device_begin_s + REAL_CLOCK_S,
                device_end_s=event.device_end_s + REAL_CLOCK_S,
            )
        moved.append(event)
    run.events = moved
    return run


def in_virtual_time(run, factor):
    """The record of a simulated device whose time runs `factor` times as fast as the run's."""
    run.events = [msgspec.structs.replace(e, t_s=e.t_s / factor) for e in run.events]
    return run


def trace_of(*recorders):
    ranks = [report.sort_events(recorder.events) for recorder in recorders]
    return msgspec.json.decode(msgspec.json.encode(chrome_of_run(ranks, run="one")))


def on_track(trace, name, *, pid=0):
    events = trace["traceEvents"]
    (tid,) = {e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == name}
    return [e for e in events if e.get("tid") == tid and e["pid"] == pid and e["ph"] != "M"]


def counter(trace, name, *, pid=0):
    return [
        (e["ts"] / 1e6, e["args"]["value"])
        for e in trace["traceEvents"]
        if e["ph"] == "C" and e["name"] == name and e["pid"] == pid
    ]


@pytest.mark.parametrize("kind", ["simulated", "measured"])
def test_blocks_settings_and_sensors_lie_where_they_were(kind):
    run = runs.governed(label=Label(kind), uuid="GPU-0")
    run.stop()
    if kind == "measured":
        run = on_a_real_clock(run)
    trace = trace_of(run)
    blocks = [e for e in run.events if isinstance(e, Block)]
    shown = on_track(trace, "blocks")
    assert len(shown) == len(blocks)
    for block, span in zip(blocks, shown, strict=True):
        assert (span["ts"] + span["dur"]) / 1e6 == pytest.approx(block.t_s, abs=1e-3)
        assert span["args"]["energy_j"] == block.energy_j
        assert span["args"]["setting"] == str(block.setting)
        assert span["name"].endswith("(left out)") is not block.clean
    power = counter(trace, "power (W)")
    samples = [e for e in run.events if isinstance(e, Sampled)]
    assert [t_s for t_s, _ in power] == pytest.approx([e.t_s for e in samples], abs=1e-3)
    assert [value for _, value in power] == [e.power_w for e in samples]


def test_setting_in_force_is_that_of_the_blocks_below():
    trace = trace_of(runs.governed())
    settings = on_track(trace, "setting in force")
    for before, after in pairwise(settings):
        assert before["ts"] + before["dur"] <= after["ts"] + 1.0
        assert before["name"] != after["name"]
    for block in on_track(trace, "blocks"):
        middle = block["ts"] + block["dur"] / 2
        (held,) = [s for s in settings if s["ts"] <= middle <= s["ts"] + s["dur"]]
        assert held["name"] == block["args"]["setting"]


@given(factor=st.floats(0.1, 50.0))
def test_decisions_of_a_simulated_device_stand_between_its_blocks(factor):
    """A decision was made after the blocks before it in the record, and before those after."""
    run = runs.governed(confirm_pairs=3, hold_pairs=1)
    run.stop()
    run = in_virtual_time(run, factor)
    decisions = on_track(trace_of(run), "decisions")
    blocks_before = []
    for event in run.events:
        if isinstance(event, Block):
            blocks_before.append(event)
        elif isinstance(event, Decided):
            span = decisions.pop(0)
            assert span["name"] == f"{event.state}: {event.setting}"
            end_s = blocks_before[-1].device_end_s
            assert span["ts"] / 1e6 == pytest.approx(end_s, abs=blocks_before[-1].iteration_s * 12)
            assert span["dur"] >= 0.0
    assert decisions == []


def test_each_rank_is_a_process_of_its_own():
    ranks = [runs.governed(rank=r, world_size=2, uuid=f"GPU-{r}", seed=r) for r in (0, 1)]
    trace = trace_of(*ranks)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == [f"rank {r}: Tesla V100-SXM2-16GB [simulated]" for r in (0, 1)]
    assert counter(trace, "power (W)", pid=0) != counter(trace, "power (W)", pid=1)


def test_refusals_errors_and_the_end_are_marks():
    run = runs.governed()
    run.fail("session", "ValueError: broken")
    run.stop("raised KeyError", restored=False)
    trace = trace_of(run)
    names = [e["name"] for e in on_track(trace, "memory plans, sections, refusals, errors")]
    assert names == ["refused: memory clock", "error of ours: session", "ended: raised KeyError"]


def test_run_without_sensors_and_blocks():
    run = runs.RunWriter(runs.WrittenJob(), mode="observe", max_slowdown=None)
    run.start("no clocks were asked for")
    trace = trace_of(run)
    assert {e["ph"] for e in trace["traceEvents"]} == {"M"}
    assert trace["otherData"]["run"] == "one"


def test_verb_writes_the_file_of_a_killed_run(tmp_path, capsys):
    directory = runs.write(tmp_path / "run", runs.governed())
    with open(directory / "events-rank0.jsonl", "ab") as file:
        file.write(b'{"event":"blo')
    target = tmp_path / "trace.json"
    assert main(["report", str(directory), "--trace", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    found = json.loads(target.read_text())
    assert all({"ph", "pid", "name"} <= set(e) for e in found["traceEvents"])
    assert all(e["ts"] >= 0.0 for e in found["traceEvents"] if "ts" in e)


def test_numbers_that_are_none_are_left_out():
    run = runs.governed(confirm_pairs=1, hold_pairs=0)
    sample = next(e for e in run.events if isinstance(e, Sampled))
    run.events.append(msgspec.structs.replace(sample, power_w=None, sm_clock_hz=float("inf")))
    values = [e["args"]["value"] for e in trace_of(run)["traceEvents"] if e["ph"] == "C"]
    assert all(isinstance(value, float) for value in values)


@pytest.mark.parametrize("flag", ["--json", "--html=page.html"])
def test_one_form_at_a_time(flag, tmp_path):
    with pytest.raises(SystemExit) as caught:
        main(["report", str(tmp_path), "--trace", "x.json", flag])
    assert caught.value.code == 2


def test_no_run_is_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path / "no"), "--trace", "x.json"]) == 1
    assert "no such run" in capsys.readouterr().err


def test_default_setting_has_a_name():
    run = runs.RunWriter(runs.WrittenJob())
    run.start()
    run.block("warm", Setting(), arm="baseline")
    assert [e["name"] for e in on_track(trace_of(run), "setting in force")] == ["default"]
