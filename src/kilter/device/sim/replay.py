"""Replays of measurements: clock tables (CSV), and the telemetry of a recorded run.

A clock table says how long a workload took, and what it drew, at each setting that somebody
measured. Nothing is interpolated: a setting outside the table is refused. Every number that comes
out of here is labelled *replayed*.
"""

from __future__ import annotations

import bisect
import csv
import io
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from kilter.core.codec import read
from kilter.core.errors import FileError, NotPermitted
from kilter.core.events import Sampled, read_events
from kilter.core.label import Label
from kilter.core.setting import DeviceInfo, Sample, Setting
from kilter.core.units import MHZ, MIB
from kilter.device.null import NullDevice

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
MOST_MHZ = 50_000.0
"""It is far above any card's clock: what is larger was written in Hz or kHz."""
LEAST, MOST = 1e-30, 1e30
"""Numbers of a table lie between these, so that their ratios are numbers as well."""
WORK_COLUMNS = ("flops", "bytes_moved")
"""A table may have these columns for the piece of work that `time_s` is the time of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRow:
    """One measured setting of a workload."""

    setting: Setting
    time_s: float
    """One run, epoch, iteration or launch takes this: the table's own unit of work."""
    power_w: float
    """It is the mean power of the card."""
    energy_j: float
    """The same piece of work takes this energy."""
    flops: float | None = None
    bytes_moved: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWorkload:
    """Everything a table says about one workload on one card."""

    source: str
    gpu: str
    name: str
    rows: tuple[RecordedRow, ...]
    default: RecordedRow
    """It is the row of the unlocked card (all knobs blank), else the highest core clock, then
    memory clock, then power limit; a knob left blank beside set ones counts as the highest."""
    busy: float | None = None
    """The card works in this share of the default's time, where that is known."""

    def at(self, setting: Setting) -> RecordedRow | None:
        return next((row for row in self.rows if row.setting == setting), None)


def load_tables(path: str | os.PathLike[str]) -> tuple[RecordedWorkload, ...]:
    """The workloads of a clock-table CSV, in the order of their first row.

    Columns as in `COLUMNS`, and `WORK_COLUMNS` where they are there (others are ignored); blank
    knobs mean "not set". A blank power or energy is computed from the other one. Any row that
    cannot be trusted is a `FileError` that names the file and the line: nothing is skipped
    silently.
    """
    groups: dict[tuple[str, str], list[tuple[str, RecordedRow]]] = defaultdict(list)
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
        RecordedWorkload(source=source, gpu=gpu, name=name, rows=rows, default=_default(rows))
        for (gpu, name), found in groups.items()
        for source, rows in _by_source(found)
    )


def _by_source(found: list[tuple[str, RecordedRow]]) -> list[tuple[str, tuple[RecordedRow, ...]]]:
    """One group of rows; one per source where sources have measured the same setting twice."""
    sources = tuple(dict.fromkeys(source for source, _ in found))
    if len({row.setting for _, row in found}) == len(found):
        return [("; ".join(sources), tuple(row for _, row in found))]
    return [(wanted, tuple(row for source, row in found if source == wanted)) for wanted in sources]


def _default(rows: tuple[RecordedRow, ...]) -> RecordedRow:
    def height(row: RecordedRow) -> tuple[float, float, float]:
        s = row.setting
        knobs = (s.sm_clock_hz, s.memory_clock_hz, s.power_limit_w)
        core, memory, limit = (math.inf if knob is None else knob for knob in knobs)
        return core, memory, limit

    return max(rows, key=height)


def _rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, str, str, str, RecordedRow]]:
    """(line, source, gpu, workload, row) of every line."""
    for line, field in _lines(path, COLUMNS):
        where = f"{path}:{line}"
        if not field["gpu"] or not field["workload"]:
            raise FileError(f"{where}: gpu or workload is blank")
        yield line, field["source"], field["gpu"], field["workload"], _row(field, where)


def _lines(
    path: str | os.PathLike[str], columns: tuple[str, ...]
) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, text by column name) of every line that is not blank."""
    try:
        text = read(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not a UTF-8 text file ({error.reason})") from error
    lines = io.StringIO(text, newline="")
    # A spreadsheet may write semicolons or tabs; the header tells.
    separator = max(",;\t", key=lines.readline().count)
    lines.seek(0)
    reader = csv.reader(lines, delimiter=separator, strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if not header:
            raise FileError(f"{path}: empty")
        missing = [name for name in columns if name not in header]
        if missing:
            raise FileError(f"{path}:1: missing columns: {', '.join(missing)}")
        if len(set(header)) != len(header):
            raise FileError(f"{path}:1: a column occurs twice")
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(header):
                raise FileError(
                    f"{path}:{reader.line_num}: {len(cells)} fields, the header has {len(header)}"
                )
            yield (
                reader.line_num,
                dict(zip(header, (cell.strip() for cell in cells), strict=True)),
            )
    except csv.Error as error:
        raise FileError(f"{path}:{reader.line_num}: not a CSV line ({error})") from error


def _row(field: dict[str, str], where: str) -> RecordedRow:
    core = _positive(field, "core_mhz", where)
    memory = _positive(field, "mem_mhz", where)
    setting = Setting(
        sm_clock_hz=None if core is None else core * MHZ,
        memory_clock_hz=None if memory is None else memory * MHZ,
        power_limit_w=_positive(field, "power_limit_w", where),
    )
    for name, clock in (("core_mhz", core), ("mem_mhz", memory)):
        if clock is not None and clock > MOST_MHZ:
            raise FileError(f"{where}: {name}={field[name]} is too large for a clock in MHz")
    time_s = _positive(field, "time_s", where)
    power_w = _positive(field, "power_w", where)
    energy_j = _positive(field, "energy_j", where)
    if time_s is None:
        raise FileError(f"{where}: time_s is blank")
    if energy_j is None:
        if power_w is None:
            raise FileError(f"{where}: power_w and energy_j are both blank")
        energy_j = power_w * time_s
    return RecordedRow(
        setting=setting,
        time_s=time_s,
        power_w=energy_j / time_s if power_w is None else power_w,
        energy_j=energy_j,
        **{name: _positive(field, name, where) for name in WORK_COLUMNS if name in field},
    )


def _positive(field: dict[str, str], name: str, where: str) -> float | None:
    value = _number(field[name], name, where)
    if value is not None and value <= 0:
        raise FileError(f"{where}: {name}={field[name]} must be positive")
    if value is not None and value < LEAST:
        raise FileError(f"{where}: {name}={field[name]} is beyond anything that can be measured")
    return value


def _number(text: str, name: str, where: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise FileError(f"{where}: {name}={text!r} is not a number") from error
    if not math.isfinite(value):
        raise FileError(f"{where}: {name}={text} is not finite")
    if abs(value) > MOST:
        raise FileError(f"{where}: {name}={text} is beyond anything that can be measured")
    return value


TELEMETRY = ("t_s", "power_instant_w", "energy_mj", "gpu_util", "mem_util", "sm_mhz")
"""A recording must have these columns; `mem_used_mib` is read where it is there."""
MOST_APART = 100.0
"""Factor between the mean powers by both columns from which on one has another unit."""
SPAN_S = (1e-3, 1e8)
"""A recording takes so long: one of more than three years has its times in another unit."""


def load_telemetry(path: str | os.PathLike[str]) -> tuple[Sample, ...]:
    """The samples of a telemetry recording (CSV), times from its own clock, ascending."""
    samples: list[Sample] = []
    for line, field in _lines(path, TELEMETRY):
        where = f"{path}:{line}"
        number = {name: _number(field[name], name, where) for name in TELEMETRY}
        t_s = number["t_s"]
        if t_s is None:
            raise FileError(f"{where}: t_s is blank")
        if samples and t_s <= samples[-1].t_s:
            raise FileError(f"{where}: t_s={t_s} does not follow the line before")
        for name in TELEMETRY[1:]:
            if (number[name] or 0.0) < 0.0:
                raise FileError(
                    f"{where}: {name}={field[name]} is below zero; leave blank what is unknown"
                )
        used_mib = _number(field.get("mem_used_mib", ""), "mem_used_mib", where)
        samples.append(
            Sample(
                t_s=t_s,
                power_w=number["power_instant_w"],
                energy_j=_times(number["energy_mj"], 1e-3),
                sm_clock_hz=_times(number["sm_mhz"], MHZ),
                sm_utilisation=_times(number["gpu_util"], 0.01),
                memory_utilisation=_times(number["mem_util"], 0.01),
                memory_used_bytes=_times(used_mib, MIB),
            )
        )
    if not samples:
        raise FileError(f"{path}: holds no samples, only a header")
    span_s = samples[-1].t_s - samples[0].t_s
    if len(samples) > 1 and not SPAN_S[0] <= span_s <= SPAN_S[1]:
        raise FileError(f"{path}: t_s spans {span_s:.3g} s: give it in seconds")
    counted_j = (samples[-1].energy_j or 0.0) - (samples[0].energy_j or 0.0)
    powers = [sample.power_w for sample in samples if sample.power_w]
    if counted_j > 0.0 and powers:
        times = counted_j / span_s / fmean(powers)
        if not 1.0 / MOST_APART <= times <= MOST_APART:
            raise FileError(
                f"{path}: the power by energy_mj is {times:.3g} times that by power_instant_w: "
                "give them in millijoules and watts"
            )
    return tuple(samples)


def load_recording(path: str | os.PathLike[str]) -> tuple[Sample, ...]:
    """The samples of a run of ours (its directory), or of a telemetry recording (a CSV file)."""
    directory = Path(path)
    if not directory.is_dir():
        return load_telemetry(path)
    events = directory / "events-rank0.jsonl"
    samples: list[Sample] = []
    for event in read_events(events):
        if isinstance(event, Sampled) and (not samples or event.device_t_s > samples[-1].t_s):
            samples.append(
                Sample(
                    t_s=event.device_t_s,
                    power_w=event.power_w,
                    sm_clock_hz=event.sm_clock_hz,
                    memory_clock_hz=event.memory_clock_hz,
                    sm_utilisation=event.sm_utilisation,
                    temperature_c=event.temperature_c,
                )
            )
    if not samples:
        raise FileError(f"{events}: holds no reading of a device's sensors")
    return tuple(samples)


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


class RecordedDevice(NullDevice):
    """A recorded run as a device that can only be read.

    `clock` is the clock that the recording is played on, from `begin_s` on; the answer is the last
    sample up to now, and stays at the last one when the recording is over.
    """

    def __init__(
        self,
        samples: tuple[Sample, ...],
        clock: Callable[[], float],
        name: str,
        *,
        begin_s: float = 0.0,
    ) -> None:
        super().__init__("a recording can be read, not set")
        self._samples = samples
        self._times = [sample.t_s - samples[0].t_s for sample in samples]
        self._clock = clock
        self._name = name
        self._begin_s = begin_s

    def info(self) -> DeviceInfo:
        return DeviceInfo(
            name=f"recording {self._name}",
            uuid=f"REPLAY-{self._name}",
            backend="replay",
            label=Label.REPLAYED,
            can_set=False,
            refusal=self._reason,
            persistent=False,
            has_energy_counter=self._samples[0].energy_j is not None,
        )

    def sample(self, *, energy: bool = False) -> Sample:
        place = max(0, bisect.bisect_right(self._times, self._clock() - self._begin_s) - 1)
        sample = replace(self._samples[place], t_s=self._begin_s + self._times[place])
        return sample if energy else replace(sample, energy_j=None)

    def set(self, setting: Setting) -> None:
        raise NotPermitted(f"recording {self._name}: cannot be set to {setting}")
