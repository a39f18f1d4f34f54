"""Autograd's hooks on saved tensors: which tensors the engine takes, and which stay as they are.

The pack hook decides from the tensor alone. Modes of the program, which count or change operations,
must not see operations of the engine. After an error of ours, behind the fence, tensors are only
fetched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, strided
from torch.autograd import forward_ad
from torch.nn import Parameter

from kilter.memory.engine import fused, recording
from kilter.memory.engine.backend import owned
from kilter.memory.engine.modified import Modified
from kilter.memory.engine.quiet import unseen, untangented
from kilter.memory.engine.store import (
    Saved,
    Store,
    View,
    kept,
    original_of,
    whole,
)
from kilter.observe import torch_internals

if TYPE_CHECKING:
    from kilter.memory.engine.recompute import Recipe
    from kilter.session.fence import Fence


def _under_a_mode() -> bool:
    """The program's operations are counted, changed or recorded, or have tangents."""
    return bool(
        torch_internals.dispatch_mode_depth()
        or torch_internals.function_mode_depth()
        or forward_ad._current_level >= 0
    )


class TensorHooks:
    """`save(tensor)` returns what autograd holds instead of a large tensor, `use(packed)` the
    tensor again. Tensors below `min_bytes`, and those on another `device`, are kept."""

    def __init__(
        self,
        store: Store,
        device: torch.device,
        min_bytes: int,
        save: Callable[[Tensor, int, int], Any],
        use: Callable[[Any], Tensor],
        fence: Fence | None,
    ) -> None:
        self.store = store
        self._position: Any = None
        """The compiled one, which sees to events by itself; None: there is none."""
        self.device = device
        self.min_bytes = min_bytes
        self._save = save
        self._use = use
        self.fence = fence
        self._save_large = save if fence is None else self._save_fenced
        self._use_large = use if fence is None else self._use_fenced
        self.tangents: dict[int, int] = {}
        """It counts, by storage, the bytes of tangents of saved tensors. Autograd keeps them beside
        what hooks give for a tensor, and asks no hook."""
        self._handed_over = False
        """The compiled library's own hooks are in place."""
        self._around: Callable[[Any, Any], tuple[Any, Any]] = lambda pack, unpack: (pack, unpack)
        """It makes of our own hooks what is put in place."""
        self._hooks: Any = None
        self.aside = False
        """They have been taken away for a while."""
        self._thread: threading.Thread | None = None

    @property
    def thread_ended(self) -> bool:
        """The thread in which they stood has ended, and they with it."""
        return self._thread is not None and not self._thread.is_alive()

    @property
    def in_thread(self) -> bool:
        """This is the thread in which they stand."""
        return self._thread is threading.current_thread()

    def enter(self) -> None:
        """In this thread, from here on."""
        self._thread = threading.current_thread()
        at = self._position
        own = (at.pack, at.unpack) if self._handed_over else (self._pack, self._unpack)
        pack, unpack = self._around(*own)
        self.store.unpack_hooks += (unpack,)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        self._hooks.__enter__()

    def exit(self, *exception: object) -> None:
        """What is saved from here on is left to autograd. In the thread of `enter`, if it lives."""
        if not self.thread_ended and not self.aside:
            self._hooks.__exit__(*(exception or (None, None, None)))
        self.aside = False

    def use_library(
        self,
        overdue: dict[int, Any],
        lent: list[Any],
        followed: dict[int, Any],
        read: Callable[[Tensor], Recipe | None],
        attend: Callable[[bool, Saved | None], None],
    ) -> Any:
        """From here on have the compiled library do what it can, if there is one, and its
        `Position`; else None. It adds the tensors that it takes over to those `followed`, by
        number; `read` gives their recipes. It calls `attend` after an event at which it could not
        carry out all that is due or `overdue`, and with a tensor that backward needs and that is
        not there. While something is `lent` it leaves all to Python."""
        if self.store.compiled is not None:
            self._position = self.store.compiled.Position(
                self, overdue, lent, followed, read, attend
            )
        return self._position

    def hand_over(self) -> None:
        """Between passes: the library's own hooks take the place of ours, as soon as there are any,
        and ours are the innermost of this thread."""
        if self._position is not None and not self._handed_over and self.in_thread:
            self._handed_over = True
            self._handed_over = self.stand_behind(self._around)

    def step_in(self) -> None:
        """Between passes, after `exit`, in the same thread."""
        self._hooks.__enter__()

    def stand_aside(self) -> None:
        """Take them away until `come_back`, if they are the innermost of this thread."""
        if self.in_thread and self._innermost:
            self.aside = True
            self._hooks.__exit__(None, None, None)

    def come_back(self) -> None:
        """Put them back after `stand_aside`, unless `exit` was called meanwhile. By what is there,
        since an alarm of the program may have come in between."""
        if self.aside and self.in_thread:
            if not self._innermost:
                self.step_in()
            self.aside = False

    @property
    def _innermost(self) -> bool:
        top = torch_internals.top_saved_hooks(True)
        return top is not None and top[1] is self.store.unpack_hooks[-1]

    def stand_behind(self, around: Callable[[Any, Any], tuple[Any, Any]]) -> bool:
        """Between passes: what `around` makes of our hooks takes their place. `False` if they are
        not the innermost of this thread."""
        if not self._innermost:
            return False
        self.exit()
        self._around = around
        self.enter()
        return True

    def _pack(self, tensor: Tensor) -> Any:
        """What autograd holds instead of a tensor. In the usual case by few calls: this runs for
        each saved tensor, in forward, where the host is ahead of the device the least. The library
        has its double, which calls this for what it leaves to Python while operations are
        recorded."""
        by, position = recording.present, self._position
        packed = None if position is None else position.save(tensor)
        if packed is None or len(packed) == 2:
            if by is None:
                return self._pack_any(tensor, packed)
            packed = by.unrecorded(self._pack_any, tensor, packed)
        if by is not None and len(packed) == 3:
            by.recorder.kept.append(packed)
        return packed

    def _pack_any(self, tensor: Tensor, taken: tuple[int, int] | None) -> Any:
        if taken is not None:
            return self._save_large(tensor, *taken)
        if _under_a_mode():
            return self._apart(self._pack_tensor, tensor, type(tensor))
        return self._pack_tensor(tensor)

    def _unpack(self, packed: Any) -> Tensor:
        """The tensor again, likewise."""
        position = self._position
        tensor: Tensor | None = None if position is None else position.use(packed)
        return self._unpack_otherwise(packed) if tensor is None else tensor

    def _unpack_otherwise(self, packed: Any) -> Tensor:
        compiled, by = self.store.compiled, recording.present
        try:
            if by is not None:
                return by.unrecorded(self._unpack_any, packed)
            if compiled is None or compiled.under_a_mode():
                return self._unpack_any(packed)
            return self._unpack_tensor(packed)
        except Modified as error:
            error.raise_in_the_program(packed, original_of(packed))

    def _unpack_any(self, packed: Any) -> Tensor:
        if _under_a_mode():
            tensor: Tensor = self._apart(self._unpack_tensor, packed, type(packed[0]))
            return tensor
        return self._unpack_tensor(packed)

    def _apart(self, hook: Callable[[Any], Any], argument: Any, kind: type) -> Any:
        """Call a hook of ours past the program's modes that count or change operations, and without
        tangents. Modes that record or imitate the program have to see everything; under those
        nothing is moved."""
        if forward_ad._current_level >= 0 and torch_internals.is_forward_mode_enabled():
            done = untangented(lambda: self._apart(hook, argument, kind))
            if hook == self._pack_tensor:
                self._note_tangent(argument)
            return done
        modes = torch_internals.DispatchModeKey
        found = torch_internals.dispatch_mode_of
        if any(found(key) for key in (modes.PROXY, modes.FUNCTIONAL, modes.FAKE)):
            return kept(argument) if hook == self._pack_tensor else hook(argument)
        if kind not in (Tensor, Parameter, Saved):
            return hook(argument)
        return unseen(partial(hook, argument))

    def _note_tangent(self, tensor: Tensor) -> None:
        tangent = forward_ad.unpack_dual(tensor).tangent
        if tangent is not None and tangent.layout is strided and not tangent._is_zerotensor():
            storage = tangent.untyped_storage()
            self.tangents[storage._cdata] = storage.nbytes()

    def _pack_tensor(self, tensor: Tensor) -> Any:
        taken = self.takes(tensor)
        return kept(tensor) if taken is None else self._save_large(tensor, *taken)

    def takes(self, tensor: Tensor) -> tuple[int, int] | None:
        """Size and address of the storage, if the engine takes this tensor over from autograd."""
        if type(tensor) is not Tensor or tensor.layout is not strided or tensor.is_nested:
            return None
        if tensor.nbytes < self.min_bytes or tensor.device != self.device:
            return None  # most tensors end here
        base = tensor._base
        if not (base is None or type(base) is Tensor):
            return None  # a view of a parameter, or of a subclass
        if tensor.is_leaf and tensor.requires_grad:
            return None
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            return None
        # A tensor, or what it is a view of, has its storage to itself. Otherwise others may write
        # to the storage, and no version counter of ours shows it (recurrent cells do so; arenas).
        storage = tensor.untyped_storage()
        size_bytes = storage.nbytes()
        if base is not None and base.untyped_storage()._cdata != storage._cdata:
            return None  # the base has been given other memory (`.data`)
        sole = (tensor if base is None else base).nbytes == size_bytes
        ours = owned(storage, on_cuda=tensor.is_cuda)
        taken = sole and size_bytes >= self.min_bytes and ours
        return (size_bytes, storage._cdata) if taken else None

    def _unpack_tensor(self, packed: Any) -> Tensor:
        return whole(packed) if len(packed) == 3 else self._use_large(packed)

    def _save_fenced(self, tensor: Tensor, size_bytes: int, key: int) -> Any:
        assert self.fence is not None
        packed = [] if self.fence.down else self.fence.ask(self._save, tensor, size_bytes, key)
        return packed[0] if packed else kept(tensor)

    def _use_fenced(self, packed: Any) -> Tensor:
        """After an error of ours tensors are only fetched; what fails in that is the program's."""
        assert self.fence is not None
        found = [] if self.fence.down else self.fence.ask(self._use_or_modified, packed)
        if not found:
            self.store.waits = None
            fused.refuse()
            return self.store.hand_out(packed) if type(packed) is View else whole(packed)
        if isinstance(found[0], Modified):
            raise found[0]
        return found[0]

    def _use_or_modified(self, packed: Any) -> Tensor | Modified:
        try:
            return self._use(packed)
        except Modified as error:  # the program's own, not ours
            return error
