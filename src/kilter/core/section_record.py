"""What the search for the clocks of a job's communication sections has come to: `SectionsFound`.

Rank 0 tells the other ranks, the record of the run keeps it, and the next run of the same job reads
it from a file of its own.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Taken = Literal["sections", "whole job", "default"]


class SectionsFound(msgspec.Struct, frozen=True, kw_only=True):
    """Clocks by section and rank, and the evidence for them."""

    taken: Taken
    """It is `whole job` if one clock for the whole iteration is expected to save more, and is
    searched."""
    reason: str
    """It says in words why."""
    keys: tuple[str, ...] = ()
    """The clocks of these sections were searched."""
    depths: tuple[tuple[int, ...], ...] = ()
    """By section and rank it has places in the lists of clocks, from 1; 0 is the default."""
    clocks_hz: tuple[float | None, ...] = ()
    """The first one is the SMs' clock at depth 1, and so on. None: as found."""
    memory_clocks_hz: tuple[float | None, ...] = ()
    """The memory has these with them; None: as found. Empty: as found at every step."""
    sections_saving: float | None = None
    """The plan expected this saving before the search, of the job's energy."""
    whole_job_saving: float | None = None
    """One clock for the whole iteration is expected to save this, within the same bound."""
    blocks: int = 0
    """The search has taken so many blocks of iterations."""
    pairs: int = 0
    """So many pairs of blocks confirmed the whole; the ratios are over them."""
    time_ratio: float | None = None
    """The slowest rank's step takes so much of its time at the default."""
    time_ratio_ci95: tuple[float, float] | None = None
    energy_ratio: float | None = None
    """All ranks together use this part of the energy at the default."""
    known: bool = False
    """The clocks were those of an earlier run, and only confirmed."""
    rehearsed: bool = False
    """The search went on with simulated ranks after the script had ended."""

    @property
    def held(self) -> bool:
        """Some section of some rank has a lower clock."""
        return any(depth for row in self.depths for depth in row)
