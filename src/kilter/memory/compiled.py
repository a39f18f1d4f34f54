"""Jobs that use `torch.compile`: a memory budget by way of the compiler's own planner.

Within a compiled region no tensor can be evicted from outside, but the compiler itself keeps less
for backward if it is given a fraction (`activation_memory_budget`). The fraction that meets a size
is found by measuring: a fraction is set, everything is compiled anew, and the peak of the next
passes is taken. The engine plans for what the fraction leaves above the budget.

At the ends of iterations, in the program's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kilter.core.units import show_bytes, show_count
from kilter.memory import messages
from kilter.memory.plan.fraction import Tried, best, next_fraction
from kilter.observe import torch_internals
from kilter.observe.torch_internals.partitioner import Partitioner

if TYPE_CHECKING:
    import torch

    from kilter.memory.engine import Swapper
    from kilter.memory.engine.pass_record import PassRecord
    from kilter.memory.plan_log import PlanLog
    from kilter.session.fence import Fence

OF_REGIONS = ("input ", "CompiledFunction")
"""How the names of tensors begin that a compiled region has made: it is one node to autograd."""
SEEN_PASSES = 2
"""So many passes are seen under one fraction, after the pass in which the regions were compiled."""


class CompiledRegions:
    """Looks for the fraction, once in a job."""

    def __init__(
        self,
        swapper: Swapper,
        log: PlanLog,
        fence: Fence,
        now_s: Callable[[], float],
        device: torch.device,
        *,
        within_bytes: int,
    ) -> None:
        """`within_bytes` is what the job may take while peaks are measured."""
        self._swapper = swapper
        self._log = log
        self._now_s = now_s
        self._device = device
        self._within_bytes = within_bytes
        self._partitioner = Partitioner(fence.ask)
        self._tried: list[Tried] = []
        """The first is the plain one. Empty: not begun."""
        self._saved_bytes = 0
        self._fraction = 1.0
        """It is in force."""
        self._compiling = False
        """In the iteration that ends next everything is compiled anew."""
        self._found = False
        """The fraction is the one to stay."""
        self._over = False
        self._last_s: float | None = None
        """When the last iteration ended."""
        self._usual_s = 0.0
        """The last iteration without compiling took this."""
        self._compile_s: list[float] = []

    @property
    def searching(self) -> bool:
        """Peaks are being measured: nothing else may move."""
        return bool(self._tried) and not self._over

    @property
    def plain_peak_bytes(self) -> int:
        """With everything kept that the compiler keeps by itself; 0: nothing was looked for."""
        return self._tried[0].peak_bytes if self._tried else 0

    @property
    def words(self) -> str:
        """The result in words; empty where no fraction was looked for."""
        if not self._tried:
            return ""
        peaks = ", ".join(
            f"{show_bytes(one.peak_bytes)} at {one.fraction:g}" for one in self._tried
        )
        found = "is being looked for" if self.searching else f"{self._fraction:g} is in force"
        return (
            f"activation_memory_budget of torch.compile: {found}; peaks measured: {peaks}; "
            f"compiled {show_count(len(self._compile_s), 'more time')}, in about "
            f"{sum(self._compile_s):.0f} s"
        )

    def iteration_ended(
        self, budget_bytes: int | None, plain: Callable[[], PassRecord | None]
    ) -> None:
        """`plain` gives the largest pass with everything kept, once that is known."""
        now_s = self._now_s()
        lasted_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        if self._over or budget_bytes is None:
            return
        if self._compiling:
            self._compiled(lasted_s)
        else:
            self._usual_s = lasted_s
            if self._tried:
                self._measure(budget_bytes)
            elif torch_internals.anything_compiled():
                self._begin(budget_bytes, plain())
        if self._found and not self._compiling:
            self._over = True
            self._swapper.limit(budget_bytes)

    def close(self) -> None:
        """What is compiled from here on is the program's."""
        self._partitioner.leave()

    def _begin(self, budget_bytes: int, plain: PassRecord | None) -> None:
        if plain is None or plain.peak_bytes <= budget_bytes:
            return
        self._saved_bytes = sum(datum.size_bytes for datum in plain.data)
        in_regions = [d for d in plain.data if d.name.partition(": ")[2].startswith(OF_REGIONS)]
        if sum(datum.size_bytes for datum in in_regions) < self._saved_bytes / 2:
            self._over = True
            return
        from kilter.memory.engine.weights import graphs_may_exist

        # A CUDA graph keeps addresses, which compiling anew would take away.
        graphs = graphs_may_exist(self._device)
        refused = "there may be CUDA graphs" if graphs else self._partitioner.enter()
        if refused:
            self._over = True
            self._log.refuse_new((messages.fraction_stays(refused),))
            return
        self._tried.append(Tried(1.0, plain.peak_bytes))
        self._log.tell(messages.LOOKS_FOR_FRACTION)
        self._go_on(budget_bytes)

    def _measure(self, budget_bytes: int) -> None:
        """The peak of a pass with everything kept, once it has come again."""
        records = self._swapper.records()
        if any(record.passes >= SEEN_PASSES for record in records):
            peak_bytes = max(record.peak_bytes for record in records)
            self._tried.append(Tried(self._fraction, peak_bytes))
            self._go_on(budget_bytes)

    def _go_on(self, budget_bytes: int) -> None:
        plain, *tried = self._tried
        fraction = next_fraction(
            plain, tried, saved_bytes=self._saved_bytes, budget_bytes=budget_bytes
        )
        self._found = fraction is None
        self._set(best(self._tried, budget_bytes).fraction if fraction is None else fraction)

    def _set(self, fraction: float) -> None:
        """From the next iteration on. Records of passes under another fraction do not count."""
        swapper = self._swapper
        if fraction != self._fraction:
            self._partitioner.set(fraction)
            self._fraction, self._compiling = fraction, True
        swapper.forget()
        swapper.limit(self._within_bytes)
        swapper.may_plan = False

    def _compiled(self, lasted_s: float) -> None:
        """The iteration is over in which everything was compiled."""
        self._compiling = False
        self._compile_s.append(max(0.0, lasted_s - self._usual_s))
        complete = self._partitioner.compiled()
        self._swapper.forget()  # what compiling itself took is no part of a pass
        if not complete and self._fraction < 1:
            self._found = True
            self._log.notice(messages.fraction_stays("not all could be compiled with another one"))
            self._set(1.0)
