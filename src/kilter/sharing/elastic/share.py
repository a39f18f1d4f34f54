"""One rank of a job whose data ratio may change while it trains.

The order of things in an iteration k, on every rank: the ratio for k is fixed when the rank's
samples are handed out; `begin(k)` brings ranks that come back up to date and sets weight and group
of the gradient reduction; the script computes; `end(k)` averages running statistics. At the end of
a pass over the data all ranks are brought up to date, so that what follows (validation, a
checkpoint) finds the same state everywhere.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from kilter.sharing.elastic.agreement import HELD, Listener
from kilter.sharing.elastic.groups import Groups
from kilter.sharing.elastic.meter import Guard, Meter
from kilter.sharing.elastic.replicas import Replicas
from kilter.sharing.elastic.schedule import GlobalBatches, Index, RatioSchedule, active
from kilter.sharing.elastic.state import RankState
from kilter.sharing.messages import RankStatus

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, TCPStore

POLL_S = 0.02
_LEFT_TOGETHER_S = 10.0
MOST_PAUSE_S = 30.0
"""Whatever a daemon asks for."""
_STORE_TIMEOUT = timedelta(seconds=600)


class Share:
    """One rank's part. Make it on all ranks, after the first backward passes of the models.

    Every method may be called again with the same arguments after an error in it: what is done is
    not done twice, in particular no collective."""

    def __init__(
        self,
        replicas: Replicas,
        state: RankState,
        groups: Groups,
        control: ProcessGroup,
        address: tuple[str, int],
        guard: Guard,
        *,
        cuda: bool,
    ) -> None:
        """`control` is a group of all ranks on the host."""
        self.rank = control.rank()
        self.store = connect(address)
        self.schedule = RatioSchedule()
        self.iteration = self.pass_number = 0
        self._replicas, self._state, self._groups = replicas, state, groups
        self._control, self._guard = control, guard
        self.listener = Listener(self.store, self.rank, self.schedule)
        self._meter = Meter(cuda, self._publish, guard)
        self._batches: GlobalBatches | None = None
        self._drawn: tuple[int, list[bytes]] | None = None
        self._before = self._everyone

    @property
    def world(self) -> int:
        return int(self._control.size())

    @property
    def address(self) -> tuple[str, int]:
        """Of the store through which the ranks agree."""
        return self.store.host, self.store.port

    @property
    def _everyone(self) -> tuple[int, ...]:
        return tuple(range(self.world))

    def take_over(self) -> None:
        """From here on the ratio may change; on all ranks at once."""
        self._replicas.take_over(self._guard, self._meter)

    def give_up(self) -> None:
        """The models train as without kilter; on all ranks at once, while all are up to date."""
        self._replicas.give_up()

    def hold(self) -> None:
        """No further change of the data ratio, on any rank."""
        self.store.set(HELD, "1")

    def sum_factor(self) -> float:
        """Of the gradient of a sum over the rank's samples in this iteration: weighted by samples,
        it is then what it would be without kilter, DDP's mean of the ranks' sums."""
        assert self._batches is not None
        own: int = self.counts(self.iteration)[self.rank]
        return float(self._batches.drawn(self.iteration) / (self.world * own))

    def _publish(self, status: RankStatus) -> None:
        self.store.set(f"status/{self.rank}", msgspec.json.encode(status))

    # A pass over the data.

    def exchange(self, said: bytes) -> list[bytes]:
        """What all ranks say at the beginning of a pass; every rank has to call it."""
        import torch.distributed as dist

        if self._drawn is None or self._drawn[0] != self.pass_number:
            everyone: list[Any] = [None] * self.world
            dist.all_gather_object(everyone, said, group=self._control)
            self._drawn = self.pass_number, everyone
        return self._drawn[1]

    def begin_pass(self, batches: GlobalBatches) -> None:
        """What follows are these batches. Every rank is up to date here."""
        self._batches, self._before = batches, self._everyone

    @property
    def divides(self) -> bool:
        """Whether a pass is going on whose batches follow the schedule."""
        return self._batches is not None

    @property
    def end_of_pass(self) -> int:
        """The first iteration after the pass."""
        assert self._batches is not None
        return self._batches.end

    def counts(self, iteration: int) -> tuple[int, ...]:
        assert self._batches is not None
        return self._batches.counts(iteration, self.schedule.at(iteration))

    def next_samples(self, iteration: int) -> list[Index] | None:
        """The rank's samples of an iteration that is not yet handed out; None if the rank's ratio
        is 0. Fixes the ratio of the iteration on this rank."""
        assert self._batches is not None
        self.listener.before(iteration)
        ratios = self.schedule.at(iteration)
        if ratios is not None and ratios[self.rank] == 0:
            return None
        return self._batches.mine(iteration, ratios, self.rank)

    def differs(self, iteration: int) -> bool:
        """Whether the ranks have other numbers of samples than without kilter."""
        assert self._batches is not None
        return self.counts(iteration) != self._batches.counts(iteration, None)

    def begin(self, iteration: int) -> None:
        """The rank has samples in this iteration, or had some in the one before."""
        self._pause(iteration)
        counts = self.counts(iteration)
        now = active(counts)
        if self.rank in self._before and self.schedule.changes_at(iteration):
            self.store.set(f"reached/{iteration}", "1")
        joining = tuple(rank for rank in now if rank not in self._before)
        if joining:
            current = [rank for rank in self._before if rank in now] or self._before
            self._bring_up_to_date(current[0], joining, iteration)
        self._before = now
        self.iteration = iteration
        self._replicas.begin(counts, self.rank)
        if self.rank in now:
            self._guard.run(self._meter.begin, counts[self.rank])

    def _pause(self, iteration: int) -> None:
        """Stand still if that was agreed for this iteration. Every rank ends the pause by itself,
        if nobody else does."""
        end_s = time.monotonic() + min(self.schedule.pause_s(iteration), MOST_PAUSE_S)
        while time.monotonic() < end_s and not self.store.check([resumed(iteration)]):
            time.sleep(POLL_S)

    def _bring_up_to_date(self, root: int, joining: Iterable[int], occasion: object) -> None:
        members = tuple(sorted({root, *joining}))
        if self.rank in members:
            group = self._groups.of(members)
            assert group is not None
            self._state.broadcast(root, group, occasion)

    def end(self, iteration: int) -> None:
        """The iteration that was begun is over."""
        self._replicas.end(iteration)
        self._guard.run(self._meter.end, iteration)
        self.iteration = iteration + 1

    # A time without samples.

    def leave(self, iteration: int) -> None:
        """The rank's ratio is 0 from this iteration on. Its last duty: bring those up to date who
        take over."""
        self.begin(iteration)
        self._guard.run(self._meter.idle, iteration)
        self._state.release()

    def awaited(self, idle_since: int) -> tuple[int, bool] | None:
        """Whether an idle rank has to go on: at which iteration, and whether the pass goes on
        there. Asked again and again; needs no work and no collective."""
        ended = f"ended/{self.pass_number}"
        if self.store.check([ended]):
            return int(self.store.get(ended)), False
        self.listener.poll(idle_since)
        back = self.schedule.next_share_of(self.rank, after=idle_since)
        if back is not None and back < self.end_of_pass and self.store.check([f"reached/{back}"]):
            return back, True
        return None

    def come_back(self, iteration: int, idle_since: int) -> None:
        """An idle rank goes on at this iteration."""
        if iteration > idle_since:
            self._before = active(self.counts(iteration - 1))
        self.iteration = iteration
        self.listener.resume(iteration)

    # The end of a pass.

    def end_pass(self, number: int) -> None:
        """All batches of the pass are done, or the others have left it (`awaited` said where).
        Brings every rank up to date."""
        if number != self.pass_number:
            return
        end = min(self.end_of_pass, self.iteration)
        if self.rank in self._before and self._before != self._everyone:
            # Only then somebody waits for it, and the process of rank 0, which has the store, is
            # there for as long as that.
            self.store.set(f"ended/{number}", str(end))
        self._all_up_to_date(number)
        self._next_pass(end)

    def leave_pass(self, number: int) -> None:
        """The script has left the loop within an iteration: by `break`, or by an error. An error on
        one rank must not keep the process from ending, so the ranks meet only where some are idle,
        and only after all active ones have said that they left in the same iteration."""
        if number != self.pass_number:
            return
        end = self.iteration + 1
        if self._before != self._everyone:
            self.store.set(f"left/{number}/{end}/{self.rank}", "1")
            left = [f"left/{number}/{end}/{rank}" for rank in self._before]
            deadline = time.monotonic() + _LEFT_TOGETHER_S
            while not self.store.check(left):
                if time.monotonic() > deadline:
                    return
                time.sleep(POLL_S)
            self.store.set(f"ended/{number}", str(end))
            self._all_up_to_date(number)
        self._next_pass(end)

    def _all_up_to_date(self, number: int) -> None:
        if self._before != self._everyone:
            group = self._groups.of(self._everyone)
            assert group is not None
            self._state.broadcast(self._before[0], group, f"pass {number}")

    def _next_pass(self, iteration: int) -> None:
        self._replicas.train_plainly()
        self._before = self._everyone
        self.iteration = iteration
        self._batches = None
        self.pass_number += 1


def resumed(iteration: int) -> str:
    """The key that ends the pause of an iteration."""
    return f"resumed/{iteration}"


def own_address() -> str:
    """Loopback for a job of one machine, else this machine's name."""
    import os

    alone = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "")
    return "127.0.0.1" if alone else socket.gethostname()


def listening_store(host: str, port: int = 0) -> TCPStore:
    """A store that listens on this address alone (by itself TCPStore listens on all)."""
    from torch.distributed import TCPStore

    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family, backlog=128)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def connect(address: tuple[str, int], timeout: timedelta = _STORE_TIMEOUT) -> TCPStore:
    """A client of a store; RuntimeError if nobody listens."""
    from torch.distributed import TCPStore

    return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
