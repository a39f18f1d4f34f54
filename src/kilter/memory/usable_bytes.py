"""How much memory a card has for this process, and how much of a budget may be counted on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kilter.core.units import show_bytes

if TYPE_CHECKING:
    import torch

    from kilter.core.setting import DeviceInfo

RESERVE = 0.1
"""This share is left alone, for fragments, and for workspace that comes and goes between two
looks."""
ROUNDING = 512
"""One part in so many of a budget is left to the allocator, which rounds sizes up."""


def countable_bytes(budget_bytes: int) -> int:
    """So much of a budget what is planned may take."""
    return budget_bytes - budget_bytes // ROUNDING


def usable_device_bytes(cuda: Any, device: torch.device) -> tuple[int, str]:
    """Bytes that the framework may hold (`cuda` is `torch.cuda`), and how they were found: what is
    free or ours already, at most the program's own cap, less the reserve."""
    free_bytes, total_bytes = cuda.mem_get_info(device)
    ours_bytes = cuda.memory_reserved(device)
    cap = getattr(cuda, "get_per_process_memory_fraction", None)  # not in all versions
    fraction = 1.0 if cap is None else cap(device)
    room_bytes = min(free_bytes + ours_bytes, int(fraction * total_bytes))
    capped = room_bytes < free_bytes + ours_bytes
    why = "the program's own cap" if capped else "the rest is held by others and by the driver"
    return (
        int((1 - RESERVE) * room_bytes),
        f"{show_bytes(room_bytes)} of {show_bytes(total_bytes)} ({why}), "
        f"less {RESERVE * 100:g} % in reserve",
    )


def card_memory(cuda: Any, device: torch.device, info: DeviceInfo) -> tuple[int | None, str]:
    """What the card has for this process, and how that was found: the GPU that torch computes on,
    or on a CPU the device that stands for one."""
    if device.type == "cuda":
        return usable_device_bytes(cuda, device)
    return info.memory_bytes, f"{show_bytes(info.memory_bytes)} of {info.name}"
