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
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from kilter.sharing.elastic.agreement import Agreement, Listener
from kilter.sharing.elastic.groups import Groups, Reduction
from kilter.sharing.elastic.meter import Meter
from kilter.sharing.elastic.schedule import GlobalBatches, Index, RatioSchedule, active
from kilter.sharing.elastic.state import Buffers, RankState
from kilter.sharing.messages import RankStatus

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, TCPStore
    from torch.nn.parallel import DistributedDataParallel

_POLL_S = 0.02
_LEFT_TOGETHER_S = 10.0
_STORE_TIMEOUT = timedelta(seconds=600)


class Share:
    """One rank's part. Make it on all ranks, after the first backward passes of the models."""

    def __init__(
        self,
        models: Sequence[DistributedDataParallel],
        state: RankState,
        reduction: Reduction,
        control: ProcessGroup,
        *,
        may_idle: bool = False,
        release: bool = False,
    ) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._everyone = tuple(range(self.world))
        self._release = release
        self.state = state
        self.control = control
        self.address = self._host()
        self.store = connect(self.address)
        self.schedule = RatioSchedule()
        self.iteration = 0
        self._groups = Groups(models[0].process_group, self.world, subsets=may_idle)
        self._reduction = reduction
        syncs = any(model.broadcast_buffers for model in models)
        self._buffers = Buffers(models if syncs else [])
        self._listener = Listener(self.store, self.rank, self._apply)
        cuda = next(models[0].parameters()).is_cuda and torch.cuda.is_available()
        self.cuda = cuda
        self._meter = Meter(cuda, self._publish)
        reduction.on_last, reduction.on_reduced = self._meter.work_done, self._meter.reduced
        self._batches: GlobalBatches | None = None
        self._first = 0
        self._pass = 0
        self._before: tuple[int, ...] = self._everyone
        for model in models:
            model.broadcast_buffers = False

    # The store of the job, hosted by rank 0.

    def _host(self) -> tuple[str, int]:
        """Rank 0 opens the store and tells the others where."""
        import torch.distributed as dist

        where: list[Any] = [None]
        if self.rank == 0:
            host = _address()
            self._hosted = listening_store(host)
            where[0] = (host, self._hosted.port)
        dist.broadcast_object_list(where, 0, group=self.control)
        address: tuple[str, int] = where[0]
        return address

    def _publish(self, status: RankStatus) -> None:
        self.store.set(f"status/{self.rank}", msgspec.json.encode(status))

    # A pass over the data.

    def gather(self, drawn: Sequence[Sequence[Index]]) -> GlobalBatches:
        """The batches of all ranks from the next iteration on; every rank has to call it."""
        import torch.distributed as dist

        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, list(drawn), group=self.control)
        return GlobalBatches(everyone)

    def begin_pass(self, batches: GlobalBatches) -> None:
        """What follows are these batches. Every rank is up to date here."""
        self._batches, self._first = batches, self.iteration
        self._before = self._everyone

    @property
    def last(self) -> int:
        """The first iteration after the pass."""
        assert self._batches is not None
        return self._first + self._batches.count

    def counts(self, iteration: int) -> tuple[int, ...]:
        assert self._batches is not None
        return self._batches.counts(iteration - self._first, self.schedule.at(iteration))

    def next_samples(self, iteration: int) -> list[Index] | None:
        """The rank's samples of an iteration that is not yet handed out; None if the rank's ratio
        is 0. Fixes the ratio of the iteration on this rank."""
        assert self._batches is not None
        self._listener.before(iteration)
        ratios = self.schedule.at(iteration)
        if ratios is not None and ratios[self.rank] == 0:
            return None
        return self._batches.mine(iteration - self._first, ratios, self.rank)

    def begin(self, iteration: int) -> None:
        """The rank has samples in this iteration, or had some in the one before."""
        counts = self.counts(iteration)
        now = active(counts)
        if self.rank in self._before and self.schedule.changes_at(iteration):
            self.store.set(f"reached/{iteration}", "1")
        joining = tuple(rank for rank in now if rank not in self._before)
        if joining:
            current = [rank for rank in self._before if rank in now] or self._before
            self._bring_up_to_date(current[0], joining)
        self._before = now
        self.iteration = iteration
        if self.rank not in now:
            return
        self._reduction.group = self._groups.of(now)
        self._reduction.weight = counts[self.rank] / sum(counts)
        self._meter.begin(counts[self.rank])

    def _bring_up_to_date(self, root: int, joining: Iterable[int]) -> None:
        members = tuple(sorted({root, *joining}))
        if self.rank in members:
            group = self._groups.of(members)
            assert group is not None
            self.state.broadcast(root, group)

    def end(self) -> None:
        """The iteration that was begun is over."""
        self._buffers.average(self._reduction.weight, self._reduction.group)
        self._meter.end(self.iteration)
        self.iteration += 1

    def idle_until(self, iteration: int) -> int | None:
        """Wait, without work and without collectives, from an iteration in which the rank has ratio
        0. Returns the iteration in which it takes part again, or None if the pass has ended."""
        self.begin(iteration)  # the last duty: bring those up to date who take over
        self._meter.idle(iteration)
        if self._release:
            self.state.release()
        ended = f"ended/{self._pass}"
        while True:
            if self.store.check([ended]):
                self._resume(int(self.store.get(ended)), iteration)
                return None
            self._listener.poll(iteration)
            back = self.schedule.next_share_of(self.rank, after=iteration)
            if back is not None and back < self.last and self.store.check([f"reached/{back}"]):
                self._resume(back, iteration)
                return back
            time.sleep(_POLL_S)

    def _resume(self, iteration: int, idle_since: int) -> None:
        if iteration > idle_since:
            self._before = active(self.counts(iteration - 1))
        self.iteration = iteration
        self._listener.resume(iteration)

    def end_pass(self) -> None:
        """All batches of the pass are done, or the others have left it (`idle_until` says where).
        Brings every rank up to date."""
        end = min(self.last, self.iteration)
        if self.rank in self._before:
            self.store.set(f"ended/{self._pass}", str(end))
        self._all_up_to_date()
        self._next_pass(end)

    def leave_pass(self) -> None:
        """The script has left the loop within an iteration: by `break`, or by an error. An error on
        one rank must not keep the process from ending, so the ranks meet only where some are idle,
        and only after all active ones have said that they left in the same iteration."""
        end = self.iteration + 1
        if self._before != self._everyone:
            self.store.set(f"left/{self._pass}/{end}/{self.rank}", "1")
            left = [f"left/{self._pass}/{end}/{rank}" for rank in self._before]
            deadline = time.monotonic() + _LEFT_TOGETHER_S
            while not self.store.check(left):
                if time.monotonic() > deadline:
                    return
                time.sleep(_POLL_S)
            self.store.set(f"ended/{self._pass}", str(end))
            self._all_up_to_date()
        self._next_pass(end)

    def _all_up_to_date(self) -> None:
        if self._before != self._everyone:
            group = self._groups.of(self._everyone)
            assert group is not None
            self.state.broadcast(self._before[0], group)

    def _next_pass(self, iteration: int) -> None:
        self._before = self._everyone
        self.iteration = iteration
        self._batches = None
        self._pass += 1

    # Changes.

    def _apply(self, verdict: Agreement) -> None:
        assert verdict.at is not None
        self.schedule.change(verdict.at, verdict.ratios)


def _address() -> str:
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
