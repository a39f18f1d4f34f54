"""`kilter top`: the screen of a run from its growing files, whatever state they are in."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import runs

from kilter.app.cli.main import main
from kilter.app.report import build as report
from kilter.app.report import follow
from kilter.app.report.follow import GrowingRun
from kilter.app.report.section_run import details, sections_report
from kilter.core.events import Moved, Sectioned
from kilter.core.label import Label
from kilter.core.plan import Goal, MemoryBudget
from kilter.core.setting import Setting
from kilter.core.units import GIB

TIMEOUT_S = 900.0


def running(**options):
    """A run in its phase `hold`."""
    return runs.governed(**options)


def once(directory, capsys, *flags):
    assert main(["top", str(directory), *(flags or ("--once",))]) == 0
    return capsys.readouterr().out


def shown(directory, capsys):
    found = json.loads(once(directory, capsys, "--json"))
    assert found["schema"] == "kilter.top/1"
    return found


def refused(directory, capsys, *flags):
    """The one line of an error of ours."""
    assert main(["top", str(directory), *(flags or ("--once",))]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_running_says_what_the_report_says(tmp_path, capsys):
    directory = runs.write(tmp_path / "one", running())
    found = shown(directory, capsys)
    truth = report.build(directory)
    for name in ("saving", "slowdown", "iterations", "contract", "within_contract"):
        assert found[name] == getattr(truth, name)
    assert found["state"] == "running"
    assert found["label"] == "simulated"
    assert found["phase"] == "hold"
    text = once(directory, capsys)
    assert "state     running for" in text
    assert "now       hold: " in text
    assert "would save" in text
    assert "would save" in found["result"]


def test_no_result_is_claimed_before_the_search_is_over(tmp_path, capsys):
    run = runs.RunWriter(runs.WrittenJob())
    run.start()
    run.decide("probe", Setting(sm_clock_hz=1.2e9), "the next step down")
    run.pairs("probe", Setting(sm_clock_hz=1.2e9), 2)
    directory = runs.write(tmp_path, run)
    found = shown(directory, capsys)
    assert (found["saving"], found["slowdown"], found["governed"]["energy_j"]) == (None,) * 3
    assert found["result"] == "no verdict yet: 1 setting compared with the default"
    assert "probe     SM 1200 MHz: the next step down" in once(directory, capsys)


def test_ended_run(tmp_path, capsys):
    run = running()
    run.stop("raised ValueError")
    directory = runs.write(tmp_path, run)
    assert shown(directory, capsys)["state"] == "ended"
    assert "raised ValueError" in once(directory, capsys)


def test_silence_is_said_and_not_taken_for_an_end(tmp_path, capsys):
    directory = runs.write(tmp_path, running())
    before_s = time.time() - 3600.0
    os.utime(directory / "events-rank0.jsonl", (before_s, before_s))
    found = shown(directory, capsys)
    assert found["state"] == "silent"
    assert found["silent_s"] == pytest.approx(3600.0, abs=60.0)
    assert "nothing written for 1 h: killed, or busy" in once(directory, capsys)


def test_several_ranks_in_order_and_one_that_has_ended(tmp_path, capsys):
    ranks = [running(rank=r, world_size=11, uuid=f"GPU-{r}") for r in (10, 0, 2)]
    ranks[2].stop()
    found = shown(runs.write(tmp_path, *ranks), capsys)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 2, 10]
    assert [rank["outcome"] for rank in found["ranks"]] == [None, "finished", None]
    assert found["state"] == "running"
    assert all(rank["power_w"] > 0.0 for rank in found["ranks"])


def test_many_ranks_fit_the_screen(tmp_path, capsys):
    ranks = [running(rank=r, world_size=40, confirm_pairs=2, hold_pairs=0) for r in range(40)]
    directory = runs.write(tmp_path, *ranks)
    text = once(directory, capsys)
    assert "and 24 ranks more" in text
    assert text.count("\n") < 50
    assert len(shown(directory, capsys)["ranks"]) == 40


def test_memory_run(tmp_path, capsys):
    run = runs.RunWriter(runs.WrittenJob(), mode="observe", max_slowdown=None)
    run.start("no clocks were asked for")
    goal = Goal(memory_budget=MemoryBudget(size_bytes=24 * GIB))
    run.events[0] = msgspec.structs.replace(run.events[0], goal=goal)
    for peak in (30 * GIB, 23 * GIB):
        run.events.append(moved(peak))
    directory = runs.write(tmp_path, run)
    (rank,) = shown(directory, capsys)["ranks"]
    assert (rank["budget_bytes"], rank["peak_bytes"]) == (24 * GIB, 23 * GIB)
    text = once(directory, capsys)
    assert "23.0 GiB of 24.0 GiB" in text
    assert "goal      memory 24.0 GiB" in text


def moved(peak_bytes):
    return Moved(
        t_s=5.0,
        passes=10,
        planned=8,
        deviations=0,
        late=0,
        spilled=0,
        recomputed=0,
        out_bytes=GIB,
        in_bytes=GIB,
        host_bytes=GIB,
        backend="cuda",
        budget_bytes=24 * GIB,
        budget="as asked for",
        applied=True,
        plain_peak_bytes=30 * GIB,
        plain_peak_seen=True,
        peak_bytes=peak_bytes,
        least_bytes=10 * GIB,
        plain_iteration_s=1.0,
        iteration_s=1.1,
    )


SECTIONED = Sectioned(
    t_s=9.0,
    summary="low clocks in 2 sections would save 3 %",
    planned=True,
    exposed_share=0.2,
    longest_s=0.01,
    break_even_s=0.004,
    saving=0.03,
    slowdown=0.0,
    stretches=2,
    windows=1,
    reopened=0,
    collectives=4,
    sets=False,
    commands=7,
    waits=2,
    waits_low_s=6.5,
    waits_clock_hz=345e6,
)


def test_sections_run(tmp_path, capsys):
    run = runs.RunWriter(runs.WrittenJob())
    run.start()
    run.events.append(SECTIONED)
    text = once(runs.write(tmp_path, run), capsys)
    assert "sections  low clocks in 2 sections would save 3 %" in text
    assert "7 clock calls written down, none sent" in text
    report = sections_report([(0, [e for e in run.events if isinstance(e, Sectioned)])])
    said = details(report, simulated=False)
    assert "long waits: 2 waits of 6.5 s in all at 345 MHz; written down, not set" in said


def test_iterations_that_the_profiler_has_made_longer_are_told():
    found = msgspec.structs.replace(SECTIONED, window_iteration_s=0.063, iteration_s=0.042)
    other = msgspec.structs.replace(found, window_iteration_s=0.045)
    first = sections_report([(0, [other])])
    assert "longer ones" not in details(first, simulated=False)[-1]
    both = sections_report([(0, [other]), (1, [found])])
    told = "on rank 1 an iteration took 63 ms in the last one and 42 ms otherwise"
    assert told in details(both, simulated=False)[-1]


def test_hostile_names_do_not_reach_the_terminal(tmp_path, capsys):
    run = running()
    run.events[0] = msgspec.structs.replace(run.events[0], command=("\x1b[2J", "ü\x00"))
    run.fail("\x1b]0;title\x07", "\x1b[31m")
    text = once(runs.write(tmp_path, run), capsys)
    assert re.search(r"[^\n -~]", text) is None


def test_numbers_that_are_none_are_null(tmp_path, capsys):
    run = running()
    sample = next(e for e in run.events if type(e).__name__ == "Sampled")
    run.events.append(msgspec.structs.replace(sample, power_w=None, sm_clock_hz=float("nan")))
    found = shown(runs.write(tmp_path, run), capsys)
    assert found["ranks"][0]["power_w"] is None
    assert found["ranks"][0]["sm_clock_hz"] is None


# Files that are missing, empty, half written or somebody else's.


def test_missing_folder(tmp_path, capsys):
    assert "no such run" in refused(tmp_path / "nowhere", capsys)


def test_empty_folder(tmp_path, capsys):
    assert "holds no run" in refused(tmp_path, capsys)


def test_no_run_yet(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "make one with: kilter run" in refused("latest", capsys)


@pytest.mark.parametrize("begin", [b"", b'{"event":"started","t_s":0.0,"sch'])
def test_first_line_not_whole(tmp_path, capsys, begin):
    (tmp_path / "events-rank0.jsonl").write_bytes(begin)
    assert "the first line of the run is not whole yet" in refused(tmp_path, capsys, "--json")


def test_foreign_file(tmp_path, capsys):
    (tmp_path / "events-rank0.jsonl").write_bytes(b"a,b\n1,2\n3,4\n")
    assert "events-rank0.jsonl:1: not an event of a run" in refused(tmp_path, capsys)


def test_damaged_in_the_middle(tmp_path, capsys):
    directory = runs.write(tmp_path, running())
    file = directory / "events-rank0.jsonl"
    lines = file.read_bytes().split(b"\n")
    lines[3] = b"\x00\x00"
    file.write_bytes(b"\n".join(lines))
    assert "events-rank0.jsonl:4: not an event of a run" in refused(directory, capsys)


def test_pipe_does_not_hang(tmp_path, capsys):
    os.mkfifo(tmp_path / "events-rank0.jsonl")
    assert "not a regular file; not read" in refused(tmp_path, capsys)


def test_wrong_usage(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["top", "--once", "--json"])
    assert caught.value.code == 2


# Growing files.


@given(data=st.data())
def test_read_in_pieces_is_read_at_once(tmp_path_factory, data):
    """However the bytes arrive, what is known is what the whole lines so far say."""
    raw = b"".join(runs.lines(runs.governed(confirm_pairs=2, hold_pairs=0).events))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    file = tmp_path_factory.mktemp("run") / "events-rank0.jsonl"
    file.write_bytes(b"")
    growing = GrowingRun(file.parent)
    for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        with open(file, "ab") as stream:
            stream.write(raw[begin:end])
        growing.read()
        whole = raw[:end].count(b"\n")
        known = [(len(r.blocks), len(r.decisions), len(r.samples)) for r in growing.ranks()]
        lines = [json.loads(line)["event"] for line in raw.split(b"\n")[:whole]]
        counts = tuple(lines.count(kind) for kind in ("block", "decided", "sampled"))
        assert known == ([counts] if whole else [])


def test_long_run_keeps_few_readings(tmp_path):
    run = running(hold_pairs=40)
    directory = runs.write(tmp_path, run)
    growing = GrowingRun(directory)
    growing.read()
    (rank,) = growing.ranks()
    kept = [e for e in run.events if type(e).__name__ == "Sampled"][-follow.MOST_SAMPLES :]
    assert len(kept) == follow.MOST_SAMPLES
    assert list(rank.samples) == kept
    assert len(rank.blocks) == sum(type(e).__name__ == "Block" for e in run.events)


def test_rank_that_comes_later_and_file_that_begins_anew(tmp_path):
    directory = runs.write(tmp_path, running(world_size=2))
    growing = GrowingRun(directory)
    growing.read()
    runs.write(directory, running(rank=1, world_size=2))
    growing.read()
    assert [rank.started.rank for rank in growing.ranks()] == [0, 1]
    again = runs.RunWriter(runs.WrittenJob())
    again.start()
    (directory / "events-rank0.jsonl").unlink()
    runs.write(directory, again)
    growing.read()
    assert not growing.ranks()[0].blocks


def live(directory, *, until, then, environment=()):
    """The verb on a terminal of its own: what it drew until `until`, and its exit code after
    `then(process)`."""
    main_end, its_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kilter", "top", str(directory)],
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "200", "LINES": "60"} | dict(environment),
    )
    os.close(its_end)
    seen, told, by_s = b"", False, time.monotonic() + TIMEOUT_S
    try:
        while time.monotonic() < by_s:
            if not select.select([main_end], [], [], 0.1)[0]:
                continue
            try:
                read = os.read(main_end, 65536)
            except OSError:  # the other end is closed
                break
            seen += read
            if not told and until in seen:
                told = True
                then(process)
        return seen.decode(), process.wait(TIMEOUT_S)
    finally:
        process.kill()
        os.close(main_end)


def test_live_view_follows_the_run_and_ends_with_it(tmp_path):
    pytest.importorskip("rich", reason="the extra `top` is not installed")
    run = running()
    directory = runs.write(tmp_path, run)

    def go_on(process):
        run.events.clear()
        run.stop()
        with open(directory / "events-rank0.jsonl", "ab") as file:
            file.writelines(runs.lines(run.events))

    seen, code = live(directory, until=b"running for", then=go_on)
    assert code == 0
    assert "ended after" in seen.split("running for")[-1]


def test_ctrl_c_ends_the_view(tmp_path):
    pytest.importorskip("rich", reason="the extra `top` is not installed")
    directory = runs.write(tmp_path, running())
    seen, code = live(
        directory, until=b"running for", then=lambda process: process.send_signal(signal.SIGINT)
    )
    assert code == 0
    assert "Traceback" not in seen


def test_without_rich_the_line_says_what_to_do(tmp_path):
    directory = runs.write(tmp_path / "run", running())
    (tmp_path / "rich.py").write_text("raise ImportError('no rich here')\n")
    seen, code = live(
        directory,
        until=b"needs rich",
        then=lambda process: None,
        environment={"PYTHONPATH": str(tmp_path)},
    )
    assert code == 2
    assert "pip install 'kilter[top]'; or: kilter top --once" in seen
    assert "Traceback" not in seen


def test_not_a_terminal_prints_once(tmp_path, capsys):
    directory = runs.write(tmp_path, running(label=Label.MEASURED))
    assert main(["top", str(directory)]) == 0
    assert "[measured]" in capsys.readouterr().out
