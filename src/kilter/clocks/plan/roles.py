"""One decision per role group: ranks that do the same work step together, groups take turns.

The stages of a pipeline have different slack: what one can give away for nothing, another would
make all wait for. A group is searched while the others hold what was chosen for them; that search
only proposes. What counts is the joint test: all groups as chosen against all as found, in
interleaved pairs, by the time of the slowest rank and the energy of all. If it fails, the group
that costs most time goes back to the default, and the rest is tested again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Sequence
from typing import TypeVar

from kilter.clocks.plan.governor import BlockOutcome, Choice, Governor, Order, Phase
from kilter.clocks.plan.job import Space
from kilter.core.plan import Goal
from kilter.core.setting import Setting

MOST_ROLES = 8
"""More groups than this share one decision: taking turns would last too long."""

T = TypeVar("T")


class RoleGovernor:
    """Like `Governor`, for several groups of ranks with the same kind of device.

    `choice.roles` says what each group holds; `choice.setting` is that of the group that saves
    most, the rest of `choice` is about the whole job.
    """

    def __init__(self, roles: Sequence[str], space: Space, goal: Goal, *, seed: int = 0) -> None:
        self._roles = tuple(dict.fromkeys(roles))
        self._space = space
        self._goal = goal
        self._seed = seed
        self._chosen: dict[str, Choice] = {}
        self.choice = Choice(setting=space.found, reason="the default stands: nothing tried yet")

    def run(self) -> Generator[Order, BlockOutcome, None]:
        """Search and hold for as long as there are iterations."""
        while True:
            self._chosen.clear()
            for number, role in enumerate(self._roles):
                yield from self._propose(role, seed=self._seed + number)
            joint = yield from self._agree()
            drift = yield from self._all(joint.hold())
            found = self._space.found
            self.choice = Choice(setting=found, reason=f"the default stands: {drift}")

    def _propose(self, role: str, *, seed: int) -> Generator[Order, BlockOutcome, None]:
        """The search of one group, within what the groups before have left of the bound."""
        spent = sum(max(choice.log_time, 0.0) for choice in self._chosen.values())
        left = math.expm1(math.log1p(self._goal.max_slowdown or 0.0) - spent)
        goal = dataclasses.replace(self._goal, max_slowdown=max(left, 0.0))
        search = Governor(self._space, goal, seed=seed).search()
        others = self._held()
        outcome: BlockOutcome | None = None
        while True:
            try:
                order = search.send(outcome) if outcome else next(search)
            except StopIteration as end:
                if end.value.setting != self._space.found:
                    self._chosen[role] = end.value
                return
            # These pairs choose and do not judge; and with other groups at lower clocks already,
            # the default of this one is not that of the job.
            outcome = yield dataclasses.replace(
                order,
                phase=Phase.PROBE,
                baseline=order.baseline and not others,
                pair=None,
                reason=f"{role}: {order.reason}",
                roles={**others, role: order.setting},
            )

    def _agree(self) -> Generator[Order, BlockOutcome, Governor]:
        """The joint test, with fewer groups each time it fails."""
        while True:
            joint = Governor(self._joint_space(), self._goal, seed=self._seed)
            choice = yield from self._all(joint.search())
            held = self._held() if choice.setting != self._space.found else {}
            told = "".join(f"; {role}: {setting}" for role, setting in held.items())
            self.choice = dataclasses.replace(choice, roles=held, reason=choice.reason + told)
            if held or not self._chosen:
                return joint
            del self._chosen[max(self._chosen, key=lambda role: self._chosen[role].log_time)]

    def _joint_space(self) -> Space:
        """One candidate, which stands for all: the setting of the group that saves most."""
        best = min(self._chosen.values(), key=lambda choice: choice.log_energy, default=None)
        return dataclasses.replace(self._space, candidates=(best.setting,) if best else ())

    def _all(self, orders: Generator[Order, BlockOutcome, T]) -> Generator[Order, BlockOutcome, T]:
        """Orders for one setting, as orders for what all groups have chosen."""
        outcome: BlockOutcome | None = None
        while True:
            try:
                order = orders.send(outcome) if outcome else next(orders)
            except StopIteration as end:
                result: T = end.value
                return result
            roles = {} if order.baseline else self._held()
            outcome = yield dataclasses.replace(order, roles=roles)

    def _held(self) -> dict[str, Setting]:
        return {role: choice.setting for role, choice in self._chosen.items()}
