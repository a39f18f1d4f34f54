"""NVIDIA GPUs through NVML. The only file that knows `pynvml` (the package nvidia-ml-py).

Three clocks that are never mixed: *requested* (`settings`), *observed* (`sample`), *supported*
(`supported`). NVML has no call that tells a locked clock, so requested clocks are what this object
has set; what another tool has locked can only be noticed by observation.

Every vendor call runs in one daemon thread per device, and the caller waits for it only so long:
NVML calls are known to hang for ever (open-gpu-kernel-modules#1333), and neither the training nor
its end may wait for them. One hop to that thread covers all reads of a sample, and costs about as
much as they do: tens of microseconds. A forked child gets a thread and a session of its own.

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
    Held,
    NoDevice,
    NotPermitted,
    NotSupported,
    ReadOnly,
)
from kilter.core.label import Label
from kilter.core.setting import DeviceInfo, Sample, Setting, Supported, Throttle
from kilter.core.units import MHZ, MILLI
from kilter.device.worker import Worker

T = TypeVar("T")

READ_ONLY_VARIABLE = "KILTER_READ_ONLY"
LIMIT_STEPS = 20
"""Power limits are nearly continuous: this many steps between the smallest and the largest."""
CALL_TIMEOUT_S = 5.0
INIT_TIMEOUT_S = 60.0
"""Without persistence mode the first call wakes every GPU of the machine, seconds for each."""
POWER_NOW_OF_GPU = ((186, 0),)
"""NVML_FI_DEV_POWER_INSTANT with NVML_POWER_SCOPE_GPU: not averaged over a second, and without the
CPU of a Grace Hopper module."""
CLOCK_SM, CLOCK_MEMORY, TEMPERATURE_GPU = 1, 2, 0
"""NVML's numbers for the kinds of clock and for the sensor on the die."""
VOLTA, AMPERE = 5, 7
"""NVML_DEVICE_ARCH_*: the first with locked SM clocks, and the first with locked memory clocks."""
SENSOR_PERIOD_S = {VOLTA: 0.02, 6: 0.1, AMPERE: 0.1, 8: 0.1, 9: 0.1}
"""By architecture, Volta to Hopper: arXiv 2312.02741; 0.1 s on an H200 is our measurement."""
SHARED_VIRTUALIZATION = (2, 3, 4)
"""NVML_GPU_VIRTUALIZATION_MODE_VGPU, _HOST_VGPU and _HOST_VSGA; pass-through is not shared."""

CAP_SYS_ADMIN = 21
"""Its bit in a process's capabilities (linux/capability.h)."""
PERMISSION_ADVICE = (
    "to set clocks and limits, run as root, or start the container with --cap-add SYS_ADMIN, or "
    "ask the administrator of this machine"
)

READ_ONLY_REFUSAL = f"{READ_ONLY_VARIABLE} is set in the environment; unset it to allow changes"

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
"""The one map from the vendor's error codes (by name, without NVML_ERROR_) to ours."""

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
"""NVML's clock event reasons, once named throttle reasons: the names changed, not the bits."""


def read_only() -> bool:
    """Whether the environment forbids every setter: `KILTER_READ_ONLY` not empty and not 0."""
    return os.environ.get(READ_ONLY_VARIABLE, "") not in ("", "0")


def forbid_if_read_only() -> None:
    if read_only():
        raise ReadOnly(READ_ONLY_REFUSAL)


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


class Library:
    """NVML, loaded and initialised, with its errors in our words."""

    def __init__(self, binding: Any | None = None, *, where: str = "NVML") -> None:
        """`binding` is the module to use in place of `pynvml`; `where` begins every message.
        Nothing is loaded yet."""
        self._binding = binding
        self._explained: dict[int, tuple[type[DeviceError], str]] = {}
        self._where = where
        self._calling = "nothing"

    def open(self) -> None:
        """Load the library and connect to the driver. Raises `NoDevice` or `DriverMismatch`."""
        if self._binding is None:
            self._binding = _import_binding()
        for name, explained in _EXPLAINED.items():
            code = getattr(self._binding, f"NVML_ERROR_{name}", None)
            if code is not None:
                self._explained[code] = explained
        self.call("nvmlInit")

    def close(self) -> None:
        """Disconnect once; other users of NVML in this process are not affected."""
        self.call("nvmlShutdown")

    def describe(self) -> str:
        """The call that runs now, for whoever waits for it."""
        return f"{self._where}: {self._calling}"

    def call(self, name: str, *arguments: Any) -> Any:
        """One vendor call. A call that this binding or driver lacks is `NotSupported`."""
        function = getattr(self._binding, name, None)
        if function is None:
            raise NotSupported(f"{name} is not in this nvidia-ml-py: pip install -U nvidia-ml-py")
        self._calling = name
        try:
            return function(*arguments)
        except self._binding.NVMLError as error:  # type: ignore[union-attr]
            raise self.explain(name, error.value) from error

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
    worker = Worker(library.describe)

    def look() -> Survey:
        library.open()
        try:
            count = library.call("nvmlDeviceGetCount")
            return Survey(
                driver=library.call("nvmlSystemGetDriverVersion"),
                gpus=tuple(_look_at(library, index) for index in range(count)),
            )
        finally:
            library.close()

    try:
        return worker.do(look, INIT_TIMEOUT_S)
    finally:
        worker.stop()


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


class NvidiaDevice:
    """One GPU by its UUID. Thread-safe after the first call. Opens again if used when closed."""

    def __init__(
        self,
        uuid: str,
        *,
        nvml: Any | None = None,
        privilege: Callable[[], str | None] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """`nvml` stands in for `pynvml`, `privilege` for `missing_privilege` (both for tests)."""
        self._uuid = uuid
        self._library = Library(nvml, where=uuid)
        self._privilege = privilege
        self._timeout_s = timeout_s
        self._worker: Worker | None = None
        self._pid = 0
        self._handle: Any = None
        self._info: DeviceInfo | None = None
        self._shared: str | None = None
        """Why a change would reach beyond this job's GPU."""
        self._absent: set[tuple[Any, ...]] = set()
        """Sensors that the GPU or the driver lacks: asked for once."""
        self._told_limit_w: float | None = None
        """The power limit that `settings` has told, or that this object has set since."""
        self._requested: dict[str, float | None] = {}
        """Clocks locked (Hz) or released (`None`) by this object; NaN where its own call may or may
        not have acted; no entry: not touched."""

    # Reading --------------------------------------------------------------------------------

    def info(self) -> DeviceInfo:
        if self._info is None:
            self._info = self._do(self._read_info)
        if read_only():
            return replace(self._info, can_set=False, refusal=READ_ONLY_REFUSAL)
        return self._info

    def sample(self, *, energy: bool = False) -> Sample:
        return self._do(lambda handle: self._read_sample(handle, energy))

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

    def close(self) -> None:
        worker, handle = self._worker, self._handle
        if worker is None or self._pid != os.getpid():
            return
        self._worker, self._handle = None, None
        if handle is not None:
            with suppress(DeviceError):
                worker.do(self._library.close, self._timeout_s)
        worker.stop()

    # In the worker's thread -----------------------------------------------------------------

    def _do(self, act: Callable[[Any], T]) -> T:
        """Run `act` on the GPU's handle in the worker; opens first if needed, also after a fork."""
        if self._worker is None or self._pid != os.getpid():
            self._worker = Worker(self._library.describe)
            self._handle = None
            self._pid = os.getpid()
        timeout_s = INIT_TIMEOUT_S if self._handle is None else self._timeout_s
        return self._worker.do(lambda: act(self._opened()), timeout_s)

    def _opened(self) -> Any:
        if self._handle is None:
            self._library.open()
            try:
                self._handle = self._library.call("nvmlDeviceGetHandleByUUID", self._uuid)
            except DeviceError:
                self._library.close()
                raise
        return self._handle

    def _optional(self, name: str, *arguments: Any) -> Any:
        """A reading, or `None` for ever if the GPU or driver lacks it or forbids it."""
        asked = (name, *arguments[1:])
        if asked in self._absent:
            return None
        try:
            return self._library.call(name, *arguments)
        except (NotSupported, NotPermitted):
            self._absent.add(asked)
            return None

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
        )

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
        if span is None or span[0] >= span[1]:
            return ()
        lowest_w, highest_w = span[0] * MILLI, span[1] * MILLI
        step_w = (highest_w - lowest_w) / LIMIT_STEPS
        inner = {float(round(lowest_w + k * step_w)) for k in range(1, LIMIT_STEPS)}
        return tuple(sorted({lowest_w, highest_w} | {w for w in inner if lowest_w < w < highest_w}))

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
        steps = (
            partial(self._lock, "Memory", setting.memory_clock_hz, supported.memory_clocks_hz),
            partial(self._lock, "Gpu", setting.sm_clock_hz, supported.sm_clocks_hz),
            partial(self._limit, setting.power_limit_w),
        )
        errors = []
        for step in steps:
            try:
                step(handle)
            except DeviceError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _lock(
        self, domain: str, value_hz: float | None, clocks_hz: tuple[float, ...], handle: Any
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

    def _limit(self, value_w: float | None, handle: Any) -> None:
        """A limit that is to stay as `settings` has told it is left as it is, even if it is another
        by now: whoever has changed it since wants it so. One that is to change is looked at once
        more; if it is another by now, that is somebody's wish, too, and `Held` is raised."""
        told_w = self._told_limit_w
        if value_w is not None and value_w == told_w:
            return
        now_mw = self._optional("nvmlDeviceGetPowerManagementLimit", handle)
        default_mw = self._optional("nvmlDeviceGetPowerManagementDefaultLimit", handle)
        wanted_mw = default_mw if value_w is None else round(value_w / MILLI)
        if wanted_mw is None:
            return
        if wanted_mw != now_mw:
            if value_w is not None and told_w is not None and now_mw != round(told_w / MILLI):
                raise Held(
                    f"{self._uuid}: somebody else has just changed the power limit to "
                    f"{(now_mw or 0) * MILLI:g} W; left as it is"
                )
            self._setter("nvmlDeviceSetPowerManagementLimit", handle, wanted_mw)
        self._told_limit_w = wanted_mw * MILLI

    def _setter(self, name: str, *arguments: Any) -> None:
        """The only place that calls a setter of the vendor."""
        forbid_if_read_only()
        self._library.call(name, *arguments)


def check_clock(knob: str, value_hz: float | None, accepted_hz: tuple[float, ...]) -> None:
    if value_hz is None or value_hz in accepted_hz:
        return
    if not accepted_hz:
        raise NotSupported(f"this GPU has no {knob} clock to lock")
    below = max((hz for hz in accepted_hz if hz < value_hz), default=accepted_hz[0])
    above = min((hz for hz in accepted_hz if hz > value_hz), default=accepted_hz[-1])
    raise NotSupported(
        f"{knob} clock {value_hz / MHZ:g} MHz is not supported; nearest are "
        f"{below / MHZ:g} and {above / MHZ:g} MHz"
    )


def check_limit(value_w: float | None, accepted_w: tuple[float, ...]) -> None:
    if value_w is None:
        return
    if not accepted_w:
        raise NotSupported("this GPU has no power limit to set")
    if not accepted_w[0] <= value_w <= accepted_w[-1]:
        raise NotSupported(
            f"power limit {value_w:g} W is outside {accepted_w[0]:g} to {accepted_w[-1]:g} W"
        )
