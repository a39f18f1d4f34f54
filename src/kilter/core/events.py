"""The records of a run: one JSON object per line in `events-rank<k>.jsonl`, append-only.

A killed run leaves whole lines and at most one broken last one; whoever reads (the report, `top`)
rebuilds everything from these lines alone, so no result depends on an orderly end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from kilter.core.codec import opened
from kilter.core.errors import FileError
from kilter.core.label import Label
from kilter.core.memory_record import MemoryRecord, PlanFigures
from kilter.core.plan import ClocksMode, Goal
from kilter.core.section_record import SectionsFound
from kilter.core.setting import Activity, DeviceInfo, Sample, Setting


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=str.lower):
    """Base: `t_s` is the run's clock (seconds since its start, real time)."""

    t_s: float


class Started(Event, frozen=True, kw_only=True):
    """First line of every file."""

    schema: str = "kilter.events/1"
    kilter: str
    """It is kilter's version."""
    wall_time: str
    """It is in ISO 8601, with the zone."""
    command: tuple[str, ...]
    rank: int
    world_size: int
    device: DeviceInfo
    goal: Goal
    found: Setting
    mode: ClocksMode
    mode_reason: str
    host: str | None = None
    """It is the name of the machine."""
    torch: str | None = None
    """This version is installed; the program may not import it."""
    config: str | None = None
    """This configuration file was read."""


class Sampled(Event, frozen=True, kw_only=True):
    """One reading of the device's sensors: two a second at first, then fewer and fewer."""

    device_t_s: float
    """It is the time of the device's clock: virtual time of a simulated device."""
    power_w: float | None = None
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    sm_utilisation: float | None = None
    temperature_c: float | None = None
    throttle: tuple[str, ...] | None = None
    activity: Activity | None = None


def sampled(sample: Sample, t_s: float) -> Sampled:
    return Sampled(
        t_s=t_s,
        device_t_s=sample.t_s,
        power_w=sample.power_w,
        sm_clock_hz=sample.sm_clock_hz,
        memory_clock_hz=sample.memory_clock_hz,
        sm_utilisation=sample.sm_utilisation,
        temperature_c=sample.temperature_c,
        throttle=None if sample.throttle is None else tuple(r.value for r in sample.throttle),
        activity=sample.activity,
    )


class Block(Event, frozen=True, kw_only=True):
    """Some iterations in a row under one setting: the unit of all judgement. `t_s` is its end."""

    number: int
    pair: int | None
    """Blocks of one pair are compared with each other; `None` outside a comparison."""
    phase: str
    """It is `warm`, `probe`, `confirm`, `hold` or `drift`."""
    arm: str
    """It is `baseline` or `candidate`."""
    setting: Setting
    iterations: int
    iteration_s: float
    """The block's iterations took this in the median."""
    energy_j: float | None
    """It is the mean per iteration."""
    device_begin_s: float
    device_end_s: float
    clean: bool
    why_not: str | None = None
    """Why the block does not count (switch in flight, throttled, stalled, late order)."""
    rehearsed: bool = False
    """Run on the simulated device with the trace, after the script had ended."""
    left_out: int = 0
    """Iterations of the blocks of a long hold before this one that have no line of their own."""


class Decided(Event, frozen=True, kw_only=True):
    """The governor came to a conclusion; the last one rules."""

    state: str
    """It is the governor's phase (`probe`, `confirm`, `hold`), or how it ended: `decided`, or
    `predicted` where nothing was set."""
    setting: Setting
    reason: str
    time_ratio: float | None = None
    """It is expected, relative to the baseline."""
    energy_ratio: float | None = None


class Fitted(PlanFigures, frozen=True, kw_only=True, tag_field="event", tag="fitted"):
    """A memory plan came into force. What the plan does is simulated, what it starts from was
    observed; the last one for the largest pass is in `plan.json`."""

    t_s: float
    hidden: float
    """Computation hides this share of the transfers' time."""
    swapped: int
    recomputed: int = msgspec.field(name="remade")
    kept: int


class Moved(MemoryRecord, frozen=True, kw_only=True, tag_field="event", tag="moved"):
    """What memory has come to since the start. The last one rules."""

    t_s: float


class ClocksInside(Event, frozen=True, kw_only=True):
    """What became of clocks inside the iteration, of whatever kind. It has many attributes because
    it is all that the report reads of them."""

    summary: str
    """It is the answer in one sentence; what would be saved in it is simulated."""
    planned: bool
    """There are stretches with low clocks; False: nothing to gain."""
    stretches: int
    longest_s: float
    """It is the length of the longest section, or stretch of operations that a lower clock would
    save energy in."""
    break_even_s: float
    """A stretch that is worth its switches is at least so long."""
    calibrated: bool = False
    """The break-even is by the device's own switch times; False: by those of its profile."""
    saving: float
    slowdown: float
    sets: bool
    """It is False in a dry run, in which commands are only written down."""
    commands: int = 0
    """So many were sent, or written down, so far."""
    left_out: int = 0
    restored: bool | None = None
    """At the end it says whether the conductor has put the found clock back. None: it did not
    run."""
    conductor_cpu_s: float | None = None
    """At the end, the conductor has taken so much processor time, beside the program. None: it did
    not run."""
    search: SectionsFound | None = None
    """What the ranks' search has come to; None: it is not over, or nothing may be set."""
    instead: str | None = None
    """Why one clock for the whole job is governed in place of these; None: it is not."""
    blocks: int = 0
    """Rank 0 has judged so many blocks of iterations in it."""
    reopened: int = 0
    """How often the iteration has become another one, so that the plan was dropped."""


class Sectioned(ClocksInside, frozen=True, kw_only=True):
    """The communication sections of one rank. The last one rules."""

    exposed_share: float
    """It was measured in the last window of the profiler."""
    windows: int
    """The profiler was opened so many times so far."""
    collectives: int | None
    """One iteration has so many, by the numbers of the process groups; None: they do not count."""
    edges: int = 0
    """The real edge of so many commands was seen in a window."""
    edge_error_p50_s: float | None = None
    """It lies between the expected edge and the real one, without its sign."""
    edge_error_p95_s: float | None = None
    edge_bias_s: float | None = None
    """The median of expected minus real is this: below zero, the commands come early."""
    window_iteration_s: float | None = None
    """The iterations in the last window took this in the mean."""
    iteration_s: float | None = None
    """The program's last ones took this in the median; those in a window may take longer."""
    window_cost_s: float = 0.0
    """What the windows have taken of the program's time."""
    key_cost_s: float = 0.0
    """What the numbers of the process groups and the marker have taken of it."""
    waits: int = 0
    """Long waits for which the clock went down (in a dry run: would have gone down)."""
    waits_low_s: float = 0.0
    """How long it was low in those that are over."""
    waits_clock_hz: float | None = None


class Operated(ClocksInside, frozen=True, kw_only=True):
    """The clocks of unit operations. The last one rules. What the plan would save is simulated, for
    times that were measured."""

    operations: int
    """The trace that was planned from has so many."""
    whole_job_saving: float
    """One clock for the whole iteration would save this within the same bound."""

    @property
    def dry_run(self) -> bool:
        """No command reached a device."""
        return not self.sets


class Refused(Event, frozen=True, kw_only=True):
    """Something was not done, and why."""

    what: str
    reason: str
    code: str | None = None
    """It is the code of the reason, for programs; None in records of runs before there were codes,
    and where the reason has none."""


class Failed(Event, frozen=True, kw_only=True):
    """An error of ours that the fence caught; the training went on."""

    where: str
    error: str


class Stopped(Event, frozen=True, kw_only=True):
    """Last line of an orderly end."""

    iterations: int
    rehearsed_iterations: int
    outcome: str
    """It is `finished`, or how the script ended: `raised ValueError`, `exit 3`."""
    found: Setting
    after: Setting
    restored: bool
    energy_method: str
    """It is `counter`, `power integral`, `model`, or `none`."""
    sampler_cost_s: float
    hook_cost_s: float
    label: Label
    energy_disagreement: float | None = None
    """It is (integral of power - counter) / counter, where both were there."""
    no_trace: str | None = None
    """Why the operations of an iteration were not recorded."""
    energy_j: float | None = None
    """The device used this over the whole run, with all that is not an iteration."""
    unseen: str | None = None
    """Why no iteration was seen, and what to do about it; None if one was."""


AnyEvent = (
    Started
    | Sampled
    | Block
    | Decided
    | Fitted
    | Moved
    | Sectioned
    | Operated
    | Refused
    | Failed
    | Stopped
)

MAX_EVENTS_BYTES = 2**32
MAX_LINE_BYTES = 2**24
_DECODER = msgspec.json.Decoder(AnyEvent)


def read_events(path: str | Path) -> Iterator[AnyEvent]:
    """The events of one file in order, a line at a time. A broken last line (killed while writing)
    is left out; a broken line elsewhere, or a file that does not begin with `Started`, is a
    `FileError`."""
    number = 0
    with opened(path, max_bytes=MAX_EVENTS_BYTES) as file:
        line = file.readline(MAX_LINE_BYTES)
        while line.endswith(b"\n"):
            number, following = number + 1, file.readline(MAX_LINE_BYTES)
            try:
                event = decode_event(line, number, path)
            except FileError:
                if not following:
                    return
                raise
            if number == 1 and not isinstance(event, Started):
                raise FileError(f"{path}: does not begin with the start of a run")
            yield event
            line = following
        if len(line) == MAX_LINE_BYTES:
            raise FileError(f"{path}:{number + 1}: not an event of a run (a line without an end)")
    if not number:
        raise FileError(f"{path}: the run ended before its first whole record")


def decode_event(line: bytes, number: int, path: str | Path) -> AnyEvent:
    """One whole line of a file; `FileError` if it is no event."""
    try:
        event: AnyEvent = _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{path}:{number}: not an event of a run ({error})") from error
    return event
