"""Which budget is in force: a size, what the card has, or a share of the plain peak.

A share needs the peak of the job with everything kept. So the job is observed first, and runs a few
iterations without the engine, with whose time and peak every later plan is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kilter.core.errors import BudgetTooSmall
from kilter.core.plan import MemoryBudget
from kilter.core.units import MIB, show_bytes
from kilter.memory.iteration_times import IterationTimes

if TYPE_CHECKING:
    import torch

    from kilter.memory.engine import Swapper
    from kilter.memory.plan.problem import Link

UNLIMITED = 2**60
"""No device has so many bytes."""
SEEN_PASSES = 2
"""After so many passes of one kind its peak is known: the first creates gradients and state."""
UNTRIED = 6
"""A share is taken after so many iteration ends, even if recipes were not tried yet."""
PLAIN = 5
"""So many iterations are timed without the engine, where the budget is a share of the plain peak.
An odd number, so that the median is one of them where some do more than others."""
LARGER_PEAK = 1.01
"""A plain peak that is larger than the largest so far by this factor makes another budget."""
LEAST_ROOM = 1.003
"""Where no plan keeps the budget, one is made for this many times the least possible peak: a plan
leaves 1/512 of its budget to rounded allocations."""


@dataclass(frozen=True, slots=True)
class BudgetInForce:
    """What the device memory is kept within, and why."""

    size_bytes: int | None
    """It is None while it is not known."""
    words: str
    """Where the budget comes from."""

    @classmethod
    def at_begin(
        cls, asked: MemoryBudget, card_bytes: int | None, card: str, *, on_gpu: bool
    ) -> BudgetInForce:
        """What is known before anything was observed. `card` says in words what the card has for
        this process; it limits a size that was asked for only where it is the job's device."""
        if asked.size_bytes is not None:
            if card_bytes is not None and card_bytes < asked.size_bytes and on_gpu:
                return cls(card_bytes, f"less than the {asked} asked for, to fit {card}")
            return cls(asked.size_bytes, "as asked")
        if asked.share is not None:
            return cls(
                None, f"{asked} of the plain peak, which takes some optimizer steps to observe"
            )
        if card_bytes is not None:
            return cls(card_bytes, f"to fit {card}")
        return cls(None, "auto, but there is no card to fit: give a size or a share")


class PlainIterations:
    """Lets some iterations run without the engine. They fit, since the watched ones did.

    Used in the thread of the engine's hooks on saved tensors, which belong to a thread.
    """

    def __init__(
        self, swapper: Swapper, device: torch.device, cuda: Any, times: IterationTimes
    ) -> None:
        """`cuda` is `torch.cuda` where the device is a GPU, else None."""
        self._swapper = swapper
        self._device = device
        self._cuda = cuda
        self._times = times
        self._left: int | None = None
        """So many are still to come; None: not begun."""
        self.peak_bytes = 0
        """As the allocator has seen it; 0: not measured."""

    def over(self) -> bool:
        """At the end of an iteration: whether they have run, or cannot begin now because the
        program has put hooks of its own above the engine's."""
        from kilter.memory.engine.saved_hooks import innermost_are_ours

        if self._left is None:
            if not (self._swapper.hooks.in_thread and innermost_are_ours()):
                return True
            self._left = PLAIN
            self._swapper.hooks.exit()
            if self._cuda is not None:
                self._cuda.reset_peak_memory_stats(self._device)
            return False
        if not self._swapper.hooks.in_thread:
            return self._left == 0  # in an iteration of another thread no hooks can be put back
        if self._left > 0:
            self._times.was_plain()
            self._left -= 1
            if self._left == 0 and self._cuda is not None:
                self.peak_bytes = int(self._cuda.max_memory_allocated(self._device))
        if self._left > 0:
            return False
        self._put_back()
        return True

    def end(self) -> None:
        """The script has ended, perhaps in the middle of them."""
        if self._left is not None and self._swapper.hooks.in_thread:
            self._put_back()

    def _put_back(self) -> None:
        """By what is there, not by a note: an alarm of the program may have come in between."""
        from kilter.memory.engine.saved_hooks import innermost_are_ours

        if not innermost_are_ours():
            self._swapper.hooks.step_in()


class JobBudget:
    """The budget that is in force in one job, and when a share becomes another number."""

    def __init__(
        self,
        asked: MemoryBudget,
        begin: BudgetInForce,
        card_bytes: int,
        swapper: Swapper,
        plain: PlainIterations,
        *,
        dry_run: bool,
    ) -> None:
        self._asked = asked
        self.in_force = begin
        self._card_bytes = card_bytes
        self._swapper = swapper
        self._plain = plain
        self._dry_run = dry_run
        self._share_of_bytes: int | None = None
        """The budget is a share of this plain peak."""
        self._untried = 0
        self._least_asked = False
        """Passes are planned for the least peak, since no plan keeps the budget."""

    def script_ended(self) -> None:
        """In whichever thread."""
        self._plain.end()

    def settle_for_least(self, link: Link) -> None:
        """Where no plan keeps the budget, plan for the least peak that any schedule reaches. Only
        to be called once nothing else can make room. Where some kind of pass has a plan, the others
        are offloaded on demand, which may take less than a plan of theirs. A plan that was refused
        before there was room, or before calls of modules are tried, says nothing."""
        report = self._swapper.report()
        too_small = any(reason.code == BudgetTooSmall.code for reason in report.refused)
        unreached = too_small and report.hopeless and not report.plans
        size_bytes = self.in_force.size_bytes
        if self._least_asked or self._dry_run or not unreached or size_bytes is None:
            return
        least_bytes = self.least_bytes(link, size_bytes)
        if least_bytes is None:  # the kinds that were refused are forgotten, none is recorded yet
            return
        self._least_asked = True
        self._swapper.limit(int(LEAST_ROOM * least_bytes))

    def least_bytes(self, link: Link, size_bytes: int) -> int | None:
        """The least peak that any schedule reaches, of all kinds of passes that came again; of all
        that are known if none did. None: none is known. (A pass that never came again may be one in
        which tensors were offloaded on demand, which differs from all others.)"""
        records = self._swapper.records()
        repeated = [record for record in records if record.passes >= SEEN_PASSES]
        floors = []
        for record in repeated or records:
            problem, _ = record.problem(link=link, budget_bytes=size_bytes, min_bytes=MIB)
            floors.append(record.as_it_runs(problem, MIB).floor_bytes)
        return max(floors, default=None)

    def iteration_ended(self) -> None:
        """Take the share once the plain peak is known, and again for a larger one."""
        if self._asked.share is None:
            return
        if self.in_force.size_bytes is None:
            self._take_first_share()
        else:
            self._raise_share()

    def plain_peak_bytes(self) -> int:
        """The largest peak with everything kept, of all kinds of passes."""
        peaks = [record.peak_bytes for record in self._swapper.records()]
        return max([self._plain.peak_bytes, *peaks])

    def plain_peak_known(self) -> bool:
        """Passes of one kind have repeated, or are known not to."""
        if self._swapper.report().watched_every > 1:
            return True
        return any(record.passes >= SEEN_PASSES for record in self._swapper.records())

    def _take_first_share(self) -> None:
        if not self.plain_peak_known():
            return
        report = self._swapper.report()
        if report.spilled > 0:
            why = ", since the job does not fit without a plan"
            self._take_share(self._card_bytes, "the card's", why)
            return
        if not (self._plain.over() and self._tried()):
            return  # the budget stays the card's until all that is to be watched was watched
        changing = f", the largest of {report.passes} passes of changing shapes"
        self._share_of_bytes = self.plain_peak_bytes()
        self._take_share(
            self._share_of_bytes, "the plain peak,", changing if report.watched_every > 1 else ""
        )

    def _raise_share(self) -> None:
        """Another kind of pass turned out to be larger than all that were seen when the share was
        taken."""
        peak_bytes = self.plain_peak_bytes()
        if self._share_of_bytes is None or peak_bytes <= LARGER_PEAK * self._share_of_bytes:
            return
        self._share_of_bytes = peak_bytes
        self._take_share(peak_bytes, "the largest plain peak,")

    def _take_share(self, of_bytes: int, what: str, why: str = "") -> None:
        assert self._asked.share is not None
        size_bytes = int(self._asked.share * of_bytes)
        words = f"{self._asked} of {what} {show_bytes(of_bytes)}{why}"
        self.in_force = BudgetInForce(size_bytes, words)
        if not self._dry_run:
            self._swapper.limit(size_bytes)

    def _tried(self) -> bool:
        self._untried += 1
        return self._swapper.tried or self._untried > UNTRIED
