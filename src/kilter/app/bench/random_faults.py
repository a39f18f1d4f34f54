"""Deaths and administrators at random moments, as rows of `kilter bench faults`; `--times` says how
often."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kilter.app.bench.accidents import Accidents
from kilter.core.setting import Setting
from kilter.core.units import MILLI
from kilter.testing.box import FOUND, LOW, Box, BoxJob, kill_watcher, may_contain, until
from kilter.testing.daemon_box import DaemonBox

MOMENTS_SEED = 15
RANDOM_ACCIDENTS, RANDOM_DAEMON_ACCIDENTS = Accidents(), Accidents()
_row, _daemon_row = RANDOM_ACCIDENTS.row, RANDOM_DAEMON_ACCIDENTS.row
THEIRS_W = 500.0
"""What the administrator sets."""


@_row("SIGKILL of job, watcher, both or container's init at random moments, then `kilter restore`")
def random_kills(box: Box, times: int) -> None:
    def recover(victims: str) -> bool:
        box.until_free()
        if victims in ("both", "container") or box.place.journal_path.exists():
            box.restore()
        return box.setting() == FOUND and not box.place.journal_path.exists()

    _kills(box, times, box.start, "watcher", lambda: kill_watcher(box.state_directory), recover)


@_row("administrator sets another limit at random moments of a job's life")
def random_changes(box: Box, times: int) -> Setting:
    return _changes(box, times, box.start)


@_daemon_row(
    "daemon: SIGKILL of job, daemon, both or container's init at random; daemon starts again"
)
def daemon_random_kills(box: DaemonBox, times: int) -> None:
    def recover(victims: str) -> bool:
        with suppress(TimeoutError):
            until(lambda: box.setting() == FOUND and not box.place.journal_path.exists())
        return box.setting() == FOUND

    _kills(box, times, box.job, "daemon", box.kill_daemon, recover, box.start_daemon)


@_daemon_row("daemon: administrator sets another limit at random moments of a job's life")
def daemon_random_changes(box: DaemonBox, times: int) -> Setting:
    return _changes(box, times, box.job)


def _life_s(job: BoxJob) -> float:
    """How long a life is here: random moments are drawn from it."""
    begin_s = time.monotonic()
    _live(job)
    return time.monotonic() - begin_s


def _live(job: BoxJob) -> None:
    """Some life under a lease, which ends in good order unless the job is killed."""
    with suppress(OSError, ValueError):
        for verb, what in (
            ("enter", {}),
            ("set", LOW),
            ("set", {"sm_mhz": 900}),
            ("renew", {}),
            ("set", LOW),
        ):
            job.ask(verb, **what)
        job.end()


def _kills(
    box: Box,
    times: int,
    start: Callable[[], BoxJob],
    other: str,
    kill_other: Callable[[], None],
    recover: Callable[[str], bool],
    start_other: Callable[[], object] = lambda: None,
) -> None:
    """Kill a job, the `other` process that puts back, both, or the init of the job's container;
    `recover` says whether all is as found after that."""
    chance, life_s = random.Random(MOMENTS_SEED), _life_s(start())
    victims_of = {"job": ("job",), other: (other,), "both": ("job", other)}
    if may_contain():
        victims_of["container"] = ("container",)
    else:
        box.note("no container: needs unshare(1) and the right to make a pid namespace")
    tried, left = Counter[str](), 0
    for _ in range(times):
        chosen = chance.choice(list(victims_of))
        victims = victims_of[chosen]
        job = box.start_contained() if "container" in victims else start()
        with _living(job, chance.uniform(0.0, life_s)):
            if other in victims:
                kill_other()
            if "job" in victims:
                job.kill()
            if "container" in victims:
                job.kill_init()
            if other in victims:
                start_other()
        tried[chosen] += 1
        left += not recover(chosen)
    box.note(", ".join(f"{chosen} {count}" for chosen, count in sorted(tried.items())))
    _count(box, left, times, "left behind")


@contextmanager
def _living(job: BoxJob, moment_s: float) -> Iterator[None]:
    """What happens at a moment of the job's life; its life is over afterwards."""
    living = threading.Thread(target=_live, args=(job,))
    living.start()
    time.sleep(moment_s)
    yield
    living.join()
    job.kill()


def _changes(box: Box, times: int, start: Callable[[], BoxJob]) -> Setting:
    """A limit that another one overwrites is wrong, unless it was set between a look at the limit
    and the very next call, which sets one: no program can prevent that."""
    chance, life_s = random.Random(MOMENTS_SEED), _life_s(start())
    theirs = Setting(power_limit_w=THEIRS_W)
    overwritten = lost = 0
    for _ in range(times):
        box.change(limit_mw=round(FOUND.power_limit_w / MILLI), limits_lost=0)  # type: ignore[operator]
        job = start()
        with _living(job, chance.uniform(0.0, life_s)):
            box.change(limit_mw=round(THEIRS_W / MILLI))
        box.until_free()
        if box.setting() != theirs:
            unseen = box.fake.state().cards[0].limits_lost > 0
            lost, overwritten = lost + unseen, overwritten + (not unseen)
    _count(box, overwritten, times, "overwritten")
    if lost:
        box.note(f"{lost} more between a look at the limit and the next call, which sets one")
    return box.setting() if lost else theirs


def _count(box: Box, wrong: int, times: int, word: str) -> None:
    box.note(f"{wrong} of {times} {word}")
    if wrong:
        box.wrong(f"{wrong} {word}")
