"""A CUDA driver and `torch.cuda` that behave, for tests without a GPU.

Streams keep what they are given until the test has them do it, so the host runs ahead as far as the
test likes. A write really changes the memory, and is a fault where the memory is not registered.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kilter.observe.cuda_driver import CudaDriver

DEFAULT_STREAM = 0
NOT_SUPPORTED = 801
_GPU_SEES_AT = 1 << 40
"""Addresses for the GPU are others than the host's."""


class FakeCuda:
    """Both ends: `driver()` for our code, and the attributes of `torch.cuda` that it reads.
    `failing` names calls of the driver that return an error."""

    def __init__(self, *, writes_values: bool = True) -> None:
        self.failing: set[str] = set()
        self.calls: list[str] = []
        self.capturing = False
        self.stream = DEFAULT_STREAM
        self.registered: set[int] = set()
        self.faults: list[int] = []
        self._writes_values = writes_values
        self._given: dict[int, list[Callable[[], None]]] = {}

    def driver(self) -> CudaDriver:
        return CudaDriver(self)

    # The GPU.

    def work(self, do: Callable[[], None] = lambda: None, *, stream: int | None = None) -> None:
        """Give a stream something of the program's."""
        self._given.setdefault(self.stream if stream is None else stream, []).append(do)

    def run(self, count: int | None = None, *, stream: int = DEFAULT_STREAM) -> None:
        """Have a stream do the first `count` things that it was given; None: all."""
        given = self._given.get(stream, [])
        count = len(given) if count is None else count
        self._given[stream] = given[count:]
        for do in given[:count]:
            do()

    def waiting(self, stream: int = DEFAULT_STREAM) -> int:
        """How much a stream has been given and has not done."""
        return len(self._given.get(stream, []))

    def _write(self, stream: int | None, there: int, number: int, size: int) -> None:
        address = there - _GPU_SEES_AT

        def do() -> None:
            if address not in self.registered:
                self.faults.append(address)
                return
            ctypes.memmove(address, number.to_bytes(8, "little"), size)

        self.work(do, stream=stream or DEFAULT_STREAM)

    # The driver.

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        calls: dict[str, Callable[..., None]] = {
            "cuMemHostRegister_v2": self._register,
            "cuMemHostGetDevicePointer_v2": self._pointer,
            "cuMemHostUnregister": self._unregister,
            "cuCtxGetDevice": _nothing,
            "cuDeviceGetAttribute": self._attribute,
            "cuStreamWriteValue64_v2": self._write_value,
            "cuMemsetD32Async": self._fill,
            "cuGetErrorName": _nothing,
        }
        if name not in calls:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.failing:
                return NOT_SUPPORTED
            calls[name](*arguments)
            return 0

        return call

    def _register(self, address: int, _size: int, _flags: int) -> None:
        self.registered.add(address)

    @staticmethod
    def _pointer(there: Any, address: int, _flags: int) -> None:
        ctypes.cast(there, ctypes.POINTER(ctypes.c_uint64))[0] = address + _GPU_SEES_AT

    def _unregister(self, address: int) -> None:
        self.registered.remove(address)

    def _attribute(self, can: Any, _attribute: int, _device: int) -> None:
        ctypes.cast(can, ctypes.POINTER(ctypes.c_int))[0] = int(self._writes_values)

    def _write_value(self, stream: int | None, there: int, number: int, _flags: int) -> None:
        self._write(stream, there, number, 8)

    def _fill(self, there: int, number: int, count: int, stream: int | None) -> None:
        self._write(stream, there, number, 4 * count)

    # torch.cuda.

    @contextmanager
    def device(self, _device: Any) -> Iterator[None]:
        yield

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_stream(self, _device: Any = None) -> FakeStream:
        return FakeStream(self.stream)


class FakeStream:
    """What `torch.cuda.current_stream` returns."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number


def _nothing(*_: Any) -> None:
    pass
