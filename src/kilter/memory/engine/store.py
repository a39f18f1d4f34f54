"""Where each saved storage is, and how it is offloaded, evicted, prefetched and recomputed.

A saved storage is resident, evicted, or being prefetched. Two rules keep its bytes right:

- Bytes are copied or evicted only while nobody else can reach the storage. So nobody can write to
  them any more, by whatever way, and there is never a second copy of a tensor that the program
  holds.
- Bytes are evicted only if they can be had again without fail: from a finished copy on the host, or
  by a recipe whose sources nobody can write to (`recompute.py`).

In each method the steps that can fail come first, so that after an error the same call can be made
again.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from kilter.memory.engine import compiled_recorder, recording
from kilter.memory.engine.aliases import StorageReference, bytes_of, view_of
from kilter.memory.engine.backend import Backend, CopyEvent
from kilter.memory.engine.host import HostBlock, HostPool
from kilter.memory.engine.modified import Modified
from kilter.memory.engine.norms import ProgramNorms
from kilter.memory.engine.operation_graph import HeldSource, OperatorCalls
from kilter.memory.engine.quiet import uncast, ungraded
from kilter.memory.engine.recompute import WRITTEN, Foreign, Read, Recipe, root_of
from kilter.memory.engine.saved_bytes import SavedBytes
from kilter.memory.engine.waits import Waits
from kilter.observe import torch_internals

if TYPE_CHECKING:
    from kilter.memory.engine.segments import ModuleCall

T = TypeVar("T")

RESIDENT, PREFETCHING, EVICTED = range(3)
OUTPUT = "kilter.output"
"""Under this key a node's metadata holds its output, if an operation saved it."""


class Pass:
    """One pass, alive as long as anything that was saved in it."""

    __slots__ = ("__weakref__", "stream")

    def __init__(self, stream: int = 0) -> None:
        self.stream = stream
        """Copies start after what was issued to this stream, and what is evicted is free for it. So
        tensors that operations on another one save are left to autograd."""


class Transfer:
    """The copies of one storage to the host and back."""

    __slots__ = ("arrival", "departure", "host", "pooled")

    def __init__(self) -> None:
        self.host: torch.Tensor | None = None
        """The bytes are there once `departure` has come."""
        self.pooled: HostBlock | None = None
        """This host memory is given back when the tensor is gone."""
        self.departure: CopyEvent = None
        self.arrival: CopyEvent = None


class Saved:
    """One storage that autograd saved, and where its bytes are. It has slots, since there is one
    for each large saved tensor."""

    __slots__ = (
        "__weakref__", "alias", "calls", "cast", "handed_out", "key", "number", "plain", "recipe",
        "size_bytes", "state", "store", "touched", "transfer", "version", "within",
    )  # fmt: skip

    store: Store
    """It is set once the store has counted this storage."""

    def __init__(
        self,
        within: Pass,
        number: int,
        size_bytes: int,
        key: int,
        held: tuple[torch.Tensor, int, bool],
    ) -> None:
        self.within = within
        self.number = number
        self.size_bytes = size_bytes
        self.key = key
        self.alias: torch.Tensor | None
        self.alias, self.version, self.plain = held
        """If `plain`, `alias` is the whole storage, in a layout that copies keep. Otherwise `alias`
        may be a part, and flat bytes are copied back."""
        self.touched = False
        """The program has read the `.data` of this storage and may have written to it without
        a trace, so the tensor is not recomputed: only a copy of the bytes is right."""
        self.cast = False
        """It is autograd's cast of a parameter, which autocast holds as well."""
        self.handed_out = False
        """Backward has been given this tensor. It stays: who holds it since is not known."""
        self.state = RESIDENT
        self.transfer: Transfer | None = None
        """It is None until the tensor is offloaded."""
        self.recipe: Recipe | ModuleCall | None = None
        self.calls: list[ModuleCall] | None = None
        """These calls of modules saved this tensor, in a pass in which segments are tried."""

    def __del__(self) -> None:
        store = getattr(self, "store", None)
        if store is not None:
            store.freed(self)

    @property
    def itself(self) -> weakref.ref[Saved]:
        """The same reference each time, as long as one is held."""
        return weakref.ref(self)

    @property
    def host(self) -> torch.Tensor | None:
        """It has been copied there, or is being copied."""
        return None if self.transfer is None else self.transfer.host

    @property
    def departs(self) -> bool:
        """A copy to the host was started, and what it holds is right."""
        return self.transfer is not None and self.transfer.departure is not None

    @property
    def unchanged(self) -> bool:
        """The storage was not written to since it was saved."""
        if self.touched:
            return False
        if self.alias is None or self.state == PREFETCHING:  # which nobody else can reach
            return True
        return bool(self.alias._version == self.version)

    @property
    def closed(self) -> bool:
        """Only the engine can reach the bytes any more."""
        if self.alias is None or self.state != RESIDENT:
            return True
        return (self.departs and not self.handed_out) or self.store.alone(self.alias)


class Itself(weakref.ref["torch.Tensor"]):
    """The program's own tensor object, as long as it lives, and its attributes after that."""

    __slots__ = ("attributes",)
    attributes: dict[str, Any] | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Itself:
        itself = cls(tensor)
        itself.attributes = (type(tensor) is torch.Tensor and tensor.__dict__) or None
        return itself


class View(NamedTuple):
    """What autograd is given instead of a large tensor: a saved storage, and the tensor's
    layout."""

    saved: Saved
    itself: Itself
    dtype: torch.dtype
    size: torch.Size | None
    """If it is None, size, stride and offset are those of `saved.alias`."""
    stride: tuple[int, ...] = ()
    offset: int = 0

    def __call__(self) -> torch.Tensor:
        """The tensor, fetched if it is evicted, for a recipe."""
        return self.saved.store.tensor_of(self)


LEAF: Any = type("Leaf", (), {})()
"""It stands in the place of `Itself` where the tensor itself is held."""


def kept(tensor: torch.Tensor) -> tuple[torch.Tensor, int, Itself]:
    """What autograd is given for everything else.

    A leaf, or a view of a parameter, may be held itself; a result must not be (its node would hold
    itself alive).
    """
    if tensor.is_leaf or type(tensor._base) is torch.nn.Parameter:
        return tensor, tensor._version, LEAF
    return tensor.detach(), tensor._version, Itself.of(tensor)


def original_of(packed: Any) -> torch.Tensor | None:
    """The program's own tensor object behind what autograd was given, while it lives."""
    itself: Any = packed.itself if type(packed) is View else packed[2]
    original: torch.Tensor | None = packed[0] if itself is LEAF else itself()
    return original


def whole(held: tuple[Any, ...]) -> torch.Tensor:
    """The tensor behind `kept`, or `Modified`."""
    tensor: torch.Tensor = held[0]
    if tensor._version != held[1]:
        raise Modified(tensor, held[1])
    return tensor


def read_kept(held: tuple[Any, ...]) -> torch.Tensor:
    """The tensor behind `kept`, or the error that the framework raises without hooks."""
    try:
        return whole(held)
    except Modified as error:
        error.raise_in_the_program(held, original_of(held))


def covers(tensor: torch.Tensor, size_bytes: int) -> bool:
    """The tensor is its storage, each element once, in a layout that copies keep."""
    if tensor.nbytes != size_bytes or tensor.storage_offset() != 0:
        return False
    if tensor.is_contiguous():
        return True
    return bool(tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def held(tensor: torch.Tensor, size_bytes: int) -> tuple[torch.Tensor, int, bool]:
    """What the engine holds of a tensor, its count of writes, and whether what is held is the whole
    storage, in a layout that copies keep.

    A view of something in another layout is held as it is: recomputed, it has that layout.
    """
    whole = tensor if tensor._base is None else tensor._base
    plain = covers(whole, size_bytes)
    return (whole if plain else tensor).detach(), tensor._version, plain


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the counter of writes to a tensor, which autograd compares."""
    torch_internals.set_version_counter((tensor,), (version,))


def _users_of_a_lone_tensor() -> int:
    lone = torch.empty(1).detach()
    return int(torch_internals.storage_use_count(lone.untyped_storage()._cdata))


def called(function: Callable[..., Any], *args: Any) -> bool:
    function(*args)
    return True


class Store:
    """All saved storages that the engine follows, resident and evicted."""

    def __init__(self, backend: Backend, *, guard: Callable[..., bool] = called) -> None:
        """`guard` calls a function where an error could not go anywhere, and says whether the
        function came to its end."""
        self.backend = backend
        """It has the device's memory and makes the copies."""
        self.guard = guard
        self._stranded: list[torch.Tensor | None] = []
        """A copy may still use this memory, after an error in waiting for that copy."""
        self.compiled: Any = None
        """It is the compiled library. Some functions here and in `TensorHooks` ask it first: it
        says the same sooner, or None where it leaves a tensor to Python."""
        self.unpack_hooks: tuple[Any, ...] = ()
        """These hooks are the engine's own, the present one the last: tensors packed by other hooks
        have others."""
        self.within = weakref.ref(Pass())
        """It refers to the present pass, while anything is left of it."""
        self.lone_users = _users_of_a_lone_tensor()
        self._resident: dict[int, weakref.ref[Saved]] = {}
        """They are found by address of the storage. Each holds its storage, so no address is ever
        reused."""
        self._dependents: dict[int, list[Callable[[], Saved | None]]] = {}
        """It has, by identity of a parameter or a saved storage, what is recomputed from it and
        evicted."""
        self._touched: dict[int, StorageReference] = {}
        """It has, by storage, the tensors whose `.data` the program has read in this pass."""
        self.counts = SavedBytes(backend.holds)
        self.closing = False
        self.waits: Waits | None = None
        """Times the waits for copies; None in passes in which they are not timed."""
        self.norms = ProgramNorms(backend.device, guard)
        self.pool = HostPool(backend)
        """It gives host memory for tensors that are offloaded without a plan."""

    def begin(self, stream: int = 0, over: Callable[[], None] = lambda: None) -> Pass:
        """Begin a pass on this stream. Everything that is saved in the pass holds the `Pass`;
        `over` is called when nothing of that is left."""
        self.use_library()
        within = Pass(stream)
        self.within = weakref.ref(within, lambda _: self.guard(over))
        if self.counts.alive == 0:  # nearly always: there is nothing to look for
            self._dependents.clear()
        dependents = {
            leaf: [r for r in found if r() is not None] for leaf, found in self._dependents.items()
        }
        self._dependents = {leaf: found for leaf, found in dependents.items() if found}
        self._touched.clear()
        self.counts.begin_pass()
        return within

    def use_library(self) -> None:
        """From here on have the compiled library do what it can, as soon as there is one."""
        if self.compiled is not None:
            return
        self.compiled = compiled_recorder.library()
        if self.compiled is not None:
            self.compiled.name(
                *(Itself, Saved, View, Transfer, Recipe, HeldSource, OperatorCalls, LEAF),
                *(OUTPUT, WRITTEN),
            )
            self.backend.use_library(self.compiled)

    # Save and read

    def find(self, tensor: torch.Tensor, key: int, within: Pass) -> Saved | None:
        """What this pass has saved of this tensor's storage, if it is unchanged since. `key` is the
        address of the storage."""
        reference = self._resident.get(key)
        saved = None if reference is None else reference()
        if saved is None or saved.within is not within or saved.version != tensor._version:
            return None
        return saved

    def save(
        self, tensor: torch.Tensor, size_bytes: int, key: int, within: Pass, number: int
    ) -> Saved:
        found = self.compiled and self.compiled.held(tensor)
        saved = Saved(within, number, size_bytes, key, found or held(tensor, size_bytes))
        saved.touched = saved.key in self._touched
        self._resident[saved.key] = saved.itself
        self.counts.hold(size_bytes)
        self.counts.alive += 1
        saved.store = self
        return saved

    def view(self, saved: Saved, tensor: torch.Tensor) -> View:
        """What autograd is given for a tensor on this saved storage."""
        alias = saved.alias
        assert alias is not None
        if self.compiled is not None:
            view: View | None = self.compiled.view(saved, alias, saved.plain, tensor)
            if view is not None:
                return view
        size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
        itself = Itself.of(tensor)
        alike = dtype is alias.dtype and size == alias.size() and stride == alias.stride()
        if saved.plain and alike:
            return View(saved, itself, dtype, None)
        return View(saved, itself, dtype, size, stride, tensor.storage_offset())

    def kept(self, tensor: torch.Tensor, code: int, within: Pass) -> tuple[Any, ...]:
        """What autograd is given for a large tensor that is not followed: also the code of its use,
        and its pass."""
        found = self.compiled and self.compiled.kept(tensor, code, within)
        return found or (*kept(tensor), code, within)

    def hand_out(self, view: View) -> torch.Tensor:
        """The tensor that autograd is given in backward. `Modified` if it was written to."""
        tensor = self.tensor_of(view)
        view.saved.handed_out = True
        return tensor

    def lend(self, view: View) -> torch.Tensor:
        """The same in a backward that retains its graph. The storage may be evicted again as soon
        as backward has dropped the tensor; writes to the tensor are in another copy then."""
        tensor, saved = self.tensor_of(view), view.saved
        assert saved.alias is not None
        saved.alias = saved.alias.detach()  # so that `alone` shows whether others hold the bytes
        transfer = saved.transfer
        if transfer is not None and transfer.departure is not None:
            self.backend.wait(transfer.departure)
            transfer.departure = None
        return tensor

    def tensor_of(self, view: View) -> torch.Tensor:
        """The tensor behind a view, fetched if it is evicted. `Modified` if it was written to."""
        saved, _, dtype, size, stride, offset = view
        if saved.state != RESIDENT:
            self.fetch(saved)
        alias = saved.alias
        assert alias is not None
        if size is None:
            tensor = alias
        elif dtype is alias.dtype:
            found = self.compiled and self.compiled.laid_out(alias, size, stride, offset)
            tensor = alias.as_strided(size, stride, offset) if found is None else found
        else:
            tensor = view_of(alias, dtype, size, stride, offset)
            set_version(tensor, alias._version)
        if alias._version != saved.version:
            raise Modified(tensor, saved.version)
        return tensor

    # Offload, evict, prefetch, recompute

    def offload(self, saved: Saved, host: torch.Tensor) -> torch.Tensor | None:
        """Start the copy to the host; the bytes stay resident until `evict`. Returns the host
        memory in the tensor's shape (which a caller may give next time), or None if nothing is
        copied, or not yet (`pending`): the program may write to what it holds, and no memory would
        be freed.
        """
        alias, transfer = saved.alias, saved.transfer
        if alias is None or saved.departs:
            return None
        if not self._may_go(saved, alias) or not self.alone(alias):
            return None
        if not saved.plain:
            alias = bytes_of(alias)
        if host.dtype is not alias.dtype or host.size() != alias.size():
            host = host.view(alias.dtype)
        if host.stride() != alias.stride():
            host = host.as_strided(alias.size(), alias.stride())
        if transfer is None:
            transfer = saved.transfer = Transfer()
        departure = self.backend.copy_out(host, alias)
        transfer.host, transfer.departure = host, departure
        self.counts.out_bytes += saved.size_bytes
        return host

    def _may_go(self, saved: Saved, alias: torch.Tensor) -> bool:
        return (
            saved.state == RESIDENT
            and not saved.handed_out
            and bool(alias._version == saved.version)
        )

    def pending(self, saved: Saved) -> bool:
        """It is resident, and may be evicted as soon as the program no longer holds it."""
        return saved.state == RESIDENT and not saved.handed_out

    def offload_unplanned(self, saved: Saved) -> bool:
        """Start the copy to host memory that is reserved for the tensor, if it may be offloaded.
        `HostMemoryError` if there is no host memory."""
        alias, transfer = saved.alias, saved.transfer
        if alias is None or not self._may_go(saved, alias) or not self.alone(alias):
            return False
        if saved.departs:
            return True  # it is there already
        if transfer is None:
            transfer = saved.transfer = Transfer()
        if transfer.pooled is None:
            transfer.pooled = self.pool.take(saved.size_bytes)
        self.offload(saved, transfer.pooled.memory[: saved.size_bytes])
        return True

    def reopen(self) -> None:
        """Begin again after an earlier `with` block. If nothing of that block is alive, the backend
        was closed, and its host memory is gone."""
        if self.counts.alive == 0:
            self.pool.forget()
        self.closing = False

    def evict(self, saved: Saved) -> None:
        """Free the device memory, if the bytes are on the host or can be recomputed."""
        alias = saved.alias
        departure = None if saved.transfer is None else saved.transfer.departure
        if departure is None:
            if saved.recipe is not None:
                self.give_up(saved.recipe, (saved,))
        elif alias is not None and self._may_go(saved, alias):
            if self.waits is None:
                self.backend.wait(departure)
            else:
                self.waits.wait(departure)
            self._leave([(saved, alias)])

    def give_up(self, recipe: Recipe | ModuleCall, several: Iterable[Saved]) -> None:
        """Free the device memory of what a recipe makes, if only the engine can reach it."""
        found = [
            (saved, alias)
            for saved in several
            if (alias := saved.alias) is not None
            and saved.recipe is recipe
            and self._may_go(saved, alias)
            and not saved.touched
            and self.alone(alias)
        ]
        if not found or not recipe.ready():
            return
        if not recipe.told:
            reference = recipe.reference(found[0][0])
            for source in recipe.read():
                self._dependents.setdefault(id(source), []).append(reference)
            recipe.told = True
        self._leave(found)

    def _leave(self, several: list[tuple[Saved, torch.Tensor]]) -> None:
        if recording.present is not None:
            recording.present.recorder.leaves([saved for saved, _ in several])
        left_bytes = 0
        for saved, alias in several:
            # Interrupted between two lines, it is resident, or evicted with a known source.
            saved.state = EVICTED
            saved.alias = None
            self._resident.pop(saved.key, None)
            self.counts.evicted += 1
            left_bytes += saved.size_bytes
            if self.backend.spoils and self.alone(alias):
                self.backend.evicted(alias.untyped_storage())
        self.counts.hold(-left_bytes)
        self.counts.evicted_bytes += left_bytes

    def recompute_dependents(self, source: object) -> None:
        """This parameter or saved storage is about to change: recompute now what depends on it."""
        for reference in self._dependents.pop(id(source), ()):
            saved = reference()
            if saved is not None and saved.state == EVICTED and saved.host is None:
                with contextlib.suppress(Modified):  # then autograd refuses that graph's backward
                    self.fetch(saved)

    def touched(self, tensor: torch.Tensor) -> None:
        """The program reads or sets the `.data` of this tensor."""
        self.recompute_dependents(root_of(tensor))
        storage = tensor.untyped_storage()
        self._touched[storage._cdata] = StorageReference(storage)
        reference = self._resident.get(storage._cdata)
        saved = None if reference is None else reference()
        if saved is not None:
            saved.touched = True

    def was_touched(self, tensor: torch.Tensor) -> bool:
        """The program has read or set the `.data` of this tensor since the pass began."""
        return bool(self._touched) and tensor.untyped_storage()._cdata in self._touched

    def prefetch(self, saved: Saved) -> None:
        """Start the copy back to the device."""
        transfer = saved.transfer
        if saved.state != EVICTED or transfer is None or transfer.host is None:
            return
        host = transfer.host
        alias = self.room_like(host)
        arrival = self.backend.copy_in(alias, host)
        saved.alias, transfer.arrival, saved.state = alias, arrival, PREFETCHING
        self.counts.in_bytes += saved.size_bytes
        self.counts.hold(saved.size_bytes)
        self.counts.evicted_bytes -= saved.size_bytes

    def fetch(self, saved: Saved) -> None:
        """Make the bytes resident now: wait for their copy, or recompute them."""
        recipe = saved.recipe if saved.state == EVICTED and saved.host is None else None
        if recipe is not None:
            recompute = partial(recipe.recompute, saved)
            made_bytes = 0
            for one, alias in self._with_room(lambda: self.carried_out(recompute)):
                self._arrived(one, alias)
                one.recipe = None  # lets go of what it reads; one that is to be tried stays
                self.counts.recomputed += 1
                made_bytes += one.size_bytes
            self.counts.evicted_bytes -= made_bytes
            self.counts.hold(made_bytes)
            return
        self.prefetch(saved)
        arrival = None if saved.transfer is None else saved.transfer.arrival
        if self.waits is None:
            self.backend.wait(arrival)
        else:
            self.waits.wait(arrival, saved.number)
        assert saved.alias is not None
        self._arrived(saved, saved.alias)

    def _arrived(self, saved: Saved, alias: torch.Tensor) -> None:
        # Filling it counted as a write.
        key = self.compiled and self.compiled.arrived(alias, saved.version)
        if key is None:
            set_version(alias, saved.version)
            key = alias.untyped_storage()._cdata
        # From here on nothing can fail.
        saved.alias, saved.key, saved.state = alias, key, RESIDENT
        self._resident[key] = saved.itself
        self.counts.evicted -= 1

    def recompute(self, recipe: Recipe) -> torch.Tensor | None:
        """What a recipe of its own makes; None if what it reads was modified."""
        with contextlib.suppress(Modified):
            return self._with_room(lambda: self.carried_out(recipe.make))
        return None

    def call_with_room(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        """One call of a recipe that the compiled library carries out."""
        return self._with_room(lambda: function(*arguments))

    def room_like(self, host: torch.Tensor) -> torch.Tensor:
        """Device memory for what was copied here."""
        return self._with_room(lambda: self.backend.alloc_like(host))

    def _with_room(self, take: Callable[[], T]) -> T:
        """Allocate. Where memory is exhausted, first collect the garbage that was left while the
        collector was held back."""
        try:
            return take()
        except torch.OutOfMemoryError:
            pass
        gc.collect()
        if self.backend.device.type == "cuda":
            torch.cuda.empty_cache()
        return take()

    def carried_out(self, make: Callable[[], T]) -> T:
        """Carry out a recipe, without recording a graph and outside of autocast."""
        device_type = self.backend.device.type
        if not torch.is_grad_enabled() and not torch.is_autocast_enabled(device_type):
            return make()  # as in every ordinary backward
        return uncast(device_type, lambda: ungraded(make))

    def alone(self, tensor: torch.Tensor, *, aliases: int = 0) -> bool:
        """No other tensor holds this one's storage, but for so many aliases. The count is compared
        with that of a lone tensor, since the framework's own wrapper counts too."""
        expected = self.lone_users + aliases
        found = self.compiled and self.compiled.alone(tensor, expected)
        if found is None:
            users = torch_internals.storage_use_count(tensor.untyped_storage()._cdata)
            found = users == expected
        return bool(found)

    def freed(self, saved: Saved) -> None:
        """Autograd has dropped this storage. A copy in flight still uses its memory: what is
        issued from now on must come after the copy, or the memory stays."""
        transfer = saved.transfer
        self.counts.alive -= 1
        self.counts.evicted -= saved.state != RESIDENT
        if saved.state == EVICTED:
            self.counts.evicted_bytes -= saved.size_bytes
        else:
            if self._resident.get(saved.key) is weakref.ref(saved):
                del self._resident[saved.key]
            self.counts.held_bytes -= saved.size_bytes
            if transfer is not None:
                prefetched = saved.state == PREFETCHING
                event = transfer.arrival if prefetched else transfer.departure
                if event is not None and not self.guard(self.backend.wait, event):
                    self._stranded.append(saved.alias)
        if transfer is not None and transfer.pooled is not None:
            self.guard(self.pool.put, transfer.pooled)
        if self.closing and self.counts.alive == 0:
            self.guard(self.backend.close)

    # What recipes read

    def mark(self, view: View, tensor: torch.Tensor) -> None:
        """Note at the node that produced the tensor where its output is saved."""
        node = tensor.grad_fn
        if node is not None and tensor.output_nr == 0:
            node.metadata[OUTPUT] = (view[0].itself, view[1:])
        cast = self.compiled and self.compiled.is_cast_of_parameter(tensor)
        view.saved.cast = _is_cast_of_parameter(tensor) if cast is None else cast

    def mark_written(self, tensor: torch.Tensor) -> None:
        """Note at the node that produced the tensor that the program has written to it since, so
        that nothing is recomputed from what the node would make again."""
        for made in (tensor, tensor._base):
            node = None if made is None else made.grad_fn
            if node is not None:
                node.metadata[WRITTEN] = True

    def produced_by(self, node: Any) -> tuple[Read, Saved] | None:
        """A node's output, if an operation saved it. `Foreign` where the program has written to
        it."""
        found = node.metadata.get(OUTPUT)
        saved = None if found is None else found[0]()
        if saved is None or saved.within is not self.within():
            return None
        if not saved.unchanged:
            raise Foreign("the program has written to what an operation has made")
        return View(saved, *found[1]), saved

    def epsilon(self, node: Any, weight: Read | None) -> float | None:
        """The epsilon of a layer norm, from the module that has this weight."""
        leaf = weight.tensor if type(weight) is HeldSource else None
        return self.norms.epsilon(node, leaf)

    def kept_by(self, node: Any, name: str, index: int | None) -> tuple[Read, Saved | None] | None:
        """What a node saved under a name, as we packed it; nothing is unpacked, since hooks of
        others may do anything (those of checkpointing run the forward again)."""
        raw = getattr(node, name)
        if index is not None:
            raw = raw[index]
        try:
            packed = raw.data
        except AttributeError:
            raise Foreign("this PyTorch does not show what its nodes saved") from None
        if packed is None:
            return None
        if type(packed) is View and packed.saved.store is self:
            if packed.saved.within is not self.within():
                raise Foreign(f"{node.name()} saved {name} in an earlier pass")
            return packed, packed.saved
        hook = raw.unpack_hook
        if hook is None:
            return HeldSource(packed.detach(), packed._version), None
        if not any(hook is ours for ours in self.unpack_hooks):
            raise Foreign(f"{node.name()} keeps {name} with a hook that is not ours")
        plain = type(packed) is tuple
        return HeldSource(packed[0], packed[1], None if plain else packed), None


def _is_cast_of_parameter(tensor: torch.Tensor) -> bool:
    base = tensor._base if tensor._is_view() else tensor
    node: Any = None if base is None else base.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    before = node.next_functions[0][0]
    return before is not None and bool(before.name() == "torch::autograd::AccumulateGrad")
