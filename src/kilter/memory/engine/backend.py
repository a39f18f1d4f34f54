"""What moves bytes: the interface, and the stand-in for a device on a machine without one.

All methods are called on the thread that runs the framework's operations, and none but
`elapsed_s` may block it. Order matters as on a GPU: a copy starts after the work that was issued
before it, and what is issued later may overtake it unless it waits for the copy's event.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from kilter.memory.engine.gone import when_gone
from kilter.memory.host_memory import HostLimit
from kilter.memory.host_memory import (
    HostMemoryError as HostMemoryError,  # callers know it from here
)

if TYPE_CHECKING:
    import torch

CopyEvent = Any
"""It marks the end of a copy, or a moment. Its type is the backend's own."""


SPOIL = "KILTER_SPOIL_EVICTED"
"""With `1` in this environment variable the stand-in overwrites what was evicted. Tests set it."""


def owned(storage: torch.UntypedStorage, *, on_cuda: bool) -> bool:
    """Whether the framework's allocator made this memory, for this process alone. (To ask the
    storage itself for its device takes longer than all the rest here.)

    Memory of NumPy, of DLPack and other buffers, of files and of other processes is not owned, nor
    is a storage cut out of another one. Others may read or write such memory at any time, so
    its bytes are neither given up nor computed with at another time than the program does.
    """
    # The framework calls every CUDA storage shared; one that came from elsewhere has no allocator.
    return bool(storage.resizable() and (on_cuda or not storage.is_shared()))


class Backend(Protocol):
    """A device with memory, a host arena, and one copy engine in each direction."""

    device: torch.device
    host: HostLimit
    """It limits the bytes that `reserve` may take."""
    spoils: bool
    """Whether `evicted` has an effect."""
    shows_waits: bool
    """Two marks around a `wait` show how long the device waited for the copy."""
    holds: Callable[[int], None] | None
    """The engine calls it with the bytes that saved tensors hold, whenever it takes or evicts some;
    None: the backend keeps no account of its own."""

    def use_library(self, compiled: Any) -> None:
        """From here on have the compiled library do what it can."""

    def alloc(self, size_bytes: int) -> torch.Tensor:
        """Device memory as a flat byte tensor."""

    def alloc_like(self, host: torch.Tensor) -> torch.Tensor:
        """Device memory of the same type and layout."""

    def reserve(self, size_bytes: int) -> torch.Tensor:
        """Host memory that copies reach at full speed. Raises `HostMemoryError` before the host
        runs short of memory."""

    def give_back(self, host: torch.Tensor) -> None:
        """Host memory that `reserve` gave is not needed any more; no copy of it is under way. What
        tensors of the device lie in is given back with the last of them."""

    def on_device(self, host: torch.Tensor, begin: int, size_bytes: int) -> torch.Tensor:
        """Part of what `reserve` gave, as a tensor of the device with a storage of its own. The
        device reads and writes it across the link. The memory stays pinned, also after `close`,
        until the last such tensor is gone."""

    def copy_out(self, host: torch.Tensor, device: torch.Tensor) -> CopyEvent:
        """Start copying device bytes to the host."""

    def copy_in(self, device: torch.Tensor, host: torch.Tensor) -> CopyEvent:
        """Start copying host bytes to the device."""

    def wait(self, event: CopyEvent) -> None:
        """Let everything that is issued from now on run after the copy."""

    def evicted(self, storage: torch.UntypedStorage) -> None:
        """The engine gives up this storage, which nothing else holds."""

    def stream(self) -> int | None:
        """The stream that operations are issued to now; None while they are captured into a graph,
        when nothing may move or be timed."""

    def mark(self) -> CopyEvent:
        """This moment on the device's timeline."""

    def reached(self, mark: CopyEvent) -> bool:
        """The device has come to this mark. Waits for nothing."""

    def elapsed_s(self, begin: CopyEvent, end: CopyEvent) -> float:
        """Device time between two marks; may wait for them."""

    def keep_busy(self, seconds: float) -> None:
        """Let the device do nothing for a moment, so that what is issued meanwhile runs back to
        back and is timed without the host's own pace."""

    def used_bytes(self) -> int | None:
        """Device memory in use now; None if only the engine's own count is to be had."""

    def usable_bytes(self) -> int | None:
        """How much device memory the program may use; None where that has no end."""

    def peak_bytes(self) -> int | None:
        """The most in use since the last call; None as above. The program's own count of its peak
        begins anew."""

    def peak_so_far_bytes(self) -> int | None:
        """The same, but counting goes on."""

    def close(self) -> None:
        """Finish all copies and give the host memory back."""


class CpuStandIn:
    """A device made of CPU memory.

    Copies are carried out as late as the interface allows (when somebody waits, or when the next
    `lag` copies have been issued), so a missing wait shows as wrong bytes. With `spoil` fresh
    memory and evicted memory are also filled with a pattern that no result survives: a check of the
    engine. Without it, as in a user's run, evicting is only counted. Not given, the environment
    says which (`SPOIL`).
    """

    POISON = 0xCD
    shows_waits = False
    """The CPU copies by itself, at the moment at which the copy is waited for."""
    holds: Callable[[int], None] | None = None

    def __init__(
        self, *, host: HostLimit | None = None, lag: int = 8, spoil: bool | None = None
    ) -> None:
        import torch

        self.device = torch.device("cpu")
        self.spoils = os.environ.get(SPOIL) == "1" if spoil is None else spoil
        self.host = HostLimit() if host is None else host
        self._reserved_bytes = 0
        self._mapped: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """It holds, by address, the memory that has become part of the device's."""
        self._lag = lag
        self._pending: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self._issued = 0

    def use_library(self, compiled: Any) -> None:
        pass

    def alloc(self, size_bytes: int) -> torch.Tensor:
        import torch

        fresh = torch.empty(size_bytes, dtype=torch.uint8)
        return fresh.fill_(self.POISON) if self.spoils else fresh

    def alloc_like(self, host: torch.Tensor) -> torch.Tensor:
        flat = self.alloc(host.numel() * host.element_size()).view(host.dtype)
        return flat.as_strided(host.size(), host.stride())

    def reserve(self, size_bytes: int) -> torch.Tensor:
        self.host.take(size_bytes)
        self._reserved_bytes += size_bytes
        return self.alloc(size_bytes)

    def give_back(self, host: torch.Tensor) -> None:
        self._run_until(self._issued)
        if host.data_ptr() in self._mapped:
            return
        self.host.give_back(host.nbytes)
        self._reserved_bytes -= host.nbytes
        if self.spoils:
            host.fill_(self.POISON)

    def on_device(self, host: torch.Tensor, begin: int, size_bytes: int) -> torch.Tensor:
        import torch

        memory = self._mapped.get(host.data_ptr())
        if memory is None:
            memory = self._mapped[host.data_ptr()] = host.numpy()
            self._reserved_bytes -= host.nbytes
            when_gone(memory, self.host.give_back, host.nbytes)
        return torch.from_numpy(memory[begin : begin + size_bytes])

    def copy_out(self, host: torch.Tensor, device: torch.Tensor) -> CopyEvent:
        return self._issue(host, device)

    def copy_in(self, device: torch.Tensor, host: torch.Tensor) -> CopyEvent:
        return self._issue(device, host)

    def _issue(self, target: torch.Tensor, source: torch.Tensor) -> int:
        self._issued += 1
        self._pending.append((self._issued, target, source))
        if len(self._pending) > self._lag:
            self._run_until(self._pending[0][0])
        return self._issued

    def _run_until(self, number: int) -> None:
        while self._pending and self._pending[0][0] <= number:
            _, target, source = self._pending.popleft()
            target.copy_(source)

    def wait(self, event: CopyEvent) -> None:
        self._run_until(event)

    def evicted(self, storage: torch.UntypedStorage) -> None:
        if self.spoils and owned(storage, on_cuda=False):
            storage.fill_(self.POISON)

    def stream(self) -> int | None:
        return 0

    def mark(self) -> CopyEvent:
        return time.perf_counter()

    def reached(self, mark: CopyEvent) -> bool:
        return True

    def elapsed_s(self, begin: CopyEvent, end: CopyEvent) -> float:
        return float(end - begin)

    def keep_busy(self, seconds: float) -> None:
        pass

    def used_bytes(self) -> int | None:
        return None

    def usable_bytes(self) -> int | None:
        return None

    def peak_bytes(self) -> int | None:
        return None

    def peak_so_far_bytes(self) -> int | None:
        return None

    def close(self) -> None:
        self._run_until(self._issued)
        self.host.give_back(self._reserved_bytes)
        self._reserved_bytes = 0
