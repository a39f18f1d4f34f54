"""What one iteration of a job is made of: `Operation`, `Datum`, `IterationTrace`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kilter.core.label import Label


class Kind(enum.Enum):
    """What an operation does in the iteration."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    DATA_WAIT = "data_wait"
    COPY = "copy"
    COLLECTIVE = "collective"
    GAP = "gap"
    """The device has nothing to do, for none of the reasons above."""
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The smallest piece of an iteration that a decision can be tied to.

    `duration_s` is busy time on the timeline that the trace names (the GPU's, or the host's), not
    counting other operations that ran beside it.
    """

    name: str
    """It is the qualified module name, the optimizer class, or the framework's name of the
    operation."""
    kind: Kind
    start_s: float
    """The iteration begins at 0."""
    duration_s: float
    flops: float | None = None
    bytes_moved: float | None = None
    """It is bytes read plus bytes written, each tensor once per kernel or framework operation."""
    kernels: int = 1
    """It consists of so many device kernels (on a host timeline: framework operations)."""
    stream: int = 0
    reads: tuple[int, ...] = ()
    """They are indices into `IterationTrace.data`."""
    writes: tuple[int, ...] = ()
    level_bytes: int | None = None
    """At most so much device memory is in use during it, with all data kept; None if not
    observed."""

    @property
    def intensity(self) -> float | None:
        """Arithmetic intensity in FLOP per byte moved."""
        if not self.flops or not self.bytes_moved:
            return None
        return self.flops / self.bytes_moved


MAX_DURATION_S = 86_400.0
"""An iteration, and so an operation, takes at most a day."""
MAX_KERNELS = 10**7
"""One operation has at most so many; a whole iteration has some ten thousand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """Required data: one tensor storage that operations need, views and ties resolved."""

    name: str
    kind: str
    """It is `input`, `weight`, `feature_map`, `gradient` or `optimizer_state`."""
    size_bytes: int
    first_use: int
    """The operation with this index uses it first; for data that exists before the iteration it is
    -1."""
    last_use: int
    producer: int | None = None
    recompute_s: float | None = None
    """It takes this time, measured, to make it again from `sources`, bit for bit; None: not known
    to be so."""
    sources: tuple[int, ...] = ()
    """This needs the data with these indices on the device."""
    together: int = 0
    """It stands for so many tensors, which the call of a module makes together; 0: it is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFeatures:
    """How an iteration uses its GPU, whatever its length."""

    kernels_per_s: float
    """It counts kernels and copies."""
    host_gap: float
    """In this share of the iteration the GPU has nothing to do."""
    exposed_communication: float
    """In this share of the iteration collectives run and nothing else."""
    flop_per_byte: float | None
    label: Label


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationTrace:
    """The operations of one repeated iteration, in order of their start."""

    iteration_s: float
    operations: tuple[Operation, ...]
    data: tuple[Datum, ...] = ()
    timeline: str
    """It says whose clock the times are from: `gpu` or `host`."""
    device: str
    label: Label
    iterations: int = 1
    """How many iterations were averaged."""
    source: str = ""
    """It was taken from this command or file."""
    memory: IterationTrace | None = None
    """It is the same iteration with its required data, on the clock of saved tensors, where memory
    was observed as well."""

    def flaw(self) -> str | None:
        """What no iteration can be, in words: looked for where a trace comes from a file."""
        if not 0.0 <= self.iteration_s <= MAX_DURATION_S:
            return f"iteration_s is {self.iteration_s:g}"
        for i, op in enumerate(self.operations):
            for name in ("start_s", "duration_s", "flops", "bytes_moved", "level_bytes"):
                if (getattr(op, name) or 0.0) < 0.0:
                    return f"operation {i}: {name} is {getattr(op, name):g}"
            if op.duration_s > MAX_DURATION_S:
                return f"operation {i}: duration_s is {op.duration_s:g}"
            if not 0 <= op.kernels <= MAX_KERNELS:
                return f"operation {i}: kernels is {op.kernels}"
        for i, datum in enumerate(self.data):
            if datum.size_bytes < 0 or (datum.recompute_s or 0.0) < 0.0:
                return f"datum {i}: a size or a time below zero"
            if not -1 <= datum.first_use <= datum.last_use < len(self.operations):
                return f"datum {i}: in use from operation {datum.first_use} to {datum.last_use}"
        return None if self.memory is None else self.memory.flaw()

    @property
    def busy_s(self) -> float:
        """Sum of the operations' durations, without gaps and data waits."""
        idle = (Kind.GAP, Kind.DATA_WAIT)
        return sum(op.duration_s for op in self.operations if op.kind not in idle)

    @property
    def features(self) -> TraceFeatures | None:
        """None on the host's timeline, which does not show what the GPU does."""
        if self.timeline != "gpu" or self.iteration_s <= 0.0:
            return None
        idle = (Kind.GAP, Kind.DATA_WAIT)
        kernels = sum(op.kernels for op in self.operations if op.kind not in idle)
        exposed_s = sum(op.duration_s for op in self.operations if op.kind is Kind.COLLECTIVE)
        return TraceFeatures(
            kernels_per_s=kernels / self.iteration_s,
            host_gap=min(1.0, max(0.0, 1.0 - self.busy_s / self.iteration_s)),
            exposed_communication=min(1.0, exposed_s / self.iteration_s),
            flop_per_byte=self.flops / self.bytes_moved if self.bytes_moved else None,
            label=self.label,
        )

    @property
    def flops(self) -> float:
        return sum(op.flops or 0.0 for op in self.operations)

    @property
    def bytes_moved(self) -> float:
        return sum(op.bytes_moved or 0.0 for op in self.operations)
