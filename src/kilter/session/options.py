"""What the user asked of one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kilter.core.plan import Goal

REHEARSE_S = 5.0
"""A rehearsal may take so many real seconds after the script, unless the user asks for more."""

HISTORY_AUTO, HISTORY_OFF = "auto", "off"
"""They stand in place of the history's file: the user's own, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of `kilter run` and arguments of `kilter.govern`, parsed and checked: an attribute
    each."""

    goal: Goal
    device: str = "auto"
    dry_run: bool = False
    out: Path | None = None
    command: tuple[str, ...] = ()
    json_summary: bool = False
    gradients: str = "auto"
    """It is one of `GRADIENTS`."""
    weights: str = "keep"
    """It is one of `WEIGHTS`."""
    recompute: str | None = None
    """It is one of `RECOMPUTE`; None: `auto` on a GPU, else `operations`."""
    strict: bool = False
    """It makes a memory budget that is not kept a failure of the run."""
    trace: bool = False
    """Record the operations of an iteration also where nothing but the report needs them."""
    sections: bool | None = None
    """It has clocks set inside the iteration, for communication sections, in place of the whole
    job's; None: where they pay more."""
    operations: bool = False
    """It has clocks set inside the iteration, for stretches of unit operations, where they pay more
    than the whole job's."""
    rehearse_s: float | None = None
    """A rehearsal after the script may take so many real seconds; None: `REHEARSE_S`."""
    history: str = HISTORY_AUTO
    """It is the file of earlier runs, `HISTORY_AUTO` or `HISTORY_OFF`."""
    predictor: Path | None = None
    """It is a file of `kilter learn`, which orders the first probes."""
    config: Path | None = None
    """Some of these were read from this file."""

    @property
    def rehearsal_s(self) -> float:
        return REHEARSE_S if self.rehearse_s is None else self.rehearse_s
