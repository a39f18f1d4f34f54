"""The calls of modules that a run has chosen to recompute, by their place in the pass: what another
run of the same job finds again in a pass with the same events."""

from __future__ import annotations

import msgspec


class KeptCall(msgspec.Struct, frozen=True):
    """One call, or the part of it that is recomputed."""

    name: str
    first: int
    last: int
    members: tuple[int, ...]


class KeptCalls(msgspec.Struct, frozen=True):
    """Those of one kind of pass, and what their plan took when they were chosen."""

    events: str
    """Such passes have this fingerprint."""
    calls: tuple[KeptCall, ...]
    budget_bytes: int
    cost_s: float
    """It was simulated, with what counts of the host's time."""
    plain_s: float
    """What the operations of the pass took then."""
