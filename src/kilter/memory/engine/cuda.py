"""The CUDA backend: two copy streams by turns in each direction, pinned host memory of exact size.

The computing stream waits for events, the CPU never does. Buffers are allocated and freed on the
computing stream and copies wait for it, so no `record_stream` is needed: that would hold memory
back until the copy stream has passed, and raise the peak.

A copy is four calls of the driver. The framework's own way (ask for the stream, switch to another
one, copy element-wise, switch back) takes the host several times as long, which matters where a
copy falls due between two kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from kilter.core.errors import DeviceError, NoDevice
from kilter.core.units import MIB, show_bytes
from kilter.memory.engine.backend import CopyEvent
from kilter.memory.engine.gone import when_gone
from kilter.memory.host_memory import (
    HostLimit,
    HostMemoryError,
    available_bytes,
    large_pages,
)
from kilter.memory.plan.problem import Link
from kilter.memory.usable_bytes import usable_device_bytes
from kilter.observe import torch_internals

CLOCK_HZ = 2e9
"""The counter that the framework's sleep counts by runs at about this rate."""
LARGE_COPIES, SMALL_COPIES = 4, 64
"""So many large copies measure the rates of the link, and so many small ones its latency."""
HOST_SHARE = 0.8
"""This share of what the host can give may be pinned; the job's own data loaders need the rest."""

MAPPED = 2
"""With this flag, `cudaHostRegisterMapped`, the device may read and write the memory itself."""


class _Driver:
    """The few calls of the CUDA driver that copies need; handles and addresses are integers."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        handle, address, size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
        self.copy = library.cuMemcpyAsync  # pinned memory has the same address on both sides
        self.copy.argtypes = (address, address, size, handle)
        self.record = library.cuEventRecord
        self.record.argtypes = (handle, handle)
        self.hold = library.cuStreamWaitEvent
        self.hold.argtypes = (handle, handle, ctypes.c_uint)
        self.address = library.cuMemHostGetDevicePointer_v2
        self.address.argtypes = (ctypes.POINTER(address), ctypes.c_void_p, ctypes.c_uint)


_driver = functools.cache(_Driver)


class _Lane:
    """The copies in one direction. They end in the order of their numbers, so whoever waits for one
    has waited for all before it, and a few events do for all copies: the event of copy `n` is used
    again by copy `n + RING`, and waiting for that one instead is late, never wrong.

    Two streams take turns, and each waits for the other. While it does, the copy engine sees to
    copies of the program: a number that is read would have to wait for all that one stream was
    given, and waits for one turn (docs/measurements/memory.md)."""

    RING = 256
    TURN = 32 * MIB
    """At most so much is copied in a turn."""

    def __init__(self, device: torch.device) -> None:
        self._driver = _driver()
        self._owners = [torch.cuda.Stream(device) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(self.RING + 2)]
        for event in self._events:
            event.record(self._owners[0])  # before that it is nothing
        self._streams = [owner.cuda_stream for owner in self._owners]
        """The first of them copies now."""
        self._in_turn = 0
        """It has been given so many bytes in its turn."""
        self._ready, self._over, *self._done = (event.cuda_event for event in self._events)
        self._turns = threading.RLock()
        """The program's threads start copies one after the other."""
        self._issued = 0
        self._waited: dict[int, int] = {}
        """It names, for each stream, the last copy that the stream waited for."""
        self._calls: Any = None
        """The compiled library starts copies; None: Python does."""

    def use_library(self, compiled: Any) -> None:
        """From here on the compiled library starts copies."""
        if self._calls is None:
            driver = self._driver
            calls = (driver.copy, driver.record, driver.hold)
            addresses = (ctypes.cast(call, ctypes.c_void_p).value for call in calls)
            handles = (*self._streams, self._ready, self._over)
            self._calls = compiled.CopyCalls(*addresses, *handles, self.TURN, self._in_turn)

    def copy(self, target: torch.Tensor, source: torch.Tensor, compute: int) -> CopyEvent:
        """Of as many bytes, dense on both sides."""
        calls = self if self._calls is None else self._calls
        with self._turns:
            number = self._issued = self._issued + 1
            failed = calls.start(target, source, compute, self._done[number % self.RING])
        if failed:
            raise DeviceError(f"a copy between host and device failed (CUDA: {failed})")
        return self, number

    def start(self, target: torch.Tensor, source: torch.Tensor, compute: int, done: int) -> int:
        """Start a copy after what was issued to `compute`; its end is the event `done`. The
        driver's error, or 0."""
        driver, size_bytes = self._driver, target.nbytes
        failed = driver.record(self._ready, compute) or driver.hold(
            self._streams[0], self._ready, 0
        )
        for begin in range(0, size_bytes, self.TURN):
            part_bytes = min(self.TURN, size_bytes - begin)
            failed = failed or self._take_turns(part_bytes)
            places = target.data_ptr() + begin, source.data_ptr() + begin
            failed = failed or driver.copy(*places, part_bytes, self._streams[0])
        return int(failed or driver.record(done, self._streams[0]))

    def _take_turns(self, part_bytes: int) -> int:
        """The other stream goes on if so much is too much for this turn. As above."""
        self._in_turn += part_bytes
        if self._in_turn <= self.TURN:
            return 0
        self._in_turn = part_bytes
        self._streams.reverse()
        now, before = self._streams
        return int(self._driver.record(self._over, before) or self._driver.hold(now, self._over, 0))

    def hold(self, compute: int, done: int) -> int:
        """What is issued to `compute` from here on waits for that event. As above."""
        return int(self._driver.hold(compute, done, 0))

    def wait(self, number: int, compute: int) -> None:
        if self._waited.get(compute, 0) < number:
            calls = self if self._calls is None else self._calls
            failed = calls.hold(compute, self._done[number % self.RING])
            if failed:
                raise DeviceError(f"waiting for a copy failed (CUDA: {failed})")
            self._waited[compute] = number


class _Mapped:
    """Registered host memory that tensors of the device lie in; unregistered after the last."""

    def __init__(self, host: torch.Tensor, device: torch.device, limit: HostLimit) -> None:
        address = ctypes.c_uint64()
        failed = _driver().address(ctypes.byref(address), host.data_ptr(), 0)
        if failed:
            raise HostMemoryError(f"the device does not reach host memory (CUDA: {failed})")
        self.address = address.value
        """The device knows the memory by it."""
        when_gone(self, _unregister, host, device, limit)


def _unregister(host: torch.Tensor, device: torch.device, limit: HostLimit) -> None:
    torch.cuda.synchronize(device)
    if int(torch.cuda.cudart().cudaHostUnregister(host.data_ptr())) != 0:
        _take_error(device)
    limit.give_back(host.nbytes)


def _take_error(device: torch.device) -> None:
    """The runtime tells of a call that failed once more at the next kernel, where the framework
    raises it. So that this is none of the program's, one of ours takes it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


class _Part:
    """Some bytes of mapped memory, as the framework takes them in."""

    def __init__(self, memory: _Mapped, begin: int, size_bytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (memory.address + begin, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 2,
        }


class Cuda:
    """Memory and copy engines of one NVIDIA GPU, through the framework's own allocator."""

    spoils = False
    shows_waits = True
    holds: Callable[[int], None] | None = None

    def __init__(
        self, device: torch.device, out: _Lane, back: _Lane, host: HostLimit | None = None
    ) -> None:
        self.device = device
        self.host = HostLimit() if host is None else host
        self._index = device.index
        self._out = out
        self._in = back
        self._registered: dict[int, torch.Tensor] = {}
        """It is kept by address."""
        self._mapped: weakref.WeakValueDictionary[int, _Mapped] = weakref.WeakValueDictionary()
        """It holds, by address, what has become part of the device's memory."""
        self._allocated: Callable[[int], tuple[int, int]] | None = None
        """The compiled library tells what is in use, and the most since that was reset."""

    @classmethod
    def open(cls, index: int | None = None, host: HostLimit | None = None) -> Cuda:
        """The current device, or the given one, with the limit that all backends of this process
        share. `NoDevice` if the framework sees none."""
        if not torch.cuda.is_available():
            raise NoDevice("PyTorch sees no CUDA device")
        device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        return cls(device, _Lane(device), _Lane(device), host)

    def use_library(self, compiled: Any) -> None:
        self._allocated = getattr(compiled, "allocated_bytes", None)  # not with PyTorch 2.8
        for lane in (self._out, self._in):
            lane.use_library(compiled)

    def alloc(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def alloc_like(self, host: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self.device)

    def reserve(self, size_bytes: int) -> torch.Tensor:
        """Registered with the driver rather than allocated by it: `pin_memory` rounds up to the
        next power of two. It is written to first: the driver's own way to pages that are not
        there yet takes six times as long (docs/measurements/memory.md)."""
        left_bytes, whose = available_bytes()
        if size_bytes > HOST_SHARE * left_bytes:
            raise HostMemoryError(
                f"{show_bytes(size_bytes)} of host memory needed, and {show_bytes(left_bytes)} "
                f"{whose} (at most {HOST_SHARE:.0%} of it is taken)"
            )
        self.host.take(size_bytes)
        try:
            host = torch.frombuffer(large_pages(size_bytes), dtype=torch.uint8).zero_()
        except OSError as error:
            self.host.give_back(size_bytes)
            raise HostMemoryError(f"{show_bytes(size_bytes)} of host memory: {error}") from None
        with torch.cuda.device(self.device):  # the framework asks whose the memory is
            result = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), size_bytes, MAPPED)
        if int(result) != 0:
            _take_error(self.device)
            self.host.give_back(size_bytes)
            raise HostMemoryError(f"{show_bytes(size_bytes)} cannot be pinned (CUDA: {result})")
        self._registered[host.data_ptr()] = host
        return host

    def give_back(self, host: torch.Tensor) -> None:
        if self._registered.pop(host.data_ptr(), None) is not None:
            _unregister(host, self.device, self.host)

    def on_device(self, host: torch.Tensor, begin: int, size_bytes: int) -> torch.Tensor:
        address = host.data_ptr()
        memory = self._mapped.get(address)
        if memory is None:
            with torch.cuda.device(self.device):
                memory = self._mapped[address] = _Mapped(host, self.device, self.host)
            del self._registered[address]
        found = torch.as_tensor(_Part(memory, begin, size_bytes), device=self.device)
        if found.data_ptr() != memory.address + begin:
            raise HostMemoryError(f"{self.device} does not reach pinned host memory")
        return found

    def copy_out(self, host: torch.Tensor, device: torch.Tensor) -> CopyEvent:
        return self._copy(self._out, host, device)

    def copy_in(self, device: torch.Tensor, host: torch.Tensor) -> CopyEvent:
        return self._copy(self._in, device, host)

    def _copy(self, lane: _Lane, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        if torch_internals.cuda_device() == self._index:
            return lane.copy(target, source, torch_internals.cuda_raw_stream(self._index))
        with torch.cuda.device(self.device):
            return lane.copy(target, source, torch_internals.cuda_raw_stream(self._index))

    def wait(self, event: CopyEvent) -> None:
        lane, number = event
        lane.wait(number, torch_internals.cuda_raw_stream(self._index))

    def evicted(self, storage: torch.UntypedStorage) -> None:
        pass

    def stream(self) -> int | None:
        if torch_internals.cuda_is_capturing():
            return None
        return int(torch_internals.cuda_raw_stream(self._index))

    def mark(self) -> CopyEvent:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reached(self, mark: CopyEvent) -> bool:
        return bool(mark.query())

    def elapsed_s(self, begin: CopyEvent, end: CopyEvent) -> float:
        begin.synchronize()  # it may be of another stream
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    def keep_busy(self, seconds: float) -> None:
        torch_internals.cuda_sleep(int(seconds * CLOCK_HZ))

    def used_bytes(self) -> int | None:
        return self._allocated_bytes()[0]

    def usable_bytes(self) -> int | None:
        return usable_device_bytes(torch.cuda, self.device)[0]

    def peak_bytes(self) -> int | None:
        peak_bytes = self.peak_so_far_bytes()
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak_bytes

    def peak_so_far_bytes(self) -> int | None:
        return self._allocated_bytes()[1]

    def _allocated_bytes(self) -> tuple[int, int]:
        """Now, and the most since that was reset. Without a plan this is asked for each tensor."""
        if self._allocated is not None:
            return self._allocated(self._index)
        # `memory_allocated` first sorts all figures by name, which takes long.
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        found = stats["allocated_bytes"]["all"] if stats else {"current": 0, "peak": 0}
        return int(found["current"]), int(found["peak"])

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        for host in self._registered.values():
            _unregister(host, self.device, self.host)
        self._registered.clear()


def measure_link(backend: Cuda, *, size_bytes: int = 256 * MIB) -> Link:
    """The link's table on this machine: each direction alone, both at once, and a small copy. The
    host memory for that is given back; less is used where the limit leaves less."""
    left_bytes = backend.host.left_bytes
    if left_bytes is not None:
        size_bytes = min(size_bytes, left_bytes // 2)
    hosts = [backend.reserve(size_bytes) for _ in range(2)]
    devices = [backend.alloc(size_bytes) for _ in range(2)]

    def seconds(out: bool, back: bool, size: int, count: int) -> float:
        torch.cuda.synchronize(backend.device)
        begin = backend.mark()
        ends = []
        for _ in range(count):
            if out:
                ends.append(backend.copy_out(hosts[0][:size], devices[0][:size]))
            if back:
                ends.append(backend.copy_in(devices[1][:size], hosts[1][:size]))
        for end in ends:
            backend.wait(end)
        return backend.elapsed_s(begin, backend.mark())

    for out, back in ((True, False), (False, True), (True, True)):
        seconds(out, back, size_bytes, 1)
    moved = size_bytes * LARGE_COPIES
    out_s = seconds(True, False, size_bytes, LARGE_COPIES)
    in_s = seconds(False, True, size_bytes, LARGE_COPIES)
    both_s = seconds(True, True, size_bytes, LARGE_COPIES)
    small_bytes = min(MIB, size_bytes)
    small_s = seconds(True, False, small_bytes, SMALL_COPIES) / SMALL_COPIES
    latency_s = small_s - small_bytes * out_s / moved
    for host in hosts:
        backend.give_back(host)
    return Link(
        to_host_bytes_per_s=moved / out_s,
        to_device_bytes_per_s=moved / in_s,
        both_bytes_per_s=2 * moved / both_s,
        latency_s=max(0.0, latency_s),
    )
