"""The history as one run uses it: what an earlier run of its job has chosen, and what it adds.

Nothing here may cost the training anything: what is wrong with the history is said in one line of
the summary, and the job is searched like a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kilter.controller import Run
from kilter.core.codec import read
from kilter.core.errors import FileError
from kilter.core.history import History
from kilter.core.past_run import KnownSetting, PastRun
from kilter.core.signature import command_of, signature

if TYPE_CHECKING:
    from kilter.clocks.conductor import GovernorProgram
    from kilter.clocks.plan.predictor import Predictor


class JobHistory:
    """Of the job that `run` runs, in the history at `file`; None: no history is kept. `predictor`
    is a file of `kilter learn`. To be made before the script may change its directory."""

    def __init__(
        self, run: Run, file: Path | None, predictor: Path | None, command: Sequence[str]
    ) -> None:
        self._run = run
        self._predictor = predictor
        self._history = None if file is None else History(file)
        self._command = command_of(command)
        self._known: KnownSetting | None = None
        self._began = datetime.now().astimezone().isoformat(timespec="seconds")

    def known(self) -> KnownSetting | None:
        """What the last run of this job has chosen; None if there is nothing to confirm."""
        if self._history is None:
            return None
        try:
            last = self._history.last(self._signature, self._run.info.label)
        except FileError as error:
            self._refuse(error)
            return None
        self._known = None if last is None else last.known
        return self._known

    @property
    def predicts(self) -> bool:
        """There is a file of a predictor, which is better with a trace."""
        return self._predictor is not None

    def predictor(self) -> Predictor | None:
        """What orders the first probes of a search; None without a file that can be used."""
        if self._predictor is None:
            return None
        from kilter.clocks.plan.predictor import decode_predictor

        try:
            found = decode_predictor(read(self._predictor), str(self._predictor))
            why_not = found.why_not_used and f"{self._predictor}: {found.why_not_used}"
        except FileError as error:
            why_not = str(error)
        if why_not is None:
            return found
        self._run.log.refuse("ordering the probes by the predictor", why_not)
        return None

    def remember(self, program: GovernorProgram, *, held: bool) -> None:
        """Add what this run has compared, and what it chose: nothing is chosen before the setting
        is held. What was compared of role groups that differ is not one setting, and not kept."""
        space, book = program.space, program.book
        if self._history is None or space is None or not book.seen or program.choice.roles:
            return
        run = self._run
        spread = book.spread
        if self._known is not None and self._known.setting == program.choice.setting:
            spread = self._known.spread_with(*spread)
        time_sd, energy_sd, freedom = spread
        past = PastRun(
            signature=self._signature,
            label=run.info.label,
            gpu=run.info.name,
            driver=run.info.driver,
            command=self._command,
            world_size=run.ranks.world_size,
            began=self._began,
            max_slowdown=run.goal.max_slowdown or 0.0,
            objective=run.goal.objective.value,
            reference=space.reference,
            features=book.features,
            seen=book.seen,
            chosen=program.choice.setting if held else None,
            found=space.found,
            time_sd=time_sd,
            energy_sd=energy_sd,
            freedom=freedom,
        )
        try:
            self._history.add(past)
        except FileError as error:
            self._refuse(error)

    @property
    def _signature(self) -> str:
        run = self._run
        return signature(
            device=f"{run.info.name}, driver {run.info.driver}",
            max_slowdown=run.goal.max_slowdown or 0.0,
            program=(
                *self._command,
                f"{run.ranks.world_size} ranks",
                f"objective {run.goal.objective.value}, time at {run.goal.price_of_time:g}",
                f"memory budget {run.goal.memory_budget}",
                f"found {run.lease.found}",
            ),
        )

    def _refuse(self, error: FileError) -> None:
        self._run.log.refuse("keeping the history of this job", str(error))
