"""What the user asked for (`Goal`) and what is going to be done about it (`Plan`)."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from kilter.core.errors import UsageError
from kilter.core.label import Label
from kilter.core.setting import Setting

FREE_MARGIN = 0.005
"""What "no slowdown" (a bound of 0) means: no finite test can prove exactly zero."""


class Objective(enum.Enum):
    """What is minimised under the contract: E, E*T or E*T^2 of one iteration."""

    ENERGY = "energy"
    EDP = "edp"
    ED2P = "ed2p"

    @property
    def time_exponent(self) -> int:
        return {Objective.ENERGY: 0, Objective.EDP: 1, Objective.ED2P: 2}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What the user asked for. Checked here, so that a planner can rely on it."""

    max_slowdown: float | None = None
    """Allowed slowdown as a fraction of the baseline's iteration time; None = clocks left alone."""
    memory_budget_bytes: int | None = None
    objective: Objective = Objective.ENERGY
    error_probability: float = 0.05
    """The contract is broken with at most this probability."""

    def __post_init__(self) -> None:
        s = self.max_slowdown
        if s is not None and not (math.isfinite(s) and 0.0 <= s < 1.0):
            raise UsageError(f"max_slowdown={s} must be a fraction from 0 to below 1 (2 % is 0.02)")
        if self.memory_budget_bytes is not None and self.memory_budget_bytes <= 0:
            raise UsageError(f"memory_budget_bytes={self.memory_budget_bytes} must be positive")
        if not 0.0 < self.error_probability < 0.5:
            raise UsageError(f"error_probability={self.error_probability} must be in (0, 0.5)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Predicted effect of an action or a plan, relative to the default: 0.95 is 5 % less."""

    time_ratio: float
    energy_ratio: float | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetClocks:
    """Hold this setting from one operation on (0 = the whole iteration)."""

    setting: Setting
    from_operation: int = 0
    effect: Effect
    reason: str


Action = SetClocks
"""The union of everything a plan can contain; a new kind of action is added here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Frozen list of actions. An empty list is a good plan: the default stands."""

    planner: str
    actions: tuple[Action, ...]
    effect: Effect
    reason: str
    label: Label
    """Where the predicted effects come from."""
