"""`kilter bench faults`: what is left on a GPU after each accident, tried out on fake cards.

Each scenario is real up to the driver: a job in a process of its own holds a lease on a card in a
`kilter.testing.box`, and is really killed, stopped or cheated.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from kilter.app.bench import daemon_faults
from kilter.app.bench import faults_of_trust as trust
from kilter.app.bench.accidents import Accident, Accidents
from kilter.app.bench.random_faults import RANDOM_ACCIDENTS, RANDOM_DAEMON_ACCIDENTS
from kilter.app.bench.section_faults import RANDOM_SECTION_ACCIDENTS, SECTION_ACCIDENTS
from kilter.app.cli.options import positive
from kilter.app.cli.output import print_json
from kilter.core.errors import UsageError
from kilter.core.label import Label
from kilter.core.setting import Setting
from kilter.core.units import MHZ
from kilter.device.vendor import CALL_TIMEOUT_S
from kilter.lease.journal import Journal
from kilter.testing.box import (
    FOUND,
    FOUND_LIMIT_W,
    Box,
    BoxJob,
    find_watcher,
    kill_watcher,
    until,
)
from kilter.testing.daemon_box import DaemonBox
from kilter.testing.section_box import SectionBox

HELP = "What is left on a GPU after each accident: killed jobs, killed watchers, refusals, losses."
EPILOG = """\
No GPU is needed or touched: the cards are fake, the processes and their deaths are real.

exit code: 0 if every scenario ends with the settings that it should, 1 otherwise

examples:
  kilter bench faults
  kilter bench faults --times 250 --only random      the five rows of random moments, at length
"""

RANDOM_TIMES = 20

HANG_S = CALL_TIMEOUT_S + 1.0


ACCIDENTS = Accidents()
_row = ACCIDENTS.row


@_row("job ends")
def ends(box: Box) -> None:
    box.low().end()


@_row("script raises")
def raises(box: Box) -> None:
    job = box.low()
    job.ask("fail")
    job.wait()


@_row("Ctrl-C")
def ctrl_c(box: Box) -> None:
    box.low().signal(signal.SIGINT)


@_row("SIGTERM to the job's process group")
def sigterm(box: Box) -> None:
    box.low().signal(signal.SIGTERM)


@_row("SIGKILL of the job")
def sigkill(box: Box) -> None:
    box.low().kill()


@_row("SIGKILL between journal and first set")
def sigkill_before_set(box: Box) -> None:
    box.rule(call="nvmlDeviceSet*", sigkill="before", times=1)
    box.killed_in_set()


@_row("SIGKILL between the two knobs of a set")
def sigkill_inside_set(box: Box) -> None:
    box.rule(call="nvmlDeviceSet*", sigkill="after", times=1)
    box.killed_in_set()


@_row("SIGKILL in the middle of the job's own restore")
def sigkill_at_restore(box: Box) -> None:
    job = box.low()
    box.rule(call="nvmlDeviceReset*", sigkill="after", times=1)
    job.end()


@_row("SIGKILL of the watcher, then of the job after its next set")
def watcher_killed(box: Box) -> None:
    job = box.low()
    kill_watcher(box.state_directory)
    job.ask("set", sm_mhz=900, limit_w=300)
    job.kill()


@_row("SIGKILL of the watcher, and no other one can start")
def watcher_killed_for_good(box: Box) -> None:
    job = box.low()
    kill_watcher(box.state_directory)
    log = box.state_directory / "watcher.log"
    log.unlink()
    log.mkdir()  # in the way
    box.note(job.ask("set", sm_mhz=900)["error"])
    box.note(f"{box.setting()} while the job goes on")
    job.end()


@_row("SIGTERM to the watcher, as `scancel` sends it to all, then SIGKILL of the job")
def watcher_terminated(box: Box) -> None:
    job = box.low()
    watcher = find_watcher(box.state_directory)
    assert watcher is not None
    os.kill(watcher, signal.SIGTERM)
    job.kill()


@_row("SIGKILL of job and watcher, then `kilter restore`")
def both_killed_then_restore(box: Box) -> None:
    job = box.low()
    kill_watcher(box.state_directory)
    job.kill()
    box.restore()


@_row("SIGKILL of job and watcher, then the next job")
def both_killed_then_next(box: Box) -> None:
    both = box.low()
    kill_watcher(box.state_directory)
    both.kill()
    box.entered("next job").end()


@_row("job hangs, its deadline passes")
def hangs(box: Box) -> None:
    job = box.low(hold_s=0.05)
    until(lambda: box.setting() == FOUND)
    box.note("put back while the job hung")
    job.kill()


@_row("SIGKILL of the job, a forked data loader lives on")
def forked_child(box: Box) -> None:
    with _child(box.low(), in_c=False):
        box.until_free()


@_row("SIGKILL of the job, a process forked in C lives on")
def forked_in_c(box: Box) -> None:
    with _child(box.low(), in_c=True):
        box.until_free()


@_row("SIGKILL of job and watcher, a forked data loader lives on, then `kilter restore`")
def forked_child_alone(box: Box) -> None:
    job = box.low()
    kill_watcher(box.state_directory)
    with _child(job, in_c=False):
        box.restore()
        box.until_free()


@_row("setter refused at the first set")
def refused_at_start(box: Box) -> None:
    box.refuse("nvmlDeviceSet*")
    box.refused_set().end()


@_row("every setter refused from the first set on")
def refused_outright(box: Box) -> None:
    box.refuse("nvmlDeviceSet*")
    box.refuse("nvmlDeviceReset*")
    box.note(box.refused_set().end()["reason"])


@_row("second setter of a set refused")
def refused_in_the_middle(box: Box) -> None:
    box.refuse("nvmlDeviceSetPowerManagementLimit", times=1)
    box.refused_set().end()


@_row("setter refused at restore, once")
def refused_at_restore(box: Box) -> None:
    job = box.low()
    box.refuse("nvmlDeviceReset*", times=1)
    job.end()


@_row("GPU lost at restore, back later, then `kilter restore`")
def lost_at_restore(box: Box) -> None:
    job = box.low()
    box.refuse("nvmlDevice*", code="GPU_IS_LOST")
    job.end()
    kill_watcher(box.state_directory)  # it would go on trying for a while
    box.note(f"kilter restore while it is lost: exit code {box.restore()}")
    box.obey_again()
    box.restore()


@_row("setter hangs at restore, once")
def hung_at_restore(box: Box) -> None:
    job = box.low()
    box.rule(call="nvmlDeviceReset*", hang_s=HANG_S, pretend=True, times=1)
    job.end()


@_row("clock accepted but not obeyed")
def not_obeyed(box: Box) -> None:
    box.change(clips_sm_mhz=(1600, 1980))
    job = box.low()
    box.note(job.ask("verify")["error"])
    job.end()


@_row("clock accepted but not obeyed, SIGKILL of the job")
def not_obeyed_and_killed(box: Box) -> None:
    box.change(clips_sm_mhz=(1600, 1980))
    box.low().kill()


@_row("power limit reported as set, but is not")
def limit_not_taken(box: Box) -> None:
    box.rule(call="nvmlDeviceSetPower*", pretend=True, times=1)
    box.refused_set().end()


@_row("administrator sets another power limit meanwhile, job ends")
def limit_changed(box: Box) -> Setting:
    job = box.low()
    box.change(limit_mw=500_000)
    job.end()
    return Setting(power_limit_w=500.0)


@_row("administrator sets another power limit meanwhile, SIGKILL of the job")
def limit_changed_and_killed(box: Box) -> Setting:
    job = box.low()
    box.change(limit_mw=500_000)
    job.kill()
    return Setting(power_limit_w=500.0)


@_row("somebody locks another SM clock meanwhile, job ends")
def clock_changed(box: Box) -> Setting:
    job = box.low()
    job.ask("verify")
    box.change(sm_lock_mhz=(345, 1500))
    job.end()
    return Setting(sm_clock_hz=1500 * MHZ, power_limit_w=FOUND_LIMIT_W)


@_row("second job on the same GPU")
def two_at_once(box: Box) -> None:
    trust.two_jobs(box)


@_row("SIGKILL of the job, the next one comes at once")
def next_waits(box: Box) -> None:
    trust.next_job(box)


@_row("stale journal of another boot")
def other_boot(box: Box) -> None:
    _write_stale(box, boot="00000000-0000-4000-8000-000000000000")
    job = box.start()
    box.note(job.ask("enter"))
    job.end()


@_row("journal cannot be written")
def no_state_directory(box: Box) -> None:
    box.state_directory.rmdir()
    box.state_directory.write_text("a file where the directory should be")
    job = box.start()
    box.note(job.ask("enter")["error"])
    job.end()
    box.state_directory.unlink()
    box.state_directory.mkdir()


@_row("journal cannot be replaced at the first set")
def journal_blocked(box: Box) -> None:
    _block_journal(box)
    box.refused_set().end()


@_row("journal cannot be replaced at the second set")
def journal_blocked_later(box: Box) -> None:
    job = box.low()
    _block_journal(box)
    box.note(job.ask("set", sm_mhz=900)["error"])
    job.end()


@_row("KILTER_READ_ONLY=1")
def read_only(box: Box) -> None:
    job = box.start(KILTER_READ_ONLY="1")
    box.note(job.ask("enter")["error"])
    job.end()
    box.note(f"{len(box.fake.setters())} setters called")


def _block_journal(box: Box) -> None:
    """A link where the next journal is going to be written: it is not followed."""
    box.place.journal_path.with_suffix(".part").symlink_to("/dev/full")


@contextmanager
def _child(job: BoxJob, *, in_c: bool) -> Iterator[None]:
    """A child of the job that outlives it, killed as it is."""
    pid = job.ask("fork", in_c=in_c)
    job.kill()
    try:
        yield
        os.kill(pid, 0)  # it still lives: that was the point
    finally:
        os.kill(pid, signal.SIGKILL)


def _write_stale(box: Box, *, boot: str) -> None:
    box.place.write(
        Journal(
            uuid=box.uuid,
            backend="nvml",
            boot_id=boot,
            pid=1,
            start_ticks=0,
            nonce="of another boot",
            found=Setting(power_limit_w=700.0),
            before=Setting(power_limit_w=700.0),
            last=FOUND,
            written="2026-01-01T00:00:00+00:00",
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRow:
    """One line of the table."""

    scenario: str
    found: Setting
    lowered: Setting
    """What a job had set meanwhile; from the card's log."""
    expected: Setting
    after: Setting
    """It is read from the card itself."""
    set_last_by: str
    note: str
    journal_left: bool
    wrongs: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.after == self.expected and not self.journal_left and not self.wrongs


def try_out(row: str, accident: Accident, box: Box, *times: int) -> FaultRow:
    """One row on an empty box; one of random moments so many times."""
    try:
        found = box.setting()
        expected = accident(box, *times) or found
        box.until_free()
        return FaultRow(
            scenario=row,
            found=found,
            lowered=box.lowered(),
            expected=expected,
            after=box.setting(),
            set_last_by=box.last_setter(),
            note="; ".join(box.notes),
            journal_left=box.place.journal_path.exists(),
            wrongs=tuple(box.wrongs),
        )
    finally:
        box.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--times",
        type=positive,
        default=RANDOM_TIMES,
        metavar="N",
        help=f"how often each row of random moments is tried (default: {RANDOM_TIMES})",
    )
    parser.add_argument(
        "--only", metavar="WORD", default="", help="only the rows whose name holds this word"
    )


FaultTables = tuple[Mapping[str, Accident], Mapping[str, Accident]]
"""The first holds accidents that happen once, the second those tried at random moments."""
FAULT_TABLES: tuple[tuple[Callable[[Path], Box], FaultTables], ...] = (
    (Box, (ACCIDENTS | trust.TRUST_ACCIDENTS, RANDOM_ACCIDENTS)),
    (partial(DaemonBox, cards=2), (daemon_faults.DAEMON_ACCIDENTS, RANDOM_DAEMON_ACCIDENTS)),
    (SectionBox, (SECTION_ACCIDENTS, RANDOM_SECTION_ACCIDENTS)),
)
"""The first is with a job alone, the second with `kilter daemon` and two cards, the third with a
program whose conductor sets its card, and a card for each of its ranks."""


def run(args: argparse.Namespace) -> int:
    chosen = [
        (row, accident, box_in, times)
        for box_in, tables in FAULT_TABLES
        for accidents, times in zip(tables, ((), (args.times,)), strict=True)
        for row, accident in accidents.items()
        if args.only in row
    ]
    if not chosen:
        raise UsageError(f"--only {args.only!r}: no row has such a name")
    rows = []
    for row, accident, box_in, times in chosen:
        print(f"{row} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(
            prefix="kilter-faults-", ignore_cleanup_errors=True
        ) as root:
            rows.append(try_out(row, accident, box_in(Path(root)), *times))
    if args.json:
        summary = {"n": len(rows), "ok": sum(row.ok for row in rows)}
        table = [asdict(row) | {"ok": row.ok} for row in rows]
        found = {"rows": table, "summary": summary}
        print_json("kilter.bench.faults/1", Label.SIMULATED, found)
    else:
        print(as_text(rows))
    return int(not all(row.ok for row in rows))


def as_text(rows: list[FaultRow]) -> str:
    """The table of the README (Markdown)."""
    lines = [
        "| accident | found | set | afterwards | last set by | |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        verdict = "ok" if row.ok else f"WRONG, expected {row.expected}; {row.wrongs or ''}"
        after = f"{row.after} (theirs)" if row.expected != row.found else str(row.after)
        note = f"; {row.note}" if row.note else ""
        lowered = "nothing" if row.lowered == Setting() else str(row.lowered)
        cells = (row.scenario, row.found, lowered, after, row.set_last_by, verdict + note)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    ok = sum(row.ok for row in rows)
    lines += ["", f"{ok} of {len(rows)} as they should be (fake cards, real processes)."]
    return "\n".join(lines)
