"""Rows of `kilter bench faults` for clocks inside the iteration: deaths of a trainer, of the
conductor of its sections, of both, and of one rank of several; collectives that hang.

Programs, conductors, gloo ranks and their deaths are real processes; the cards are fake.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kilter.app.bench.accidents import Accidents
from kilter.testing.box import FOUND, kill_watcher, until
from kilter.testing.section_box import (
    DEADLINE_S,
    ENDLESS_S,
    ITERATION_S,
    ITERATIONS,
    UP_S,
    WAIT,
    SectionBox,
    SectionProgram,
)

SECTION_ACCIDENTS, RANDOM_SECTION_ACCIDENTS = Accidents(), Accidents()
_row, _random_row = SECTION_ACCIDENTS.row, RANDOM_SECTION_ACCIDENTS.row
VICTIMS = (("trainer",), ("conductor",), ("trainer", "conductor"))
SECTION_MOMENTS_SEED = 13


def _low_section(
    box: SectionBox, *, hold_s: float = ENDLESS_S, up_s: float = ENDLESS_S
) -> SectionProgram:
    program = box.begin(hold_s=hold_s, up_s=up_s)
    program.ask("mark")
    until(box.low)
    return program


def _section_over(box: SectionBox) -> SectionProgram:
    program = _low_section(box, up_s=UP_S)
    until(box.found)
    return program


def _low_wait(box: SectionBox) -> SectionProgram:
    program = box.begin(WAIT)
    until(box.low)
    return program


STATES: dict[str, Callable[[SectionBox], SectionProgram]] = {
    "before its first command": SectionBox.begin,
    "while a section's clock is low": _low_section,
    "after a section": _section_over,
    "while a long wait's clock is low": _low_wait,
}


def _killed(state: str, victims: tuple[str, ...]) -> None:
    """Takes in a row."""

    @_row(f"sections: SIGKILL of {' and '.join(victims)} {state}")
    def scenario(box: SectionBox) -> None:
        _kill(STATES[state](box), victims)
        begin_s = time.monotonic()
        box.until_free()
        box.note(f"all as found {time.monotonic() - begin_s:.2f} s after the kill")


for _state, _victims in itertools.product(STATES, VICTIMS):
    _killed(_state, _victims)


def _kill(program: SectionProgram, victims: tuple[str, ...]) -> None:
    if "watcher" in victims:
        kill_watcher(program.box.state_directory)
    if "conductor" in victims:
        os.kill(program.conductor, signal.SIGKILL)
    if "trainer" in victims:
        program.kill()
    elif not program.lives:
        program.box.wrong("the trainer ended")


def _is_stopped(pid: int) -> bool:
    """Each thread of the process is."""
    stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(text.rpartition(")")[2].split()[0] == "T" for text in stats)


def _conductor_hangs(state: str, reach: Callable[[SectionBox], SectionProgram]) -> None:
    """Takes in a row."""

    @_row(f"sections: conductor hangs (SIGSTOP) {state}, the deadline passes")
    def scenario(box: SectionBox) -> None:
        program = reach(box)
        with box.fake.edit():  # a process that stops in the middle of a call would lock all out
            os.kill(program.conductor, signal.SIGSTOP)
            until(lambda: _is_stopped(program.conductor))  # the signal takes a moment
        until(box.found)
        os.kill(program.conductor, signal.SIGCONT)
        if not program.lives:
            box.wrong("the trainer ended")
        program.kill()


_conductor_hangs("while a section's clock is low", partial(_low_section, hold_s=1.0))
_conductor_hangs("while a long wait's clock is low", _low_wait)


@_row("sections: the trainer hangs while a section is low, the deadline passes")
def trainer_hangs(box: SectionBox) -> None:
    program = _low_section(box, hold_s=DEADLINE_S)
    os.kill(program.pid, signal.SIGSTOP)
    begin_s = time.monotonic()
    until(box.found)
    box.note(f"back after {time.monotonic() - begin_s:.2f} s of a deadline of {DEADLINE_S:g} s")
    if box.free():
        box.wrong("the conductor ended")
    program.kill()


@_row("sections: setter refused at the command that ends a section, once")
def refused_at_the_end(box: SectionBox) -> None:
    program = box.begin(up_s=UP_S)
    box.refuse("nvmlDeviceReset*", times=1)
    program.ask("mark")
    until(box.low)
    until(box.found)
    if not program.lives:
        box.wrong("the trainer ended")
    program.kill()


@_row("sections: ranks wait long in a collective for a stopped one while all are low, then go on")
def rank_waits_long(box: SectionBox) -> None:
    ranks = _all_low(box)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    _until_left_as_found(box)
    os.kill(ranks[1].pid, signal.SIGCONT)
    until(lambda: all(box.low(card) for card in range(len(ranks))))
    box.note("low again when they went on")
    for rank in ranks:
        rank.kill()


@_row("sections: a collective hangs while all ranks are low, and the job is killed")
def collective_hangs(box: SectionBox) -> None:
    ranks = _all_low(box)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    _until_left_as_found(box)
    if any(box.free(card) for card in range(len(ranks))):
        box.wrong("a conductor ended")
    for rank in ranks:
        rank.kill()


@_row("sections: SIGKILL of one rank of three in the middle of a section, the others fail")
def rank_lost(box: SectionBox) -> None:
    first, *others = _all_low(box)
    first.kill()  # the host of the store
    for rank in others:
        rank.wait()  # gloo says that its peer is gone


@_row("sections: SIGKILL of one rank's conductor while all are low, the job goes on")
def conductor_of_one_rank(box: SectionBox) -> None:
    ranks = _all_low(box)
    os.kill(ranks[0].conductor, signal.SIGKILL)
    until(lambda: box.found([0]))
    until(lambda: box.low(1))  # in a later iteration
    if not all(rank.lives for rank in ranks):
        box.wrong("a rank ended")
    for rank in ranks:
        rank.kill()


def _all_low(box: SectionBox) -> list[SectionProgram]:
    ranks = box.begin_ranks()
    until(lambda: all(box.low(card) for card in range(len(ranks))))
    return ranks


def _until_left_as_found(box: SectionBox) -> None:
    """All cards as found for three iterations' time: the collective hangs, and nothing is set."""
    since_s = time.monotonic()

    def steady() -> bool:
        nonlocal since_s
        if not box.found():
            since_s = time.monotonic()
        return time.monotonic() - since_s > 3 * ITERATION_S

    until(steady)


@_random_row(
    "sections: SIGKILL of trainer, conductor, both or watcher too at random, `kilter restore`"
)
def random_section_kills(box: SectionBox, times: int) -> None:
    chance, tried, left = random.Random(SECTION_MOMENTS_SEED), Counter[str](), 0
    every = (*VICTIMS, ("watcher",), ("trainer", "conductor", "watcher"))
    for _ in range(times):
        victims = chance.choice(every)
        program = box.begin(ITERATIONS, hold_s=DEADLINE_S, up_s=UP_S)
        time.sleep(chance.uniform(0.0, 3 * ITERATION_S))
        _kill(program, victims)
        program.kill()
        until(box.free)
        # A kill between the journal and the first set leaves a journal, and nothing to put back.
        if "watcher" in victims or (box.found() and box.place.journal_path.exists()):
            box.restore()
        tried[" and ".join(victims)] += 1
        left += box.setting() != FOUND or box.place.journal_path.exists()
    box.note(", ".join(f"{victims} {count}" for victims, count in sorted(tried.items())))
    box.note(f"{left} of {times} left behind")
    if left:
        box.wrong(f"{left} left behind")
