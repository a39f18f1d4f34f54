"""The operator's policy: who may set which knobs of which GPUs, in which ranges. Pure.

    longest-hold-s = 600           # no setting outlives a hanging job for longer

    [[allow]]
    users = ["alice", 1007]        # names or numbers; or groups; ["*"] is every user but root
    groups = ["ml"]
    gpus = ["*"]                   # UUIDs, or beginnings of them
    sm-clock-mhz = [600, 1980]     # a knob that is not named may not be set
    power-limit-w = [300, 700]
    gpus-at-once = 2

The first `[[allow]]` that names both the user and the GPU decides; without one nothing is allowed.
Root is a user like any other, and is only meant where `users` names it.
"""

from __future__ import annotations

import tomllib
from typing import Annotated

import msgspec

from kilter.core.daemon_protocol import Grant, Range
from kilter.core.errors import FileError
from kilter.core.reasons import Reason
from kilter.core.units import MHZ

ANY = "*"
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_Span = tuple[_Positive, _Positive]
_Count = Annotated[int, msgspec.Meta(ge=1, le=100_000)]


class AllowRule(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"
):
    """One `[[allow]]`."""

    users: tuple[str | int, ...] = ()
    groups: tuple[str | int, ...] = ()
    gpus: tuple[str, ...] = (ANY,)
    sm_clock_mhz: _Span | None = None
    memory_clock_mhz: _Span | None = None
    power_limit_w: _Span | None = None
    gpus_at_once: _Count = 1


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """What one user may ask of the daemon itself."""

    connections: _Count = 512
    connections_per_user: _Count = 32
    messages_per_s: _Count = 100


class DaemonPolicy(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"
):
    allow: tuple[AllowRule, ...] = ()
    limits: Limits = Limits()
    longest_hold_s: _Positive = 600.0


class User(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, by the kernel's number and the names of the account database."""

    uid: int
    name: str
    groups: tuple[tuple[int, str], ...] = ()


def parse(raw: bytes, *, where: str) -> DaemonPolicy:
    """Raises `FileError`, naming the file and the place."""
    try:
        policy = msgspec.convert(tomllib.loads(raw.decode()), DaemonPolicy)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{where}: not a TOML file ({error})") from error
    except msgspec.ValidationError as error:
        raise FileError(f"{where}: malformed policy ({error})") from error
    for rule in policy.allow:
        for span in (rule.sm_clock_mhz, rule.memory_clock_mhz, rule.power_limit_w):
            if span is not None and span[0] > span[1]:
                raise FileError(f"{where}: malformed policy (the range {list(span)} is empty)")
    return policy


def decide(policy: DaemonPolicy, user: User, uuid: str) -> Grant | Reason:
    """What this user may set on this GPU, or why nothing."""
    named = [rule for rule in policy.allow if _names(rule, user)]
    if not named:
        text = f"the operator's policy does not name user {user.name} ({user.uid})"
        return Reason("user_not_allowed", user.name, text)
    for rule in named:
        if any(gpu == ANY or (gpu and uuid.startswith(gpu)) for gpu in rule.gpus):
            return Grant(
                sm_clock_hz=_hz(rule.sm_clock_mhz),
                memory_clock_hz=_hz(rule.memory_clock_mhz),
                power_limit_w=rule.power_limit_w,
                gpus_at_once=rule.gpus_at_once,
                longest_hold_s=policy.longest_hold_s,
            )
    text = f"the operator's policy does not give user {user.name} this GPU ({uuid})"
    return Reason("gpu_not_allowed", uuid, text)


def is_named(policy: DaemonPolicy, user: User) -> bool:
    return any(_names(rule, user) for rule in policy.allow)


def _names(rule: AllowRule, user: User) -> bool:
    if user.uid in rule.users or user.name in rule.users:
        return True
    if user.uid == 0:
        return False
    groups = {part for group in user.groups for part in group}
    return ANY in rule.users or any(group in groups for group in rule.groups)


def _hz(span: Range | None) -> Range | None:
    return None if span is None else (span[0] * MHZ, span[1] * MHZ)
