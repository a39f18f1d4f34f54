"""A behaving fake of `pynvml`: same names, same error codes, and cards that answer to what is set.

A mock answers; this one behaves. A lower clock gives less power and longer work, a power limit
pulls the clock down, energy adds up with time. The cards live in a JSON file, so several processes
see the same ones, and a process that is killed leaves its settings behind, as on a real machine.

    fake = FakeNvml.create(tmp_path / "cards.json", Card(load=1.0), Card(name="Other"))
    device = NvidiaDevice(fake.state().cards[0].uuid, nvml=fake)       # in this process
    subprocess.run([...], env=fake.environ())                          # in another one

    with fake.edit() as state:                                         # somebody else at work
        state.cards[0].sm_lock_mhz = (345, 900)
        state.rules.append(Rule(call="nvmlDeviceSet*", error=fake.NVML_ERROR_NO_PERMISSION))
    assert fake.setters() == []                                        # nobody set anything

In another process the fake stands in for the binding through a directory that comes first on
`PYTHONPATH` (`shim_path`); no product code knows about it. `tests/contract` checks names, codes
and signatures against the installed `nvidia-ml-py`.
"""

# ruff: noqa: N802, N803 - the binding's names

from __future__ import annotations

import fcntl
import fnmatch
import inspect
import itertools
import math
import os
import signal
import string
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar, cast

import msgspec

from kilter.lease.machine import LOCK_VARIABLE
from kilter.testing.fake_card import Call, Card, FakeState, Rule

T = TypeVar("T")

FAKE_STATE_VARIABLE = "KILTER_TEST_NVML"
"""It names the file with the cards, for processes that import the shim."""

_ERRORS = {
    "UNINITIALIZED": (1, "Uninitialized"),
    "INVALID_ARGUMENT": (2, "Invalid Argument"),
    "NOT_SUPPORTED": (3, "Not Supported"),
    "NO_PERMISSION": (4, "Insufficient Permissions"),
    "NOT_FOUND": (6, "Not Found"),
    "DRIVER_NOT_LOADED": (9, "Driver Not Loaded"),
    "TIMEOUT": (10, "Timeout"),
    "LIBRARY_NOT_FOUND": (12, "NVML Shared Library Not Found"),
    "FUNCTION_NOT_FOUND": (13, "Function Not Found"),
    "GPU_IS_LOST": (15, "GPU is lost"),
    "RESET_REQUIRED": (16, "GPU requires restart"),
    "LIB_RM_VERSION_MISMATCH": (18, "RM has detected an NVML/RM version mismatch."),
    "IN_USE": (19, "In use"),
    "UNKNOWN": (999, "Unknown Error"),
}


class NVMLError(Exception):
    """As in the binding: `NVMLError(code)` makes an instance of the subclass for that code."""

    value: int
    _classes: ClassVar[dict[int, type[NVMLError]]] = {}

    def __new__(cls, value: int | None = None) -> NVMLError:
        if cls is NVMLError and value is not None:
            cls = cls._classes.get(value, cls)
        error = Exception.__new__(cls)
        error.value = value if value is not None else getattr(cls, "code", 999)
        return error

    def __str__(self) -> str:
        texts = dict(_ERRORS.values())
        return texts.get(self.value, f"NVML Error with code {self.value}")


ERROR_CLASSES: dict[str, type[NVMLError]] = {}
"""They are `NVMLError_NoPermission` and so on, named as the binding names them."""
for _name, (_code, _text) in _ERRORS.items():
    _class = "NVMLError_" + string.capwords(_name, "_").replace("_", "")
    ERROR_CLASSES[_class] = type(_class, (NVMLError,), {"code": _code})
    NVMLError._classes[_code] = ERROR_CLASSES[_class]


@dataclass(frozen=True, slots=True)
class _Handle:
    card: int
    mig: int | None = None


class _GpmSample:
    """The buffer of a sample: the card as it was then."""

    def __init__(self) -> None:
        self.card: Card | None = None
        self.t_s = 0.0
        self.freed = False


class _GpmMetricsGet:
    """As `c_nvmlGpmMetricsGet_t`, with fewer metrics."""

    def __init__(self) -> None:
        self.version = self.numMetrics = 0
        self.sample1 = self.sample2 = _GpmSample()
        self.metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(8)]


def shim_path() -> Path:
    """The directory with a `pynvml.py` that is this fake. Put it first on `PYTHONPATH`."""
    return Path(__file__).parent / "nvml_shim"


_LOGGED = (int, str, list)
"""The log of the calls can hold arguments of these kinds."""


def _binding(act: Callable[..., T]) -> Callable[..., T]:
    """A call of the binding, with the parameters of `act` but for the cards' state."""
    myself, _, *parameters = inspect.signature(act).parameters.values()
    on_card = bool(parameters) and parameters[0].name in ("handle", "device")

    def method(self: FakeNvml, *given: Any) -> T:
        logged = tuple(argument for argument in given if isinstance(argument, _LOGGED))
        handle = given[0] if on_card else None
        return self._call(act.__name__, handle, logged, lambda state: act(self, state, *given))

    vars(method)["__signature__"] = inspect.Signature([myself, *parameters])
    return method


class FakeNvml:
    """Looks like the module `pynvml`. One instance per process; the cards are in the file. It has
    many attributes because callers find the module's constants there.
    """

    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_TEMPERATURE_GPU = 0
    NVML_FI_DEV_POWER_AVERAGE = 185
    NVML_FI_DEV_POWER_INSTANT = 186
    NVML_DEVICE_ARCH_VOLTA = 5
    NVML_DEVICE_ARCH_HOPPER = 9
    NVML_DEVICE_ARCH_UNKNOWN = 0xFFFFFFFF
    NVML_GPU_VIRTUALIZATION_MODE_NONE = 0
    NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH = 1
    NVML_GPU_VIRTUALIZATION_MODE_VGPU = 2
    NVML_GPU_VIRTUALIZATION_MODE_HOST_VGPU = 3
    NVML_GPU_VIRTUALIZATION_MODE_HOST_VSGA = 4
    NVML_DEVICE_MIG_DISABLE = 0
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_FEATURE_ENABLED = 1
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL = 2
    NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5
    NVML_GPM_METRIC_DRAM_BW_UTIL = 10
    nvmlClocksEventReasonGpuIdle = 0x1  # noqa: N815
    nvmlClocksEventReasonSwPowerCap = 0x4  # noqa: N815

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._initialised = 0
        self._calls = 0
        self._limit_seen: tuple[int, int, int] | None = None
        """Which call looked at the limit of which card last, and the limit in milliwatts."""

    def __getattr__(self, name: str) -> Any:
        """The error codes and classes."""
        if name.startswith("NVML_ERROR_") and name[11:] in _ERRORS:
            return _ERRORS[name[11:]][0]
        if name in ERROR_CLASSES:
            return ERROR_CLASSES[name]
        raise AttributeError(f"module 'pynvml' has no attribute {name!r}")

    # For tests ------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *cards: Card,
        driver: str = "580.159.04",
        permitted: bool = True,
        virtual_time: bool = True,
    ) -> FakeNvml:
        """A new set of cards in a file; one idle card if none is given."""
        chosen = list(cards) or [Card()]
        for index, card in enumerate(chosen):
            card.uuid = card.uuid or f"GPU-{index:08x}-fa4e-4000-8000-{index:012x}"
            card.pci_bus_id = card.pci_bus_id or f"00000000:{0x10 + index:02X}:00.0"
        state = FakeState(
            cards=chosen,
            driver=driver,
            permitted=permitted,
            virtual_s=0.0 if virtual_time else None,
        )
        fake = cls(path)
        for card in state.cards:
            card.energy_at_s = fake._now_s(state)
        fake._write(state)
        return fake

    def state(self) -> FakeState:
        """The cards as they are now (a copy)."""
        with self._locked():
            return self._read()

    @contextmanager
    def edit(self) -> Iterator[FakeState]:
        """Change cards and rules under the lock: the job, the administrator, another tool."""
        with self._locked():
            state = self._read()
            self._settle(state)
            yield state
            self._write(state)

    def advance(self, seconds: float) -> None:
        """Let time pass for cards with a virtual clock."""
        with self.edit() as state:
            assert state.virtual_s is not None, "these cards live in real time"
            state.virtual_s += seconds
            self._settle(state)

    def calls(self, pattern: str = "*") -> list[Call]:
        """The log of all processes, oldest first. A line cut short by a kill is left out."""
        try:
            lines = self._log.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        calls = (msgspec.json.decode(line, type=Call) for line in lines)
        return [call for call in calls if fnmatch.fnmatch(call.name, pattern)]

    def setters(self) -> list[Call]:
        """The calls that set or reset something, also those that were refused."""
        return [call for call in self.calls() if call.is_setter]

    def environ(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a process that is to see these cards instead of real ones."""
        result = dict(os.environ if base is None else base)
        paths = [str(shim_path()), result.get("PYTHONPATH", "")]
        result["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        result[FAKE_STATE_VARIABLE] = str(self.path.resolve())
        result[LOCK_VARIABLE] = str(self.path.resolve().parent / "machine")
        return result

    def missing_privilege(self, process: Path | None = None) -> str | None:
        """In place of `kilter.device.nvidia.missing_privilege`: here the cards decide."""
        return None if self._permits(self.state()) else "the fake cards are not permitted"

    @staticmethod
    def _permits(state: FakeState) -> bool:
        return state.permitted and state.permitted_uid in (None, os.geteuid())

    # The file -------------------------------------------------------------------------------

    @property
    def _log(self) -> Path:
        return self.path.with_name(self.path.name + ".calls")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The lock is on a file of its own, since the state is replaced, never rewritten: a
        process killed at any point leaves a whole state and no lock."""
        handle = os.open(self.path.with_name(self.path.name + ".lock"), os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _read(self) -> FakeState:
        return msgspec.json.decode(self.path.read_bytes(), type=FakeState)

    def _write(self, state: FakeState) -> None:
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.{threading.get_ident()}")
        part.write_bytes(msgspec.json.encode(state))
        part.replace(self.path)

    def _now_s(self, state: FakeState) -> float:
        return time.monotonic() if state.virtual_s is None else state.virtual_s

    def _settle(self, state: FakeState) -> None:
        """Add up the energy until now, before anything that changes the power."""
        now_s = self._now_s(state)
        for card in state.cards:
            if not card.counter_stuck:
                card.energy_mj += (card.power_w + card.module_w) * (now_s - card.energy_at_s) * 1e3
            card.loaded_s += card.load * (now_s - card.energy_at_s)
            card.energy_at_s = now_s

    # Calls ----------------------------------------------------------------------------------

    def _call(
        self,
        name: str,
        handle: _Handle | None,
        arguments: tuple[Any, ...],
        act: Callable[[FakeState], T],
    ) -> T:
        """One call: rules first, then what the driver would check, then the act; always logged."""
        rule, state = self._match(name, handle)
        self._calls += 1
        setter = name.startswith(("nvmlDeviceSet", "nvmlDeviceReset"))
        error: int | None = None
        if rule.hang_s:
            time.sleep(rule.hang_s)
        if rule.sigkill == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if name in state.missing:
                raise NVMLError(_ERRORS["FUNCTION_NOT_FOUND"][0])
            if name != "nvmlInit" and not self._initialised:
                raise NVMLError(_ERRORS["UNINITIALIZED"][0])
            if rule.error is not None:
                raise NVMLError(rule.error)
            if setter and not self._permits(state):
                raise NVMLError(_ERRORS["NO_PERMISSION"][0])
            if rule.pretend:
                return cast(T, None)
            if not setter:
                return act(state)
            with self.edit() as now:
                return act(now)
        except NVMLError as raised:
            error = raised.value
            raise
        finally:
            card = None if handle is None else handle.card
            call = Call(pid=os.getpid(), name=name, card=card, arguments=arguments, error=error)
            with open(self._log, "ab") as log:
                log.write(msgspec.json.encode(call) + b"\n")
            if rule.sigkill == "after":
                os.kill(os.getpid(), signal.SIGKILL)

    def _match(self, name: str, handle: _Handle | None) -> tuple[Rule, FakeState]:
        """The first rule that acts on this call (or one that does nothing), and the state to
        answer from. Every matching rule counts the call."""
        with self._locked():
            state = self._read()
            acting = None
            matching = [rule for rule in state.rules if self._matches(rule, name, handle)]
            for rule in matching:
                rule.seen += 1
                last = math.inf if rule.times is None else rule.skip + rule.times
                if acting is None and rule.skip < rule.seen <= last:
                    acting = rule
            if matching:
                self._write(state)
            return acting or Rule(call=name), state

    @staticmethod
    def _matches(rule: Rule, name: str, handle: _Handle | None) -> bool:
        here = rule.card is None or (handle is not None and handle.card == rule.card)
        return here and fnmatch.fnmatchcase(name, rule.call)

    # Library --------------------------------------------------------------------------------

    @_binding
    def nvmlInit(self, state: FakeState) -> None:
        if state.init_error is not None:
            raise NVMLError(state.init_error)
        self._initialised += 1

    @_binding
    def nvmlShutdown(self, state: FakeState) -> None:
        self._initialised -= 1

    def nvmlErrorString(self, result: int) -> str:
        return dict(_ERRORS.values()).get(result, "Unknown Error")

    @_binding
    def nvmlSystemGetDriverVersion(self, state: FakeState) -> str:
        return state.driver

    @_binding
    def nvmlSystemGetNVMLVersion(self, state: FakeState) -> str:
        return f"13.{state.driver}"

    # Finding cards --------------------------------------------------------------------------

    @_binding
    def nvmlDeviceGetCount(self, state: FakeState) -> int:
        return len(state.cards)

    @_binding
    def nvmlDeviceGetHandleByIndex(self, state: FakeState, index: int) -> _Handle:
        if not 0 <= index < len(state.cards):
            raise NVMLError(_ERRORS["INVALID_ARGUMENT"][0])
        return _Handle(index)

    @_binding
    def nvmlDeviceGetHandleByUUID(self, state: FakeState, uuid: str) -> _Handle:
        for index, card in enumerate(state.cards):
            if card.uuid == uuid:
                return _Handle(index)
            if uuid in card.mig_uuids:
                return _Handle(index, card.mig_uuids.index(uuid))
        raise NVMLError(_ERRORS["NOT_FOUND"][0])

    @_binding
    def nvmlDeviceGetHandleByPciBusId(self, state: FakeState, pciBusId: str) -> _Handle:
        for index, card in enumerate(state.cards):
            if card.pci_bus_id == pciBusId:
                return _Handle(index)
        raise NVMLError(_ERRORS["NOT_FOUND"][0])

    @_binding
    def nvmlDeviceGetMigDeviceHandleByIndex(
        self, state: FakeState, device: _Handle, index: int
    ) -> _Handle:
        if index >= len(state.cards[device.card].mig_uuids):
            raise NVMLError(_ERRORS["NOT_FOUND"][0])
        return _Handle(device.card, index)

    @_binding
    def nvmlDeviceGetIndex(self, state: FakeState, handle: _Handle) -> int:
        return handle.card

    @_binding
    def nvmlDeviceGetUUID(self, state: FakeState, handle: _Handle) -> str:
        card = state.cards[handle.card]
        return card.uuid if handle.mig is None else card.mig_uuids[handle.mig]

    # Sensors --------------------------------------------------------------------------------

    @_binding
    def nvmlDeviceGetFieldValues(
        self, state: FakeState, handle: _Handle, fieldIds: list[Any]
    ) -> list[Any]:
        card, values = state.cards[handle.card], []
        for field, scope in (each if isinstance(each, tuple) else (each, 0) for each in fieldIds):
            known = field in (self.NVML_FI_DEV_POWER_AVERAGE, self.NVML_FI_DEV_POWER_INSTANT)
            known = known and card.architecture >= 7
            power_mw = int((card.power_w + (card.module_w if scope == 1 else 0.0)) * 1e3)
            values.append(
                SimpleNamespace(
                    fieldId=field,
                    scopeId=scope,
                    valueType=1,
                    nvmlReturn=0 if known else _ERRORS["NOT_SUPPORTED"][0],
                    value=SimpleNamespace(uiVal=power_mw if known else 0),
                )
            )
        return values

    @_binding
    def nvmlDeviceGetTotalEnergyConsumption(self, state: FakeState, handle: _Handle) -> int:
        card = state.cards[handle.card]
        if not card.has_energy_counter:
            raise NVMLError(_ERRORS["NOT_SUPPORTED"][0])
        self._settle(state)
        return int(card.energy_mj)

    @_binding
    def nvmlDeviceGetClockInfo(self, state: FakeState, handle: _Handle, type: int) -> int:
        card = state.cards[handle.card]
        return card.memory_clock_mhz if type == self.NVML_CLOCK_MEM else card.sm_clock_mhz

    # Performance monitoring -----------------------------------------------------------------

    c_nvmlGpmMetricsGet_t = _GpmMetricsGet  # noqa: N815

    @_binding
    def nvmlGpmSampleAlloc(self, state: FakeState) -> _GpmSample:
        return _GpmSample()

    @_binding
    def nvmlGpmSampleFree(self, state: FakeState, gpmSample: _GpmSample) -> None:
        assert not gpmSample.freed, "freed twice"
        gpmSample.freed = True

    @_binding
    def nvmlGpmSampleGet(
        self, state: FakeState, device: _Handle, gpmSample: _GpmSample
    ) -> _GpmSample:
        card = state.cards[device.card]
        if device.mig is not None or card.architecture < self.NVML_DEVICE_ARCH_HOPPER:
            raise NVMLError(_ERRORS["NOT_SUPPORTED"][0])
        assert not gpmSample.freed, "used after it was freed"
        self._settle(state)
        gpmSample.t_s, gpmSample.card = self._now_s(state), card
        return gpmSample

    @_binding
    def nvmlGpmMetricsGet(self, state: FakeState, metricsGet: _GpmMetricsGet) -> _GpmMetricsGet:
        before, after = metricsGet.sample1, metricsGet.sample2
        if before.card is None or after.card is None or metricsGet.version != 1:
            raise NVMLError(_ERRORS["INVALID_ARGUMENT"][0])
        passed_s = after.t_s - before.t_s
        loaded_s = after.card.loaded_s - before.card.loaded_s
        shares = {
            self.NVML_GPM_METRIC_SM_UTIL: after.card.sm_active,
            self.NVML_GPM_METRIC_ANY_TENSOR_UTIL: after.card.tensor_active,
            self.NVML_GPM_METRIC_DRAM_BW_UTIL: after.card.dram_active,
        }
        for metric in metricsGet.metrics[: metricsGet.numMetrics]:
            share = shares.get(metric.metricId)
            metric.nvmlReturn = 0 if share is not None else _ERRORS["NOT_SUPPORTED"][0]
            load = loaded_s / passed_s if passed_s > 0.0 else math.nan
            metric.value = math.nan if share is None else 100 * share * load
        return metricsGet

    # Knobs ----------------------------------------------------------------------------------

    @_binding
    def nvmlDeviceGetSupportedGraphicsClocks(
        self, state: FakeState, handle: _Handle, memoryClockMHz: int
    ) -> list[int]:
        card = state.cards[handle.card]
        if memoryClockMHz not in card.memory_clocks_mhz:
            raise NVMLError(_ERRORS["NOT_FOUND"][0])
        lowest, highest, step = card.sm_clocks_mhz
        highest = card.sm_top_mhz.get(memoryClockMHz, highest)
        return list(range(highest, lowest - 1, -step))

    @_binding
    def nvmlDeviceSetGpuLockedClocks(
        self, state: FakeState, handle: _Handle, minGpuClockMHz: int, maxGpuClockMHz: int
    ) -> None:
        card = state.cards[handle.card]
        lowest, highest, _ = card.sm_clocks_mhz
        if not lowest <= minGpuClockMHz <= maxGpuClockMHz <= highest:
            raise NVMLError(_ERRORS["INVALID_ARGUMENT"][0])
        card.sm_lock_mhz = (minGpuClockMHz, maxGpuClockMHz)

    @_binding
    def nvmlDeviceResetGpuLockedClocks(self, state: FakeState, handle: _Handle) -> None:
        state.cards[handle.card].sm_lock_mhz = None

    @_binding
    def nvmlDeviceSetMemoryLockedClocks(
        self, state: FakeState, handle: _Handle, minMemClockMHz: int, maxMemClockMHz: int
    ) -> None:
        card = state.cards[handle.card]
        if not card.memory_lockable:
            raise NVMLError(_ERRORS["NOT_SUPPORTED"][0])
        clocks = card.memory_clocks_mhz
        if not clocks[0] <= minMemClockMHz <= maxMemClockMHz <= clocks[-1]:
            raise NVMLError(_ERRORS["INVALID_ARGUMENT"][0])
        card.memory_lock_mhz = (minMemClockMHz, maxMemClockMHz)

    @_binding
    def nvmlDeviceResetMemoryLockedClocks(self, state: FakeState, handle: _Handle) -> None:
        if not state.cards[handle.card].memory_lockable:
            raise NVMLError(_ERRORS["NOT_SUPPORTED"][0])
        state.cards[handle.card].memory_lock_mhz = None

    @_binding
    def nvmlDeviceGetPowerManagementLimit(self, state: FakeState, handle: _Handle) -> int:
        limit_mw = state.cards[handle.card].enforced_limit_mw
        self._limit_seen = (self._calls, handle.card, limit_mw)
        return limit_mw

    @_binding
    def nvmlDeviceSetPowerManagementLimit(
        self, state: FakeState, handle: _Handle, limit: int
    ) -> None:
        card = state.cards[handle.card]
        low, high = card.power_limits_mw
        if not low <= limit <= high:
            raise NVMLError(_ERRORS["INVALID_ARGUMENT"][0])
        seen, before = self._limit_seen, (self._calls - 1, handle.card)
        if seen is not None and seen[:2] == before and seen[2] != card.enforced_limit_mw:
            card.limits_lost += 1
        card.limit_mw = limit


# Readings of a card -------------------------------------------------------------------------


def _processes(card: Card) -> list[Any]:
    there = (pid for pid in card.pids if os.path.exists(f"/proc/{pid}"))
    return [SimpleNamespace(pid=pid, usedGpuMemory=2**30) for pid in there]


def _mig_mode(card: Card) -> list[int]:
    if card.architecture < 7:
        raise NVMLError(_ERRORS["NOT_SUPPORTED"][0])
    return [int(card.mig)] * 2


def _memory(card: Card) -> Any:
    total, used = card.memory_bytes, int(card.memory_bytes * 0.1 * card.load)
    return SimpleNamespace(total=total, used=used, free=total - used)


def _reasons(card: Card) -> int:
    idle = FakeNvml.nvmlClocksEventReasonGpuIdle if card.load == 0 else 0
    capped = FakeNvml.nvmlClocksEventReasonSwPowerCap if card.power_capped else 0
    return card.event_reasons | idle | capped


_READINGS: dict[str, Callable[[Card], Any]] = {
    "nvmlDeviceGetName(handle)": lambda card: card.name,
    "nvmlDeviceGetPciInfo(handle)": lambda card: SimpleNamespace(busId=card.pci_bus_id),
    "nvmlDeviceGetVbiosVersion(handle)": lambda _: "96.00.74.00.11",
    "nvmlDeviceGetArchitecture(device)": lambda card: card.architecture,
    "nvmlDeviceGetPersistenceMode(handle)": lambda card: int(card.persistence),
    "nvmlDeviceGetMigMode(device)": _mig_mode,
    "nvmlDeviceGetMaxMigDeviceCount(device)": lambda card: 7 * card.mig,
    "nvmlDeviceGetVirtualizationMode(handle)": lambda card: card.virtualization,
    "nvmlDeviceGetComputeRunningProcesses(handle)": _processes,
    "nvmlDeviceGetMPSComputeRunningProcesses(handle)": lambda _: [],
    "nvmlDeviceGetPowerUsage(handle)": lambda card: int((card.power_w + card.module_w) * 1e3),
    "nvmlDeviceGetUtilizationRates(handle)": lambda card: SimpleNamespace(
        gpu=int(100 * card.load), memory=int(40 * card.load)
    ),
    "nvmlDeviceGetTemperature(handle, sensor)": lambda card: card.temperature_c,
    "nvmlDeviceGetTemperatureV(handle, sensor, version=0)": lambda card: card.temperature_c,
    "nvmlDeviceGetMemoryInfo(handle, version=None)": _memory,
    "nvmlDeviceGetCurrentClocksEventReasons(handle)": _reasons,
    "nvmlDeviceGetCurrentClocksThrottleReasons(handle)": _reasons,
    "nvmlGpmQueryDeviceSupport(device)": lambda card: SimpleNamespace(
        isSupportedDevice=int(card.architecture >= FakeNvml.NVML_DEVICE_ARCH_HOPPER)
    ),
    "nvmlDeviceGetSupportedMemoryClocks(handle)": lambda card: sorted(
        card.memory_clocks_mhz, reverse=True
    ),
    "nvmlDeviceGetPowerManagementDefaultLimit(handle)": lambda card: card.default_limit_mw,
    "nvmlDeviceGetPowerManagementLimitConstraints(handle)": lambda card: list(card.power_limits_mw),
}
"""These calls, with the parameters of the binding, only look at a card."""


def _parameter(text: str) -> inspect.Parameter:
    name, equals, value = text.partition("=")
    default = value if equals else inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)


def _reading(call: str, read: Callable[[Card], Any]) -> tuple[str, Callable[..., Any]]:
    name, _, parameters = call.removesuffix(")").partition("(")

    def method(self: FakeNvml, handle: _Handle, *others: Any) -> Any:
        return self._call(name, handle, others, lambda state: read(state.cards[handle.card]))

    vars(method)["__signature__"] = inspect.Signature(
        [_parameter(each) for each in ("self", *parameters.split(", "))]
    )
    return name, method


for _name, _method in itertools.starmap(_reading, _READINGS.items()):
    setattr(FakeNvml, _name, _method)
