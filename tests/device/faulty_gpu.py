"""A simulated GPU on which something goes wrong, by a script."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kilter.core.errors import DeviceLost, NotPermitted
from kilter.core.setting import Sample, Setting, over
from kilter.device.sim.gpu import SimGpu
from kilter.device.sim.profile import Profile


class Trouble(enum.Enum):
    """What can go wrong."""

    SET_REFUSED = "set_refused"
    """`set` raises `NotPermitted`; with a `setting`, only for exactly that one (so a refused
    restore is a refused return to the setting that was found)."""
    SET_IGNORED = "set_ignored"
    """`set` succeeds and nothing happens."""
    SET_CLIPPED = "set_clipped"
    """No SM clock below `value` hertz is obeyed."""
    LOST = "lost"
    """Every call raises `DeviceLost`."""
    COUNTER_STUCK = "counter_stuck"
    """The energy counter stays where it was when it was last read."""
    COUNTER_OF_MODULE = "counter_of_module"
    """The energy counter also counts another chip, which draws `value` watts (Grace Hopper)."""
    SENSORS_LATE = "sensors_late"
    """Sensors show what was true `value` seconds ago."""
    OTHER_TOOL = "other_tool"
    """Somebody else sets the knobs of `setting` that are not `None`, once, at `begin_s`. As on a
    real card, `settings()` then shows a power limit, but nobody can ask about a locked clock."""
    HOT_ROOM = "hot_room"
    """The cooling air has `value` degrees Celsius."""
    NEIGHBOUR = "neighbour"
    """Another job on the card: iterations take `1 + value` times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One trouble over a stretch of virtual time."""

    trouble: Trouble
    begin_s: float = 0.0
    end_s: float = math.inf
    value: float = 0.0
    setting: Setting | None = None


class FaultyGpu(SimGpu):
    def __init__(self, profile: Profile, *, faults: Sequence[Fault] = (), **options: Any) -> None:
        super().__init__(profile, **options)
        self._faults = faults
        self._ambient_c = profile.thermal.ambient_c
        self._edges_s = {t for fault in faults for t in (fault.begin_s, fault.end_s)}
        others = (fault for fault in faults if fault.trouble is Trouble.OTHER_TOOL)
        self._others = sorted(others, key=lambda fault: fault.begin_s)
        late = (fault.value for fault in faults if fault.trouble is Trouble.SENSORS_LATE)
        self._remember_s += max(late, default=0.0)
        self._counter_j: float | None = None

    def _active(self, trouble: Trouble) -> list[Fault]:
        now_s = self.now_s
        return [f for f in self._faults if f.trouble is trouble and f.begin_s <= now_s < f.end_s]

    def _strength(self, trouble: Trouble) -> float:
        return max((fault.value for fault in self._active(trouble)), default=0.0)

    def set(self, setting: Setting) -> None:
        self._reach()
        for fault in self._active(Trouble.SET_REFUSED):
            if fault.setting is None or fault.setting == setting:
                raise NotPermitted(f"{self.profile.title}: {setting} was refused (scripted)")
        coming = list(self._pending)
        super().set(setting)
        if self._active(Trouble.SET_IGNORED):
            self._pending = coming

    def sample(self, *, energy: bool = False) -> Sample:
        sample = super().sample(energy=energy)
        if sample.energy_j is None:
            return sample
        if not self._active(Trouble.COUNTER_STUCK) or self._counter_j is None:
            modules = self._active(Trouble.COUNTER_OF_MODULE)
            more_j = sum(fault.value * (self.now_s - fault.begin_s) for fault in modules)
            self._counter_j = sample.energy_j + more_j
        return replace(sample, energy_j=self._counter_j)

    def _reach(self) -> None:
        if self._active(Trouble.LOST):
            raise DeviceLost(f"{self.profile.title} fell off the bus (scripted)")
        super()._reach()
        while self._others and self._others[0].begin_s <= self.now_s:
            setting = self._others.pop(0).setting
            assert setting is not None
            self._force = over(self._force, setting)
            self._asked = self._asked.with_(power_limit_w=setting.power_limit_w)
        air_c, thermal = self._strength(Trouble.HOT_ROOM) or self._ambient_c, self.profile.thermal
        if air_c != thermal.ambient_c:
            self.profile = replace(self.profile, thermal=replace(thermal, ambient_c=air_c))

    def _quiet_s(self) -> float:
        coming_s = (edge_s - self.now_s for edge_s in self._edges_s if edge_s > self.now_s)
        return min(super()._quiet_s(), min(coming_s, default=math.inf))

    def _at(self, t_s: float) -> Any:
        return super()._at(t_s - self._strength(Trouble.SENSORS_LATE))

    def _state(self, work: Any) -> Any:
        force, least_hz = self._force, self._strength(Trouble.SET_CLIPPED)
        if force.sm_clock_hz is not None:
            self._force = force.with_(sm_clock_hz=max(force.sm_clock_hz, least_hz))
        state, self._force = super()._state(work), force
        crowd, cost = 1.0 + self._strength(Trouble.NEIGHBOUR), state.cost
        cost = replace(cost, time_s=cost.time_s * crowd, energy_j=cost.energy_j * crowd)
        return state._replace(cost=cost)
