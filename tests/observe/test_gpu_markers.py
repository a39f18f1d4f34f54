"""Where the markers of iterations stand on a GPU's timeline, while the host runs ahead of it."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.observe.gpu_program import COMPUTE, GpuProgram

from kilter.clocks.plan.sections import places
from kilter.clocks.plan.timing import Command, Commanded, CommandSchedule, differences, edges
from kilter.clocks.section_conductor import Follow, SectionConductor
from kilter.core.errors import FileError
from kilter.core.rank_trace import IterationMarks, RankTrace
from kilter.observe.marked_trace import read_marked
from kilter.observe.rank_traces import KernelTable, read_rank

TABLE = KernelTable()
WINDOW = range(5, 10)
CLOSE_S = 25e-6
"""The program's thread notes its time up to 10 us after the annotation."""


def marks(program: GpuProgram) -> IterationMarks:
    found = {number: program.marked_s[number] for number in program.annotated_s}
    return IterationMarks(annotated_s=program.annotated_s, marked_s=found)


def read(program: GpuProgram) -> RankTrace:
    with TemporaryDirectory() as directory:
        path = program.write(Path(directory, "trace.json"))
        return read_rank(path, table=TABLE, marks=marks(program))


programs = st.builds(
    GpuProgram,
    seed=st.integers(0, 2**32),
    launch_s=st.sampled_from([5e-6, 50e-6, 500e-6, 3e-3]),
    host_waits_s=st.sampled_from([0.0, 0.01, 0.3]),
    most_ahead_s=st.sampled_from([0.001, 0.1, 1.0]),
    exchange_s=st.sampled_from([1e-3, 0.05, 0.2]),
    graph=st.booleans(),
)


@settings(deadline=None, max_examples=60)
@given(program=programs)
def test_markers_stand_where_the_stream_came_to_them(program: GpuProgram) -> None:
    """However far the host runs ahead or lags behind."""
    trace = read(program.run(range(1, 15), recorded=WINDOW))
    # Earlier work may be under way when the window opens, so its first marker has no place.
    assert [window.number for window in trace.iterations] == list(WINDOW)[1:-1]
    for window in trace.iterations:
        begin_s = trace.origin_s + window.begin_s
        assert begin_s == pytest.approx(program.marker_s[window.number], abs=CLOSE_S)
        assert trace.origin_s + window.end_s == pytest.approx(
            program.marker_s[window.number + 1], abs=CLOSE_S
        )


@settings(deadline=None, max_examples=40)
@given(program=programs)
def test_sections_stand_where_communication_was_exposed(program: GpuProgram) -> None:
    trace = read(program.run(range(1, 15), recorded=WINDOW))
    found = {place.iteration: place for place in places(trace)}
    assert set(found) == set(WINDOW[1:-1])
    for number, place in found.items():
        begin_s, end_s = program.exposed_s[number]
        assert place.begin_s == pytest.approx(begin_s, abs=CLOSE_S)
        assert place.end_s == pytest.approx(end_s, abs=CLOSE_S)
        assert place.marker_s == pytest.approx(program.marker_s[number], abs=CLOSE_S)


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 2**32),
    most_ahead_s=st.sampled_from([0.05, 0.15, 1.0]),
    look_s=st.sampled_from([0.0, 1e-4, 1e-3]),
)
def test_commands_meet_the_edges_however_far_the_host_is_ahead(
    seed: int, most_ahead_s: float, look_s: float
) -> None:
    """The plan is learned in one window; later iterations are timed by their markers alone. The
    kernels of an iteration take between 4 and 40 ms, so the edges move by as much; the median of a
    window's offsets is held against the median of the later ones."""
    program = GpuProgram(seed=seed, most_ahead_s=most_ahead_s).run(range(1, 60), recorded=WINDOW)
    trace = read(program)
    offsets = sorted(place.begin_s - place.marker_s for place in places(trace))
    command = Command(
        edge="down",
        key="all_reduce/stream 17/1",
        sm_clock_hz=1e9,
        at_s=offsets[len(offsets) // 2] - 0.001,
        lead_s=0.001,
        hold_s=1.0,
    )
    up = Command(edge="up", key="", sm_clock_hz=None, at_s=0.1, lead_s=0.0, hold_s=0.0)
    log: list[Commanded] = []
    now = [0.0]
    conductor = SectionConductor(_Setter(), log.append, lambda: now[0])
    planned = CommandSchedule(commands=(command, up), iteration_s=0.15, calls_per_s=1e6)
    conductor.follow(Follow(schedule=planned))
    for number in range(20, 59):
        seen_s = program.marker_s[number] + look_s
        while conductor.due_s < seen_s:
            now[0] = conductor.due_s
            conductor.act()
        now[0] = seen_s
        conductor.passed(number, seen_s)
        conductor.act()
    late = [
        line.edge_s - program.exposed_s[line.iteration][0]
        for line in log
        if line.edge == "down" and line.state == "would set"
    ]
    assert len(late) >= 38
    spread = [program.exposed_s[n][0] - program.marker_s[n] for n in range(20, 58)]
    for line, off_s in zip([c for c in log if c.edge == "down"], late, strict=True):
        true_s = program.exposed_s[line.iteration][0] - program.marker_s[line.iteration]
        assert off_s == pytest.approx(command.at_s + 0.001 - true_s + look_s, abs=CLOSE_S)
    assert max(spread) - min(spread) < 0.05


class _Setter:
    sets = False

    def down(self, sm_clock_hz: float, hold_s: float) -> None:
        pass

    def up(self) -> None:
        pass


def test_the_edges_of_a_window_are_those_that_the_commands_aimed_at() -> None:
    program = GpuProgram().run(range(1, 15), recorded=WINDOW)
    real = edges(places(read(program)))
    assert {edge.iteration for edge in real} == set(WINDOW[1:-1])
    aimed = [
        Commanded(
            t_s=0.0,
            iteration=edge.iteration,
            edge=edge.edge,
            key=edge.key,
            sm_clock_hz=None,
            edge_s=edge.t_s + 0.002,
            late_s=0.0,
            took_s=0.0,
            state="would set",
        )
        for edge in real
    ]
    assert differences(aimed, real) == pytest.approx([0.002] * len(real))


def test_an_end_inside_backward_counts_from_its_mark_and_not_from_its_annotation() -> None:
    """The profiler is told at the next call of a module, by when the stream has been given more
    than the marker."""
    program = GpuProgram().run(range(1, 15), recorded=WINDOW)
    late_s = 4e-4
    ends = [event for event in program.events if event["name"] == "kilter::iteration_end"]
    ends[2]["ts"] += late_s * 1e6
    program.annotated_s[WINDOW[2]] += late_s
    trace = read(program)
    for window in trace.iterations:
        begin_s = trace.origin_s + window.begin_s
        assert begin_s == pytest.approx(program.marker_s[window.number], abs=CLOSE_S)


def test_the_marked_stream_is_the_one_that_computed_last() -> None:
    program = GpuProgram().run(range(1, 15), recorded=WINDOW)
    # Copies and collectives that are launched on other streams just before an iteration end.
    for number in list(WINDOW)[1:]:
        at = (program.marked_s[number] - 1e-7 + program.trace_ahead_s) * 1e6
        for k, (name, cat) in enumerate(
            [("Memcpy HtoD", "gpu_memcpy"), ("ncclDevKernel_AllReduce", "kernel")]
        ):
            correlation = 10**6 + 10 * number + k
            program.events += [
                {"ph": "X", "name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": at, "dur": 1,
                 "args": {"correlation": correlation}},
                {"ph": "X", "name": name, "cat": cat, "ts": at + 10, "dur": 10**6,
                 "args": {"device": 0, "stream": COMPUTE + 20 + k, "correlation": correlation}},
            ]  # fmt: skip
    for window in (trace := read(program)).iterations:
        begin_s = trace.origin_s + window.begin_s
        assert begin_s == pytest.approx(program.marker_s[window.number], abs=CLOSE_S)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: p.annotated_s.pop(7), "iteration ends"),
        (lambda p: p.events.clear(), "no GPU kernels"),
        (
            lambda p: p.events.__setitem__(
                slice(None), [e for e in p.events if e["cat"] != "cuda_runtime"]
            ),
            "0 launches",
        ),
    ],
)
def test_a_window_that_cannot_be_used_is_one_line(spoil, words, tmp_path: Path) -> None:
    program = GpuProgram().run(range(1, 15), recorded=WINDOW)
    spoil(program)
    with pytest.raises(FileError, match=words):
        read_rank(
            program.write(tmp_path / "trace.json"),
            table=TABLE,
            marks=IterationMarks(annotated_s=program.annotated_s, marked_s={}),
        )


def test_a_process_of_its_own_reads_the_same(tmp_path: Path) -> None:
    program = GpuProgram(graph=True).run(range(1, 15), recorded=WINDOW)
    path = program.write(tmp_path / "trace.json")
    there = read_marked(path, marks(program), rank=0)
    assert there == read_rank(path, table=TABLE, marks=marks(program))


def test_a_process_that_cannot_read_says_why(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [')
    now = {0: time.monotonic(), 1: time.monotonic()}
    with pytest.raises(FileError, match="not a complete JSON file"):
        read_marked(path, IterationMarks(annotated_s=now, marked_s=now), rank=0)
    with pytest.raises(FileError, match="cannot be read"):
        read_marked(
            tmp_path / "nowhere.json", IterationMarks(annotated_s=now, marked_s=now), rank=0
        )
