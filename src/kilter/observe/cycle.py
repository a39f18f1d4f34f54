"""Which optimizer's step ends an iteration, learnt from the order of the steps. Pure."""

from __future__ import annotations

MAX_CYCLE = 64
"""An optimizer that rests longer than this many iterations is not part of their rhythm."""

_MAX_KNOWN = 4096


class Cycle:
    """Finds the end of iterations among the steps of one or more optimizers.

    The iteration is the whole cycle, so it ends with the step of the *leader*: the optimizer that
    steps least often, and among equals the one that joined last (it ends the first
    iteration). A GAN's critic that steps five times for one step of the generator thus gives one
    iteration per step of the generator. An optimizer that joins, or stepped once where the leader
    stepped twice or more, takes over; a leader that stays away for four times its usual rest is
    given up. `changed` counts these changes: an interval across one is no iteration.
    """

    __slots__ = ("_patience", "_seen", "_since", "_steps", "changed", "leader")

    def __init__(self) -> None:
        self.leader: int | None = None
        self.changed = 0
        self._steps = 0
        """Steps of the leader since it leads."""
        self._seen: dict[int, tuple[int, int]] = {}
        """Optimizer -> `changed` and `_steps` at its last step."""
        self._since: dict[int, int] = {}
        """Steps of the others since the leader's last one."""
        self._patience = 0
        """So many steps of another without one of the leader end its lead."""

    def step(self, key: int) -> bool:
        """`key` stepped. Is this the end of an iteration?"""
        if key == self.leader:
            if self._since:
                self._patience = max(8, 4 * max(self._since.values()))
                self._since.clear()
            self._steps += 1
            return True
        changed, steps = self._seen.get(key, (-1, 0))
        joins = changed < 0
        rested = self._steps - (steps if changed == self.changed else 0)
        self._seen[key] = self.changed, self._steps
        if (joins or rested >= 2) and rested <= MAX_CYCLE:
            return self._lead(key, rested)
        count = self._since[key] = self._since.get(key, 0) + 1
        return count > self._patience and self._lead(key, 1)

    def _lead(self, key: int, rested: int) -> bool:
        if self.leader is not None:
            self.changed += 1
            if len(self._seen) >= _MAX_KNOWN:
                self._seen.clear()
            self._seen[self.leader] = self.changed, 1
        self.leader = key
        self._since.clear()
        self._patience = max(8, 4 * rested)
        self._steps = 1
        return True
