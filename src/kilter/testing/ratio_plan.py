"""Changes the data ratio of a job by a plan: each ratio as soon as the one before is in force.

The ranks go at the pace of the plan: after a step they wait until the next ratio has been proposed.
So the whole plan is carried out within a known number of iterations (about seven for each change),
however fast or loaded the machine is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kilter.sharing.elastic.agreement import HELD, Agreement, propose
from kilter.sharing.elastic.share import connect
from kilter.sharing.plan.snapshot import Ratios

if TYPE_CHECKING:
    from torch.distributed import Store

    from kilter.sharing.elastic.job import ElasticJob
    from kilter.sharing.elastic.share import Share

_POLL_S = 0.002


class RatioPlan:
    """The plan of one job, in the process of one of its ranks."""

    def __init__(
        self,
        plan: Sequence[Ratios],
        *,
        pause_s: Callable[[int], float] = lambda number: 0.0,
        agreed: Callable[[Store, int, Agreement], None] = lambda store, number, verdict: None,
    ) -> None:
        """`pause_s` says for how long all ranks pause with the change of this number, counted from
        1; `agreed` is called with the verdict of each."""
        self._plan, self._pause_s, self._agreed = plan, pause_s, agreed
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def attached(self, job: ElasticJob) -> None:
        """For `ElasticJob`, which calls it once the ratio may change, unless somebody else proposes
        the ratios of the plan."""
        if job.share is not None and job.share.rank == 0:
            self._thread = threading.Thread(target=self._carry_out, args=(job.share,), daemon=True)
            self._thread.start()

    def keep_pace(self, job: ElasticJob) -> None:
        """Call on every rank after each step of the optimizer."""
        share = job.share
        if share is None:
            return
        share.listener.look_s = 0.0
        in_force = sum(map(share.schedule.changes_at, range(share.iteration + 1)))
        if in_force < len(self._plan):
            while not (
                share.store.check([f"proposal/{in_force + 1}"]) or share.store.check([HELD])
            ):
                time.sleep(_POLL_S)

    def end(self) -> None:
        """The job trains no more."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _carry_out(self, share: Share) -> None:
        store = connect(share.address)
        for number, ratios in enumerate(self._plan, start=1):
            pause_s = self._pause_s(number)
            verdict = propose(
                store, number, ratios, share.world, pause_s=pause_s, stop=self._over.is_set
            )
            self._agreed(store, number, verdict)
            while not self._over.is_set() and not store.check([f"reached/{verdict.at}"]):
                self._over.wait(_POLL_S)
