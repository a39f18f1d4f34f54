"""Plots stay readable whatever the numbers are."""

import re
from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from kilter.app.report import svg

finite = st.floats(-1e9, 1e9)


@given(low=finite, span=st.floats(1e-6, 1e9), count=st.integers(1, 12))
def test_ticks_are_inside_and_few(low, span, count):
    high = low + span
    assume(high - low > 1e-9 * max(1.0, abs(low), abs(high)))
    marks = svg.ticks(low, high, count)
    slack = 1e-6 * (high - low) + 1e-9
    assert all(low - slack <= mark <= high + slack for mark in marks)
    assert len(marks) <= count + 1
    assert marks == sorted(marks)


@given(wanted=st.lists(st.floats(0, 100), max_size=6))
def test_spread_keeps_labels_apart_and_inside(wanted):
    placed = svg.spread(wanted, 10.0, 0.0, 100.0)
    assert all(-1e-9 <= place <= 100.0 + 1e-9 for place in placed)
    ordered = sorted(placed)
    assert all(b - a >= 10.0 - 1e-9 for a, b in pairwise(ordered))
    apart = all(abs(a - b) >= 10.0 for i, a in enumerate(wanted) for b in wanted[:i])
    if apart:
        assert placed == wanted


@given(points=st.lists(st.tuples(st.floats(0, 300), st.floats(0, 200)), max_size=30))
def test_labels_never_cover_each_other(points):
    frame = svg.Frame(left=0, top=0, right=300, bottom=200, x_range=(0, 1), y_range=(0, 1))
    labels = svg.Labels(frame)
    boxes = []
    for x, y in points:
        drawn = labels.put(x, y, "1380 MHz", "label")
        if drawn:
            found = re.search(r'x="([-\d.]+)" y="([-\d.]+)".*text-anchor="(\w+)"', drawn)
            width = 8 * svg.FONT_SIZE * svg.TEXT_WIDTH
            shift = {"start": 0.0, "middle": width / 2, "end": width}[found[3]]
            boxes.append((float(found[1]) - shift, float(found[2])))
    for i, (left, base) in enumerate(boxes):
        for other_left, other_base in boxes[:i]:
            apart = abs(left - other_left) >= width or abs(base - other_base) >= 12.5
            assert apart


@given(value=finite, other=finite)
def test_a_range_without_length_is_drawn(value, other):
    """All readings at one time, all times alike: nothing to divide by."""
    frame = svg.Frame(
        left=10, top=0, right=30, bottom=20, x_range=(value, value), y_range=(other, other)
    )
    assert (frame.x(value), frame.y(other)) == (20.0, 10.0)
    drawn = frame.axes(
        x_title="x", y_title="y", x_text=lambda v, n: f"{v}", y_text=lambda v, n: f"{v}"
    )
    assert "nan" not in drawn


@given(text=st.text())
def test_escaped_text_holds_no_markup_and_no_control_characters(text):
    escaped = svg.escape(text)
    assert not set("<>\"'") & set(escaped)
    assert all(c.isprintable() or c == "\n" for c in escaped)


def test_a_label_that_would_be_nearer_to_another_mark_is_left_out():
    frame = svg.Frame(left=0, top=0, right=300, bottom=200, x_range=(0, 1), y_range=(0, 1))
    labels = svg.Labels(frame)
    crowd = [(100.0 + 12.0 * i, 100.0 + 3.0 * (i % 2)) for i in range(6)]
    for x, y in crowd:
        labels.mark(x, y)
    labels.mark(40.0, 40.0)
    assert labels.put(40.0, 40.0, "alone", "label") != ""
    assert [labels.put(x, y, "a long name", "label") for x, y in crowd[2:4]] == ["", ""]
    led = labels.put(*crowd[2], "a long name", "label", gap=60.0)
    assert "<line" in led, "from afar, a line leads to the mark"
    assert "a long name" in led
