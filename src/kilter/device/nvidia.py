"""NVIDIA GPUs through NVML. The only file that knows `pynvml` (the package nvidia-ml-py).

Three clocks that are never mixed: *requested* (`settings`), *observed* (`sample`), *supported*
(`supported`). NVML has no call that tells a locked clock, so requested clocks are what this object
has set; what another tool has locked can only be noticed by observation.

Setters: a clock is locked to the range from the lowest supported clock to the value, a cap. Under
load the GPU runs at the cap; while it waits its governor may still drop, so that a stalled job
does not burn the power of a pinned clock.
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from kilter.core.errors import (
    DeviceError,
    DeviceHung,
    DeviceLost,
    DriverMismatch,
    NoDevice,
    NotPermitted,
    NotSupported,
    ReadOnly,
)
from kilter.core.label import Label
from kilter.core.setting import Activity, DeviceInfo, Sample, Setting, Supported, Throttle
from kilter.core.units import MHZ, MILLI
from kilter.device.gpm import UnitMonitor
from kilter.device.vendor import (
    CALL_TIMEOUT_S,
    VendorDevice,
    VendorLibrary,
    check_clock,
    check_limit,
    forbid_if_read_only,
    limit_ladder,
    try_all,
)

T = TypeVar("T")

POWER_NOW_OF_GPU = ((186, 0),)
"""It is NVML_FI_DEV_POWER_INSTANT with NVML_POWER_SCOPE_GPU: not averaged over a second, and
without the CPU of a Grace Hopper module."""
CLOCK_SM, CLOCK_MEMORY, TEMPERATURE_GPU = 1, 2, 0
"""They are NVML's numbers for the kinds of clock and for the sensor on the die."""
VOLTA, AMPERE = 5, 7
"""They are NVML_DEVICE_ARCH_*: the first with locked SM clocks, and the first with locked memory
clocks."""
SENSOR_PERIOD_S = {VOLTA: 0.02, 6: 0.1, AMPERE: 0.1, 8: 0.1, 9: 0.1}
"""It goes by architecture, Volta to Hopper: arXiv 2312.02741; 0.1 s on an H200 is our
measurement."""
SHARED_VIRTUALIZATION = (2, 3, 4)
"""They are NVML_GPU_VIRTUALIZATION_MODE_VGPU, _HOST_VGPU and _HOST_VSGA; pass-through is not
shared."""

CAP_SYS_ADMIN = 21
"""It has this bit in a process's capabilities (linux/capability.h)."""
PERMISSION_ADVICE = (
    "to set clocks and limits, run as root, or start the container with --cap-add SYS_ADMIN, or "
    "ask the administrator of this machine"
)

_EXPLAINED: Mapping[str, tuple[type[DeviceError], str]] = {
    "UNINITIALIZED": (NoDevice, "NVML was shut down by somebody else in this process; start anew"),
    "NOT_SUPPORTED": (NotSupported, "this GPU or driver does not offer it"),
    "FUNCTION_NOT_FOUND": (NotSupported, "the driver is too old for it; a newer driver has it"),
    "NO_PERMISSION": (NotPermitted, PERMISSION_ADVICE),
    "NOT_FOUND": (NoDevice, "no such GPU here; `nvidia-smi -L` lists what this process sees"),
    "DRIVER_NOT_LOADED": (NoDevice, "the NVIDIA kernel module is not loaded; try: nvidia-smi"),
    "LIBRARY_NOT_FOUND": (
        NoDevice,
        "libnvidia-ml.so.1 is missing: install the NVIDIA driver, or start the container with "
        "--gpus all and NVIDIA_DRIVER_CAPABILITIES including utility",
    ),
    "LIB_RM_VERSION_MISMATCH": (
        DriverMismatch,
        "the driver was updated under a loaded kernel module: reboot, or reload the module; in a "
        "container, restart it",
    ),
    "GPU_IS_LOST": (DeviceLost, "the GPU fell off the bus: see dmesg for Xid, then reboot"),
    "RESET_REQUIRED": (DeviceLost, "the GPU needs a reset: stop its jobs, nvidia-smi --gpu-reset"),
    "GPU_NOT_FOUND": (DeviceLost, "the GPU is no longer visible: see dmesg for Xid"),
    "TIMEOUT": (DeviceHung, "the driver gave up waiting for the GPU: see dmesg for Xid"),
}
"""It is the one map from the vendor's error codes (by name, without NVML_ERROR_) to ours."""

_THROTTLE = (
    (0x001, Throttle.IDLE),
    (0x002, Throttle.CLOCK_SETTING),
    (0x004, Throttle.POWER_CAP),
    (0x008, Throttle.HARDWARE),
    (0x010, Throttle.OTHER),
    (0x020, Throttle.THERMAL),
    (0x040, Throttle.THERMAL),
    (0x080, Throttle.HARDWARE),
    (0x100, Throttle.CLOCK_SETTING),
)
"""They are NVML's clock event reasons, once named throttle reasons: the names changed, not the
bits."""


def missing_privilege(process: Path = Path("/proc/self")) -> str | None:
    """Why the kernel module would refuse this process, or `None`; found without asking it.

    The module asks for CAP_SYS_ADMIN of the *machine*: root in a plain container lacks it, and
    root of a user namespace (rootless container) has it only in there.
    """
    try:
        status = (process / "status").read_text()
        user_map = (process / "uid_map").read_text().split()
    except OSError:
        return None if os.geteuid() == 0 else f"not root; {PERMISSION_ADVICE}"
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    if not int(effective.split()[1], 16) >> CAP_SYS_ADMIN & 1:
        return f"this process lacks CAP_SYS_ADMIN; {PERMISSION_ADVICE}"
    if user_map[:3] != ["0", "0", str(2**32 - 1)]:
        return f"root of a user namespace is not root of the machine; {PERMISSION_ADVICE}"
    return None


class Library(VendorLibrary):
    raises = "NVMLError"
    package = "nvidia-ml-py: pip install -U nvidia-ml-py"

    def __init__(self, binding: Any | None = None, *, where: str = "NVML") -> None:
        super().__init__(binding, where)
        self._explained: dict[int, tuple[type[DeviceError], str]] = {}

    def open(self) -> None:
        if self._binding is None:
            self._binding = _import_binding()
        for name, explained in _EXPLAINED.items():
            code = getattr(self._binding, f"NVML_ERROR_{name}", None)
            if code is not None:
                self._explained[code] = explained
        self.call("nvmlInit")

    def close(self) -> None:
        self.call("nvmlShutdown")

    def handle_of(self, uuid: str) -> Any:
        return self.call("nvmlDeviceGetHandleByUUID", uuid)

    def explained(self, name: str, error: Any) -> DeviceError:
        return self.explain(name, error.value)

    def explain(self, name: str, code: int) -> DeviceError:
        """Our error for a vendor's code, with what to do about it."""
        kind, advice = self._explained.get(code, (DeviceError, f"unexpected NVML error {code}"))
        return kind(f"{self._where}: {name}: {advice}")


def _import_binding() -> ModuleType:
    try:
        binding = importlib.import_module("pynvml")
    except ImportError as error:
        raise NoDevice(f"no pynvml ({error}); run: pip install nvidia-ml-py") from error
    if not hasattr(binding, "nvmlDeviceGetFieldValues") or not hasattr(binding, "NVMLError"):
        raise NoDevice(
            f"{getattr(binding, '__file__', 'pynvml')} is not NVIDIA's binding, or a very old one; "
            "run: pip uninstall pynvml; pip install --force-reinstall nvidia-ml-py"
        )
    return binding


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML lists it, in the order of the PCI bus."""

    index: int
    uuid: str
    name: str
    mig_uuids: tuple[str, ...] = ()
    persistence: bool | None = None
    """Without it the driver forgets settings when the last user of the GPU leaves."""
    fault: str | None = None
    """Why it cannot be used (`uuid` is then empty)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What NVML sees from here."""

    driver: str
    gpus: tuple[Gpu, ...]


def survey(nvml: Any | None = None) -> Survey:
    """List driver and GPUs. Reads only; raises `NoDevice`, `DriverMismatch` or `DeviceHung`."""
    library = Library(nvml)

    def look() -> Survey:
        count = library.call("nvmlDeviceGetCount")
        return Survey(
            driver=library.call("nvmlSystemGetDriverVersion"),
            gpus=tuple(_look_at(library, index) for index in range(count)),
        )

    return library.once(look)


def _look_at(library: Library, index: int) -> Gpu:
    """One GPU; a lost one must not hide the others."""
    try:
        handle = library.call("nvmlDeviceGetHandleByIndex", index)
        return Gpu(
            index=index,
            uuid=library.call("nvmlDeviceGetUUID", handle),
            name=library.call("nvmlDeviceGetName", handle),
            mig_uuids=tuple(_mig_uuids(library, handle)),
            persistence=_persistence(library, handle),
        )
    except DeviceError as error:
        return Gpu(index=index, uuid="", name="unknown", fault=str(error))


def _persistence(library: Library, handle: Any) -> bool | None:
    try:
        return bool(library.call("nvmlDeviceGetPersistenceMode", handle))
    except NotSupported:
        return None


def _mig_uuids(library: Library, handle: Any) -> Iterator[str]:
    try:
        slots = library.call("nvmlDeviceGetMaxMigDeviceCount", handle)
    except NotSupported:
        return
    for slot in range(slots):
        try:
            instance = library.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot)
        except (NoDevice, NotSupported):
            continue
        yield library.call("nvmlDeviceGetUUID", instance)


class NvidiaDevice(VendorDevice):
    _library: Library

    def __init__(
        self,
        uuid: str,
        *,
        nvml: Any | None = None,
        privilege: Callable[[], str | None] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """`nvml` stands in for `pynvml`, `privilege` for `missing_privilege` (both for tests)."""
        super().__init__(uuid, Library(nvml, where=uuid), timeout_s)
        self._privilege = privilege
        self._shared: str | None = None
        """Why a change would reach beyond this job's GPU."""
        self._absent: set[tuple[Any, ...]] = set()
        """The GPU or the driver lacks these sensors: they were asked for once."""
        self._units: UnitMonitor | None = None
        self._requested: dict[str, float | None] = {}
        """This object has locked clocks (Hz) or released them (`None`); NaN where its own call may
        or may not have acted; no entry: not touched."""

    # Reading --------------------------------------------------------------------------------

    def supported(self) -> Supported:
        return self._do(lambda handle: self._read_supported(handle, self._requested.get("Memory")))

    def settings(self) -> Setting:
        limit_w = self._do(self._read_limit_w)
        self._told_limit_w = limit_w
        return Setting(
            sm_clock_hz=self._asked("Gpu"),
            memory_clock_hz=self._asked("Memory"),
            power_limit_w=limit_w,
        )

    def compute_pids(self) -> tuple[int, ...]:
        """The processes that compute on this GPU, by their numbers on the machine."""
        return self._do(self._read_compute_pids)

    def _asked(self, domain: str) -> float | None:
        value_hz = self._requested.get(domain)
        return None if value_hz is None or math.isnan(value_hz) else value_hz

    # Setting --------------------------------------------------------------------------------

    def set(self, setting: Setting) -> None:
        """As in `Device`. Each knob is tried even if another one fails, so that a restore gets as
        far as it can; the first error is raised. A clock that this object has never set is
        left alone when the setting says `None`: who has locked it may want it so."""
        forbid_if_read_only()
        self.info()
        if self._shared is not None:
            raise NotPermitted(f"{self._uuid}: {self._shared}")
        try:
            self._do(lambda handle: self._apply(handle, setting))
        except ReadOnly:
            raise
        except NotPermitted as error:
            self._info = replace(self.info(), can_set=False, refusal=str(error))
            raise

    def reset(self) -> None:
        """Release both clocks, whoever has locked them, and put back the default limit."""
        forbid_if_read_only()
        self._requested = {"Gpu": math.nan, "Memory": math.nan}
        self.set(Setting())

    # In the worker's thread -----------------------------------------------------------------

    def _optional(self, name: str, *arguments: Any) -> Any:
        """A reading, or `None` for ever if the GPU or driver lacks it or forbids it."""
        asked = (name, *arguments[1:])
        if asked in self._absent:
            return None
        found = super()._optional(name, *arguments)
        if found is None:
            self._absent.add(asked)
        return found

    def _read_info(self, handle: Any) -> DeviceInfo:
        refusal = self._find_refusal(handle)
        memory = self._optional("nvmlDeviceGetMemoryInfo", handle)
        return DeviceInfo(
            name=self._library.call("nvmlDeviceGetName", handle),
            uuid=self._uuid,
            backend="nvml",
            label=Label.MEASURED,
            can_set=refusal is None,
            refusal=refusal,
            has_energy_counter=self._read_energy_j(handle) is not None,
            sensor_period_s=SENSOR_PERIOD_S.get(self._architecture(handle)),
            memory_bytes=None if memory is None else int(memory.total),
            driver=self._library.call("nvmlSystemGetDriverVersion"),
            vbios=self._optional("nvmlDeviceGetVbiosVersion", handle),
            index=self._optional("nvmlDeviceGetIndex", handle),
        )

    def _find_refusal(self, handle: Any) -> str | None:
        """Why nothing may be set, found by reading only."""
        mig = self._optional("nvmlDeviceGetMigMode", handle)
        if mig is not None and mig[0] == 1:
            self._shared = "MIG is on, and its instances share one clock; turn MIG off to set it"
        if self._optional("nvmlDeviceGetVirtualizationMode", handle) in SHARED_VIRTUALIZATION:
            self._shared = "a vGPU shares its clocks with other guests; set them on the host"
        if self._shared is not None:
            return self._shared
        if self._read_supported(handle, None) == Supported():
            return "this GPU or driver has neither locked clocks (Volta or newer) nor power limits"
        return (self._privilege or missing_privilege)()

    def _architecture(self, handle: Any) -> int:
        """NVML's number, or a large one for what it does not know."""
        found = self._optional("nvmlDeviceGetArchitecture", handle)
        return 0xFFFFFFFF if found is None else int(found)

    def _read_energy_j(self, handle: Any) -> float | None:
        counter_mj = self._optional("nvmlDeviceGetTotalEnergyConsumption", handle)
        return None if counter_mj is None else counter_mj * MILLI

    def _read_power_w(self, handle: Any) -> float | None:
        """Now, of the GPU alone; else the vendor's average, which may be over a second and over
        the whole module."""
        fields = self._optional("nvmlDeviceGetFieldValues", handle, POWER_NOW_OF_GPU)
        if fields is not None:
            code = fields[0].nvmlReturn
            if code == 0:
                return float(fields[0].value.uiVal * MILLI)
            error = self._library.explain("power field", code)
            if not isinstance(error, NotSupported):
                raise error
            self._absent.add(("nvmlDeviceGetFieldValues", POWER_NOW_OF_GPU))
        usage_mw = self._optional("nvmlDeviceGetPowerUsage", handle)
        return None if usage_mw is None else usage_mw * MILLI

    def _read_clock_hz(self, handle: Any, kind: int) -> float | None:
        clock_mhz = self._optional("nvmlDeviceGetClockInfo", handle, kind)
        return None if clock_mhz is None else clock_mhz * MHZ

    def _read_sample(self, handle: Any, energy: bool) -> Sample:
        energy_j = self._read_energy_j(handle) if energy else None
        t_s = time.monotonic()
        power_w = self._read_power_w(handle)
        busy = self._optional("nvmlDeviceGetUtilizationRates", handle)
        memory = self._optional("nvmlDeviceGetMemoryInfo", handle)
        celsius = self._optional("nvmlDeviceGetTemperature", handle, TEMPERATURE_GPU)
        return Sample(
            t_s=t_s,
            power_w=power_w,
            energy_j=energy_j,
            sm_clock_hz=self._read_clock_hz(handle, CLOCK_SM),
            memory_clock_hz=self._read_clock_hz(handle, CLOCK_MEMORY),
            sm_utilisation=None if busy is None else busy.gpu / 100,
            memory_utilisation=None if busy is None else busy.memory / 100,
            temperature_c=None if celsius is None else float(celsius),
            memory_used_bytes=None if memory is None else float(memory.used),
            throttle=self._read_throttle(handle),
            activity=self._read_activity(handle, t_s),
        )

    def _read_activity(self, handle: Any, t_s: float) -> Activity | None:
        if self._units is None or self._units.handle is not handle:  # opened anew, or forked
            self._units = UnitMonitor(self._library, handle)
        return self._units.read(t_s)

    def _let_go(self, handle: Any) -> None:
        units, self._units = self._units, None
        try:
            if units is not None and units.handle is handle:
                units.close()
        finally:
            super()._let_go(handle)

    def _read_throttle(self, handle: Any) -> tuple[Throttle, ...] | None:
        bits = self._optional("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if bits is None:
            bits = self._optional("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if bits is None:
            return None
        return tuple(dict.fromkeys(reason for bit, reason in _THROTTLE if bits & bit))

    def _read_limit_w(self, handle: Any) -> float | None:
        limit_mw = self._optional("nvmlDeviceGetPowerManagementLimit", handle)
        return None if limit_mw is None else limit_mw * MILLI

    def _read_supported(self, handle: Any, memory_clock_hz: float | None) -> Supported:
        """With the SM clocks at this memory clock; `None`: at the highest, since a GPU that idles
        at a low one, where few SM clocks exist, will not stay there under load."""
        architecture = self._architecture(handle)
        memory_mhz = sorted(self._optional("nvmlDeviceGetSupportedMemoryClocks", handle) or ())
        sm_mhz: list[int] = []
        if architecture >= VOLTA and memory_mhz:
            highest_mhz = memory_mhz[-1] if memory_clock_hz is None else memory_clock_hz / MHZ
            at_mhz = max((mhz for mhz in memory_mhz if mhz <= highest_mhz), default=memory_mhz[0])
            sm_mhz = self._optional("nvmlDeviceGetSupportedGraphicsClocks", handle, at_mhz) or []
        if architecture < AMPERE or len(memory_mhz) < 2:
            memory_mhz = []
        return Supported(
            sm_clocks_hz=tuple(mhz * MHZ for mhz in sorted(sm_mhz)),
            memory_clocks_hz=tuple(mhz * MHZ for mhz in memory_mhz),
            power_limits_w=self._limit_ladder(handle),
        )

    def _limit_ladder(self, handle: Any) -> tuple[float, ...]:
        span = self._optional("nvmlDeviceGetPowerManagementLimitConstraints", handle)
        return () if span is None else limit_ladder(span[0] * MILLI, span[1] * MILLI)

    def _read_compute_pids(self, handle: Any) -> tuple[int, ...]:
        """Clients of a multi-process service are listed apart from its server."""
        plain = self._library.call("nvmlDeviceGetComputeRunningProcesses", handle)
        served = self._optional("nvmlDeviceGetMPSComputeRunningProcesses", handle) or []
        return tuple(dict.fromkeys(process.pid for process in (*plain, *served)))

    def _apply(self, handle: Any, setting: Setting) -> None:
        supported = self._read_supported(handle, setting.memory_clock_hz)
        check_clock("SM", setting.sm_clock_hz, supported.sm_clocks_hz)
        check_clock("memory", setting.memory_clock_hz, supported.memory_clocks_hz)
        if setting.power_limit_w != self._read_limit_w(handle):
            # one that cannot be set can still be left as it is
            check_limit(setting.power_limit_w, supported.power_limits_w)
        lock = partial(self._lock, handle)
        try_all(
            partial(lock, "Memory", setting.memory_clock_hz, supported.memory_clocks_hz),
            partial(lock, "Gpu", setting.sm_clock_hz, supported.sm_clocks_hz),
            partial(self._limit, handle, setting.power_limit_w),
        )

    def _lock(
        self, handle: Any, domain: str, value_hz: float | None, clocks_hz: tuple[float, ...]
    ) -> None:
        """Cap the clocks of a domain (in NVML's word), or release them."""
        if self._requested.get(domain) == value_hz:
            return
        self._requested[domain] = math.nan
        if value_hz is not None:
            lowest_mhz, value_mhz = round(clocks_hz[0] / MHZ), round(value_hz / MHZ)
            self._setter(f"nvmlDeviceSet{domain}LockedClocks", handle, lowest_mhz, value_mhz)
        else:
            with suppress(NotSupported):
                self._setter(f"nvmlDeviceReset{domain}LockedClocks", handle)
        self._requested[domain] = value_hz

    def _limit(self, handle: Any, value_w: float | None) -> None:
        self._change_limit(
            value_w,
            default=self._optional("nvmlDeviceGetPowerManagementDefaultLimit", handle),
            now=self._optional("nvmlDeviceGetPowerManagementLimit", handle),  # right before the set
            unit_w=MILLI,
            change=partial(self._setter, "nvmlDeviceSetPowerManagementLimit", handle),
        )
