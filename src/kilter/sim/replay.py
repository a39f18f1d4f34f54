"""Replays of measurements: clock tables (CSV), and the telemetry of a recorded run.

A clock table says how long a workload took, and what it drew, at each setting that somebody
measured. Nothing is interpolated: a setting outside the table is refused. Every number that comes
out of here is labelled *replayed*.
"""

from __future__ import annotations

import csv
import math
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kilter.core.errors import FileError
from kilter.core.setting import Setting
from kilter.core.units import MHZ

COLUMNS = (
    "source",
    "gpu",
    "workload",
    "core_mhz",
    "mem_mhz",
    "power_limit_w",
    "time_s",
    "power_w",
    "energy_j",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured setting of a workload."""

    setting: Setting
    time_s: float
    """Of one run, epoch, iteration or launch: the table's own unit of work."""
    power_w: float
    """Mean power of the card."""
    energy_j: float
    """Energy of the same piece of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Everything a table says about one workload on one card."""

    source: str
    gpu: str
    name: str
    rows: tuple[Row, ...]
    default: Row
    """The row of the unlocked card (all knobs blank), else the highest core clock, then memory
    clock, then power limit; a knob left blank beside set ones counts as the highest."""

    def at(self, setting: Setting) -> Row | None:
        """The row of exactly this setting."""
        return next((row for row in self.rows if row.setting == setting), None)


def load_tables(path: str | os.PathLike[str]) -> tuple[Workload, ...]:
    """The workloads of a clock-table CSV, in the order of their first row.

    Columns as in `COLUMNS` (others are ignored); blank knobs mean "not set". A blank power or
    energy is computed from the other one. Any row that cannot be trusted is a `FileError` that
    names the file and the line: nothing is skipped silently.
    """
    groups: dict[tuple[str, str], list[tuple[str, Row]]] = defaultdict(list)
    lines: dict[tuple[str, str, str, Setting], int] = {}
    for line, source, gpu, name, row in _rows(path):
        seen = lines.setdefault((source, gpu, name, row.setting), line)
        if seen != line:
            raise FileError(
                f"{path}:{line}: {gpu} {name!r} at {row.setting} is already on line {seen}"
            )
        groups[gpu, name].append((source, row))
    if not groups:
        raise FileError(f"{path}: holds no measurements, only a header")
    return tuple(
        Workload(source=source, gpu=gpu, name=name, rows=rows, default=_default(rows))
        for (gpu, name), found in groups.items()
        for source, rows in _by_source(found)
    )


def _by_source(found: list[tuple[str, Row]]) -> list[tuple[str, tuple[Row, ...]]]:
    """One group of rows; one per source where sources have measured the same setting twice."""
    sources = tuple(dict.fromkeys(source for source, _ in found))
    if len({row.setting for _, row in found}) == len(found):
        return [("; ".join(sources), tuple(row for _, row in found))]
    return [(wanted, tuple(row for source, row in found if source == wanted)) for wanted in sources]


def _default(rows: tuple[Row, ...]) -> Row:
    def height(row: Row) -> tuple[float, float, float]:
        s = row.setting
        knobs = (s.sm_clock_hz, s.memory_clock_hz, s.power_limit_w)
        core, memory, limit = (math.inf if knob is None else knob for knob in knobs)
        return core, memory, limit

    return max(rows, key=height)


def _rows(path: str | os.PathLike[str]) -> Iterable[tuple[int, str, str, str, Row]]:
    """(line, source, gpu, workload, row) of every line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not a UTF-8 text file ({error.reason})") from error
    reader = csv.reader(text.splitlines(keepends=True), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if not header:
            raise FileError(f"{path}: empty")
        missing = [name for name in COLUMNS if name not in header]
        if missing:
            raise FileError(f"{path}:1: missing columns: {', '.join(missing)}")
        if len(set(header)) != len(header):
            raise FileError(f"{path}:1: a column occurs twice")
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            where = f"{path}:{reader.line_num}"
            if len(cells) != len(header):
                raise FileError(f"{where}: {len(cells)} fields, the header has {len(header)}")
            field = dict(zip(header, (cell.strip() for cell in cells), strict=True))
            if not field["gpu"] or not field["workload"]:
                raise FileError(f"{where}: gpu or workload is blank")
            yield (
                reader.line_num,
                field["source"],
                field["gpu"],
                field["workload"],
                _row(field, where),
            )
    except csv.Error as error:
        raise FileError(f"{path}:{reader.line_num}: not a CSV line ({error})") from error


def _row(field: dict[str, str], where: str) -> Row:
    core = _positive(field, "core_mhz", where)
    memory = _positive(field, "mem_mhz", where)
    setting = Setting(
        sm_clock_hz=None if core is None else core * MHZ,
        memory_clock_hz=None if memory is None else memory * MHZ,
        power_limit_w=_positive(field, "power_limit_w", where),
    )
    time_s = _positive(field, "time_s", where)
    power_w = _positive(field, "power_w", where)
    energy_j = _positive(field, "energy_j", where)
    if time_s is None:
        raise FileError(f"{where}: time_s is blank")
    if energy_j is None:
        if power_w is None:
            raise FileError(f"{where}: power_w and energy_j are both blank")
        energy_j = power_w * time_s
    return Row(
        setting=setting,
        time_s=time_s,
        power_w=energy_j / time_s if power_w is None else power_w,
        energy_j=energy_j,
    )


def _positive(field: dict[str, str], name: str, where: str) -> float | None:
    text = field[name]
    if not text:
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise FileError(f"{where}: {name}={text!r} is not a number") from error
    if not (math.isfinite(value) and value > 0):
        raise FileError(f"{where}: {name}={text} must be a positive finite number")
    return value
