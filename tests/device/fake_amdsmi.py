"""A fake of amdsmi with one GPU that behaves: it clamps, caps, counts energy, and refuses.

Only what `kilter.device.amd` calls, with the names, parameters and keys of amdsmi 7; a test holds
the signatures against the installed package. The state is shared by all who hold the object, so a
setting outlives the device object that made it, as on a real GPU.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Any

NOT_SUPPORTED, NO_PERM = 2, 10


class AmdSmiLibraryException(Exception):
    """As the library's own."""

    def __init__(self, err_code: int) -> None:
        super().__init__(err_code)
        self.err_code = err_code

    def get_error_code(self) -> int:
        return self.err_code


AmdSmiClkType = enum.IntEnum("AmdSmiClkType", {"GFX": 0, "MEM": 4})
AmdSmiDevPerfLevel = enum.IntEnum("AmdSmiDevPerfLevel", {"AUTO": 0, "DETERMINISM": 8})
AmdSmiTemperatureType = enum.IntEnum("AmdSmiTemperatureType", {"HOTSPOT": 1})
AmdSmiTemperatureMetric = enum.IntEnum("AmdSmiTemperatureMetric", {"CURRENT": 0})


@dataclass(slots=True)
class AmdCard:
    """One GPU."""

    uuid: str = "a1ff74a1-0000-1000-8047-000000000001"
    level: str = "AUTO"
    determinism_mhz: int = 0
    sclk_mhz: tuple[int, int] = (132, 2100)
    mclk_mhz: int = 1300
    cap_uw: int = 750_000_000
    default_cap_uw: int = 750_000_000
    caps_uw: tuple[int, int] = (0, 750_000_000)
    load: float = 1.0
    partition: str = "SPX"
    lacks: set[str] = field(default_factory=set)
    """Calls that this GPU does not support."""
    permitted: bool = True
    setters: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def clock_mhz(self) -> int:
        top = self.determinism_mhz if self.level == "DETERMINISM" else self.sclk_mhz[1]
        return top if self.load else self.sclk_mhz[0]

    @property
    def power_w(self) -> float:
        wanted = 150.0 + 550.0 * self.load * (self.clock_mhz / self.sclk_mhz[1]) ** 2
        return min(wanted, self.cap_uw / 1e6)


class FakeAmdSmi:
    """Stands in for the module `amdsmi`."""

    AmdSmiLibraryException = AmdSmiLibraryException
    AmdSmiClkType = AmdSmiClkType
    AmdSmiDevPerfLevel = AmdSmiDevPerfLevel
    AmdSmiTemperatureType = AmdSmiTemperatureType
    AmdSmiTemperatureMetric = AmdSmiTemperatureMetric

    def __init__(self, *cards: AmdCard) -> None:
        self.cards = list(cards) or [AmdCard()]
        self._began_s = time.monotonic()
        self._open = 0

    def _look(self, name: str, processor_handle: int) -> AmdCard:
        card = self.cards[processor_handle]
        if not self._open:
            raise AmdSmiLibraryException(32)
        if name in card.lacks:
            raise AmdSmiLibraryException(NOT_SUPPORTED)
        return card

    def _set(self, name: str, processor_handle: int, value: Any) -> AmdCard:
        card = self._look(name, processor_handle)
        if not card.permitted:
            raise AmdSmiLibraryException(NO_PERM)
        card.setters.append((name, value))
        return card

    def amdsmi_init(self, flag: int = 2) -> None:
        self._open += 1

    def amdsmi_shut_down(self) -> None:
        self._open -= 1

    def amdsmi_get_processor_handles(self) -> list[int]:
        return list(range(len(self.cards)))

    def amdsmi_get_gpu_device_uuid(self, processor_handle: int) -> str:
        return self._look("amdsmi_get_gpu_device_uuid", processor_handle).uuid

    def amdsmi_get_gpu_asic_info(self, processor_handle: int) -> dict[str, Any]:
        self._look("amdsmi_get_gpu_asic_info", processor_handle)
        return {"market_name": "AMD Instinct MI300X"}

    def amdsmi_get_gpu_driver_info(self, processor_handle: int) -> dict[str, Any]:
        self._look("amdsmi_get_gpu_driver_info", processor_handle)
        return {"driver_name": "amdgpu", "driver_version": "6.12.12"}

    def amdsmi_get_gpu_vram_usage(self, processor_handle: int) -> dict[str, Any]:
        self._look("amdsmi_get_gpu_vram_usage", processor_handle)
        return {"vram_total": 196592, "vram_used": 20000}

    def amdsmi_get_gpu_compute_partition(self, processor_handle: int) -> str:
        return self._look("amdsmi_get_gpu_compute_partition", processor_handle).partition

    def amdsmi_get_gpu_perf_level(self, processor_handle: int) -> str:
        card = self._look("amdsmi_get_gpu_perf_level", processor_handle)
        return f"AMDSMI_DEV_PERF_LEVEL_{card.level}"

    def amdsmi_get_energy_count(self, processor_handle: int) -> dict[str, Any]:
        card = self._look("amdsmi_get_energy_count", processor_handle)
        used_uj = (time.monotonic() - self._began_s) * card.power_w * 1e6
        return {
            "energy_accumulator": int(used_uj / 15.259),
            "counter_resolution": 15.259,
            "timestamp": time.monotonic_ns(),
        }

    def amdsmi_get_clock_info(
        self, processor_handle: int, clock_type: enum.IntEnum
    ) -> dict[str, Any]:
        card = self._look("amdsmi_get_clock_info", processor_handle)
        shader = clock_type is AmdSmiClkType.GFX
        lowest, highest = card.sclk_mhz if shader else (900, card.mclk_mhz)
        return {
            "clk": card.clock_mhz if shader else card.mclk_mhz,
            "min_clk": lowest,
            "max_clk": highest,
            "clk_locked": "N/A",
            "clk_deep_sleep": "N/A",
        }

    def amdsmi_get_clk_freq(self, processor_handle: int, clk_type: enum.IntEnum) -> dict[str, Any]:
        card = self._look("amdsmi_get_clk_freq", processor_handle)
        return {
            "num_supported": 2,
            "current": 1,
            "frequency": [mhz * 1_000_000 for mhz in card.sclk_mhz],
        }

    def amdsmi_get_power_info(self, processor_handle: int) -> dict[str, Any]:
        card = self._look("amdsmi_get_power_info", processor_handle)
        return {"current_socket_power": int(card.power_w), "average_socket_power": "N/A"}

    def amdsmi_get_power_cap_info(self, processor_handle: int) -> dict[str, Any]:
        card = self._look("amdsmi_get_power_cap_info", processor_handle)
        return {
            "power_cap": card.cap_uw,
            "default_power_cap": card.default_cap_uw,
            "dpm_cap": 0,
            "min_power_cap": card.caps_uw[0],
            "max_power_cap": card.caps_uw[1],
        }

    def amdsmi_get_gpu_activity(self, processor_handle: int) -> dict[str, Any]:
        card = self._look("amdsmi_get_gpu_activity", processor_handle)
        return {"gfx_activity": int(100 * card.load), "umc_activity": 40, "mm_activity": "N/A"}

    def amdsmi_get_temp_metric(
        self,
        processor_handle: int,
        sensor_type: enum.IntEnum,
        metric: enum.IntEnum,
    ) -> int:
        self._look("amdsmi_get_temp_metric", processor_handle)
        return 55

    def amdsmi_set_power_cap(self, processor_handle: int, sensor_ind: int, cap: int) -> None:
        card = self._set("amdsmi_set_power_cap", processor_handle, cap)
        if not card.caps_uw[0] <= cap <= card.caps_uw[1]:
            raise AmdSmiLibraryException(1)
        card.cap_uw = cap

    def amdsmi_set_gpu_perf_determinism_mode(self, processor_handle: int, clkvalue: int) -> None:
        card = self._set("amdsmi_set_gpu_perf_determinism_mode", processor_handle, clkvalue)
        card.level, card.determinism_mhz = "DETERMINISM", clkvalue

    def amdsmi_set_gpu_perf_level(self, processor_handle: int, perf_level: enum.IntEnum) -> None:
        card = self._set("amdsmi_set_gpu_perf_level", processor_handle, perf_level)
        card.level = perf_level.name
