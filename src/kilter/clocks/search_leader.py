"""Rank 0's part of a search: asks the governor, and judges what the ranks have seen of a block."""

from __future__ import annotations

from collections.abc import Callable, Generator

from kilter.clocks.block_messages import OrderNote, RankResult
from kilter.clocks.plan.governor import BlockOutcome, Order, Phase
from kilter.core.errors import DeviceError
from kilter.core.events import AnyEvent, Block, Decided
from kilter.core.pace import Pace
from kilter.core.setting import Setting, changes

LEAST_ITERATIONS = 5
"""A block has at least so many: its median has to survive an outlier or two."""
SENSOR_PERIODS = 20
"""A block lasts so many: a mean power from fewer readings is worth little."""
LEAST_BLOCK_S = 1.0
"""Settings change at most about once a second: faster switching disturbs collectives
(NVIDIA/nccl#1551)."""
MOST_ITERATIONS = 100_000
"""A block has at most so many; no more are kept."""
BLOCK_REPEATS = 2
"""How often a block may be done again before it counts as it is."""


class SearchLeader:
    """Executes the governor's coroutine `orders`, which is thrown a `DeviceError` when a rank
    cannot set."""

    def __init__(
        self,
        orders: Generator[Order, BlockOutcome, None],
        *,
        found: Setting,
        sensor_period_s: float,
        record: Callable[[AnyEvent], None],
        clock: Callable[[], float],
        given_up: bool,
    ) -> None:
        self._orders = orders
        self._found = found
        self._block_s = max(LEAST_BLOCK_S, SENSOR_PERIODS * sensor_period_s)
        self._record = record
        self._clock = clock
        self._given_up = given_up
        """Nothing is set any more, and the governor knows."""
        self._held_lines = HeldLines()
        self._repeats = 0
        """The present block was run again so many times."""
        self._iteration_s: float | None = None
        self._decided: tuple[str, Setting, str] | None = None
        """What was recorded last."""
        self.order: Order | None = None
        """It is being executed."""

    def first(self) -> OrderNote:
        return self._noted(next(self._orders))

    def conclude(
        self,
        result: RankResult,
        *,
        number: int,
        iterations: int,
        device_begin_s: float,
        device_end_s: float,
        rehearsed: bool,
    ) -> OrderNote:
        """All ranks have reported, `result` together: record the block, ask for the next order."""
        assert self.order is not None
        order = self.order
        outcome = BlockOutcome(iteration_s=result.iteration_s, energy_j=result.energy_j)
        refused = None if self._given_up else result.refused
        why_not = refused or result.why_not
        if order.phase is Phase.WARM or self._repeats >= BLOCK_REPEATS:
            why_not = refused
        self._iteration_s = outcome.iteration_s
        now_s, left_out = self._clock(), self._held_lines.left_out
        if self._held_lines.due(order, iterations, now_s):
            self._record(
                Block(
                    t_s=now_s,
                    number=number,
                    pair=order.pair,
                    phase=order.phase.value,
                    arm="baseline" if order.baseline else "candidate",
                    setting=order.setting,
                    iterations=iterations,
                    iteration_s=outcome.iteration_s,
                    energy_j=outcome.energy_j,
                    device_begin_s=device_begin_s,
                    device_end_s=device_end_s,
                    clean=why_not is None,
                    why_not=why_not,
                    rehearsed=rehearsed,
                    left_out=left_out,
                )
            )
        if refused:
            self._given_up = True
            order = self._orders.throw(DeviceError(refused))
        elif why_not is None:
            order = self._orders.send(outcome)
        self._repeats = 0 if why_not is None else self._repeats + 1
        return self._noted(order)

    def _noted(self, order: Order) -> OrderNote:
        """What the ranks are told to run next."""
        self.order = order
        state = (order.phase.value, order.setting, order.reason)
        if not order.baseline and state != self._decided:
            self._decided = state
            self._record(
                Decided(
                    t_s=self._clock(), state=state[0], setting=order.setting, reason=order.reason
                )
            )
        iterations = LEAST_ITERATIONS
        if self._iteration_s:
            iterations = max(iterations, round(self._block_s / self._iteration_s))
        return OrderNote(
            setting=changes(self._found, order.setting),
            roles={role: changes(self._found, s) for role, s in order.roles.items()},
            iterations=min(iterations, MOST_ITERATIONS),
        )


class HeldLines:
    """Which blocks have a line in the record: of a hold, which may last for weeks, fewer and fewer;
    of a pair both or none, whatever they have come to."""

    def __init__(self) -> None:
        self._alone, self._pairs = Pace(), Pace()
        self._pair: int | None = None
        self._pair_due = True
        self.left_out = 0
        """So many iterations since the last line have none."""

    def due(self, order: Order, iterations: int, now_s: float) -> bool:
        due = order.phase is not Phase.HOLD
        if not due and order.pair is None:
            due = self._alone.due(now_s)
        elif not due:
            if order.pair != self._pair:
                self._pair, self._pair_due = order.pair, self._pairs.due(now_s)
            due = self._pair_due
        self.left_out = 0 if due else self.left_out + iterations
        return due
