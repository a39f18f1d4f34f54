"""Fits the predictor of time and power (`clocks/plan/predictor`) to tables and to governed runs.

Only here scikit-learn is imported (the extra `learn`), in a process of its own: `kilter learn`, or
a benchmark. What a training process gets is a file of numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kilter.clocks.plan.job import POWER_PRIORS, SEARCHED_KNOBS, TIME_PRIORS
from kilter.clocks.plan.predictor import (
    KNOB_COLUMNS,
    PREDICTOR_COLUMNS,
    Ensemble,
    LearningError,
    Predictor,
    Tree,
    row_of,
)
from kilter.core.errors import UsageError
from kilter.core.label import Label
from kilter.core.past_run import Features, PastRun
from kilter.core.setting import Setting
from kilter.device.sim.replay import RecordedWorkload
from kilter.model.curve import Prior

MOST_FOLDS = 40
"""More workloads than this are left out several at a time."""
LEAST_POINTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPoint:
    """One setting of one workload, and what it did relative to the baseline."""

    gpu: str
    workload: str
    row: tuple[float, ...]
    """It has the columns of the predictor."""
    log_time: float
    log_power: float

    @property
    def log_energy(self) -> float:
        return self.log_time + self.log_power


def reference_of(workload: RecordedWorkload) -> Setting:
    """The default of a table; an unlocked knob counts as the highest value in the table."""
    found = workload.default.setting

    def top(knob: str) -> float | None:
        values = [v for row in workload.rows if (v := getattr(row.setting, knob)) is not None]
        return max(values, default=None)

    return Setting(**{knob: getattr(found, knob) or top(knob) for knob in SEARCHED_KNOBS})


def features_of(workload: RecordedWorkload) -> Features:
    """What a table says of a job at its default."""
    default = workload.default
    return Features(
        power_w=default.power_w,
        flop_per_s=None if default.flops is None else default.flops / default.time_s,
        bytes_per_s=None if default.bytes_moved is None else default.bytes_moved / default.time_s,
    )


def points_of_table(workloads: Iterable[RecordedWorkload]) -> Iterator[TrainingPoint]:
    """Every row but the default of every workload."""
    for workload in workloads:
        default = workload.default
        reference = reference_of(workload)
        features = features_of(workload)
        for row in workload.rows:
            if row is not default:
                time = math.log(row.time_s / default.time_s)
                yield TrainingPoint(
                    gpu=workload.gpu,
                    workload=workload.name,
                    row=tuple(row_of(row.setting, reference, features)),
                    log_time=time,
                    log_power=math.log(row.energy_j / default.energy_j) - time,
                )


def points_of_runs(runs: Iterable[PastRun]) -> Iterator[TrainingPoint]:
    """Every setting that a governed run has compared with its baseline."""
    for run in runs:
        for seen in run.seen:
            yield TrainingPoint(
                gpu=run.gpu,
                workload=run.signature,
                row=tuple(row_of(seen.setting, run.reference, run.features)),
                log_time=seen.log_time,
                log_power=seen.log_energy - seen.log_time,
            )


def need_sklearn() -> None:
    """`UsageError` where the extra is not installed."""
    try:
        import sklearn.ensemble  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"fitting needs scikit-learn ({error}): pip install 'kilter[learn]'"
        ) from error


def fit(
    points: Sequence[TrainingPoint],
    *,
    label: Label,
    sources: Sequence[str],
    errors: Sequence[LearningError] = (),
) -> Predictor:
    """The predictor of these points."""
    log_time, log_power = _fit_both(points)
    return Predictor(
        columns=PREDICTOR_COLUMNS,
        log_time=_exported(log_time),
        log_power=_exported(log_power),
        label=label,
        sources=tuple(sources),
        workloads=len({(p.gpu, p.workload) for p in points}),
        rows=len(points),
        errors=tuple(errors),
    )


def errors_of(
    points: Sequence[TrainingPoint],
    progress: Callable[[str], None] = lambda line: None,
    *,
    folds: int = MOST_FOLDS,
) -> tuple[LearningError, ...]:
    """Of a model that has not seen the workload, and of one that has not seen the GPU; without
    those for which there is nothing to leave out."""
    found = []
    for left_out in ("workload", "gpu"):
        groups = _groups(points, left_out, folds)
        if len(groups) < 2:
            continue
        missed: list[tuple[float, float, float, float]] = []
        for number, (test, rest) in enumerate(groups, 1):
            progress(f"leaving out {left_out} {number} of {len(groups)} ...")
            log_time, log_power = _fit_both(rest)
            x = _matrix(test)
            times, powers = log_time.predict(x), log_power.predict(x)
            for point, time, power in zip(test, times, powers, strict=True):
                plain_time = _by_slopes(point, TIME_PRIORS)
                plain_power = _by_slopes(point, POWER_PRIORS)
                missed.append(
                    (
                        _relative(time, point.log_time),
                        _relative(time + power, point.log_energy),
                        _relative(plain_time, point.log_time),
                        _relative(plain_time + plain_power, point.log_energy),
                    )
                )
        means = [statistics.fmean(column) for column in zip(*missed, strict=True)]
        found.append(
            LearningError(
                left_out=left_out,
                groups=len(groups),
                time=means[0],
                energy=means[1],
                time_without=means[2],
                energy_without=means[3],
            )
        )
    return tuple(found)


def _groups(
    points: Sequence[TrainingPoint], left_out: Literal["workload", "gpu"], folds: int
) -> list[tuple[list[TrainingPoint], list[TrainingPoint]]]:
    """(what is left out, the rest), for each in turn. A workload is left out on all GPUs."""
    names = list(dict.fromkeys(getattr(point, left_out) for point in points))
    fold = {name: number % folds for number, name in enumerate(names)}
    parts = []
    for number in range(min(len(names), folds)):
        test = [p for p in points if fold[getattr(p, left_out)] == number]
        rest = [p for p in points if fold[getattr(p, left_out)] != number]
        if len(rest) >= LEAST_POINTS:
            parts.append((test, rest))
    return parts


def _fit_both(points: Sequence[TrainingPoint]) -> tuple[Any, Any]:
    from sklearn.ensemble import HistGradientBoostingRegressor
    from threadpoolctl import threadpool_limits

    if len(points) < LEAST_POINTS:
        raise UsageError(
            f"too few settings to learn from: {len(points)} of the {LEAST_POINTS} that are needed"
        )
    x = _matrix(points)
    x[:, np.isnan(x).all(axis=0)] = 0.0  # scikit-learn refuses a column of which nothing is known
    models = []
    for direction, target in (
        (-1, [p.log_time for p in points]),
        (1, [p.log_power for p in points]),
    ):
        constraint = [direction] * len(KNOB_COLUMNS)
        model = HistGradientBoostingRegressor(
            learning_rate=0.1,
            max_iter=150,
            max_leaf_nodes=15,
            min_samples_leaf=5,
            l2_regularization=1.0,
            monotonic_cst=constraint + [0] * (len(PREDICTOR_COLUMNS) - len(KNOB_COLUMNS)),
            early_stopping=False,
            random_state=0,
        )
        # Tables are small, and on a busy machine several threads wait for each other: 17 s of fits
        # by one thread were not over after 9 minutes by two.
        with threadpool_limits(1):
            models.append(model.fit(x, np.array(target)))
    return models[0], models[1]


def _exported(model: Any) -> Ensemble:
    """The trees of a fitted scikit-learn model; a test compares their predictions."""
    trees = []
    for (predictor,) in model._predictors:
        nodes = predictor.nodes
        leaf = nodes["is_leaf"].astype(bool)
        trees.append(
            Tree(
                column=tuple(int(v) for v in nodes["feature_idx"]),
                threshold=tuple(
                    0.0 if at_leaf else _finite(float(v))
                    for v, at_leaf in zip(nodes["num_threshold"], leaf, strict=True)
                ),
                missing_left=tuple(bool(v) for v in nodes["missing_go_to_left"]),
                left=tuple(
                    0 if at_leaf else int(v) for v, at_leaf in zip(nodes["left"], leaf, strict=True)
                ),
                right=tuple(
                    0 if at_leaf else int(v)
                    for v, at_leaf in zip(nodes["right"], leaf, strict=True)
                ),
                value=tuple(float(v) for v in nodes["value"]),
            )
        )
    return Ensemble(constant=float(model._baseline_prediction.item()), trees=tuple(trees))


def _finite(threshold: float) -> float:
    """JSON has no infinity, which is the threshold between known and missing values."""
    return threshold if math.isfinite(threshold) else math.copysign(1e300, threshold)


def _matrix(points: Sequence[TrainingPoint]) -> Any:
    return np.array([point.row for point in points])


def _by_slopes(point: TrainingPoint, priors: Sequence[Prior]) -> float:
    return sum(prior.slope * x for prior, x in zip(priors, point.row, strict=False))


def _relative(predicted: float, true: float) -> float:
    """Absolute error of a ratio, as a fraction of the true one."""
    return abs(math.expm1(predicted - true))
