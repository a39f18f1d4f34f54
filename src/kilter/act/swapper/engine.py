"""The engine: stands in the saved-tensor hooks and carries a memory schedule out.

One *pass* is from the first save to the moment when nothing saved is alive any more: a forward with
its backward. Passes are told apart by their fingerprint, the running hash of their events. A new
kind of pass is watched first (large data leave only where the budget forces them: the patent's
demand-swapped first iterations), then its recipes are tried against the real data, then it is
planned; from then on each event runs the few commands that the plan attached to it.

Whatever happens, the numbers are those of the plain run: a datum comes back from a copy, or from a
recipe that was taken in this very pass, or it never left. The plan decides only when. A pass that
departs from its fingerprint drops its plan in the middle and goes on like a watched one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kilter.act.fence import Fence
from kilter.act.swapper.backend import Backend, Event, HostMemoryError
from kilter.act.swapper.remake import EPS, SAVED, Foreign, Recipe, Stale, recipe
from kilter.core.errors import PlanError
from kilter.core.units import MIB
from kilter.observe.data import PassRecord, PassRecorder, SavedDatum
from kilter.plan.swap.choose import MemoryPlan, arena, plan
from kilter.plan.swap.problem import Link

if TYPE_CHECKING:
    import torch

SETTLED_STEPS = 2
"""Optimizer steps before a pass counts as settled: the first creates gradients and state."""
SETTLED_PASSES = 6
"""The same for jobs without a `torch.optim` optimizer."""
MAX_TRIALS = 3
"""A kind of pass that does not come again within so many is left without a plan."""
TUNED = 3
"""Passes under a new plan whose peak is measured."""
PATIENCE = 2
"""Passes in a row that may depart from every plan before planning starts anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    """What the engine did so far."""

    passes: int
    planned: int
    """Passes that ran under a plan to their end."""
    deviations: int
    """Passes that departed from their plan and were finished without it."""
    late: int
    """Uses that found their datum away and fetched it then and there."""
    spilled: int
    """Data that left without a plan because the budget was reached."""
    remade: int
    out_bytes: int
    in_bytes: int
    host_bytes: int
    """Host memory reserved now."""
    held_peak_bytes: int
    """The most saved data on the device at one time in the last complete pass."""
    plans: tuple[MemoryPlan, ...]
    peaks_bytes: tuple[int, ...]
    """Measured peak of the first passes under each plan, in order of planning."""
    refused: tuple[str, ...]
    """Why something could not be planned, or was planned otherwise."""


class Modified(RuntimeError):
    """The error of the plain run, raised for it: a saved tensor was modified in place."""

    def __init__(self) -> None:
        super().__init__(
            "one of the variables needed for gradient computation has been modified by an "
            "inplace operation (found by kilter, which holds the saved tensors)"
        )


def _note_epsilon(module: Any, inputs: Any, output: Any) -> None:
    """A layer norm's node does not keep its epsilon, which its recipe needs."""
    if output.grad_fn is not None:
        output.grad_fn.metadata[EPS] = module.eps


def _described(tensor: torch.Tensor) -> str:
    """What made a tensor, its shape and its type, for people."""
    base = tensor._base if tensor._is_view() else tensor
    maker = "input" if base is None or base.grad_fn is None else base.grad_fn.name()
    return f"{maker} {tuple(tensor.size())} {str(tensor.dtype).removeprefix('torch.')}"


_HERE, _COMING, _AWAY = range(3)


class _Saved:
    """One storage that autograd saved, and where its bytes are."""

    __slots__ = (
        "__weakref__", "alias", "arrival", "departure", "engine", "host", "intact", "key", "number",
        "original", "packed", "pooled", "recipe", "round", "size_bytes", "state", "version",
    )  # fmt: skip

    def __init__(self, engine: Swapper, number: int, tensor: torch.Tensor, size_bytes: int) -> None:
        self.engine = engine
        self.number = number
        self.size_bytes = size_bytes
        self.alias: torch.Tensor | None = tensor.detach()
        self.original = weakref.ref(tensor)
        self.packed = self.version = tensor._version
        self.round = engine._round
        self.intact = True
        """Never left: `alias` is the tensor that was saved."""
        self.key = tensor.untyped_storage()._cdata
        self.state = _HERE
        self.host: torch.Tensor | None = None
        self.pooled = False
        self.departure: Event = None
        self.arrival: Event = None
        self.recipe: Recipe | None = None

    def __del__(self) -> None:
        self.engine._gone(self)


class _View(NamedTuple):
    """What autograd is given instead of a large tensor: a storage and how it is looked at."""

    saved: _Saved
    first: bool
    """The view that the storage was met with, which is how `saved.alias` looks at it."""
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Small(NamedTuple):
    """What autograd is given for everything else."""

    tensor: torch.Tensor
    version: int

    def whole(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise Modified
        return self.tensor


def _small(tensor: torch.Tensor) -> _Small:
    # A leaf may be held itself; a result must not be (its node would hold itself alive).
    return _Small(tensor if tensor.is_leaf else tensor.detach(), tensor._version)


@dataclass(slots=True)
class _Planned:
    """A plan made ready to run: commands by event."""

    value: MemoryPlan
    numbers: tuple[int, ...]
    """The datum behind each interval that was planned."""
    prints: tuple[int, ...]
    leave: dict[int, tuple[int, ...]]
    release: dict[int, tuple[int, ...]]
    load: dict[int, tuple[int, ...]]
    offsets: dict[int, int]
    """Data to copy out, and where in the arena."""
    remade: frozenset[int]
    tuned: int = 0
    """Passes whose peak was measured."""


@dataclass(slots=True)
class _Known:
    """What is known of one kind of pass."""

    record: PassRecord
    tried: bool = False
    """Its recipes were tried against the real data."""
    trials: int = 0
    plan: _Planned | None = None
    hopeless: bool = False
    less_bytes: int = 0
    """Taken off the budget because passes under a plan measured more than predicted."""


class Swapper(AbstractContextManager["Swapper"]):
    """Keeps the training inside the `with` block within `budget_bytes` of device memory.

    `link` is the measured table of this machine. Storages below `min_bytes` are left alone. What
    goes wrong in here ends at the `fence`, where there is one: from then on data only come back.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        budget_bytes: int,
        link: Link,
        planner: str = "mix",
        min_bytes: int = MIB,
        fence: Fence | None = None,
    ) -> None:
        self._backend = backend
        self.budget_bytes = budget_bytes
        """May be changed until a plan is made for it."""
        self.may_plan = True
        """Switched off, passes are watched and data leave on demand, but nothing is planned."""
        self._link = link
        self._planner = planner
        self._min_bytes = min_bytes
        self._fence = fence
        self._here: dict[int, weakref.ref[_Saved]] = {}
        """By storage, those on the device: each holds its storage, so no key is ever reused."""
        self._by_number: dict[int, weakref.ref[_Saved]] = {}
        self._owed: weakref.WeakSet[_Saved] = weakref.WeakSet()
        """Those away that are to be made again from parameters."""
        self._alive = 0
        self._round = 0
        self._boundary = False
        self._closing = False
        self._event = 0
        self._print = 0
        self._number = 0
        self._plan: _Planned | None = None
        self._deviated = False
        self._misses = 0
        self._recorder: PassRecorder | None = None
        self._times: list[tuple[Event, Event]] = []
        self._trial: _Known | None = None
        self._watched: dict[int, Any] = {}
        self._away_bytes = 0
        self._held_bytes = 0
        self._held_peak_bytes = 0
        self._segment_peak_bytes = 0
        self._last_held_peak_bytes = 0
        self._leaving: list[weakref.ref[_Saved]] = []
        self._known: dict[int, _Known] = {}
        self._steps = 0
        self._arena: torch.Tensor | None = None
        self._pool: dict[int, list[torch.Tensor]] = {}
        self._pool_bytes = 0
        self._handles: list[Any] = []
        self._hooks: Any = None
        self._unpack_hook: Any = None
        self._norms: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._search: Any = None
        self._counts = dict.fromkeys(
            ("passes", "planned", "deviations", "late", "spilled", "remade", "out", "in"), 0
        )
        self._peaks: list[int] = []
        self._refused: list[str] = []

    # Begin and end

    def __enter__(self) -> Swapper:
        import torch
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self._torch = torch
        hooks: tuple[Callable[..., Any], ...] = (self._pack, self._unpack)
        if self._fence is not None:
            hooks = (self._pack_fenced, self._unpack_fenced)
        # Without this dynamo would compile our own frames when it meets them beside the user's.
        pack, self._unpack_hook = (torch.compiler.disable(hook) for hook in hooks)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, self._unpack_hook)
        self._alone = self._users(torch.empty(1).detach())
        self._hooks.__enter__()
        self._search_norms(True)
        self._handles = [
            register_optimizer_step_pre_hook(self._fenced(self._before_step)),
            register_optimizer_step_post_hook(self._fenced(self._after_step)),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop observing. Graphs that are still alive stay usable: their data find their way."""
        self._hooks.__exit__(*exception)
        for handle in (*self._handles, *self._norms.values()):
            handle.remove()
        self._norms.clear()
        self._search_norms(False)
        if self._alive == 0:
            self._end_pass()
        self._plan = None
        self._recorder = None
        self._closing = True
        if self._alive == 0:
            self._backend.close()

    def _search_norms(self, search: bool) -> None:
        from torch.nn.modules.module import register_module_forward_hook

        if search and self._search is None:
            self._search = register_module_forward_hook(self._fenced(self._after_module))
        elif not search and self._search is not None:
            self._search.remove()
            self._search = None

    @property
    def planned(self) -> bool:
        """The present pass runs under a plan, or the last one did."""
        return self._plan is not None

    def report(self) -> SwapReport:
        counts = self._counts
        plans = tuple(known.plan.value for known in self._known.values() if known.plan)
        return SwapReport(
            passes=counts["passes"],
            planned=counts["planned"],
            deviations=counts["deviations"],
            late=counts["late"],
            spilled=counts["spilled"],
            remade=counts["remade"],
            out_bytes=counts["out"],
            in_bytes=counts["in"],
            host_bytes=(0 if self._arena is None else self._arena.numel()) + self._pool_bytes,
            held_peak_bytes=self._last_held_peak_bytes,
            plans=plans,
            peaks_bytes=tuple(self._peaks),
            refused=tuple(self._refused),
        )

    def records(self) -> tuple[PassRecord, ...]:
        """What was observed, one record for each kind of pass."""
        return tuple(known.record for known in self._known.values())

    def plans(self) -> tuple[tuple[PassRecord, MemoryPlan, tuple[int, ...]], ...]:
        """For each kind of pass with a plan: its record, the plan, and the number of the datum
        behind each interval that the plan names."""
        found = [(known.record, known.plan) for known in self._known.values()]
        return tuple((record, p.value, p.numbers) for record, p in found if p is not None)

    # Hooks

    def _fenced(self, hook: Callable[..., None]) -> Callable[..., None]:
        return hook if self._fence is None else self._fence(hook)

    def _pack_fenced(self, tensor: torch.Tensor) -> Any:
        assert self._fence is not None
        packed = [] if self._fence.down else self._fence.ask(self._pack, tensor)
        return packed[0] if packed else _small(tensor)

    def _unpack_fenced(self, packed: Any) -> torch.Tensor:
        """After an error of ours only the way back is left; what fails there is the program's."""
        assert self._fence is not None
        found = [] if self._fence.down else self._fence.ask(self._unpack_or_modified, packed)
        if not found:
            return packed.whole() if type(packed) is _Small else self._look(packed)
        if isinstance(found[0], Modified):
            raise found[0]
        return found[0]

    def _unpack_or_modified(self, packed: Any) -> torch.Tensor | Modified:
        try:
            return self._unpack(packed)
        except Modified as error:  # the program's own, not ours
            return error

    def _after_module(self, module: Any, inputs: Any, output: Any) -> None:
        """While passes are watched: find the layer norms. A hook on every module call would cost
        too much to keep, so each norm gets its own."""
        if type(module) is self._torch.nn.LayerNorm and module not in self._norms:
            self._norms[module] = module.register_forward_hook(_note_epsilon)
            _note_epsilon(module, inputs, output)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A graph that outlives the step still needs what is made from the old parameters."""
        if self._alive == 0:
            return
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for saved in list(self._owed):
            if saved.recipe is not None and stepped.intersection(saved.recipe.leaves):
                self._fetch(saved)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._steps += 1
        self._boundary = self._alive > 0

    def _tracked(self, tensor: torch.Tensor) -> bool:
        # In the order of what decides most often: this runs for every saved tensor.
        return (
            type(tensor) is self._torch.Tensor
            and tensor.numel() * tensor.element_size() >= self._min_bytes
            and tensor.device == self._backend.device
            and tensor.layout is self._torch.strided
            and not (tensor.is_leaf and tensor.requires_grad)
            and type(tensor._base) is not self._torch.nn.Parameter
            and not tensor.is_conj()
            and not tensor.is_neg()
            and tensor.untyped_storage().nbytes() >= self._min_bytes
        )

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not self._tracked(tensor):
            return _small(tensor)
        storage = tensor.untyped_storage()
        size_bytes = storage.nbytes()
        if self._alive == 0 or self._boundary:
            self._end_pass()
            self._begin_pass(hash((0, 0, size_bytes)))
        reference = self._here.get(storage._cdata)
        saved = None if reference is None else reference()
        known = (
            saved is not None and saved.round == self._round and saved.version == tensor._version
        )
        begin = self._enter_event(0, -1 - saved.number if saved and known else size_bytes)
        if saved is None or not known:
            saved = self._save(tensor, size_bytes)
        self._leave_event(begin)
        seen = (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
        return _View(saved, not known, *seen)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is _Small:
            return packed.whole()
        saved = packed.saved
        now = saved.round == self._round
        begin = self._enter_event(1, saved.number if now else -1)
        if now and self._recorder is not None:
            datum = self._recorder.data[saved.number]
            if datum.needed_at is None:
                datum.needed_at = len(self._recorder.prints) - 1
        if saved.state == _AWAY and self._plan is not None:
            self._counts["late"] += saved.host is not None
        tensor = self._look(packed)
        if now and self._trial is not None and saved.recipe is not None:
            self._try(saved)
        planned = self._plan
        if planned is not None and planned.tuned < TUNED and self._event == len(planned.prints):
            self._measure(planned)
        self._leave_event(begin)
        return tensor

    # Events

    def _enter_event(self, kind: int, what: int) -> Event:
        """Advance the clock by one event, and do what is due."""
        event = self._event
        self._event = event + 1
        mark = self._print = hash((self._print, kind, what))
        recorder = self._recorder
        begin = None
        if recorder is not None:
            begin = self._backend.mark()
            recorder.event(mark, self._node_name(kind), backward=kind == 1)
        if recorder is not None and not recorder.timing_only:
            if event:
                peak_bytes = self._backend.peak_bytes()
                recorder.level(
                    self._segment_peak_bytes if peak_bytes is None else peak_bytes,
                    self._away_bytes,
                )
            self._poll(event)
        planned = self._plan
        if planned is None:
            if self._leaving:
                self._release_leaving()
        elif event < len(planned.prints) and planned.prints[event] == mark:
            for number in planned.leave.get(event, ()):
                self._leave(number, planned)
            for number in planned.release.get(event, ()):
                self._release(number, planned)
            for number in planned.load.get(event, ()):
                self._load(number)
        else:
            self._deviate(event, mark)
        return begin

    def _leave_event(self, begin: Event) -> None:
        if self._recorder is not None:
            self._times.append((begin, self._backend.mark()))
            self._segment_peak_bytes = self._held_bytes

    def _node_name(self, kind: int) -> str:
        node = self._torch._C._current_autograd_node() if kind == 1 else None
        return "forward" if node is None else str(node.name())

    def _deviate(self, event: int, mark: int) -> None:
        """This pass is another than planned: take the plan of one that began alike, or none."""
        self._plan = self._plan_for(event, mark)
        if self._plan is None:
            self._deviated = True
            self._counts["deviations"] += 1

    def _plan_for(self, event: int, mark: int) -> _Planned | None:
        for known in self._known.values():
            planned = known.plan
            if planned and event < len(planned.prints) and planned.prints[event] == mark:
                return planned
        return None

    def _poll(self, event: int) -> None:
        """Which saved storages nobody but autograd holds any more."""
        assert self._recorder is not None
        use_count = self._torch._C._storage_Use_Count
        alone = self._alone
        freed = []
        for number, (reference, weak) in self._watched.items():
            saved = reference()
            if saved is None or weak.expired():
                free = True
            else:
                free = saved.state == _HERE and use_count(saved.key) == alone
            if free:
                self._recorder.data[number].free_at = event
                freed.append(number)
        for number in freed:
            del self._watched[number]

    # Passes

    def _begin_pass(self, first_print: int) -> None:
        self._event = self._print = self._number = 0
        self._round += 1
        self._boundary = False
        self._by_number.clear()
        self._watched.clear()
        self._leaving.clear()
        self._times.clear()
        self._deviated = False
        self._held_peak_bytes = self._segment_peak_bytes = self._held_bytes
        candidate = self._candidate() if self.may_plan else None
        if candidate is not None and candidate.tried:
            self._make_plan(candidate)
            candidate = None
        if candidate is not None:
            candidate.trials += 1
            self._trial = candidate
        elif self._misses < PATIENCE:
            self._plan = self._plan_for(0, first_print)
        if self._plan is None:
            # Looking at memory is slow and would show in the times: every other pass only times.
            alike = [k for k in self._known.values() if k.record.prints[0] == first_print]
            timing_only = bool(alike) and self._trial is None and self._round % 2 == 0
            self._recorder = PassRecorder(timing_only=timing_only)
        self._search_norms(self._plan is None)
        if self._plan is None or self._plan.tuned < TUNED:
            self._backend.peak_bytes()  # from here on

    def _candidate(self) -> _Known | None:
        """A kind of pass that was watched long enough and has no plan yet."""
        for known in self._known.values():
            if known.plan or known.hopeless or (known.trials >= MAX_TRIALS and not known.tried):
                continue
            passes = known.record.passes
            if passes >= SETTLED_PASSES or (passes >= 2 and self._steps >= SETTLED_STEPS):
                return known
        return None

    def _end_pass(self) -> None:
        if self._event == 0:
            return
        self._counts["passes"] += 1
        self._last_held_peak_bytes = self._held_peak_bytes
        planned = self._plan
        if planned is not None:
            if self._event < len(planned.prints):
                self._counts["deviations"] += 1
                self._deviated = True
            else:
                self._counts["planned"] += 1
        self._misses = self._misses + 1 if self._deviated else 0
        if self._recorder is not None:
            self._file(self._recorder)
        self._recorder = self._trial = self._plan = None
        self._event = 0

    def _file(self, recorder: PassRecorder) -> None:
        ends = [begin for begin, _ in self._times[1:]]
        starts = [end for _, end in self._times[:-1]]
        pairs = zip(starts, ends, strict=True)
        seconds = [max(0.0, self._backend.elapsed_s(start, end)) for start, end in pairs]
        record = recorder.record(seconds)
        trial = self._trial
        if trial is not None:
            if trial.record.prints == record.prints:
                for mine, theirs in zip(trial.record.data, record.data, strict=True):
                    mine.recipe, mine.sources = theirs.recipe, theirs.sources
                    mine.remake_s = theirs.remake_s
                trial.tried = True
            return
        mark = record.prints[-1]
        known = self._known.get(mark)
        if known is None:
            if not recorder.timing_only:
                self._known[mark] = _Known(record)
        elif known.record.prints == record.prints:
            known.record.merge(record)
        self._misses = 0

    def _measure(self, planned: _Planned) -> None:
        """Compare the peak of the first passes under a plan with the budget; plan for less if the
        prediction was short (fragments and workspace that no event shows)."""
        peak_bytes = self._backend.peak_bytes()
        planned.tuned += 1
        if peak_bytes is None:
            return
        self._peaks.append(peak_bytes)
        if peak_bytes > self.budget_bytes:
            for known in self._known.values():
                if known.plan is planned:
                    known.less_bytes += peak_bytes - self.budget_bytes
                    self._make_plan(known)

    # Planning

    def _make_plan(self, known: _Known) -> None:
        for swap in (True, False):
            try:
                known.plan = self._ready(known, swap=swap)
            except (PlanError, HostMemoryError) as error:
                self._refused.append(str(error))
                continue
            return
        known.hopeless = known.plan is None

    def _ready(self, known: _Known, *, swap: bool) -> _Planned:
        problem, numbers = known.record.problem(
            link=self._link,
            budget_bytes=self.budget_bytes - known.less_bytes,
            min_bytes=self._min_bytes,
            swap=swap,
        )
        value = plan(problem, self._planner)
        offsets, total = arena(problem, value.schedule)
        if total > (0 if self._arena is None else self._arena.numel()):
            self._arena = self._backend.reserve(total)
        leave: dict[int, list[int]] = {}
        release: dict[int, list[int]] = {}
        load: dict[int, list[int]] = {}
        for move in value.schedule.moves:
            after = problem.intervals[move.interval].after
            leave.setdefault(after + 1, []).append(numbers[move.interval])
            release.setdefault(move.release, []).append(numbers[move.interval])
            load.setdefault(move.load, []).append(numbers[move.interval])
        for index in value.schedule.remade:
            release.setdefault(problem.intervals[index].after + 1, []).append(numbers[index])
        return _Planned(
            value=replace(value, host_bytes=total),
            numbers=numbers,
            prints=known.record.prints,
            leave={event: tuple(found) for event, found in leave.items()},
            release={event: tuple(found) for event, found in release.items()},
            load={event: tuple(found) for event, found in load.items()},
            offsets={numbers[index]: offset for index, offset in offsets.items()},
            remade=frozenset(numbers[index] for index in value.schedule.remade),
        )

    # Data

    def _save(self, tensor: torch.Tensor, size_bytes: int) -> _Saved:
        number = self._number
        self._number += 1
        saved = _Saved(self, number, tensor, size_bytes)
        self._alive += 1
        planned = self._plan
        reference = self._here[saved.key] = weakref.ref(saved)
        self._by_number[number] = reference
        recipes = self._trial is not None or (planned is not None and planned.remade)
        if recipes and tensor.grad_fn is not None and tensor.output_nr == 0:
            seen = (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
            tensor.grad_fn.metadata[SAVED] = (reference, seen)
        self._hold(saved.size_bytes)
        if self._recorder is not None:
            self._watch(saved, tensor)
        if planned is not None:
            if number in planned.remade:
                saved.recipe = recipe(tensor, self._kept_by, self._produced_by)
        elif self._over_budget():
            self._spill(saved)
        return saved

    def _watch(self, saved: _Saved, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        assert self._recorder is not None
        datum = SavedDatum(
            name="" if self._recorder.timing_only else f"{saved.number}: {_described(tensor)}",
            size_bytes=saved.size_bytes,
            packed_at=len(self._recorder.prints) - 1,
        )
        self._recorder.data.append(datum)
        if not self._recorder.timing_only:
            self._watched[saved.number] = (
                weakref.ref(saved),
                StorageWeakRef(tensor.untyped_storage()),
            )
        if self._trial is not None:
            saved.recipe = recipe(tensor, self._kept_by, self._produced_by)
            if saved.recipe is not None:
                datum.recipe, datum.sources = saved.recipe.kind, saved.recipe.sources

    def _kept_by(self, node: Any, name: str) -> tuple[Any, int | None] | None:
        """What a node saved under a name, as we packed it; nothing is unpacked, since the hooks of
        others may do anything (checkpointing runs the forward again)."""
        raw = getattr(node, f"_raw_saved_{name}")
        packed, hook = raw.data, raw.unpack_hook
        if packed is None:
            return None
        if hook is None:
            packed = _Small(packed.detach(), packed._version)
        elif hook is not self._unpack_hook:
            raise Foreign(f"{node.name()} keeps {name} with a hook that is not ours")
        if isinstance(packed, _View):
            view = packed
            return (lambda: self._look(view)), view.saved.number

        def small() -> torch.Tensor:
            if packed.tensor._version != packed.version:
                raise Stale("a tensor that the recipe reads was modified in place")
            return packed.tensor.detach()

        return small, None

    def _produced_by(self, node: Any) -> tuple[Any, int] | None:
        """A node's output, if an operation saved it and nobody wrote to it since."""
        found = node.metadata.get(SAVED)
        saved = None if found is None else found[0]()
        if saved is None or saved.round != self._round:
            return None
        if saved.alias is not None and saved.alias._version != saved.version:
            return None
        view = _View(saved, False, *found[1])
        return (lambda: self._look(view)), saved.number

    def _look(self, view: _View) -> torch.Tensor:
        """The tensor behind a view, fetched if it is away."""
        saved = view.saved
        if saved.state != _HERE:
            self._fetch(saved)
        alias = saved.alias
        assert alias is not None
        if alias._version != saved.version:
            raise Modified
        original = saved.original()
        if original is not None and original._version != saved.packed:
            raise Modified
        if view.first and saved.intact:
            return alias
        tensor = self._torch.empty(0, dtype=view.dtype, device=alias.device)
        return tensor.set_(alias.untyped_storage(), view.offset, view.size, view.stride)

    def _flat(self, saved: _Saved) -> torch.Tensor:
        assert saved.alias is not None
        storage = saved.alias.untyped_storage()
        flat = self._torch.empty(0, dtype=self._torch.uint8, device=saved.alias.device)
        return flat.set_(storage, 0, (saved.size_bytes,), (1,))

    def _send(self, saved: _Saved, host: torch.Tensor) -> None:
        """Start the copy to the host; the datum stays until it is released."""
        saved.host = host
        saved.departure = self._backend.copy_out(host, self._flat(saved))
        self._counts["out"] += saved.size_bytes

    def _leave(self, number: int, planned: _Planned) -> None:
        """Start the planned copy to the host, in the order that the plan counts on."""
        reference = self._by_number.get(number)
        saved = None if reference is None else reference()
        if saved is None or saved.state != _HERE or saved.departure is not None:
            return
        assert saved.alias is not None
        assert self._arena is not None
        if saved.alias._version == saved.version:
            offset = planned.offsets[number]
            self._send(saved, self._arena[offset : offset + saved.size_bytes])

    def _release(self, number: int, planned: _Planned) -> None:
        reference = self._by_number.get(number)
        saved = None if reference is None else reference()
        if saved is None or saved.state != _HERE:
            return
        if saved.departure is None and (number not in planned.remade or saved.recipe is None):
            return
        self._evict(saved)

    def _evict(self, saved: _Saved) -> None:
        """Give the device memory up, once the bytes are safe on the host or can be made again."""
        assert saved.alias is not None
        if saved.departure is not None:
            self._backend.wait(saved.departure)
        if saved.alias._version != saved.version:
            return  # written to in place: stays, and the next use raises what the plain run raises
        self._here.pop(saved.key, None)
        if self._users(saved.alias) == self._alone:
            self._backend.evicted(saved.alias.untyped_storage())
        saved.alias = None
        saved.intact = False
        saved.state = _AWAY
        if saved.host is None and saved.recipe is not None and saved.recipe.leaves:
            self._owed.add(saved)
        self._hold(-saved.size_bytes)
        self._away_bytes += saved.size_bytes

    def _load(self, number: int) -> None:
        """Start the copy back to the device."""
        reference = self._by_number.get(number)
        saved = None if reference is None else reference()
        if saved is None or saved.state != _AWAY or saved.host is None:
            return
        self._start_load(saved)

    def _start_load(self, saved: _Saved) -> None:
        assert saved.host is not None
        saved.alias = self._backend.alloc(saved.size_bytes)
        saved.arrival = self._backend.copy_in(saved.alias, saved.host)
        saved.state = _COMING
        self._counts["in"] += saved.size_bytes
        self._hold(saved.size_bytes)
        self._away_bytes -= saved.size_bytes

    def _fetch(self, saved: _Saved) -> None:
        """Bring it back now."""
        if saved.state == _AWAY and saved.host is None:
            self._remake(saved)
            return
        if saved.state == _AWAY:
            self._start_load(saved)
        self._backend.wait(saved.arrival)
        self._arrived(saved)

    def _arrived(self, saved: _Saved) -> None:
        assert saved.alias is not None
        saved.state = _HERE
        # From here on `version` counts writes to the copy; writes to the original were judged.
        saved.version = saved.alias._version
        saved.key = saved.alias.untyped_storage()._cdata
        self._here[saved.key] = weakref.ref(saved)

    def _remake(self, saved: _Saved) -> None:
        assert saved.recipe is not None
        saved.alias = self._made(saved.recipe)
        saved.recipe = None  # lets go of what it reads
        self._owed.discard(saved)
        self._counts["remade"] += 1
        self._hold(saved.size_bytes)
        self._away_bytes -= saved.size_bytes
        self._arrived(saved)

    def _made(self, found: Recipe) -> torch.Tensor:
        torch = self._torch
        device_type = self._backend.device.type
        with torch.no_grad():
            if not torch.is_autocast_enabled(device_type):  # as in every ordinary backward
                return found.make()
            with torch.autocast(device_type, enabled=False):
                return found.make()

    def _try(self, saved: _Saved) -> None:
        """Make a datum again beside the real one: how long it takes, and whether it is the same."""
        assert self._recorder is not None
        assert saved.recipe is not None
        datum = self._recorder.data[saved.number]
        if datum.remake_s is not None:
            return
        torch = self._torch
        try:
            self._made(saved.recipe)  # what it reads is here from now on, and every kernel loaded
            self._backend.keep_busy()
            begin = self._backend.mark()
            issued_s = time.perf_counter()
            made = self._made(saved.recipe)
            issued_s = time.perf_counter() - issued_s
        except (Stale, torch.OutOfMemoryError) as error:
            self._refused.append(f"{datum.name}: {error}")
            saved.recipe = None
            return
        end = self._backend.mark()
        flat = self._flat(saved)
        again = torch.empty(0, dtype=torch.uint8, device=flat.device)
        again.set_(made.untyped_storage(), 0, (saved.size_bytes,), (1,))
        if torch.equal(flat, again):
            # Small ones cost the host more than the device, and a job may be limited by either.
            datum.remake_s = max(issued_s, self._backend.elapsed_s(begin, end))
        else:
            self._refused.append(f"{datum.name}: made again, it differs")
        saved.recipe = None

    def _hold(self, change_bytes: int) -> None:
        self._held_bytes += change_bytes
        if self._held_bytes > self._segment_peak_bytes:
            self._segment_peak_bytes = self._held_bytes
            if self._held_bytes > self._held_peak_bytes:
                self._held_peak_bytes = self._held_bytes

    # Without a plan

    def _over_budget(self) -> bool:
        used_bytes = self._backend.used_bytes()
        return (self._held_bytes if used_bytes is None else used_bytes) > self.budget_bytes

    def _spill(self, saved: _Saved) -> None:
        """The budget is reached: this datum goes to the host, freed at the next event."""
        free = self._pool.get(saved.size_bytes)
        if free:
            host = free.pop()
        else:
            try:
                host = self._backend.reserve(saved.size_bytes)
            except HostMemoryError as error:
                self._refused.append(str(error))
                return
            self._pool_bytes += saved.size_bytes
        saved.pooled = True
        self._counts["spilled"] += 1
        self._send(saved, host)
        self._leaving.append(weakref.ref(saved))

    def _users(self, tensor: torch.Tensor) -> int:
        """How many hold this tensor's storage; compared with the count for one tensor alone, since
        the framework's own wrapper counts too."""
        return int(self._torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))

    def _release_leaving(self) -> None:
        """Free what nobody else uses any more; the rest stays until a later event."""
        still = []
        for reference in self._leaving:
            saved = reference()
            if saved is None or saved.state != _HERE:
                continue
            self._backend.wait(saved.departure)
            if saved.alias is not None and self._users(saved.alias) == self._alone:
                self._evict(saved)
            else:
                still.append(reference)
        self._leaving = still

    def _gone(self, saved: _Saved) -> None:
        """Nobody will ask for this datum again. Copies in flight still use its memory: what is
        issued from now on must come after them."""
        self._alive -= 1
        if saved.state == _AWAY:
            self._away_bytes -= saved.size_bytes
        else:
            reference = self._here.get(saved.key)
            if reference is not None and reference() is None:
                del self._here[saved.key]
            self._held_bytes -= saved.size_bytes
            if saved.state == _COMING:
                self._backend.wait(saved.arrival)
            elif saved.departure is not None:
                self._backend.wait(saved.departure)
        if saved.pooled and saved.host is not None:
            self._pool.setdefault(saved.size_bytes, []).append(saved.host)
        if self._closing and self._alive == 0:
            self._backend.close()
