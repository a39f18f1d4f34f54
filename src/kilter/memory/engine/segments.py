"""Recompute of a segment: what the call of a module saved, recomputed all at one time.

The calls of modules are watched while a pass is tried, and those that a plan recomputes are watched
in every pass under the plan. The operations of such a call are recorded (`recording.py`), and those
that make the tensors saved in the call are run again when backward needs the first of them. The
module itself is not called again.

A segment reads what a recipe may read: saved tensors that only the engine can reach, copies of
everything small, and parameters that autograd saved for the same call, so that a program that
writes to one of those gets autograd's error in the plain run as well. A call that reads anything
else is no segment.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kilter.memory.engine import recording
from kilter.memory.engine.aliases import StorageReference
from kilter.memory.engine.backend import owned
from kilter.memory.engine.operation_graph import HeldSource
from kilter.memory.engine.pass_record import COPIED_SHARE, HELD_SHARE
from kilter.memory.engine.recompute import Foreign, Read, Unlike
from kilter.memory.engine.store import EVICTED, Saved, Store, View
from kilter.observe import torch_internals

if TYPE_CHECKING:
    from kilter.memory.engine.small_copies import SmallCopies

COPIED_BYTES = 2**20
"""Tensors of the program up to this size, and larger parameters that autograd has not saved, are
copied, once a pass, if together they are at most `COPIED_SHARE` of what the segment makes."""


class _Running(NamedTuple):
    """What a call needs only until it returns."""

    recorder: recording.CallRecorder
    begin: int
    """How many operations were recorded before."""
    kept: int
    """How many tensors autograd had kept as they are before."""
    arguments: list[recording.Given]
    """The module was called with these tensors."""


class ModuleCall:
    """One call of a module, while it runs, and after that as far as it can be recomputed."""

    def __init__(
        self,
        calls: ModuleCalls,
        module: torch.nn.Module,
        arguments: Any,
        recorder: recording.CallRecorder,
        first: int,
    ) -> None:
        self._calls = calls
        self.running: _Running | None = _Running(
            recorder,
            recorder.position,
            len(recorder.kept),
            [
                recording.Given(tensor, tensor._version)
                for tensor in tensors_in(arguments)
                if type(tensor) is torch.Tensor
            ],
        )
        self.module = module
        self.first = first
        """This event of the pass is the first one inside."""
        self.last = -1
        self.expected: Any = None
        """Its observer expects this of it."""
        self.reads: dict[int, frozenset[int]] = {}
        """By number of each tensor in the pass, it has the saved tensors that the tensor is made
        from where all others are there."""
        self.inputs: list[View] = []
        """What it reads of the engine's tensors."""
        self.held: list[HeldSource] = []
        """It reads these tensors, and nobody else may hold them when its own are evicted."""
        self.parameters: list[HeldSource] = []
        """What it reads in place, since autograd saved it as well."""
        self._sources: dict[int, Read] = {}
        """It reads all of these; each is known by its storage."""
        self._rerun: recording.Rerun | None = None
        self._made_bytes = 0
        self.copied_bytes = 0
        """It keeps copies of so much that the engine has not saved."""
        self.members: list[weakref.ref[Saved]] = []
        """These tensors are made together. Under a plan the engine adds them as they are saved, and
        the call is their recipe."""
        self.told = False
        """Whoever may change what it reads has its tensors recomputed before."""

    # The end of the call

    def made(self, saved: Saved) -> int | None:
        """The storage of a tensor, if the call has made that storage."""
        assert self.running is not None
        recorder, begin = self.running[:2]
        (number,) = recorder.storages_of([saved])
        return number if number >= 0 and recorder.made_at(number) >= begin else None

    def ended(self, members: Mapping[int, Saved], data: Sequence[Saved]) -> None:
        """The module has returned: find out what makes `members`, given by storage. `data` are all
        tensors of the pass so far. `Foreign` if they cannot be recomputed."""
        self.members = [saved.itself for saved in members.values()]
        self._resolve(list(members), list(members.values()), data, there=False)
        self.reads = self._read_by(members, data)

    def _read_by(
        self, members: Mapping[int, Saved], data: Sequence[Saved]
    ) -> dict[int, frozenset[int]]:
        assert self.running is not None
        recorder = self.running.recorder
        pairs = zip(recorder.storages_of(data), data, strict=True)
        found = {storage: one for storage, one in pairs if storage >= 0}
        reads = {}
        for storage, saved in members.items():
            there = {*found} - {storage}
            try:
                _, given = recorder.program(self.running.begin, [storage], there)
            except Foreign:
                continue
            reads[saved.number] = frozenset(found[one].number for one in given if one in found)
        return reads

    def ended_as_planned(self, sources: Sequence[Saved], copied: frozenset[int]) -> None:
        """The same under a plan, with the tensors that are read; `copied` are the numbers of those
        that are copied for that."""
        assert self.running is not None
        members = self.alive()
        like = [saved.alias for saved in members if saved.alias is not None]
        if len(like) < len(self.members):
            raise Foreign("what was saved is gone")
        wanted = self.running.recorder.numbers_of(like)
        self._resolve(wanted, members, sources, copied, like, there=True)

    def _resolve(
        self,
        wanted: Sequence[int],
        members: Sequence[Saved],
        data: Sequence[Saved],
        copied: frozenset[int] = frozenset(),
        like: Sequence[torch.Tensor] = (),
        *,
        there: bool,
    ) -> None:
        """`there`: all of `data` are read, and none of them is made; else casts alone are."""
        running = self.running
        assert running is not None
        recorder = running.recorder
        found = dict(zip(recorder.storages_of(data), data, strict=True))
        read = {n for n, saved in found.items() if n >= 0 and (there or saved.cast)}
        kept = recorder.kept_since(running.kept)
        read = read.union(kept).difference(wanted)
        rerun, given = recorder.program(running.begin, wanted, read, like)
        self._made_bytes = sum(saved.size_bytes for saved in members)
        left_bytes = COPIED_SHARE * self._made_bytes
        self.copied_bytes = 0
        for number, one in given.items():
            saved = found.get(number)
            if saved is None:
                copied_bytes = self._hold(running, number, one, kept.get(number), left_bytes)
                self.copied_bytes += copied_bytes
                left_bytes -= copied_bytes
            else:
                self._read(number, one, saved, copied)
                left_bytes -= saved.size_bytes if saved.number in copied else 0
        if left_bytes < 0:
            raise Foreign("reads too much that would have to be copied")
        self._rerun = rerun

    def _read(
        self,
        number: int,
        given: recording.Given | None,
        saved: Saved,
        copied: frozenset[int],
    ) -> None:
        if not saved.unchanged or (given is not None and given.version != saved.version):
            raise Foreign("the call reads what was written to after it was saved")
        if saved.number in copied:
            self._sources[number] = self._calls.copy_of_saved(saved)
            return
        # (Without a layout of its own it is the whole storage; the type is not read.)
        self.inputs.append(View(saved, _NOBODY, torch.uint8, None))
        self._sources[number] = self.inputs[-1]

    def _hold(
        self,
        running: _Running,
        number: int,
        given: recording.Given | None,
        kept: tuple[Any, ...] | None,
        left_bytes: float,
    ) -> int:
        """Hold what the engine has not saved; `kept` is what autograd has been given for it. Gives
        the bytes that are copied for that, at most `left_bytes` but for small parameters."""
        if given is None and kept is not None:  # small, and autograd's own
            self.parameters.append(HeldSource(kept[0], kept[1]))
            self._sources[number] = self.parameters[-1]
            return 0
        if given is None:  # an argument that the call around this one has made
            numbers = running.recorder.numbers_of([one.tensor for one in running.arguments])
            if number not in numbers:
                raise Foreign("reads what is gone")
            given = running.arguments[numbers.index(number)]
        tensor, version = given
        root = recording.root_of(tensor)
        storage = tensor.untyped_storage()
        self._check(tensor, version)
        if kept is not None:
            if root is None:
                held = HeldSource(tensor.detach(), version)
            else:
                held = HeldSource(root, version, lambda: root)
            self.parameters.append(held)
        elif storage.nbytes() <= (
            max(COPIED_BYTES, left_bytes) if root is not None else min(COPIED_BYTES, left_bytes)
        ):
            held = self._calls.copy_of(tensor)
            self._sources[number] = held
            return int(storage.nbytes())
        elif root is not None:
            raise Foreign("reads a parameter that autograd has not saved, too large to be copied")
        else:
            held = self._calls.holder_of(tensor.detach())
            self.held.append(held)
        self._sources[number] = held
        return 0

    def _check(self, tensor: torch.Tensor, version: int) -> None:
        """Raise `Foreign` if what the call reads may be another thing by the time of backward."""
        storage = tensor.untyped_storage()
        if tensor._version != version:
            raise Foreign("the call has written to what it reads")
        if storage.nbytes() == 0 and tensor.numel():
            raise Foreign("reads weights that come and go (sharding)")
        if not owned(storage, on_cuda=tensor.is_cuda):
            raise Foreign("reads memory that is not the framework's")
        if self._calls.store.was_touched(tensor):
            raise Foreign("the program has asked for the `.data` of what is read")

    @property
    def operations(self) -> tuple[str, ...]:
        """Names of what has to run, in order."""
        return () if self._rerun is None else tuple(self._rerun.operations())

    # Under a plan

    def alive(self) -> list[Saved]:
        """Those of its tensors that backward may still need."""
        found = [reference() for reference in self.members]
        return [saved for saved in found if saved is not None]

    def read(self) -> list[object]:
        """What must not change before the tensors are made."""
        return [*(view.saved for view in self.inputs), *(one.tensor for one in self.parameters)]

    def reference(self, saved: Saved) -> Callable[[], Saved | None]:
        """Gives an evicted tensor; to fetch it recomputes all that are."""
        call = weakref.ref(self)

        def one() -> Saved | None:
            alive = call()
            return None if alive is None else next(filter(_is_evicted, alive.alive()), None)

        return one

    def ready(self) -> bool:
        """Run from now on, the call makes what it saved."""
        if self._rerun is None:
            return False
        store = self._calls.store
        if not all(
            (one.saved.cast or one.saved.closed) and one.saved.unchanged for one in self.inputs
        ) or any(one.changed or store.was_touched(one.tensor) for one in self.parameters):
            return False
        self.held = [one for one in self.held if not self._replaced(one)]
        return all(not one.changed and store.alone(one.tensor) for one in self.held)

    def _replaced(self, held: HeldSource) -> bool:
        """The program holds the tensor still, and a copy is read in its place from now on."""
        tensor, store = held.tensor, self._calls.store
        if held.changed or store.alone(tensor) or store.was_touched(tensor):
            return False
        if tensor.untyped_storage().nbytes() > HELD_SHARE * self._made_bytes:
            return False
        copy = self._calls.copy_of(tensor)
        self._sources = {n: copy if one is held else one for n, one in self._sources.items()}
        return True

    def recompute(self, saved: Saved) -> list[tuple[Saved, torch.Tensor]]:
        """All that is evicted, recomputed."""
        self.told = False
        pairs = [(one(), made) for one, made in zip(self.members, self.run(), strict=True)]
        return [(one, made) for one, made in pairs if one is not None and _is_evicted(one)]

    def run(self) -> Sequence[torch.Tensor]:
        """What the call makes, as `members`. `Modified` if what it reads was written to; `Unlike`
        if not all of them are made."""
        bases = {number: source() for number, source in self._sources.items()}
        assert self._rerun is not None
        made = [one for one in self._rerun.run(bases) if one is not None]
        if len(made) < len(self.members):
            raise Unlike("an operation makes something only where gradients are recorded")
        return made


_NOBODY: Any = type("Nobody", (), {})()
"""It stands in the place of the program's own tensor where a segment reads a saved one."""


def _is_evicted(saved: Saved) -> bool:
    return saved.state == EVICTED and saved.host is None


class ModuleCalls:
    """Replaces `Module.__call__` and reports calls that may be segments.

    `begin(module)` gives the event at which a call begins that is of interest, and what is expected
    of it, or None; `end` is called when a call has ended, with its result.
    """

    def __init__(
        self,
        store: Store,
        copies: SmallCopies,
        begin: Callable[[torch.nn.Module], tuple[int, Any] | None],
        end: Callable[[ModuleCall, Any], None],
    ) -> None:
        self.store = store
        self.device = store.backend.device
        self._small = copies
        self.watching = False
        """The present pass is tried, or runs under a plan with segments."""
        self._guard = store.guard
        self._begin = begin
        self._end = end
        self._thread = 0
        self.present: ModuleCall | None = None
        """Under a plan this call is running and is recomputed. None of those in it is."""
        self._nested = False
        """Calls within calls are of interest."""
        self._wanted: frozenset[int] | None = None
        """It holds, by identity, the modules of which a call may be of interest; None: all."""
        self._plain: Any = None
        self._ours: Any = None
        """It stands in the place of `Module.__call__`; None: nothing does."""
        self._copies = weakref.WeakValueDictionary[tuple[Any, ...], _Copy]()
        self._holders = weakref.WeakValueDictionary[tuple[Any, ...], HeldSource]()

    def enter(self) -> None:
        self._thread = get_ident()

    def exit(self) -> None:
        self._stand_aside()
        self._copies.clear()
        if torch_internals.COMPILATIONS in sys.modules:
            compiler = torch_internals.compilations
            # Another list: the compiler may be walking through this one.
            kept = [each for each in compiler.start_callbacks if each != self._compiles]
            compiler.start_callbacks = kept

    def begin_pass(self, watching: bool, wanted: frozenset[int] | None) -> None:
        """`wanted` are the identities of the modules of which a call may be of interest. None: all,
        and calls within calls are as well."""
        self._copies.clear()
        self._wanted, self._nested = wanted, wanted is None
        if watching and not torch_internals.anything_compiled() and self._hears_of_compiling():
            self._stand()
        else:
            self._stand_aside()

    def _hears_of_compiling(self) -> bool:
        """The compiler calls us before it traces anything: a function of ours around each module
        would break its graphs. (Every optimizer imports it, so it is there.)"""
        if torch_internals.COMPILATIONS not in sys.modules:
            return False
        callbacks = torch_internals.compilations.start_callbacks
        if self._compiles not in callbacks:  # never there, or a reset has taken it out
            callbacks.append(self._compiles)
        return True

    def _compiles(self, _: Any = None) -> None:
        self._guard(self._stand_aside)

    def _stand_aside(self) -> None:
        self.watching = False
        if recording.present is not None:
            recording.present.recorder.end("the program compiles, or the pass is over")
            recording.stop()
        if self._ours is not None and torch.nn.Module.__call__ is self._ours:
            setattr(torch.nn.Module, "__call__", self._plain)  # noqa: B010
            self._ours = None

    def _stand(self) -> None:
        self.watching = True
        if self.store.compiled is None:
            self.store.use_library()
        if self._ours is not None:  # still there, or under a function of the program's
            return
        plain = self._plain = torch.nn.Module.__call__
        calls = self

        # PyTorch's profiler of Python calls finds the module in this function's local `self`.
        def call(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            unwanted = calls._wanted is not None and id(self) not in calls._wanted
            if unwanted or not calls.watching or calls.present or get_ident() != calls._thread:
                return plain(self, *args, **kwargs)
            opened: list[ModuleCall] = []
            outermost = recording.present is None
            try:
                calls._guard(calls._open, self, (args, kwargs), opened)
                result = plain(self, *args, **kwargs)
                if opened:
                    calls._guard(recording.unrecorded, calls._close, opened[0], result)
                return result
            finally:
                for each in opened:  # what was saved holds the call, but not all that it has met
                    calls.present = each.running = None
                if outermost and recording.present is not None:
                    recording.stop()

        self._ours = call
        setattr(torch.nn.Module, "__call__", call)  # noqa: B010

    def copy_of(self, tensor: torch.Tensor) -> HeldSource:
        """A copy of the whole storage, the same for all calls of a pass. The copy of a small
        parameter from the beginning of the pass serves, where there is one."""
        storage, version = tensor.untyped_storage(), tensor._version
        size_bytes = storage.nbytes()
        if tensor.nbytes == size_bytes <= COPIED_BYTES and self.store.alone(tensor):
            copy = self._small.of(tensor, version)
            if copy is not None:
                return HeldSource(copy, copy._version)
        return self._copy((storage._cdata, version), tensor)

    def copy_of_saved(self, saved: Saved) -> HeldSource:
        """The same of a tensor that autograd has saved, and that the program holds."""
        return self._copy((saved.number,), saved.alias)

    def _copy(self, key: tuple[Any, ...], tensor: torch.Tensor | None) -> _Copy:
        found = self._copies.get(key)
        if found is not None:  # another call reads it as well
            return found
        if tensor is None:
            raise Foreign("what is to be copied has left")
        self._copies[key] = found = _Copy(tensor)
        return found

    def holder_of(self, tensor: torch.Tensor) -> HeldSource:
        """Holds a tensor, the same for all calls that do: else one would see the other's."""
        key = tensor.untyped_storage()._cdata, tensor._version
        found = self._holders.get(key)
        if found is None:
            found = self._holders[key] = HeldSource(tensor, tensor._version)
        return found

    def _open(self, module: torch.nn.Module, arguments: Any, opened: list[ModuleCall]) -> None:
        found = self._begin(module)
        if found is None:  # nearly always, under a plan
            return
        if torch_internals.current_graph_task() != -1 or not torch.is_grad_enabled():
            return
        if torch_internals.dispatch_mode_depth() or torch_internals.function_mode_depth():
            return
        if torch_internals.functorch_level() is not None:  # tensors have no storages in there
            return
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        recorder = recording.begin(self._guard, self.store.compiled)
        # What the outermost call is called with, no operation of the recording has made.
        call = ModuleCall(self, module, arguments if self._nested else (), recorder, found[0])
        call.expected = found[1]
        opened.append(call)
        self.present = None if self._nested else call

    def _close(self, call: ModuleCall, result: Any) -> None:
        try:
            self._end(call, result)
        except Foreign:
            return


class _Copy(HeldSource):
    """A copy of the whole storage, and in it the tensor. It lives as long as a call reads it."""

    __slots__ = ("_of",)

    def __init__(self, tensor: torch.Tensor) -> None:
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        copy.set_(tensor.untyped_storage().clone(), *layout)
        super().__init__(copy, copy._version)
        self._of = StorageReference(tensor.untyped_storage())
        """With it the address stays that of the storage."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a module is called with, or returns, as far as they can be seen."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
