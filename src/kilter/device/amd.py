"""An AMD GPU, through amdsmi, which comes with ROCm (the extra `amd`).

Two knobs: the power cap, which is read back, and the clock of the shaders (GFX), capped by the mode
"performance determinism" and released by the level `auto`. The library does not tell the clock of
that mode, nor what the manual levels hold. So a GPU that is found at another level than `auto` is
not set at all: it could not be put back exactly. The memory clock is left alone.

Written against the package's source and a behaving fake; no real AMD GPU has been set by it yet.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from kilter.core.errors import DeviceError, NoDevice, NotPermitted, NotSupported
from kilter.core.label import Label
from kilter.core.setting import DeviceInfo, Sample, Setting, Supported
from kilter.core.units import MHZ, MIB
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

MICRO = 1e-6
CLOCK_STEP_MHZ = 50
AUTO = "AMDSMI_DEV_PERF_LEVEL_AUTO"
DETERMINISM = "AMDSMI_DEV_PERF_LEVEL_DETERMINISM"
WHOLE = ("SPX", "N/A")
"""A GPU that is not divided has one of these compute partitions."""
_KINDS: dict[int, type[DeviceError]] = {
    2: NotSupported,  # AMDSMI_STATUS_NOT_SUPPORTED
    3: NotSupported,  # AMDSMI_STATUS_NOT_YET_IMPLEMENTED
    10: NotPermitted,  # AMDSMI_STATUS_NO_PERM
    31: NoDevice,  # AMDSMI_STATUS_NOT_FOUND
    40: NotSupported,  # AMDSMI_STATUS_NO_DATA
}


class AmdLibrary(VendorLibrary):
    raises = "AmdSmiLibraryException"
    package = "amdsmi"

    def __init__(self, binding: Any | None = None) -> None:
        super().__init__(binding, "amdsmi")

    def open(self) -> None:
        if self._binding is None:
            try:
                self._binding = importlib.import_module("amdsmi")
            except (ImportError, KeyError, OSError) as error:  # KeyError: its own, without the .so
                text = f"no amdsmi ({error}); it comes with ROCm: pip install kilter[amd]"
                raise NoDevice(text) from error
        self.call("amdsmi_init")

    def close(self) -> None:
        self.call("amdsmi_shut_down")

    def handle_of(self, uuid: str) -> Any:
        handle = self.handles().get(uuid)
        if handle is None:
            raise NoDevice(f"amdsmi knows no GPU {uuid}")
        return handle

    def name(self, group: str, member: str) -> Any:
        """A member of one of the library's enumerations."""
        return getattr(getattr(self._binding, group), member)

    def explained(self, name: str, error: Any) -> DeviceError:
        kind = _KINDS.get(error.get_error_code(), DeviceError)
        return kind(f"amdsmi: {name}: {error}")

    def handles(self) -> dict[str, Any]:
        found = self.call("amdsmi_get_processor_handles")
        return {self.call("amdsmi_get_gpu_device_uuid", handle): handle for handle in found}


def list_uuids() -> list[str]:
    """The AMD GPUs of this machine. Raises `NoDevice` or `DeviceHung`."""
    library = AmdLibrary(None)
    return library.once(lambda: list(library.handles()))


class AmdDevice(VendorDevice):
    _library: AmdLibrary

    def __init__(
        self,
        uuid: str,
        *,
        amdsmi: Any | None = None,
        privileged: Callable[[], bool] = lambda: os.geteuid() == 0,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """`amdsmi` and `privileged` stand in for the library and the kernel (for tests)."""
        super().__init__(uuid, AmdLibrary(amdsmi), timeout_s)
        self._privileged = privileged
        self._asked_sm_hz: float | None = None
        self._touched_sm = False
        self._never: str | None = None
        """Why nothing is set, whatever the level is."""

    # Reading --------------------------------------------------------------------------------

    def supported(self) -> Supported:
        return self._do(self._read_supported)

    def settings(self) -> Setting:
        self._told_limit_w = self._do(self._read_limit_w)
        return Setting(sm_clock_hz=self._asked_sm_hz, power_limit_w=self._told_limit_w)

    # Setting --------------------------------------------------------------------------------

    def set(self, setting: Setting) -> None:
        forbid_if_read_only()
        self.info()
        if self._never is not None:
            raise NotPermitted(self._never)
        if setting.memory_clock_hz is not None:
            raise NotSupported("the memory clock of an AMD GPU is left alone")
        self._do(lambda handle: self._apply(handle, setting))

    def reset(self) -> None:
        forbid_if_read_only()
        self._touched_sm = True
        self.set(Setting())

    # In the worker's thread -----------------------------------------------------------------

    def _read_info(self, handle: Any) -> DeviceInfo:
        refusal = self._find_refusal(handle)
        asic = self._library.call("amdsmi_get_gpu_asic_info", handle)
        driver = self._optional("amdsmi_get_gpu_driver_info", handle) or {}
        memory = self._optional("amdsmi_get_gpu_vram_usage", handle) or {}
        total_mib = _number(memory.get("vram_total"))
        return DeviceInfo(
            name=asic["market_name"],
            uuid=self._uuid,
            backend="amdsmi",
            label=Label.MEASURED,
            can_set=refusal is None,
            refusal=refusal,
            has_energy_counter=self._read_energy_j(handle) is not None,
            memory_bytes=None if total_mib is None else int(total_mib * MIB),
            driver=driver.get("driver_version"),
        )

    def _find_refusal(self, handle: Any) -> str | None:
        partition = self._optional("amdsmi_get_gpu_compute_partition", handle)
        if partition is not None and partition not in WHOLE:
            self._never = f"the GPU is divided ({partition}), and its parts share one clock"
        elif not self._privileged():
            self._never = "only root sets AMD GPUs"
        if self._never is not None:
            return self._never
        level = self._optional("amdsmi_get_gpu_perf_level", handle)
        if level not in (None, AUTO):
            name = level.removeprefix("AMDSMI_DEV_PERF_LEVEL_").lower()
            return (
                f"its performance level is {name}, which could not be put back exactly; as root, "
                "if nobody needs it: amd-smi set --perf-level AUTO"
            )
        if self._read_supported(handle) == Supported():
            return "this GPU or driver has neither a power cap nor a performance level"
        return None

    def _read_energy_j(self, handle: Any) -> float | None:
        counter = self._optional("amdsmi_get_energy_count", handle)
        if counter is None:
            return None
        return float(counter["energy_accumulator"] * counter["counter_resolution"] * MICRO)

    def _read_clock_hz(self, handle: Any, kind: str) -> float | None:
        found = self._optional("amdsmi_get_clock_info", handle, self._kind(kind)) or {}
        mhz = _number(found.get("clk"))
        return None if mhz is None or mhz <= 0.0 else mhz * MHZ

    def _kind(self, name: str) -> Any:
        return self._library.name("AmdSmiClkType", name)

    def _read_sample(self, handle: Any, energy: bool) -> Sample:
        energy_j = self._read_energy_j(handle) if energy else None
        t_s = time.monotonic()
        power = self._optional("amdsmi_get_power_info", handle) or {}
        power_w = _number(power.get("current_socket_power"))
        busy = self._optional("amdsmi_get_gpu_activity", handle) or {}
        memory = self._optional("amdsmi_get_gpu_vram_usage", handle) or {}
        used_mib = _number(memory.get("vram_used"))
        celsius = self._optional(
            "amdsmi_get_temp_metric",
            handle,
            self._library.name("AmdSmiTemperatureType", "HOTSPOT"),
            self._library.name("AmdSmiTemperatureMetric", "CURRENT"),
        )
        return Sample(
            t_s=t_s,
            power_w=_number(power.get("average_socket_power")) if power_w is None else power_w,
            energy_j=energy_j,
            sm_clock_hz=self._read_clock_hz(handle, "GFX"),
            memory_clock_hz=self._read_clock_hz(handle, "MEM"),
            sm_utilisation=_share(busy.get("gfx_activity")),
            memory_utilisation=_share(busy.get("umc_activity")),
            temperature_c=_number(celsius),
            memory_used_bytes=None if used_mib is None else used_mib * MIB,
        )

    def _read_limit_w(self, handle: Any) -> float | None:
        found = self._optional("amdsmi_get_power_cap_info", handle)
        return None if found is None else found["power_cap"] * MICRO

    def _read_supported(self, handle: Any) -> Supported:
        return Supported(sm_clocks_hz=self._clocks(handle), power_limits_w=self._limits(handle))

    def _clocks(self, handle: Any) -> tuple[float, ...]:
        level = self._optional("amdsmi_get_gpu_perf_level", handle)
        found = self._optional("amdsmi_get_clk_freq", handle, self._kind("GFX")) or {}
        table_mhz = [round(hz / MHZ) for hz in found.get("frequency", ()) if hz > 0]
        if level not in (AUTO, DETERMINISM) or len(set(table_mhz)) < 2:
            return ()
        lowest, highest = min(table_mhz), max(table_mhz)
        first = -(-lowest // CLOCK_STEP_MHZ) * CLOCK_STEP_MHZ
        return tuple(mhz * MHZ for mhz in (*range(first, highest, CLOCK_STEP_MHZ), highest))

    def _limits(self, handle: Any) -> tuple[float, ...]:
        found = self._optional("amdsmi_get_power_cap_info", handle)
        if found is None:
            return ()
        ladder_w = limit_ladder(found["min_power_cap"] * MICRO, found["max_power_cap"] * MICRO)
        return tuple(limit_w for limit_w in ladder_w if limit_w > 0.0)

    def _apply(self, handle: Any, setting: Setting) -> None:
        supported = self._read_supported(handle)
        check_clock("shader", setting.sm_clock_hz, supported.sm_clocks_hz)
        if setting.power_limit_w != self._read_limit_w(handle):
            check_limit(setting.power_limit_w, supported.power_limits_w)
        try_all(partial(self._cap_clock, handle, setting), partial(self._limit, handle, setting))

    def _cap_clock(self, handle: Any, setting: Setting) -> None:
        """A level that this object has not touched is left alone."""
        wanted_hz = setting.sm_clock_hz
        if wanted_hz == self._asked_sm_hz and (wanted_hz is not None or not self._touched_sm):
            return
        self._touched_sm = True
        if wanted_hz is None:
            auto = self._library.name("AmdSmiDevPerfLevel", "AUTO")
            with suppress(NotSupported):
                self._setter("amdsmi_set_gpu_perf_level", handle, auto)
            self._touched_sm = False
        else:
            mhz = round(wanted_hz / MHZ)
            self._setter("amdsmi_set_gpu_perf_determinism_mode", handle, mhz)
        self._asked_sm_hz = wanted_hz

    def _limit(self, handle: Any, setting: Setting) -> None:
        found = self._optional("amdsmi_get_power_cap_info", handle)
        if found is not None:
            self._change_limit(
                setting.power_limit_w,
                now=found["power_cap"],
                default=found["default_power_cap"],
                unit_w=MICRO,
                change=partial(self._setter, "amdsmi_set_power_cap", handle, 0),
            )


def _number(value: Any) -> float | None:
    """amdsmi says `N/A` where it has nothing to tell."""
    return float(value) if isinstance(value, int | float) else None


def _share(percent: Any) -> float | None:
    value = _number(percent)
    return None if value is None else min(1.0, value / 100.0)
