"""What the user asked for (`Goal`) and what is going to be done about it (`Plan`)."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from kilter.core.errors import UsageError
from kilter.core.label import Label
from kilter.core.setting import Setting
from kilter.core.units import MIB, parse_bytes, show_bytes

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


class ClocksMode(enum.StrEnum):
    """What is done about clocks in a run."""

    GOVERN = "govern"
    SHADOW = "shadow"
    """The whole loop runs, and sets nothing."""
    OBSERVE = "observe"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """How much device memory the job may take: a size, a share of what it takes without us, or
    (neither given) as much as the card has."""

    size_bytes: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if self.size_bytes is not None and self.share is not None:
            raise UsageError("a memory budget is a size or a share, not both")
        if self.size_bytes is not None and self.size_bytes < MIB:
            raise UsageError(f"{self.size_bytes} bytes are no memory budget: write 24GiB")
        if self.share is not None and not 0.0 < self.share < 1.0:
            raise UsageError(f"{self.share:.4g} of the peak is no memory budget: write 75%")

    @classmethod
    def parse(cls, text: str) -> MemoryBudget:
        """`24GiB`, `75%` or `auto`."""
        words = text.strip().lower()
        if words == "auto":
            return cls()
        if words.endswith("%"):
            try:
                share = float(words[:-1]) / 100
            except ValueError:
                raise UsageError(f"{text!r} is not a share: write 75%") from None
            if not 0.0 < share < 1.0:
                raise UsageError(f"{text!r} leaves nothing to do: write a share like 75%, or auto")
            return cls(share=share)
        try:
            size_bytes = parse_bytes(text)
        except UsageError:
            raise UsageError(
                f"{text!r} is not a memory budget: write 24GiB, 75% (of the peak without kilter) "
                "or auto (just fit the card)"
            ) from None
        if size_bytes < MIB:
            raise UsageError(
                f"{text!r} is less than 1 MiB: write a size with its unit, such as 24GiB"
            )
        return cls(size_bytes=size_bytes)

    def __str__(self) -> str:
        if self.size_bytes is not None:
            return show_bytes(self.size_bytes)
        return "auto" if self.share is None else f"{self.share * 100:g} %"


GRADIENTS = ("auto", "consume", "keep")
WEIGHTS = ("keep", "offload")
"""What a memory plan may do with gradients: keep them and say where more could be done, use them up
as they arrive, or keep them."""
RECOMPUTE = ("operations", "segments", "auto")
"""What a memory plan may run again: single operations, or calls of modules as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What the user asked for. Checked here, so that a planner can rely on it."""

    max_slowdown: float | None = None
    """The slowdown may be this fraction of the baseline's iteration time; None = clocks left
    alone."""
    memory_budget: MemoryBudget | None = None
    """It is None where memory is left alone."""
    host_memory_bytes: int | None = None
    """What each process may offload to the host's memory; None = not said."""
    objective: Objective = Objective.ENERGY
    error_probability: float = 0.05
    """The contract is broken with at most this probability."""
    price_of_time: float = 0.5
    """A setting has to save this many times as large a fraction of the energy as it is slower. 0:
    any saving within the bound is welcome. 0.5: the energy of a machine whose other parts draw half
    as much as its GPUs does not rise. 1: energy times time does not rise."""

    def __post_init__(self) -> None:
        s = self.max_slowdown
        if s is not None and not (isinstance(s, int | float) and 0.0 <= s < 1.0):  # nor NaN
            raise UsageError(
                f"max_slowdown={s!r} must be a fraction from 0 to below 1 (2 % is 0.02)"
            )
        if not 0.0 < self.error_probability < 0.5:
            raise UsageError(f"error_probability={self.error_probability} must be in (0, 0.5)")
        if not (math.isfinite(self.price_of_time) and self.price_of_time >= 0.0):
            raise UsageError(f"price_of_time={self.price_of_time} must be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Predicted effect of an action or a plan, relative to the default: 0.95 is 5 % less."""

    time_ratio: float
    energy_ratio: float | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetClocks:
    setting: Setting
    effect: Effect
    """The whole plan has it: settings of several role groups are judged together."""
    reason: str
    role: str = ""
    """It is for this role group; for all ranks if empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveData:
    """What leaves the device in a pass, when it comes back, and what is recomputed.

    Numbers are those of the trace's memory: intervals and operations.
    """

    budget_bytes: int
    min_bytes: int
    """Smaller data are left alone."""
    link: tuple[float, float, float, float]
    """It has bytes per second to the host, to the device, and both at once; and latency in
    seconds."""
    moves: tuple[tuple[int, int, int], ...]
    """Each has the interval, the operation from which on its memory is free, and the operation at
    which its load starts."""
    recomputed: tuple[int, ...]
    """These intervals are recomputed before their use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Frozen list of actions. An empty list is a good plan: the default stands."""

    planner: str
    actions: tuple[SetClocks, ...]
    effect: Effect
    reason: str
    label: Label
    """Where the predicted effects come from."""
    memory: MoveData | None = None
    """The rest was planned on this memory schedule."""
