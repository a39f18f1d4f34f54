"""The few calls of the CUDA driver that the GPU's marker needs, through ctypes.

The driver's and not the runtime's: a failed call of the runtime is remembered in its thread, and
torch would raise the error at the program's next kernel. None of these calls waits for the GPU's
work; the registration of a page happens once. (CUDA driver API: memory management, stream memory
operations.)
"""

from __future__ import annotations

import ctypes
from typing import Any

from kilter.core.errors import DeviceError

_PORTABLE, _DEVICE_MAP = 1, 2
"""With these flags of `cuMemHostRegister` the memory is for all contexts of the process, and has an
address for the GPU."""
_CAN_WRITE_64_BITS = 122
"""CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS."""
_DEFAULT = 0
"""With this flag of `cuStreamWriteValue64` the write comes after all work before it, behind a
fence."""
_LIBRARY = "libcuda.so.1"

_int, _unsigned, _word = ctypes.c_int, ctypes.c_uint, ctypes.c_uint64
_handle, _size = ctypes.c_void_p, ctypes.c_size_t
_ARGUMENTS: dict[str, list[Any]] = {
    "cuMemHostRegister_v2": [_handle, _size, _unsigned],
    "cuMemHostGetDevicePointer_v2": [ctypes.POINTER(_word), _handle, _unsigned],
    "cuMemHostUnregister": [_handle],
    "cuCtxGetDevice": [ctypes.POINTER(_int)],
    "cuDeviceGetAttribute": [ctypes.POINTER(_int), _int, _int],
    "cuStreamWriteValue64_v2": [_handle, _word, _word, _unsigned],
    "cuMemsetD32Async": [_word, _unsigned, _size, _handle],
    "cuGetErrorName": [_int, ctypes.POINTER(ctypes.c_char_p)],
}


class CudaDriver:
    """All but the first need the context of the GPU to be current in the calling thread, as it is
    where torch has just computed. Each raises `DeviceError`."""

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = ctypes.CDLL(_LIBRARY) if library is None else library
        except OSError as error:
            raise DeviceError(f"there is no CUDA driver: {error}") from error

    def register(self, address: int, size: int) -> int:
        """Have the GPU reach memory of the host: the memory's address for the GPU."""
        self._call("cuMemHostRegister_v2", address, size, _PORTABLE | _DEVICE_MAP)
        there = _word()
        try:
            self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(there), address, 0)
        except DeviceError:
            self.unregister(address)
            raise
        return there.value

    def unregister(self, address: int) -> None:
        """The GPU must not write there any more."""
        self._call("cuMemHostUnregister", address)

    def writes_values(self) -> bool:
        """Whether a stream of the current GPU writes 64 bits on its own."""
        device, can = _int(), _int()
        self._call("cuCtxGetDevice", ctypes.byref(device))
        self._call("cuDeviceGetAttribute", ctypes.byref(can), _CAN_WRITE_64_BITS, device.value)
        return bool(can.value) and self._function("cuStreamWriteValue64_v2") is not None

    def write(self, stream: int, address: int, number: int) -> None:
        """A number of 64 bits, once the stream has done all that it was given before."""
        self._call("cuStreamWriteValue64_v2", stream, address, number, _DEFAULT)

    def fill(self, stream: int, address: int, number: int) -> None:
        """The same by other means: the lower 32 bits of the number. An asynchronous fill never
        waits for the GPU, also not where the memory is the host's."""
        self._call("cuMemsetD32Async", address, number, 1, stream)

    def _call(self, name: str, *arguments: Any) -> None:
        function = self._function(name)
        if function is None:
            raise DeviceError(f"the CUDA driver has no {name}")
        code = function(*arguments)
        if code:
            raise DeviceError(f"{name}: {self._name_of(code)}")

    def _function(self, name: str) -> Any:
        function = getattr(self._library, name, None)
        if function is not None:
            function.argtypes, function.restype = _ARGUMENTS[name], _int
        return function

    def _name_of(self, code: int) -> str:
        text = ctypes.c_char_p()
        function = self._function("cuGetErrorName")
        if function is None or function(code, ctypes.byref(text)) or not text.value:
            return f"CUDA error {code}"
        return f"{text.value.decode()} ({code})"
