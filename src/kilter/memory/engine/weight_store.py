"""The bytes of weights: on the device, or in host memory that the device reads across the link.

A weight is offloaded if the host has a copy of its value and its bytes are reached only through the
parameter (`aliases.py`). The copy is valid as long as version, storage and `.data` show no
write; otherwise the weight is copied again when it is offloaded. For writes that do not show,
`copy_check.py` compares sums.

The bytes of an offloaded weight are in host memory that the device can read: code in C++ that reads
them finds the right values, only more slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kilter.core.reasons import Reason
from kilter.memory import messages
from kilter.memory.engine.aliases import WeightHolders, bytes_of
from kilter.memory.engine.backend import Backend, HostMemoryError
from kilter.memory.engine.copy_check import CopyCheck, bit_sum
from kilter.memory.engine.moved_weight import HostCopy, MovedWeight
from kilter.memory.engine.offloaded_parameter import offloaded_class
from kilter.memory.engine.stream import Where, shaped
from kilter.memory.engine.weight_stream import ModuleStream, undisturbed


@dataclass(slots=True)
class WeightCounts:
    """What has happened to weights so far; `WeightReport` says what each number means."""

    most_offloaded_bytes: int = 0
    late: int = 0
    stayed: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    host_bytes: int = 0


class WeightStore:
    """Moves weights. `late` is called with a weight that is needed while it is offloaded."""

    def __init__(
        self, backend: Backend, late: Callable[[MovedWeight], None], say: Callable[[Reason], None]
    ) -> None:
        self._backend = backend
        self._late = late
        self._say = say
        self._offloaded_class = offloaded_class(self.fetch)
        self._holders = WeightHolders(backend.device)
        if not self._holders.counted:
            say(messages.weights_stay(messages.NO_USE_COUNT))
        self.modules = ModuleStream(backend.device)
        self.check = CopyCheck(backend, self.modules)
        self.counts = WeightCounts()
        self.weights: dict[int, MovedWeight] = {}
        """Each is known by the identity of its parameter."""
        self.offloaded = 0
        """These parameters are `OffloadedParameter`."""
        self.offloaded_bytes = 0
        self.moved = False
        """Some weight no longer has the address that it began with."""

    def add(self, parameter: torch.nn.Parameter) -> MovedWeight:
        weight = self.weights[id(parameter)] = MovedWeight(parameter, self._forget)
        return weight

    def _forget(self, key: int) -> None:
        """The parameter was freed."""
        weight = self.weights.pop(key, None)
        if weight is None:
            return
        self.offloaded -= weight.where is not Where.RESIDENT
        if weight.where is Where.PREFETCHING:  # others get its memory now: not before the copy
            self._backend.wait(weight.arrival)
        if weight.where is Where.OFFLOADED:
            self.offloaded_bytes -= weight.size_bytes
        weight.incoming = None
        weight.where, weight.stays = Where.RESIDENT, True

    def fetch(self, parameter: Any) -> None:
        """Make the parameter resident for all work that is issued from now on."""
        if type(parameter) is not self._offloaded_class:
            return
        weight = self.weights.get(id(parameter))
        if weight is None:
            # The program has made another tensor of this class. Its value is in its own bytes, also
            # where they are in host memory, which the device reads.
            parameter.__class__ = torch.nn.Parameter
            return
        if weight.where is Where.OFFLOADED:
            self._late(weight)
        if self.modules.left():  # which stream has waited for which is not known
            with self.modules.entered():
                self._fetch(weight, parameter)
            self.modules.synchronize()
        else:
            self._fetch(weight, parameter)

    def _fetch(self, weight: MovedWeight, parameter: Any) -> None:
        self.prefetch(weight)
        copy = weight.copy
        assert copy is not None
        assert weight.incoming is not None
        with undisturbed():
            self._backend.wait(weight.arrival)
            if parameter._version != copy.version:  # written from C++ since the copy was started
                weight.arrival = self._backend.copy_in(weight.incoming, copy.host)
                self._backend.wait(weight.arrival)
            if self._holders.others(parameter, ours=1):
                weight.stays = True
                self._say(messages.HELD_ON_HOST)
            else:
                _take(parameter, shaped(weight.incoming, 0, copy.on_host))
            copy.storage = parameter.untyped_storage()._cdata
        weight.incoming = None
        weight.where = Where.RESIDENT
        parameter.__class__ = torch.nn.Parameter
        self.offloaded -= 1

    def wrote(self, parameter: Any) -> None:
        """The program has read or set the `.data` of a parameter."""
        weight = self.weights.get(id(parameter))
        if weight is not None and weight.copy is not None:
            weight.copy.lent = True

    def copy_out(self, weight: MovedWeight) -> None:
        """Copy the present value to the host."""
        parameter: Any = weight.parameter()
        if parameter is None or weight.stays or weight.where is not Where.RESIDENT:
            return
        copy = weight.copy
        if copy is not None and copy.departure is not None:
            self._backend.wait(copy.departure)
        lent = not self._holders.unreachable(parameter)  # they may write when they like
        storage = parameter.untyped_storage()
        sizes = {storage.nbytes(), parameter.nbytes, weight.size_bytes}
        if len(sizes) > 1 or parameter.device != self._backend.device:
            weight.stays = True
            self._say(messages.RESIZED)
            return
        try:
            self.check.reserve()
            if copy is None:
                copy = weight.copy = self._reserve(parameter, weight.size_bytes)
        except HostMemoryError as error:
            weight.stays = True
            self._say(messages.weights_stay(messages.of_error(error)))
            return
        copy.lent = lent
        copy.storage = storage._cdata
        with undisturbed():
            flat = bytes_of(parameter)
            copy.sum = bit_sum(flat)
            copy.departure = self._backend.copy_out(copy.host, flat)
        copy.version = parameter._version
        self.counts.out_bytes += weight.size_bytes

    def _reserve(self, parameter: Any, size_bytes: int) -> HostCopy:
        host = self._backend.reserve(size_bytes)
        with undisturbed():
            try:
                memory = self._backend.on_device(host, 0, size_bytes)
            except HostMemoryError:
                self._backend.give_back(host)
                raise
            on_host = shaped(memory, 0, parameter)
        self.counts.host_bytes += size_bytes
        return HostCopy(host, on_host)

    def offload(self, weight: MovedWeight) -> None:
        """Evict the weight, if the host has its bytes and they can be reached in no other way."""
        parameter: Any = weight.parameter()
        if parameter is None or weight.stays or type(parameter) is not torch.nn.Parameter:
            return
        copy = weight.copy
        if copy is not None and copy.departure is not None:
            self._backend.wait(copy.departure)
        if not self._holders.unreachable(parameter):
            self.counts.stayed += 1
            return
        storage = parameter.untyped_storage()
        if copy is None or not copy.valid(parameter):
            self.copy_out(weight)
            if weight.stays:
                return
            copy = weight.copy
        assert copy is not None
        with undisturbed():
            self.check.add(bit_sum(bytes_of(parameter)), copy.sum)
            self._backend.wait(copy.departure)
            _take(parameter, copy.on_host)
            self._backend.evicted(storage)
        weight.where = Where.OFFLOADED
        parameter.__class__ = self._offloaded_class
        self.offloaded += 1
        self.moved = True
        self.offloaded_bytes += weight.size_bytes
        counts = self.counts
        counts.most_offloaded_bytes = max(counts.most_offloaded_bytes, self.offloaded_bytes)

    def prefetch(self, weight: MovedWeight) -> None:
        """Start the copy back to the device, if the weight is offloaded."""
        if weight.where is not Where.OFFLOADED:
            return
        assert weight.copy is not None
        with undisturbed():
            weight.incoming = self._backend.alloc(weight.size_bytes)
            weight.arrival = self._backend.copy_in(weight.incoming, weight.copy.host)
        weight.where = Where.PREFETCHING
        self.offloaded_bytes -= weight.size_bytes
        self.counts.in_bytes += weight.size_bytes

    def fetch_all(self) -> None:
        for weight in list(self.weights.values()):
            self.prefetch(weight)
            self.fetch(weight.parameter())


def _take(parameter: Any, source: torch.Tensor) -> None:
    """Give the parameter the bytes of another tensor. Its version stays, as its value does."""
    data: Any = torch.Tensor.data
    data.__set__(parameter, source)
