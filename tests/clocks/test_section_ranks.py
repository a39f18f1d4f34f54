"""Real gloo ranks whose conductors set fake cards: what a hung collective and a dead rank leave."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kilter.core.errors import Held
from kilter.lease.journal import JournalPlace
from kilter.testing.box import FOUND, TIMEOUT_S, Box

LOW_HZ = 1.2e9
RANK = """
import datetime, os, sys, time
import torch, torch.distributed as dist
from kilter.clocks.plan.timing import Command, CommandSchedule
from kilter.clocks.section_conductor import Begin, Follow
from kilter.clocks.section_process import SectionProcess
from kilter.observe.marker import Marker

uuid, log = sys.argv[1:]
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))
marker = Marker()
process = SectionProcess(marker, Begin(log=log, backend="nvml", device=uuid, program=os.getpid()))
down = Command(edge="down", key="a", sm_clock_hz=1.2e9, at_s=0.05, lead_s=0.0, hold_s=0.8)
up = Command(edge="up", key="a", sm_clock_hz=None, at_s=0.3, lead_s=0.0, hold_s=0.0)
planned = CommandSchedule(number=1, commands=(down, up), iteration_s=0.4, calls_per_s=10.0)
process.say(Follow(schedule=planned))
ones = torch.ones(4)
for iteration in range(10_000):
    dist.all_reduce(ones.fill_(1.0))
    marker.mark(iteration)
    time.sleep(0.4)
"""


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


class Ranks:
    """Two ranks, each with a card of its own."""

    def __init__(self, root: Path) -> None:
        self.box = Box(root, cards=2)
        self.uuids = [card.uuid for card in self.box.fake.state().cards]
        port = str(free_port())
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, uuid, str(root / f"log{rank}.jsonl")],
                env=self.box.environ()
                | {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "WORLD_SIZE": "2",
                    "RANK": str(rank),
                    "OMP_NUM_THREADS": "1",
                },
                stderr=subprocess.DEVNULL,
            )
            for rank, uuid in enumerate(self.uuids)
        ]

    def until(self, reached: Callable[[], bool]) -> None:
        by_s = time.monotonic() + TIMEOUT_S
        while not reached():
            assert time.monotonic() < by_s, [self.box.setting(card) for card in (0, 1)]
            time.sleep(0.01)

    def until_low(self, card: int) -> None:
        self.until(lambda: self.box.setting(card).sm_clock_hz == LOW_HZ)

    def until_found(self) -> None:
        self.until(lambda: all(self.box.setting(card) == FOUND for card in (0, 1)))

    def free(self, card: int) -> bool:
        """Nobody controls the card any more."""
        machine = self.box.root / "machine"
        place = JournalPlace(self.box.state_directory, self.uuids[card], machine=machine)
        try:
            place.lock(patience_s=0.1).close()
        except Held:
            return False
        return True

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate(timeout=TIMEOUT_S)
        self.until(lambda: self.free(0) and self.free(1))


def test_a_hung_collective_and_then_a_dead_rank_leave_all_cards_as_found(tmp_path: Path) -> None:
    ranks, victim = Ranks(tmp_path), 1
    try:
        for card in (0, 1):
            ranks.until_low(card)
        ranks.until_low(victim)
        os.kill(
            ranks.processes[victim].pid, signal.SIGSTOP
        )  # the other one hangs in its collective
        ranks.until_found()
        time.sleep(1.0)
        assert all(ranks.box.setting(card) == FOUND for card in (0, 1))
        assert not ranks.free(0)
        assert not ranks.free(1)

        ranks.processes[victim].kill()
        ranks.until(lambda: ranks.free(victim))
        ranks.processes[1 - victim].wait(TIMEOUT_S)  # gloo says that its peer is gone
        ranks.until(lambda: ranks.free(1 - victim))
        assert all(ranks.box.setting(card) == FOUND for card in (0, 1))
    finally:
        ranks.end()


def test_a_rank_that_is_killed_while_all_clocks_are_low_leaves_no_card_low(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    try:
        ranks.until(lambda: all(ranks.box.setting(n).sm_clock_hz == LOW_HZ for n in (0, 1)))
        ranks.processes[0].kill()  # the host of the store
        ranks.until_found()
        ranks.processes[1].wait(TIMEOUT_S)
        ranks.until(lambda: ranks.free(0) and ranks.free(1))
        assert all(ranks.box.setting(card) == FOUND for card in (0, 1))
    finally:
        ranks.end()
