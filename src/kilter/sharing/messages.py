"""What jobs and the daemon tell each other, and how it is signed."""

from __future__ import annotations

import hashlib
import hmac
from typing import TypeVar

import msgspec

from kilter.sharing.model import JobCost
from kilter.sharing.plan.snapshot import Ratios

T = TypeVar("T")


class RankStatus(msgspec.Struct, frozen=True):
    """Mean times of one rank over the steps since its samples last changed."""

    iteration: int
    samples: int
    steps: int
    step_s: float
    work_s: float
    """A step needs this from its beginning until the rank's last gradient is ready."""
    comm_s: float
    """From then it takes this until the gradients of all ranks are summed up; the wait for slower
    ones is in it, too."""
    reserved_bytes: int | None = None
    """The rank's process holds so much GPU memory for tensors."""
    free_bytes: int | None = None
    """Nobody holds so much GPU memory."""
    ended_s: float | None = None
    """When the iteration ended, on the machine's monotonic clock."""


class Facts(msgspec.Struct, frozen=True):
    """What does not change in a job."""

    world: int
    global_batch: int
    total_steps: int | None
    min_samples: int
    may_idle: bool
    note: str | None = None
    """What its user should know of its gradients."""


class Identity(msgspec.Struct, frozen=True):
    """How a job presents itself."""

    name: str
    gpus: tuple[int, ...]
    """Each rank has its GPU here."""
    alone_step_s: float | None = None
    """The user has given it."""
    max_slowdown: float | None = None
    """What lower clocks may cost the job, given by the user."""
    ratios: Ratios | None = None
    """They go by rank: to begin with, and in a report those in force."""
    probe: bool = False
    """Whether the user wants the run-alone time to be measured, while the other jobs pause."""


class JobStatus(Identity, frozen=True, kw_only=True):
    """A job, as its rank 0 reports it."""

    number: int
    """It grows with every report: the heartbeat."""
    pid: int
    facts: Facts
    iteration: int
    elapsed_s: float
    ranks: tuple[RankStatus, ...]
    """They are in the order of their numbers."""


class RatioTarget(msgspec.Struct, frozen=True):
    """The ratio, by rank, that the daemon wants for a job."""

    number: int
    ratios: Ratios
    reason: str
    pause_s: float = 0.0
    """All ranks stand still for so long, or until the next target comes."""


class JobSummary(msgspec.Struct, frozen=True):
    """A job as `kilter share top` shows it."""

    name: str
    pid: int
    state: str
    iteration: int
    step_s: float | None
    slowdown: float | None
    alone_s: float | None
    alone_source: str | None
    ratios: Ratios | None
    """Each GPU of the machine has one."""
    cost: JobCost | None = None
    """It is as fitted so far."""
    note: str | None = None
    energy_j: float | None = None
    """It is the job's part of what the meters of its GPUs have counted."""


class Summary(msgspec.Struct, frozen=True):
    """The machine as `kilter share top` shows it."""

    beat: int
    pid: int
    policy: str
    period_s: float
    gpus: tuple[int, ...]
    utilisation: tuple[float, ...]
    jobs: tuple[JobSummary, ...]
    decisions: tuple[str, ...]
    energy_j: tuple[float | None, ...] = ()
    """What the meter of each GPU has counted since the daemon began."""
    free_bytes: tuple[int | None, ...] = ()
    """Nobody holds so much memory of each GPU."""
    clocks: str | None = None
    """What the clocks of the GPUs are, and why; None if nobody looks after them."""
    unshared_energy_j: float = 0.0
    """So much of that was used while no job had a process on the GPU."""


def signed(token: str, key: str, value: msgspec.Struct) -> bytes:
    """The value with a signature that holds for this key alone."""
    body = msgspec.json.encode(value)
    return _signature(token, key, body) + body


def verified(token: str, key: str, raw: bytes, kind: type[T]) -> T | None:
    """The value, or None if it was not signed with this token for this key."""
    signature, body = raw[:64], raw[64:]
    if not hmac.compare_digest(signature, _signature(token, key, body)):
        return None
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError:
        return None


def _signature(token: str, key: str, body: bytes) -> bytes:
    return (
        hmac.new(token.encode(), key.encode() + b"\0" + body, hashlib.sha256).hexdigest().encode()
    )
