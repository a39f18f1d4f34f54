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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from kilter.app.bench import daemon_faults
from kilter.app.bench import faults_of_trust as trust
from kilter.app.bench.random_faults import RANDOM_DAEMON_SCENARIOS, RANDOM_SCENARIOS
from kilter.app.bench.section_faults import RANDOM_SECTION_ACCIDENTS, SECTION_ACCIDENTS
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


# Scenarios; the docstring is the row's name -------------------------------------------------


def ends(box: Box) -> None:
    """job ends"""
    box.low().end()


def raises(box: Box) -> None:
    """script raises"""
    job = box.low()
    job.ask("fail")
    job.wait()


def ctrl_c(box: Box) -> None:
    """Ctrl-C"""
    box.low().signal(signal.SIGINT)


def sigterm(box: Box) -> None:
    """SIGTERM to the job's process group"""
    box.low().signal(signal.SIGTERM)


def sigkill(box: Box) -> None:
    """SIGKILL of the job"""
    box.low().kill()


def sigkill_before_set(box: Box) -> None:
    """SIGKILL between journal and first set"""
    box.rule(call="nvmlDeviceSet*", sigkill="before", times=1)
    box.killed_in_set()


def sigkill_inside_set(box: Box) -> None:
    """SIGKILL between the two knobs of a set"""
    box.rule(call="nvmlDeviceSet*", sigkill="after", times=1)
    box.killed_in_set()


def sigkill_at_restore(box: Box) -> None:
    """SIGKILL in the middle of the job's own restore"""
    job = box.low()
    box.rule(call="nvmlDeviceReset*", sigkill="after", times=1)
    job.end()


def watcher_killed(box: Box) -> None:
    """SIGKILL of the watcher, then of the job after its next set"""
    job = box.low()
    kill_watcher(box.state_directory)
    job.ask("set", sm_mhz=900, limit_w=300)
    job.kill()


def watcher_killed_for_good(box: Box) -> None:
    """SIGKILL of the watcher, and no other one can start"""
    job = box.low()
    kill_watcher(box.state_directory)
    log = box.state_directory / "watcher.log"
    log.unlink()
    log.mkdir()  # in the way
    box.note(job.ask("set", sm_mhz=900)["error"])
    box.note(f"{box.setting()} while the job goes on")
    job.end()


def watcher_terminated(box: Box) -> None:
    """SIGTERM to the watcher, as `scancel` sends it to all, then SIGKILL of the job"""
    job = box.low()
    watcher = find_watcher(box.state_directory)
    assert watcher is not None
    os.kill(watcher, signal.SIGTERM)
    job.kill()


def both_killed_then_restore(box: Box) -> None:
    """SIGKILL of job and watcher, then `kilter restore`"""
    job = box.low()
    kill_watcher(box.state_directory)
    job.kill()
    box.restore()


def both_killed_then_next(box: Box) -> None:
    """SIGKILL of job and watcher, then the next job"""
    both = box.low()
    kill_watcher(box.state_directory)
    both.kill()
    box.entered("next job").end()


def hangs(box: Box) -> None:
    """job hangs, its deadline passes"""
    job = box.low(hold_s=0.05)
    until(lambda: box.setting() == FOUND)
    box.note("put back while the job hung")
    job.kill()


def forked_child(box: Box) -> None:
    """SIGKILL of the job, a forked data loader lives on"""
    with _child(box.low(), in_c=False):
        box.until_free()


def forked_in_c(box: Box) -> None:
    """SIGKILL of the job, a process forked in C lives on"""
    with _child(box.low(), in_c=True):
        box.until_free()


def forked_child_alone(box: Box) -> None:
    """SIGKILL of job and watcher, a forked data loader lives on, then `kilter restore`"""
    job = box.low()
    kill_watcher(box.state_directory)
    with _child(job, in_c=False):
        box.restore()
        box.until_free()


def refused_at_start(box: Box) -> None:
    """setter refused at the first set"""
    box.refuse("nvmlDeviceSet*")
    box.refused_set().end()


def refused_outright(box: Box) -> None:
    """every setter refused from the first set on"""
    box.refuse("nvmlDeviceSet*")
    box.refuse("nvmlDeviceReset*")
    box.note(box.refused_set().end()["reason"])


def refused_in_the_middle(box: Box) -> None:
    """second setter of a set refused"""
    box.refuse("nvmlDeviceSetPowerManagementLimit", times=1)
    box.refused_set().end()


def refused_at_restore(box: Box) -> None:
    """setter refused at restore, once"""
    job = box.low()
    box.refuse("nvmlDeviceReset*", times=1)
    job.end()


def lost_at_restore(box: Box) -> None:
    """GPU lost at restore, back later, then `kilter restore`"""
    job = box.low()
    box.refuse("nvmlDevice*", code="GPU_IS_LOST")
    job.end()
    kill_watcher(box.state_directory)  # it would go on trying for a while
    box.note(f"kilter restore while it is lost: exit code {box.restore()}")
    box.obey_again()
    box.restore()


def hung_at_restore(box: Box) -> None:
    """setter hangs at restore, once"""
    job = box.low()
    box.rule(call="nvmlDeviceReset*", hang_s=HANG_S, pretend=True, times=1)
    job.end()


def not_obeyed(box: Box) -> None:
    """clock accepted but not obeyed"""
    box.change(clips_sm_mhz=(1600, 1980))
    job = box.low()
    box.note(job.ask("verify")["error"])
    job.end()


def not_obeyed_and_killed(box: Box) -> None:
    """clock accepted but not obeyed, SIGKILL of the job"""
    box.change(clips_sm_mhz=(1600, 1980))
    box.low().kill()


def limit_not_taken(box: Box) -> None:
    """power limit reported as set, but is not"""
    box.rule(call="nvmlDeviceSetPower*", pretend=True, times=1)
    box.refused_set().end()


def limit_changed(box: Box) -> Setting:
    """administrator sets another power limit meanwhile, job ends"""
    job = box.low()
    box.change(limit_mw=500_000)
    job.end()
    return Setting(power_limit_w=500.0)


def limit_changed_and_killed(box: Box) -> Setting:
    """administrator sets another power limit meanwhile, SIGKILL of the job"""
    job = box.low()
    box.change(limit_mw=500_000)
    job.kill()
    return Setting(power_limit_w=500.0)


def clock_changed(box: Box) -> Setting:
    """somebody locks another SM clock meanwhile, job ends"""
    job = box.low()
    job.ask("verify")
    box.change(sm_lock_mhz=(345, 1500))
    job.end()
    return Setting(sm_clock_hz=1500 * MHZ, power_limit_w=FOUND_LIMIT_W)


def two_at_once(box: Box) -> None:
    """second job on the same GPU"""
    trust.two_jobs(box)


def next_waits(box: Box) -> None:
    """SIGKILL of the job, the next one comes at once"""
    trust.next_job(box)


def other_boot(box: Box) -> None:
    """stale journal of another boot"""
    _write_stale(box, boot="00000000-0000-4000-8000-000000000000")
    job = box.start()
    box.note(job.ask("enter"))
    job.end()


def no_state_directory(box: Box) -> None:
    """journal cannot be written"""
    box.state_directory.rmdir()
    box.state_directory.write_text("a file where the directory should be")
    job = box.start()
    box.note(job.ask("enter")["error"])
    job.end()
    box.state_directory.unlink()
    box.state_directory.mkdir()


def journal_blocked(box: Box) -> None:
    """journal cannot be replaced at the first set"""
    _block_journal(box)
    box.refused_set().end()


def journal_blocked_later(box: Box) -> None:
    """journal cannot be replaced at the second set"""
    job = box.low()
    _block_journal(box)
    box.note(job.ask("set", sm_mhz=900)["error"])
    job.end()


def read_only(box: Box) -> None:
    """KILTER_READ_ONLY=1"""
    job = box.start(KILTER_READ_ONLY="1")
    box.note(job.ask("enter")["error"])
    job.end()
    box.note(f"{len(box.fake.setters())} setters called")


SCENARIOS: tuple[trust.Accident, ...] = (
    ends,
    raises,
    ctrl_c,
    sigterm,
    sigkill,
    sigkill_before_set,
    sigkill_inside_set,
    sigkill_at_restore,
    watcher_killed,
    watcher_killed_for_good,
    watcher_terminated,
    both_killed_then_restore,
    both_killed_then_next,
    hangs,
    forked_child,
    forked_in_c,
    forked_child_alone,
    refused_at_start,
    refused_outright,
    refused_in_the_middle,
    refused_at_restore,
    lost_at_restore,
    hung_at_restore,
    not_obeyed,
    not_obeyed_and_killed,
    limit_not_taken,
    limit_changed,
    limit_changed_and_killed,
    clock_changed,
    two_at_once,
    next_waits,
    other_boot,
    no_state_directory,
    journal_blocked,
    journal_blocked_later,
    read_only,
    *trust.TRUST_SCENARIOS,
)


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
    """Read from the card itself."""
    set_last_by: str
    note: str
    journal_left: bool
    wrongs: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.after == self.expected and not self.journal_left and not self.wrongs


def try_out(scenario: Callable[..., Setting | None], root: Path, *times: int) -> FaultRow:
    """Run one scenario in an empty directory; one of random moments so many times."""
    return _try_out(scenario, Box(root), *times)


def try_out_daemon(scenario: Callable[..., Setting | None], root: Path, *times: int) -> FaultRow:
    """The same with `kilter daemon` running, and two cards."""
    return _try_out(scenario, DaemonBox(root, cards=2), *times)


def try_out_sections(scenario: Callable[..., Setting | None], root: Path, *times: int) -> FaultRow:
    """The same with a program whose conductor sets its card, and a card for each of its ranks."""
    return _try_out(scenario, SectionBox(root), *times)


def _try_out(scenario: Callable[..., Setting | None], box: Box, *times: int) -> FaultRow:
    try:
        found = box.setting()
        expected = scenario(box, *times) or found
        box.until_free()
        return FaultRow(
            scenario=scenario.__doc__ or scenario.__name__,
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
        type=int,
        default=RANDOM_TIMES,
        metavar="N",
        help=f"how often each row of random moments is tried (default: {RANDOM_TIMES})",
    )
    parser.add_argument(
        "--only", metavar="WORD", default="", help="only the rows whose name holds this word"
    )


Act = Callable[..., FaultRow]
_ROWS: tuple[tuple[Act, Sequence[Callable[..., Setting | None]], bool], ...] = (
    (try_out, SCENARIOS, False),
    (try_out, RANDOM_SCENARIOS, True),
    (try_out_daemon, daemon_faults.DAEMON_SCENARIOS, False),
    (try_out_daemon, RANDOM_DAEMON_SCENARIOS, True),
    (try_out_sections, SECTION_ACCIDENTS, False),
    (try_out_sections, RANDOM_SECTION_ACCIDENTS, True),
)


def run(args: argparse.Namespace) -> int:
    if args.times < 1:
        raise UsageError(f"--times {args.times}: at least once")
    chosen = [
        (act, scenario, (args.times,) if is_random else ())
        for act, scenarios, is_random in _ROWS
        for scenario in scenarios
        if args.only in (scenario.__doc__ or "")
    ]
    if not chosen:
        raise UsageError(f"--only {args.only!r}: no row has such a name")
    rows = []
    for act, scenario, times in chosen:
        print(f"{scenario.__doc__} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(
            prefix="kilter-faults-", ignore_cleanup_errors=True
        ) as root:
            rows.append(act(scenario, Path(root), *times))
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
