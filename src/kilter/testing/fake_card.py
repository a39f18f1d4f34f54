"""The cards behind `kilter.testing.fake_nvml`: what they have, how they answer to what is set, and
what a test may script. Values in one JSON file, so that they outlive the processes that use them.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec


class Card(msgspec.Struct, kw_only=True):
    """One fake card, with an attribute for each property that a driver tells or sets; the defaults
    have the published limits of an H200. Its power and timing are invented, plausible numbers:
    nothing may be concluded from them about a real card."""

    name: str = "NVIDIA Fake H200"
    uuid: str = ""
    """It is made from the position if it is empty."""
    pci_bus_id: str = ""
    architecture: int = 9
    sm_clocks_mhz: tuple[int, int, int] = (345, 1980, 15)
    """They are the lowest, the highest, and the step."""
    memory_clocks_mhz: tuple[int, ...] = (2201, 3201)
    sm_top_mhz: dict[int, int] = {}
    """It maps a memory clock to the highest SM clock there; gaming cards have few SM clocks at
    their lowest."""
    power_limits_mw: tuple[int, int] = (200_000, 700_000)
    default_limit_mw: int = 700_000
    memory_bytes: int = 143_771 * 2**20

    idle_w: float = 75.0
    memory_w: float = 165.0
    """It is drawn at full load and the highest memory clock, on top of idle."""
    core_w: float = 420.0
    """It is drawn at full load and the highest SM clock, on top of the two."""
    module_w: float = 0.0
    """A CPU on the same module draws this: the energy counter and `GetPowerUsage` count it, the
    power field with the scope of the GPU does not."""

    load: float = 0.0
    """It goes from 0, idle, to 1, busy: what the imagined job does."""
    sm_lock_mhz: tuple[int, int] | None = None
    memory_lock_mhz: tuple[int, int] | None = None
    limit_mw: int | None = None
    """It is the limit that was requested; the default if `None`."""
    limits_lost: int = 0
    """So often somebody else set a limit between a process's look at the limit and its next call,
    which set one. No program can prevent this: NVML cannot compare and set in one call."""
    pids: tuple[int, ...] = ()
    """These processes compute on the card."""
    temperature_c: int = 45
    persistence: bool = True
    mig: bool = False
    mig_uuids: tuple[str, ...] = ()
    virtualization: int = 0
    has_energy_counter: bool = True
    counter_stuck: bool = False
    memory_lockable: bool = True
    """It is False for Volta and Turing: they have no locked memory clocks."""
    clips_sm_mhz: tuple[int, int] | None = None
    """The card accepts any request, and obeys it only inside this range."""

    event_reasons: int = 0
    """These bits come on top of those for idle and power cap."""

    sm_active: float = 0.9
    dram_active: float = 0.4
    tensor_active: float = 0.3
    """They are as at full load, as the performance monitoring of Hopper and newer tells them."""
    loaded_s: float = 0.0
    """It is the integral of the load: its counters."""

    energy_mj: float = 0.0
    energy_at_s: float = 0.0

    @property
    def enforced_limit_mw(self) -> int:
        return self.default_limit_mw if self.limit_mw is None else self.limit_mw

    @property
    def memory_clock_mhz(self) -> int:
        if self.load == 0 and self.memory_lock_mhz is None and self.sm_top_mhz:
            return self.memory_clocks_mhz[0]
        low, high = self.memory_lock_mhz or (0, self.memory_clocks_mhz[-1])
        allowed = [clock for clock in self.memory_clocks_mhz if low <= clock <= high]
        return allowed[-1] if allowed else self.memory_clocks_mhz[-1]

    def _requested_sm_mhz(self) -> int:
        lowest, highest, _ = self.sm_clocks_mhz
        low, high = self.sm_lock_mhz or (lowest, highest)
        if self.clips_sm_mhz:
            low, high = (
                min(max(v, self.clips_sm_mhz[0]), self.clips_sm_mhz[1]) for v in (low, high)
            )
        return high if self.load > 0 else low

    def _power_at_w(self, sm_mhz: int) -> float:
        memory = self.memory_w * self.memory_clock_mhz / self.memory_clocks_mhz[-1]
        core = self.core_w * math.pow(sm_mhz / self.sm_clocks_mhz[1], 2.5)
        return self.idle_w + self.load * (memory + core)

    @property
    def sm_clock_mhz(self) -> int:
        """What runs: the request, pulled down until the power fits under the limit."""
        lowest, _, step = self.sm_clocks_mhz
        clock = self._requested_sm_mhz()
        while clock > lowest and self._power_at_w(clock) * 1e3 > self.enforced_limit_mw:
            clock -= step
        return max(clock, lowest)

    @property
    def power_w(self) -> float:
        return self._power_at_w(self.sm_clock_mhz)

    @property
    def power_capped(self) -> bool:
        return self.sm_clock_mhz < self._requested_sm_mhz()


class Rule(msgspec.Struct, kw_only=True):
    """A scripted refusal, lie or hang: what happens to calls whose name matches."""

    call: str
    """It is a name, or a pattern as in `fnmatch`: `nvmlDeviceSet*`."""
    card: int | None = None
    """It holds for this card only; `None`: for all, and for calls without a card."""
    skip: int = 0
    """Let this many matching calls pass first: a refusal in the middle, or at restore."""
    times: int | None = None
    """Act this many times only."""
    error: int | None = None
    """Raise this code."""
    pretend: bool = False
    """Report success and do nothing."""
    hang_s: float = 0.0
    """Sleep (for real) before anything else."""
    sigkill: Literal["before", "after"] | None = None
    """The calling process is killed (SIGKILL) just before or after the card obeys."""
    seen: int = 0


class FakeState(msgspec.Struct, kw_only=True):
    """Everything that outlives a process."""

    cards: list[Card]
    driver: str = "580.159.04"
    init_error: int | None = None
    """`nvmlInit` raises this code."""
    permitted: bool = True
    """Whether anybody may set anything."""
    permitted_uid: int | None = None
    """It is the only user who may; None: every user."""
    missing: list[str] = []
    """The driver's library does not have these calls (`FUNCTION_NOT_FOUND`)."""
    rules: list[Rule] = []
    virtual_s: float | None = None
    """The cards' clock is this: moved by `advance` only, or real time if `None`."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    name: str
    card: int | None
    arguments: tuple[Any, ...]
    error: int | None

    @property
    def is_setter(self) -> bool:
        return self.name.startswith(("nvmlDeviceSet", "nvmlDeviceReset"))
