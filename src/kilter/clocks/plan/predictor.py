"""What time and power a job would have at every setting, from what is seen of it at one. Pure.

Two ensembles of regression trees (gradient boosting, as in GPOEO) say the logarithms of time and
power relative to the baseline. Their columns are named; those of the candidate's knobs come first
and are monotone: time never rises, and power never falls, with a clock or a limit. The trees are
fitted elsewhere (`app/learning`, with scikit-learn) and come from a file of plain numbers, which is
checked and evaluated here: a training process imports no scikit-learn, and nothing is unpickled.

A prediction is the mean with which the search begins, and nothing more: it orders the probes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kilter.clocks.plan.job import SEARCHED_KNOBS
from kilter.core.errors import FileError
from kilter.core.label import Label
from kilter.core.past_run import Features
from kilter.core.setting import Setting

KNOB_COLUMNS = ("log_sm_clock_ratio", "log_memory_clock_ratio", "log_power_limit_ratio")
"""They are a candidate's over the reference's, in the order of `SEARCHED_KNOBS`."""
JOB_COLUMNS = (
    "power_w",
    "power_of_limit",
    "reference_sm_clock_hz",
    "reference_memory_clock_hz",
    "sm_utilisation",
    "memory_utilisation",
    "flop_per_byte",
    "flop_per_s",
    "bytes_per_s",
    "throttled",
    "kernels_per_s",
    "host_gap",
    "exposed_communication",
)
"""They are the job's at the reference; NaN where a value is not known."""
PREDICTOR_COLUMNS = (*KNOB_COLUMNS, *JOB_COLUMNS)
MOST_NODES = 2_000_000
WORTH_USING = 0.8
"""A model is used if on workloads that it has not seen it is wrong by at most this share of what
the slopes without a model are wrong by, in time and in energy. A search that believes a bad model
does not try what is good: on one table of 15 kernels that cost half of the saving (replayed)."""


def row_of(setting: Setting, reference: Setting, features: Features) -> list[float]:
    """The columns of one candidate. A knob that is not set, or that the device does not have, is as
    in the reference."""
    row = []
    for knob in SEARCHED_KNOBS:
        value, own = getattr(setting, knob), getattr(reference, knob)
        row.append(math.log(value / own) if value and own else 0.0)
    limit_w, power_w = reference.power_limit_w, features.power_w
    flop_per_s, bytes_per_s = features.flop_per_s, features.bytes_per_s
    job = (
        power_w,
        power_w / limit_w if power_w and limit_w else None,
        reference.sm_clock_hz,
        reference.memory_clock_hz,
        features.sm_utilisation,
        features.memory_utilisation,
        flop_per_s / bytes_per_s if flop_per_s and bytes_per_s else None,
        flop_per_s,
        bytes_per_s,
        features.throttled,
        features.kernels_per_s,
        features.host_gap,
        features.exposed_communication,
    )
    return [*row, *(math.nan if value is None else value for value in job)]


class Tree(msgspec.Struct, frozen=True):
    """A regression tree, column by column. Node 0 is its root; children come after their parent."""

    column: tuple[int, ...]
    threshold: tuple[float, ...]
    """Values up to this go left."""
    missing_left: tuple[bool, ...]
    left: tuple[int, ...]
    """The node is a leaf if this is 0."""
    right: tuple[int, ...]
    value: tuple[float, ...]
    """A leaf predicts this."""

    def flaw(self, columns: int) -> str | None:
        """What makes this no tree; None if it is one."""
        n = len(self.column)
        if n == 0 or {len(part) for part in self.parts} != {n}:
            return "a tree whose columns differ in length"
        for node in range(n):
            leaf = self.left[node] == 0
            below = node < self.left[node] < n and node < self.right[node] < n
            if not (leaf or (below and 0 <= self.column[node] < columns)):
                return f"a tree whose node {node} leads nowhere"
        return None

    @property
    def parts(self) -> tuple[Sequence[float], ...]:
        return self.column, self.threshold, self.missing_left, self.left, self.right, self.value

    def predict(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """(n,) values of the leaves that the rows of `x` (n, columns) fall into."""
        column, left, right = np.array(self.column), np.array(self.left), np.array(self.right)
        threshold, missing_left = np.array(self.threshold), np.array(self.missing_left)
        at = np.zeros(len(x), dtype=int)
        while (inside := left[at] != 0).any():
            values = x[np.arange(len(x)), column[at]]
            goes_left = np.where(np.isnan(values), missing_left[at], values <= threshold[at])
            at = np.where(inside, np.where(goes_left, left[at], right[at]), at)
        result: NDArray[np.float64] = np.array(self.value)[at]
        return result


class Ensemble(msgspec.Struct, frozen=True, kw_only=True):
    """The sum of some trees and a constant."""

    constant: float
    trees: tuple[Tree, ...]

    def predict(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """(n,) of the rows of `x`."""
        total = np.full(len(x), self.constant)
        for tree in self.trees:
            total += tree.predict(x)
        return total


class LearningError(msgspec.Struct, frozen=True, kw_only=True):
    """Mean absolute errors of relative time and relative energy on what was left out of a fit,
    each as a fraction, and those of the slopes that are believed without a model."""

    left_out: Literal["workload", "gpu"]
    groups: int
    """How many were left out in turn."""
    time: float
    energy: float
    time_without: float
    energy_without: float


class Predictor(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted model, as its file holds it."""

    columns: tuple[str, ...]
    log_time: Ensemble
    log_power: Ensemble
    label: Label
    sources: tuple[str, ...]
    workloads: int
    rows: int
    errors: tuple[LearningError, ...]
    schema: Literal["kilter.predictor/1"] = "kilter.predictor/1"

    @property
    def why_not_used(self) -> str | None:
        """Why a search is better off without this model; None if it is not."""
        errors = next((error for error in self.errors if error.left_out == "workload"), None)
        if errors is None:
            return "its errors on workloads that it has not seen are not known"
        time, energy = errors.time / errors.time_without, errors.energy / errors.energy_without
        if max(time, energy) <= WORTH_USING:
            return None
        return (
            f"on workloads that it has not seen its errors are {time:.0%} (time) and {energy:.0%} "
            f"(energy) of those without a model; it is used up to {WORTH_USING:.0%}"
        )

    def expected(
        self, candidates: Sequence[Setting], reference: Setting, features: Features
    ) -> Mapping[Setting, tuple[float, float]]:
        """Log time and log power ratios of each candidate to the baseline. At the baseline itself
        both are 0: what the trees say of it is taken off everywhere."""
        x = np.array([row_of(s, reference, features) for s in (reference, *candidates)])
        times, powers = self.log_time.predict(x), self.log_power.predict(x)
        times, powers = times[1:] - times[0], powers[1:] - powers[0]
        return {
            setting: (float(time), float(power))
            for setting, time, power in zip(candidates, times, powers, strict=True)
        }


_PREDICTOR = msgspec.json.Decoder(Predictor)


def decode_predictor(raw: bytes, where: str) -> Predictor:
    """The model in the bytes of a file; `FileError` for anything else."""
    try:
        found = _PREDICTOR.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(
            f"{where}: not a predictor of kilter ({error}); write one with kilter learn --out"
        ) from error
    trees = (*found.log_time.trees, *found.log_power.trees)
    flaw = next(
        (flaw for tree in trees if (flaw := tree.flaw(len(PREDICTOR_COLUMNS))) is not None), None
    )
    if found.columns != PREDICTOR_COLUMNS:
        flaw = "fitted to other columns than this kilter has"
    elif sum(len(tree.column) for tree in trees) > MOST_NODES:
        flaw = "too large"
    if flaw is not None:
        raise FileError(f"{where}: {flaw}; fit it again with kilter learn --out")
    return found
