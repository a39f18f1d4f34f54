"""What `--recompute auto` has chosen, kept for the next run of the same job.

It is a row of the user's history, which rank 0 alone reads and writes, in the session's thread.
What is wrong with the history is said in one line of the summary, and the job compares the ways.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import msgspec

from kilter import __version__
from kilter.controller import Run
from kilter.core.errors import FileError
from kilter.core.history import History
from kilter.core.signature import command_of, signature
from kilter.memory.kept_calls import KeptCalls


class RecomputeWay(Enum):
    """How tensors are recomputed."""

    CALLS = "calls of modules"
    OWN = "the model's own checkpointing"
    OPERATIONS = "single operations"


class KeptRecompute(msgspec.Struct, frozen=True, kw_only=True):
    """What one run has chosen."""

    day: str
    """The run chose on this day."""
    way: RecomputeWay
    models: str
    """These models have checkpointing of their own."""
    events: str
    """The largest pass with everything kept has this fingerprint."""
    share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
    """Their own checkpointing covers this share of the models' blocks."""
    each_s: Annotated[float, msgspec.Meta(ge=0.0)]
    """Plans count so much of the host's time for each tensor recomputed alone or offloaded."""
    calls: tuple[KeptCalls, ...] = ()
    """These calls were chosen, for each kind of pass."""


class RecomputeHistory:
    """Of the job that `run` runs, in the history at `file`; None: none is kept. To be made before
    the script may change its directory."""

    def __init__(
        self, run: Run, file: Path | None, command: Sequence[str], asked: Sequence[str]
    ) -> None:
        """`asked` are the options, besides the budget, that say what may be moved, and how."""
        self._run = run
        self._history = None if file is None or run.ranks.rank != 0 else History(file)
        self._job = *command_of(command), *asked
        self.last: KeptRecompute | None = None
        """What an earlier run has chosen, or this one."""
        self.known = self._history is None
        """`last` was looked up."""
        self._chosen: KeptRecompute | None = None
        """What is to be kept."""

    def keep(self, chosen: KeptRecompute) -> None:
        """At the next tick, or at the end."""
        self._chosen = chosen

    def tick(self) -> None:
        """Once torch is imported: look up what is kept, write what is to be."""
        if self._history is None:
            return
        chosen = self._chosen
        try:
            if not self.known:
                self.last = self._read(self._history)
            elif chosen is not None and chosen != self.last:
                record = msgspec.json.encode(chosen).decode()
                self._history.keep_memory(self._signature, record)
                self.last = chosen
        except FileError as error:
            self._run.log.refuse("keeping the history of this job", str(error))
            self._history = None
        self.known = True

    def _read(self, history: History) -> KeptRecompute | None:
        record = history.memory(self._signature)
        try:
            return None if record is None else msgspec.json.decode(record, type=KeptRecompute)
        except msgspec.MsgspecError as error:
            raise FileError(
                f"{history.path}: the memory plans of this job are not readable ({error})"
            ) from error

    @property
    def _signature(self) -> str:
        run = self._run
        return signature(
            device=f"{run.info.name}, driver {run.info.driver}, {run.info.label.value}",
            max_slowdown=run.goal.max_slowdown or 0.0,
            program=(
                *self._job,
                f"{run.ranks.world_size} ranks",
                f"memory budget {run.goal.memory_budget}",
                f"torch {sys.modules['torch'].__version__}, kilter {__version__}",
            ),
        )
