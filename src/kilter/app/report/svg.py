"""Just enough of inline SVG for the plots of the report: scales, ticks, axes, labels that give way.

Everything that comes from a run goes through `escape`. Colours are classes, so that the page's
style sheet rules both light and dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TEXT_WIDTH = 0.6
"""Mean width of a character over the font's size, to keep labels apart without a font at hand."""
FONT_SIZE = 13.0


def escape(value: object) -> str:
    """Safe in HTML text and attributes; control characters, which no page may hold, replaced."""
    text = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in str(value))
    return html.escape(text, quote=True)


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from `low` to `high`, inside."""
    if not high > low:
        return [low]
    raw = (high - low) / max(count, 1)
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(s * unit for s in (1.0, 2.0, 2.5, 5.0, 10.0) if s * unit >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def micro(words: str) -> str:
    """`12 uJ` as `12 \u00b5J`: a page is not limited to ASCII."""
    return words.replace(" us", " \u00b5s").replace(" uJ", " \u00b5J")


def width(words: str) -> float:
    """About how wide a text is, in pixels."""
    return len(words) * FONT_SIZE * TEXT_WIDTH


def decimals(values: Sequence[float]) -> int:
    """Decimals that tell all of these numbers apart."""
    return max((len(f"{value:g}".partition(".")[2]) for value in values), default=0)


def padded(values: Sequence[float], share: float = 0.08) -> tuple[float, float]:
    """The range of some values with a margin on both sides."""
    low, high = min(values), max(values)
    margin = (high - low) * share or abs(high) * share or 1.0
    return low - margin, high + margin


def plain(value: float, decimals: int) -> str:
    """The text of a number on an axis."""
    return f"{value:.{decimals}f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The rectangle of a plot, in pixels, and the values at its edges."""

    left: float
    top: float
    right: float
    bottom: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        return self.left + _part(value, self.x_range) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - _part(value, self.y_range) * (self.bottom - self.top)

    def axes(
        self,
        *,
        x_title: str,
        y_title: str,
        x_text: Callable[[float, int], str] = plain,
        y_text: Callable[[float, int], str] = plain,
        x_labels: bool = True,
        lift: float = 12.0,
    ) -> str:
        """Horizontal grid lines, numbers on both axes, and titles with units. The texts are made
        of a number and how many decimals it is to have; `lift` is how far above the plot the title
        of the y axis stands."""
        return (
            self.grid(max(2, int((self.bottom - self.top) / 46)), y_text)
            + self.x_axis(x_title, x_text, labels=x_labels)
            + text(0.0, self.top - lift, y_title, "title")
        )

    def grid(self, count: int, in_words: Callable[[float, int], str] = plain) -> str:
        """About so many horizontal lines with their numbers."""
        parts = []
        values = ticks(*self.y_range, count)
        for value in values:
            y, shown = self.y(value), in_words(value, decimals(values))
            parts.append(line(self.left, y, self.right, y, "grid"))
            parts.append(text(self.left - 8, y + 4, shown, "tick", anchor="end"))
        return "".join(parts)

    def x_axis(
        self, title: str, in_words: Callable[[float, int], str] = plain, *, labels: bool = True
    ) -> str:
        """The line at the bottom with its ticks, numbers and title."""
        parts = [line(self.left, self.bottom, self.right, self.bottom, "axis")]
        values = ticks(*self.x_range, max(2, int((self.right - self.left) / 90)))
        for value in values:
            x, shown = self.x(value), in_words(value, decimals(values))
            parts.append(line(x, self.bottom, x, self.bottom + 4, "axis"))
            if labels:
                parts.append(text(x, self.bottom + 19, shown, "tick", anchor="middle"))
        if labels:
            parts.append(text(self.right, self.bottom + 38, title, "title", anchor="end"))
        return "".join(parts)


def _part(value: float, ends: tuple[float, float]) -> float:
    """How far along a range a value lies; in the middle of a range without length."""
    low, high = ends
    return (value - low) / (high - low) if high > low else 0.5


def picture(key: str, width: float, height: float, title: str, description: str, body: str) -> str:
    """A whole drawing that a screen reader announces by its title and description. `key` must be
    unique in the page."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-labelledby="{key}-t {key}-d"><title id="{key}-t">{escape(title)}</title>'
        f'<desc id="{key}-d">{escape(description)}</desc>{body}</svg>'
    )


WIDE, NARROW = 860.0, 400.0
"""Pictures are drawn for these widths, in pixels: so text keeps its size on a phone."""


def both_widths(
    key: str, title: str, description: str, draw: Callable[[float], tuple[float, str]]
) -> str:
    """The picture for wide screens and for narrow ones; `draw` gives its height and its body."""
    drawn = []
    for name, width in (("wide", WIDE), ("narrow", NARROW)):
        height, body = draw(width)
        drawing = picture(f"{key}-{name}", width, height, title, description, body)
        drawn.append(f"<div class='{name}'>{drawing}</div>")
    return "".join(drawn)


def legend(entries: Sequence[tuple[str, str, bool]], wide: float) -> tuple[str, float]:
    """Style, name and whether it is an area, of what is drawn; in as many rows as they need. And
    the height that they take."""
    x, y, parts = 0.0, 12.0, []
    for style, words, area in entries:
        if x > 0.0 and x + 29 + width(words) > wide:
            x, y = 0.0, y + 20
        parts.append(
            rectangle(x, y - 10, 22, 12, style) if area else line(x, y - 4, x + 22, y - 4, style)
        )
        parts.append(text(x + 29, y, words, "tick"))
        x += 47 + width(words)
    return "".join(parts), y + 20


def text(x: float, y: float, content: str, style: str, *, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">'
        f"{escape(content)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'


def rectangle(x: float, y: float, width: float, height: float, style: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" '
        f'height="{max(height, 0.0):.1f}" class="{style}"/>'
    )


def dot(x: float, y: float, radius: float, style: str, note: str) -> str:
    """A point; `note` is what hovering over it shows."""
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{style}">'
        f"<title>{escape(note)}</title></circle>"
    )


def path(points: Sequence[tuple[float, float] | None], style: str) -> str:
    """A line through the points; it breaks where a point is None."""
    parts, pen = [], "M"
    for point in points:
        if point is None:
            pen = "M"
            continue
        parts.append(f"{pen}{point[0]:.1f} {point[1]:.1f}")
        pen = "L"
    return f'<path d="{"".join(parts)}" class="{style}"/>'


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones, at least `gap` apart and within bounds where they fit."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    placed = list(wanted)
    floor = low
    for i in order:
        placed[i] = floor = max(placed[i], floor)
        floor += gap
    ceiling = high
    for i in reversed(order):
        placed[i] = ceiling = min(placed[i], ceiling)
        ceiling -= gap
    return placed


class Labels:
    """Puts labels beside points where they cover nothing; one that finds no room is left out
    (the point still shows it on hovering, and the table beside the plot has it)."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._boxes: list[tuple[float, float, float, float]] = []
        self._marks: list[tuple[float, float]] = []

    def mark(self, x: float, y: float) -> None:
        """A point that a label may belong to: no other label may lie nearer to it than its own."""
        self._marks.append((x, y))
        self.avoid(x, y, 6.0)

    def avoid(self, x: float, y: float, radius: float) -> None:
        self._boxes.append((x - radius, y - radius, x + radius, y + radius))

    def avoid_line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        steps = max(1, math.ceil(math.hypot(x2 - x1, y2 - y1) / 6.0))
        for i in range(steps + 1):
            self.avoid(x1 + (x2 - x1) * i / steps, y1 + (y2 - y1) * i / steps, 1.0)

    def reserve(self, x: float, y: float, content: str, style: str) -> str:
        """Write here whatever it covers, and keep later labels away."""
        self._boxes.append((x, y - FONT_SIZE, x + width(content), y + 4))
        return text(x, y, content, style)

    def put(self, x: float, y: float, content: str, style: str, *, gap: float = 9.0) -> str:
        """Write near a mark; from `_LEADER` pixels on with a line to it."""
        led = gap >= _LEADER
        wide, half = width(content), FONT_SIZE / 2
        places = (
            (x + gap, y + 4, "start", x + gap),
            (x - gap, y + 4, "end", x - gap - wide),
            (x, y - gap - 2, "middle", x - wide / 2),
            (x, y + gap + 10, "middle", x - wide / 2),
            (x + gap, y - gap, "start", x + gap),
            (x + gap, y + gap + 8, "start", x + gap),
            (x - gap, y - gap, "end", x - gap - wide),
            (x - gap, y + gap + 8, "end", x - gap - wide),
        )
        for place_x, place_y, anchor, left in places:
            box = (left - 4, place_y - 4 - half, left + wide + 4, place_y - 4 + half)
            if self._free(box) and (led or self._is_nearest(box, x, y)):
                self._boxes.append(box)
                end_x, end_y = _nearest(box, x, y)
                leader = line(x, y, end_x, end_y, "axis") if led else ""
                return leader + text(place_x, place_y, content, style, anchor=anchor)
        return ""

    def _free(self, box: tuple[float, float, float, float]) -> bool:
        frame = self._frame
        inside = frame.left - 4 <= box[0] and box[2] <= frame.right + 8 and box[1] >= frame.top - 4
        return inside and box[3] <= frame.bottom and not any(_overlap(box, b) for b in self._boxes)

    def _is_nearest(self, box: Rectangle, x: float, y: float) -> bool:
        own = _distance(box, x, y)
        others = (mark for mark in self._marks if mark != (x, y))
        return all(_distance(box, *mark) > own + _APART for mark in others)


_APART = 5.0
"""A label has to be nearer to its own mark than to any other by so many pixels."""

_LEADER = 30.0

Rectangle = tuple[float, float, float, float]


def _nearest(box: Rectangle, x: float, y: float) -> tuple[float, float]:
    """The point of a box that is nearest to another point."""
    left, top, right, bottom = box
    return min(max(x, left), right), min(max(y, top), bottom)


def _distance(box: Rectangle, x: float, y: float) -> float:
    return math.dist(_nearest(box, x, y), (x, y))


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
