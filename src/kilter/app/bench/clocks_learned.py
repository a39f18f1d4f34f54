"""Two policies of `kilter bench clocks` that have seen something before: the predictor's, fitted to
the other workloads of the same card, and that of a job that has run before, with other noise."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kilter.app.bench.driven import driven
from kilter.app.learning import (
    LEAST_POINTS,
    errors_of,
    features_of,
    fit,
    need_sklearn,
    points_of_table,
)
from kilter.clocks.plan.governor import Governor
from kilter.clocks.plan.job import Space
from kilter.clocks.plan.known import PairBook, RecurringGovernor
from kilter.clocks.plan.predictor import Predictor
from kilter.core.label import Label
from kilter.core.past_run import LEAST_FREEDOM, KnownSetting
from kilter.core.plan import Goal
from kilter.core.setting import Setting
from kilter.device.sim.replay import RecordedWorkload

if TYPE_CHECKING:
    from kilter.app.bench.clocks import Replay

FOLDS = 5
"""The other workloads are left out in so many folds to see whether the model is worth using."""
ANOTHER_SEED = 7_919
"""The earlier run of a job has noise of its own."""


def learned(
    run: Replay, space: Space, goal: Goal, seed: int, others: Sequence[RecordedWorkload]
) -> Setting:
    """The search, with its first probes ordered by what was learned from the other workloads."""
    features = features_of(run.workload)
    predictor = _fitted(tuple(others))
    expected = None
    if predictor is not None and predictor.why_not_used is None:
        expected = predictor.expected(space.candidates, space.reference, features)
    return _play(run, Governor(space, goal, seed=seed, expected=expected))


@functools.lru_cache(maxsize=1)
def _fitted(others: tuple[RecordedWorkload, ...]) -> Predictor | None:
    need_sklearn()
    points = list(points_of_table(others))
    if len(points) < LEAST_POINTS:
        return None
    errors = errors_of(points, folds=FOLDS)
    return fit(points, label=Label.REPLAYED, sources=("the other workloads",), errors=errors)


def recurring(run: Replay, space: Space, goal: Goal, seed: int) -> Setting:
    """A job that has run before; where its last run held the default, there is nothing to confirm
    and the search is done again."""
    earlier, book = Governor(space, goal, seed=seed + ANOTHER_SEED), PairBook()
    chosen = _play(run.again(ANOTHER_SEED), earlier, book)
    time_sd, energy_sd, freedom = book.spread
    if chosen == space.found or freedom < LEAST_FREEDOM:
        return _play(run, Governor(space, goal, seed=seed))
    known = KnownSetting(
        setting=chosen, time_sd=time_sd, energy_sd=energy_sd, freedom=freedom, began="1970-01-01"
    )
    return _play(run, RecurringGovernor(space, goal, known, seed=seed))


def _play(
    run: Replay, governor: Governor | RecurringGovernor, book: PairBook | None = None
) -> Setting:
    orders = governor.search() if book is None else book.note(governor.search())
    driven(orders, lambda order: run.block(order.setting))
    return governor.choice.setting
