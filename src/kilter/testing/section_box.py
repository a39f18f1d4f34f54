"""Programs with conductors of sections, each on a fake card of its own, to be killed and stopped.

As `kilter.testing.box`; what sets the cards is the conductor's process of each program.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from kilter.clocks.plan.timing import NOTHING, Command, CommandSchedule
from kilter.clocks.plan.waits import WaitPlan
from kilter.clocks.section_conductor import Begin, ConductorReady, Follow
from kilter.clocks.section_process import SectionProcess
from kilter.core.errors import Held
from kilter.core.units import MHZ
from kilter.lease.journal import JournalPlace
from kilter.observe.marker import Marker
from kilter.testing.box import FOUND, Box, ToldProcess, until

RANKS = 3
LOW_HZ = 1200 * MHZ
SECTION, WAIT, DRY_WAIT, ITERATIONS, RANK = "section", "wait", "dry wait", "iterations", "rank"
"""What a program does: one long section, begun by `mark`; a long wait, in a dry run, too; short
iterations with a section each, alone or as one of several gloo ranks."""
ENDLESS_S = 600.0
ITERATION_S, DOWN_S, UP_S = 0.4, 0.05, 0.3
DEADLINE_S = 0.8
"""A low clock has this deadline in the short iterations."""


class SectionBox(Box):
    """A card for each rank."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, cards=RANKS)
        cards = self.fake.state().cards
        self.places = [
            JournalPlace(self.state_directory, card.uuid, machine=root / "machine")
            for card in cards
        ]
        self.programs: list[SectionProgram] = []

    def begin(
        self, what: str = SECTION, *, hold_s: float = ENDLESS_S, up_s: float = ENDLESS_S
    ) -> SectionProgram:
        """A program alone, on the first card; its conductor is there, and has set nothing."""
        self.change(load=0.0 if what in (WAIT, DRY_WAIT) else 1.0)
        program = SectionProgram(self, what, hold_s=hold_s, up_s=up_s)
        self.programs.append(program)
        program.meet()
        return program

    def begin_ranks(self) -> list[SectionProgram]:
        """Ranks that meet in a collective in every iteration; their clocks are low until it is
        over."""
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = str(bound.getsockname()[1])
        for rank in range(RANKS):
            names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            names |= {"WORLD_SIZE": str(RANKS), "RANK": str(rank)}
            program = SectionProgram(
                self, RANK, hold_s=DEADLINE_S, up_s=ENDLESS_S, card=rank, **names
            )
            self.programs.append(program)
        for program in self.programs:
            program.meet()
        return self.programs

    def low(self, card: int = 0) -> bool:  # type: ignore[override]
        return self.setting(card).sm_clock_hz == LOW_HZ

    def found(self, cards: Iterable[int] = range(RANKS)) -> bool:
        return all(self.setting(card) == FOUND for card in cards)

    def free(self, card: int = 0) -> bool:
        """Nobody controls the card any more."""
        try:
            self.places[card].lock(patience_s=0.1).close()
        except Held:
            return False
        return True

    def until_free(self) -> None:
        """As the base class; a conductor whose program has died lives on until all is put back."""
        until(lambda: all(self.free(card) for card in range(RANKS)))
        if not self.found():
            self.wrong(f"cards stand at {[self.setting(card) for card in range(RANKS)]}")

    def close(self) -> None:
        for program in self.programs:
            program.kill()


class SectionProgram(ToldProcess):
    """A program whose conductor may set one card."""

    def __init__(
        self,
        box: SectionBox,
        what: str,
        *,
        hold_s: float,
        up_s: float,
        card: int = 0,
        **environ: str,
    ) -> None:
        self.box = box
        self.log = box.root / f"log{len(box.programs)}.jsonl"
        place = (box.places[card].uuid, str(self.log))
        code = f"from {__name__} import serve; serve(*{place!r}, {what!r}, {hold_s}, {up_s})"
        super().__init__(box, code, environ)
        self.conductor = 0
        """It is its process id."""

    def meet(self) -> None:
        self.conductor = int(self._out.readline())
        self.box.names[self.conductor] = "conductor"

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def ask(self, verb: str) -> str:
        """`mark`: the next iteration begins; `look`: what the conductor has said; `stop` it."""
        return self.tell(verb)


def serve(uuid: str, log: str, what: str, hold_s: float, up_s: float) -> None:
    """The program's side of `SectionProgram`."""
    marker = Marker()
    process = SectionProcess(
        marker,
        Begin(log=log, backend="nvml", device=uuid, sets=what != DRY_WAIT, program=os.getpid()),
    )
    answers = process.answers()
    while not answers:
        time.sleep(0.01)
        answers = process.answers()
    ready = answers[0]
    if what == RANK:
        _meet_ranks()
    print(ready.pid if isinstance(ready, ConductorReady) else ready, flush=True)
    down = Command(edge="down", key="a", sm_clock_hz=LOW_HZ, at_s=DOWN_S, lead_s=0.0, hold_s=hold_s)
    up = Command(edge="up", key="a", sm_clock_hz=None, at_s=up_s, lead_s=0.0, hold_s=0.0)
    length_s = ITERATION_S if what in (ITERATIONS, RANK) else 2 * ENDLESS_S
    waits = WaitPlan(
        sm_clock_hz=LOW_HZ,
        after_s=0.2,
        return_s=0.01,
        share=0.5,
        high_w=300.0,
        low_w=300.0,
        rise_w=100.0,
        settle_s=0.1,
        calls_per_s=10.0,
    )
    if what in (WAIT, DRY_WAIT):
        process.say(Follow(schedule=NOTHING, waits=waits))
    else:
        commands = CommandSchedule(commands=(down, up), iteration_s=length_s, calls_per_s=10.0)
        process.say(Follow(schedule=commands))
    iteration = 0
    while what in (ITERATIONS, RANK):
        if what == RANK:
            _all_reduce()
        marker.mark(iteration)
        iteration += 1
        time.sleep(ITERATION_S)
    for iteration in range(10 if what in (WAIT, DRY_WAIT) else 0):
        time.sleep(0.06)
        marker.mark(iteration)
    for iteration, line in enumerate(sys.stdin, 100):
        if line == "mark\n":
            marker.mark(iteration)
            print("marked", flush=True)
        else:
            print(process.answers() if line == "look\n" else process.stop(), flush=True)


def _meet_ranks() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))


def _all_reduce() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(4))
