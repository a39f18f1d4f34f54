"""The bytes of weights: on the device, or in host memory that the device reads across the link.

A weight is offloaded if the host has a copy of its value and its bytes are reached only through the
parameter: no other tensor on its storage, no holder in C++ (a graph that saved it without our
hooks, a scripted module), no other process. The copy is valid as long as version, storage and
`.data` show no write; otherwise the weight is copied again when it is offloaded. Code that knows
the address may write unnoticed. So a sum over the bits is then compared with that of the copy.

The bytes of an offloaded weight are in host memory that the device can read: code in C++ that reads
them finds the right values, only more slowly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kilter.core.reasons import Reason
from kilter.memory import messages
from kilter.memory.engine.aliases import Holders, bytes_of, holders, shared_with_processes
from kilter.memory.engine.backend import Backend, CopyEvent, HostMemoryError, owned
from kilter.memory.engine.offloaded_parameter import offloaded_class
from kilter.memory.engine.saved_hooks import is_ours
from kilter.memory.engine.stream import Where, shaped
from kilter.observe import torch_internals

if TYPE_CHECKING:
    import torch


class MovedWeight:
    """One weight that may be offloaded: where its bytes are, its copies, and its use. It has more
    attributes than most classes, since each decision to offload compares all of them."""

    def __init__(self, parameter: torch.nn.Parameter, forget: Callable[[int], None]) -> None:
        key = id(parameter)
        self.parameter = weakref.ref(parameter, lambda _: forget(key))
        self.storage = parameter.untyped_storage()._cdata
        self.size_bytes = parameter.untyped_storage().nbytes()
        self.where = Where.RESIDENT
        self.host: torch.Tensor | None = None
        self.on_host: torch.Tensor | None = None
        """It is the host memory as a tensor of the device, in the parameter's shape."""
        self.incoming: torch.Tensor | None = None
        """The weight is copied back to this device memory."""
        self.version = -1
        """The parameter had this version when it was copied to the host; -1: there is no copy."""
        self.lent = False
        """The program has read `.data` since the copy, or holds the bytes by another tensor."""
        self.departure: CopyEvent = None
        self.arrival: CopyEvent = None
        self.sum: Any = None
        """It is the sum over the bits of the copy."""
        self.published = False
        """The weight was copied since it was updated in backward."""
        self.marker = key
        """The gradient of the parameter with this identity shows when backward needs the weight."""
        self.updated_at: int | None = None
        self.needed_at: int | None = None
        """The weight was needed at this tick, where that was before its gradient."""
        self.asked_in = -2
        """This is the last pass in which forward needed the weight after it was offloaded."""
        self.stays = False


class WeightStore:
    """Moves weights and counts. `late` is called with a weight that is needed while it is
    offloaded.

    It has more attributes than most classes: offloading a weight changes its class, its bytes, the
    counts and the sums that are compared later in one step.
    """

    def __init__(
        self, backend: Backend, late: Callable[[MovedWeight], None], say: Callable[[Reason], None]
    ) -> None:
        import torch

        self._torch = torch
        self._backend = backend
        self._late = late
        self._say = say
        self._plain = torch.nn.Parameter
        self._offloaded_class = offloaded_class(self.fetch)
        self.stream: Any = None
        """The program's modules issue their work on this stream."""
        self.weights: dict[int, MovedWeight] = {}
        """Each is known by the identity of its parameter."""
        self.offloaded = 0
        """These parameters are `OffloadedParameter`."""
        self.offloaded_bytes = self.most_offloaded_bytes = 0
        self.stayed = 0
        """So many times a weight could not be offloaded because something else held its bytes."""
        self.out_bytes = self.in_bytes = self.host_bytes = 0
        self.moved = False
        """Some weight no longer has the address that it began with."""
        self._left: list[tuple[Any, Any]] = []
        """It holds sums over the weights that were offloaded in this pass, and over their
        copies."""
        self._falsified = False
        self._flag: Any = None
        self._flag_host: torch.Tensor | None = None
        self._counted = hasattr(torch.Tensor, "_use_count")
        if not self._counted:
            say(messages.weights_stay(messages.NO_USE_COUNT))
            return
        fresh = torch.nn.Parameter(torch.empty(1, device=backend.device))
        self._alone = holders(fresh)
        edge = torch.autograd.graph.get_gradient_edge(fresh)
        self._alone_in_graph = holders(fresh)
        del edge

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
            parameter.__class__ = self._plain
            return
        if weight.where is Where.OFFLOADED:
            self._late(weight)
        if self.on_other_stream():  # which stream has waited for which is not known
            with self._torch.cuda.stream(self.stream):
                self._fetch(weight, parameter)
            self.stream.synchronize()
        else:
            self._fetch(weight, parameter)

    def _fetch(self, weight: MovedWeight, parameter: Any) -> None:
        self.prefetch(weight)
        assert weight.host is not None
        assert weight.incoming is not None
        assert weight.on_host is not None
        with self._undisturbed():
            self._backend.wait(weight.arrival)
            if parameter._version != weight.version:  # written from C++ since the copy was started
                weight.arrival = self._backend.copy_in(weight.incoming, weight.host)
                self._backend.wait(weight.arrival)
            if holders(parameter).exceed(self._alone_of(parameter), others=1):
                weight.stays = True
                self._say(messages.HELD_ON_HOST)
            else:
                self._take(parameter, shaped(weight.incoming, 0, weight.on_host))
            weight.storage = parameter.untyped_storage()._cdata
        weight.incoming = None
        weight.where = Where.RESIDENT
        parameter.__class__ = self._plain
        self.offloaded -= 1

    def _take(self, parameter: Any, source: torch.Tensor) -> None:
        """Give the parameter the bytes of another tensor. Its version stays, as its value does."""
        data: Any = self._torch.Tensor.data
        data.__set__(parameter, source)

    def foreign(self, stream: Any) -> bool:
        """Modules have run on another stream than this."""
        return self.stream is not None and stream is not None and stream != self.stream

    def settle(self) -> None:
        """Wait until weights that were fetched may be read by any stream."""
        if self.moved and self.stream is not None:
            self.stream.synchronize()

    def on_other_stream(self) -> bool:
        """The program issues work on another stream than that of its modules."""
        if self._backend.device.type != "cuda" or self.stream is None:
            return False
        here = self._torch.cuda.current_stream(self._backend.device)
        return bool(here != self.stream)

    def _undisturbed(self) -> Any:
        """A context in which the program's modes do not see our operations."""
        quiet = torch_internals.DisableFunction()
        modes = (
            torch_internals.dispatch_mode_depth() or torch_internals.functorch_level() is not None
        )
        if not modes and not self._torch.is_inference_mode_enabled():
            return quiet
        stack = ExitStack()
        stack.enter_context(quiet)
        stack.enter_context(self._torch.inference_mode(False))
        stack.enter_context(torch_internals.DisableFunctorch())
        stack.enter_context(torch_internals.disable_current_modes())
        return stack

    def wrote(self, parameter: Any) -> None:
        """The program has read or set the `.data` of a parameter."""
        weight = self.weights.get(id(parameter))
        if weight is not None:
            weight.lent = True

    def _unreachable(self, parameter: Any) -> bool:
        """The bytes can be reached through the parameter only."""
        if not self._counted:
            return False
        if holders(parameter).exceed(self._alone_of(parameter)):
            return False
        if not owned(parameter.untyped_storage(), on_cuda=parameter.is_cuda):
            return False
        top = torch_internals.top_saved_hooks(True)
        if top is not None and not is_ours(top[1]):
            return False
        return not shared_with_processes(parameter.untyped_storage())

    def _alone_of(self, parameter: Any) -> Holders:
        return self._alone_in_graph if parameter.requires_grad else self._alone

    def _sum(self, flat: torch.Tensor) -> torch.Tensor:
        torch = self._torch
        words = flat.view(torch.int64) if flat.numel() % 8 == 0 else flat
        return words.sum(dtype=torch.int64)

    def copy_out(self, weight: MovedWeight) -> None:
        """Copy the present value to the host."""
        parameter = weight.parameter()
        if parameter is None or weight.stays or weight.where is not Where.RESIDENT:
            return
        if weight.departure is not None:
            self._backend.wait(weight.departure)
        weight.lent = not self._unreachable(parameter)  # they may write when they like
        storage = parameter.untyped_storage()
        weight.storage = storage._cdata
        sizes = {storage.nbytes(), parameter.nbytes, weight.size_bytes}
        if len(sizes) > 1 or parameter.device != self._backend.device:
            weight.stays = True
            self._say(messages.RESIZED)
            return
        try:
            if self._flag_host is None:
                self._flag_host = self._backend.reserve(1)
                self._flag_host.fill_(0)
            if weight.host is None:
                self._reserve(weight, parameter)
        except HostMemoryError as error:
            weight.stays = True
            self._say(messages.weights_stay(messages.of_error(error)))
            return
        assert weight.host is not None
        with self._undisturbed():
            flat = bytes_of(parameter)
            weight.sum = self._sum(flat)
            weight.departure = self._backend.copy_out(weight.host, flat)
        weight.version = parameter._version
        self.out_bytes += weight.size_bytes

    def _reserve(self, weight: MovedWeight, parameter: Any) -> None:
        host = self._backend.reserve(weight.size_bytes)
        with self._undisturbed():
            try:
                memory = self._backend.on_device(host, 0, weight.size_bytes)
            except HostMemoryError:
                self._backend.give_back(host)
                raise
            weight.on_host = shaped(memory, 0, parameter)
        weight.host = host
        self.host_bytes += weight.size_bytes

    def offload(self, weight: MovedWeight) -> None:
        """Evict the weight, if the host has its bytes and they can be reached in no other way."""
        parameter = weight.parameter()
        if parameter is None or weight.stays or type(parameter) is not self._plain:
            return
        if weight.departure is not None:
            self._backend.wait(weight.departure)
        if not self._unreachable(parameter):
            self.stayed += 1
            return
        storage = parameter.untyped_storage()
        same = storage._cdata == weight.storage and parameter._version == weight.version
        if not same or weight.lent:
            self.copy_out(weight)
            if weight.stays:
                return
        with self._undisturbed():
            self._left.append((self._sum(bytes_of(parameter)), weight.sum))
            self._backend.wait(weight.departure)
            assert weight.on_host is not None
            self._take(parameter, weight.on_host)
            self._backend.evicted(storage)
        weight.where = Where.OFFLOADED
        parameter.__class__ = self._offloaded_class
        self.offloaded += 1
        self.moved = True
        self.offloaded_bytes += weight.size_bytes
        self.most_offloaded_bytes = max(self.most_offloaded_bytes, self.offloaded_bytes)

    def prefetch(self, weight: MovedWeight) -> None:
        """Start the copy back to the device, if the weight is offloaded."""
        if weight.where is not Where.OFFLOADED:
            return
        assert weight.host is not None
        with self._undisturbed():
            weight.incoming = self._backend.alloc(weight.size_bytes)
            weight.arrival = self._backend.copy_in(weight.incoming, weight.host)
        weight.where = Where.PREFETCHING
        self.offloaded_bytes -= weight.size_bytes
        self.in_bytes += weight.size_bytes

    def fetch_all(self) -> None:
        for weight in list(self.weights.values()):
            self.prefetch(weight)
            self.fetch(weight.parameter())

    def compare(self) -> None:
        """Compare the weights that were offloaded since the last call with their copies."""
        if not self._left:
            return
        torch = self._torch
        with (
            self._undisturbed(),
            torch.cuda.stream(self.stream if self.on_other_stream() else None),
        ):
            now, then = (torch.stack(sums) for sums in zip(*self._left, strict=True))
            wrong = (now != then).any().view(torch.uint8).view(1)
            if self._flag is None:
                self._flag = torch.zeros_like(wrong)
            self._flag |= wrong
            assert self._flag_host is not None  # since the first copy
            self._backend.copy_out(self._flag_host, self._flag)
        self._left.clear()

    def falsified(self) -> bool:
        """True once if an offloaded weight differed from its copy. The device finds out later."""
        if self._falsified or self._flag_host is None or self._torch.jit.is_tracing():
            return False
        with self._undisturbed():
            self._falsified = bool(self._flag_host[0])
        return self._falsified
