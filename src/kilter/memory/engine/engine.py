"""The engine: stands in the saved-tensor hooks and carries a memory schedule out.

One *pass* is from the first save to the moment when nothing saved is alive any more: a forward with
its backward. Passes are told apart by their events, the large tensors saved and used. A new kind of
pass is watched first (large data leave only where the budget forces them: the patent's
demand-swapped first iterations), then its recipes are tried against the real data, then it is
planned; from then on each event runs the few commands that the plan attached to it.

Whatever happens, the numbers are those of the plain run: a datum comes back from a copy, or from a
recipe that was taken in this very pass, or it never left. The plan decides only when; what the
program still holds when it is due stays until the program lets go. A pass that departs from its
events drops its plan in the middle and goes on like a watched one.

Under a plan the host's time counts: a job that issues its work just in time has none to give. So
what the plan leaves alone is handed to autograd as it is, and an event is one look at a list.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from kilter.core.memory_record import MemoryCounts
from kilter.core.reasons import Reason
from kilter.core.units import MIB
from kilter.memory import messages
from kilter.memory.engine import fused
from kilter.memory.engine.backend import Backend, owned
from kilter.memory.engine.collector import Collector
from kilter.memory.engine.demand import Demand
from kilter.memory.engine.kinds import TUNED, Kinds, PassKind
from kilter.memory.engine.modified import Modified
from kilter.memory.engine.pass_record import FOREIGN, PassRecord, again_code, use_code
from kilter.memory.engine.quiet import unseen
from kilter.memory.engine.reach import Reach
from kilter.memory.engine.ready import Due, Ready
from kilter.memory.engine.recompute import EPS, Reader
from kilter.memory.engine.store import (
    AWAY,
    Pass,
    Saved,
    Store,
    View,
    called,
    kept,
    original_of,
    sole,
    whole,
)
from kilter.memory.engine.waits import Waits
from kilter.memory.engine.watch import Watch
from kilter.memory.plan.choose import MemoryPlan
from kilter.memory.plan.problem import Link
from kilter.observe import torch_internals

if TYPE_CHECKING:
    import torch

    from kilter.session.fence import Fence

DEVIATION_PATIENCE = 2
"""Passes that may depart from every plan before some are watched again; one that keeps to its plan
makes up for half of one."""
LOOK = 4
"""How many are watched then: kinds that take turns all get theirs."""
HOPELESS_EVERY = 8
"""Of passes that begin like one that cannot be planned, each so manieth is looked at again."""


class SwapReport(MemoryCounts, frozen=True, kw_only=True):
    """What the engine did so far, and how it stands."""

    watched: int
    """Passes that were watched, or tried."""
    watched_every: int
    """Of passes without a plan one in this many is watched; more than 1 where shapes keep changing.
    """
    held_peak_bytes: int
    """The most saved data on the device at one time in the last pass that was measured: watched,
    or among the first under a plan."""
    plans: tuple[MemoryPlan, ...]
    settled: bool
    """There is a plan, and every plan was measured and holds."""
    highest_bytes: int
    """The largest measured peak of passes of all kinds, each as it runs now; 0: not measured."""
    peaks_bytes: tuple[int, ...]
    """Measured peak of the first passes under each plan, in order of planning."""
    refused: tuple[Reason, ...]
    """Why something could not be planned, or was planned otherwise."""


def note_epsilon(module: Any, inputs: Any, output: Any) -> None:
    """A layer norm's node does not keep its epsilon, which its recipe needs; without a weight
    nothing leads back to the module."""
    node, eps = getattr(output, "grad_fn", None), vars(module).get("eps")
    if node is not None and eps is not None:
        node.metadata[EPS] = eps


@cache
def leave_uncompiled() -> None:
    """Dynamo would compile our own frames when it meets them beside the user's. A wrapper
    (`torch.compiler.disable`) would cost each call more than an ordinary event does."""
    torch_internals.trace_rules.add("kilter")


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
        self._collector = Collector()
        guard = called if fence is None else fence.run
        self._store = Store(backend, over=self._pass_is_over, guard=guard)
        self._reach = Reach(self._store, guard)
        self._reader = Reader(self._store)
        self._demand = Demand(backend, self._store)
        self.budget_bytes = budget_bytes
        """What the next plans are made for."""
        self.may_plan = True
        """Switched off, passes are watched and tried and data leave on demand, and that is all."""
        self._kinds = Kinds(backend, self._store, link=link, planner=planner, min_bytes=min_bytes)
        self._min_bytes = min_bytes
        self._fence = fence
        self._by_number: dict[int, weakref.ref[Saved]] = {}
        """Data of the present pass that are followed."""
        self._overdue: dict[int, torch.Tensor | None] = {}
        """Those of them that should have left, and were held by the program. With the host memory
        for the copy; None: to be recomputed."""
        self._open = False
        self._measured = False
        self._boundary = False
        self._round = 0
        self._event = 0
        self._plan: Ready | None = None
        self._deviated = False
        self._misses = 0.0
        self._looking = 0
        """Passes still to be watched though there is a plan."""
        self._watch: Watch | None = None
        self._stepped = False
        """The pass that is watched began after an optimizer step."""
        self._trial: PassKind | None = None
        self._last_held_peak_bytes = 0
        self._steps = 0
        self._handles: list[Any] = []
        self._hooks: Any = None
        self._norms: Any = None
        """Our hook behind modules, where there are layer norms without weights."""
        self._counts = dict.fromkeys(("passes", "planned", "watched", "deviations", "late"), 0)

    # Begin and end

    def __enter__(self) -> Swapper:
        import torch
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        if self._store.closing:  # used before: plans and host memory of then are gone
            self._kinds.forget(arena=True)
            self._store.reopen()
        self._torch = torch
        self._tensor = torch.Tensor
        self._dispatch_modes = torch_internals.dispatch_mode_depth
        self._function_modes = torch_internals.function_mode_depth
        self._duals = torch.autograd.forward_ad
        self._retained = torch_internals.graph_task_keeps_graph
        leave_uncompiled()
        fenced = self._fence is not None
        self._save_large = self._save_fenced if fenced else self._save
        self._use_large = self._use_fenced if fenced else self._use
        self._store.unpack_hook = self._unpack
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._store.unpack_hook)
        self._hooks.__enter__()
        self._reach.__enter__()
        self._handles = [
            register_optimizer_step_pre_hook(self._fenced(self._before_step)),
            register_optimizer_step_post_hook(self._fenced(self._after_step)),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop observing. Graphs that are still alive stay usable: their data find their way."""
        self._hooks.__exit__(*exception)
        self._reach.__exit__(*exception)
        for handle in self._handles:
            handle.remove()
        self._norms = None
        self._store.norms.clear()
        self._collector.let_go()
        if self._store.within() is None:
            self._end_pass()
        self._plan = None
        self._watch = None
        self._store.closing = True
        if self._store.alive == 0:
            self._backend.close()

    def step_out(self) -> None:
        """Between passes: what is saved from here on is left to autograd."""
        self._hooks.__exit__(None, None, None)

    def step_in(self) -> None:
        """Between passes, after `step_out`, in the same thread."""
        self._hooks.__enter__()

    def stand_behind(self, around: Callable[[Any, Any], tuple[Any, Any]]) -> bool:
        """Between passes: what `around` makes of our hooks takes their place. `False` if they are
        not the innermost of this thread."""
        top = torch_internals.top_saved_hooks(True)
        if top is None or top[1] is not self._store.unpack_hook:
            return False
        self.step_out()
        pack, self._store.unpack_hook = around(self._pack, self._unpack)
        self._hooks = self._torch.autograd.graph.saved_tensors_hooks(pack, self._store.unpack_hook)
        self.step_in()
        return True

    @property
    def tried(self) -> bool:
        """A kind of pass is known well enough to be planned."""
        return any(kind.tried for kind in self._kinds)

    @property
    def planned(self) -> bool:
        """The present pass runs under a plan, or the last one did."""
        return self._plan is not None

    @property
    def event(self) -> int | None:
        """Operation of the present pass that is being issued, where that is known."""
        if self._plan is not None:
            return self._event - 1
        return None if self._watch is None else self._watch.event

    @property
    def leave_above_bytes(self) -> int:
        """In use above which data leave without a plan; asked between two passes, in the next."""
        peak_bytes = None if self._watch is None else self._watch.peak_bytes
        return self._demand.leave_above_bytes(self.budget_bytes, peak_bytes)

    def report(self) -> SwapReport:
        counts, store = self._counts, self._store
        plans = tuple(kind.plan.value for kind in self._kinds if kind.plan)
        return SwapReport(
            passes=counts["passes"],
            planned=counts["planned"],
            watched=counts["watched"],
            watched_every=self._kinds.attention.every,
            deviations=counts["deviations"],
            late=counts["late"],
            hastened=self._kinds.hastened,
            waited_s=self._kinds.waited_s,
            spilled=self._demand.spilled,
            recomputed=store.recomputed,
            out_bytes=store.out_bytes,
            in_bytes=store.in_bytes,
            host_bytes=self._kinds.host_bytes + store.pool.taken_bytes,
            held_peak_bytes=self._last_held_peak_bytes,
            plans=plans,
            settled=bool(plans) and all(kind.settled for kind in self._kinds),
            highest_bytes=self._kinds.highest_bytes,
            most_bytes=self._kinds.most_bytes,
            peaks_bytes=tuple(self._kinds.peaks_bytes),
            refused=(*self._kinds.refused, *self._demand.refused),
        )

    def limit(self, budget_bytes: int) -> None:
        """From here on this is the budget, and passes are planned for it."""
        self.budget_bytes, self.may_plan = budget_bytes, True
        self._kinds.outdate()

    def records(self) -> tuple[PassRecord, ...]:
        """What was observed, one record for each kind of pass."""
        return tuple(kind.record for kind in self._kinds)

    def largest_pass(self) -> PassRecord | None:
        """The record of the kind of pass with the largest plain peak."""
        return max(self.records(), key=lambda record: record.peak_bytes, default=None)

    def plans(self) -> tuple[tuple[PassRecord, MemoryPlan, tuple[int, ...]], ...]:
        """For each kind of pass with a plan: its record, the plan, and the number of the datum
        behind each interval that the plan names."""
        found = [(kind.record, kind.plan) for kind in self._kinds]
        return tuple((record, r.value, r.numbers) for record, r in found if r is not None)

    # Hooks

    def _fenced(self, hook: Callable[..., None]) -> Callable[..., None]:
        return hook if self._fence is None else self._fence(hook)

    def _find_norms(self) -> None:
        """The program's layer norms. They are looked for among all objects, once in a trial: a hook
        on every module call costs more than the rest of an event, and ends compiled regions. Only
        those without weights need one. It is not on them: a hook of ours on a module of the program
        would get into its pickles, and TorchScript would try to compile it."""
        from torch.nn.modules.module import register_module_forward_hook

        norm = self._torch.nn.LayerNorm
        for module in gc.get_objects():
            if not issubclass(type(module), norm):
                continue
            weight = vars(module).get("_parameters", {}).get("weight")
            if weight is not None:
                self._store.norms[id(weight)] = weakref.ref(module)
            elif self._norms is None:
                self._norms = register_module_forward_hook(
                    lambda module, *rest: (
                        note_epsilon(module, *rest) if isinstance(module, norm) else None
                    )
                )
                self._handles.append(self._norms)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.before_update(p for group in optimizer.param_groups for p in group["params"])

    def before_update(self, parameters: Iterable[torch.Tensor]) -> None:
        """A graph that outlives the update still needs what is made from the old parameters."""
        for parameter in parameters:
            self._store.pay(parameter)

    def forget(self) -> None:
        """What stays on the device takes more or less than before: watch and plan anew."""
        if self._store.within() is None:
            self._end_pass()
        self._kinds.forget()
        self._misses, self._looking = 0.0, 0

    def relevel(self, record: PassRecord, level_bytes: list[int], taken: float) -> None:
        """The same, where it is known what a kind of pass takes with everything kept: it is planned
        anew without being watched. Others take a share of the way to the device from now on."""
        if self._store.within() is None:
            self._end_pass()
        self._kinds.taken = taken
        self._kinds.relevel(record, level_bytes)
        self._misses, self._looking = 0.0, 0

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._steps += 1
        self._collector.let_go()  # something unused may keep the pass alive
        self._boundary = self._store.within() is not None

    def _pack(self, tensor: torch.Tensor) -> Any:
        """What autograd holds instead of a tensor."""
        if self._dispatch_modes() or self._function_modes():
            return self._unseen(self._pack_tensor, tensor, type(tensor))
        return self._pack_tensor(tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        try:
            if self._dispatch_modes() or self._function_modes():
                tensor: torch.Tensor = self._unseen(self._unpack_tensor, packed, type(packed[0]))
                return tensor
            return self._unpack_tensor(packed)
        except Modified as error:
            plain = error.as_the_framework(packed, original_of(packed))
        try:
            raise plain
        finally:
            del plain  # its traceback would keep this frame alive

    def _unseen(self, hook: Callable[[Any], Any], argument: Any, kind: type) -> Any:
        """Modes of the program's, which count operations or change them, are not for ours. Those
        that record or imitate the program have to see all; there nothing is moved."""
        modes = torch_internals.DispatchModeKey
        found = torch_internals.dispatch_mode_of
        if any(found(key) for key in (modes.PROXY, modes.FUNCTIONAL, modes.FAKE)):
            return kept(argument) if hook == self._pack_tensor else hook(argument)
        if kind not in (self._tensor, self._torch.nn.Parameter, Saved):
            return hook(argument)
        return unseen(partial(hook, argument))

    def _pack_tensor(self, tensor: torch.Tensor) -> Any:
        if (
            type(tensor) is self._tensor
            and tensor.numel() * tensor.element_size() >= self._min_bytes
            and tensor.device == self._backend.device
            and tensor.layout is self._torch.strided
            and not tensor.is_nested
            and not (tensor.is_leaf and tensor.requires_grad)
            and type(tensor._base) is not self._torch.nn.Parameter
            and not tensor.is_conj()
            and not tensor.is_neg()
            and tensor.untyped_storage().nbytes() >= self._min_bytes
            and sole(tensor)
            and owned(tensor.untyped_storage())
        ):
            return self._save_large(tensor)
        return kept(tensor)

    def _unpack_tensor(self, packed: Any) -> torch.Tensor:
        return whole(packed) if len(packed) == 3 else self._use_large(packed)

    def _save_fenced(self, tensor: torch.Tensor) -> Any:
        assert self._fence is not None
        packed = [] if self._fence.down else self._fence.ask(self._save, tensor)
        return packed[0] if packed else kept(tensor)

    def _use_fenced(self, packed: Any) -> torch.Tensor:
        """After an error of ours only the way back is left; what fails there is the program's."""
        assert self._fence is not None
        found = [] if self._fence.down else self._fence.ask(self._use_or_modified, packed)
        if not found:
            self._store.waits = None
            fused.refuse()
            return self._store.hand_out(packed) if type(packed) is View else whole(packed)
        if isinstance(found[0], Modified):
            raise found[0]
        return found[0]

    def _use_or_modified(self, packed: Any) -> torch.Tensor | Modified:
        try:
            return self._use(packed)
        except Modified as error:  # the program's own, not ours
            return error

    # Events

    def _save(self, tensor: torch.Tensor) -> Any:
        """A large tensor is saved."""
        store = self._store
        if self._duals._current_level >= 0:
            self._demand.refuse(messages.FORWARD_MODE)
            return kept(tensor)
        size_bytes = tensor.untyped_storage().nbytes()
        within = store.within()
        if within is None or self._boundary:
            self._end_pass()
            within = self._begin_pass(size_bytes)
        planned = self._plan
        if planned is not None and planned.steps[self._event].expected != size_bytes:
            planned = self._switch(planned, size_bytes)
        if planned is None:
            return self._save_unplanned(tensor, size_bytes, within)
        _, number, due, followed, read, recomputed, version = planned.steps[self._event]
        if not followed:
            self._advance(planned, due)
            return *kept(tensor), use_code(number), within
        saved = store.find(tensor, within)
        if saved is not self._followed(number):
            self._drop(planned)
            return self._save_unplanned(tensor, size_bytes, within)
        self._advance(planned, due)
        if saved is not None:
            return store.view(saved, tensor)
        saved = store.save(tensor, size_bytes, within, number)
        self._by_number[number] = saved.itself
        view = store.view(saved, tensor)
        if tensor._version == version:  # else it is not what its node has made
            if read:
                store.mark(view, tensor)
            if recomputed:
                saved.recipe = self._reader.read(tensor)
        return view

    def _save_unplanned(self, tensor: torch.Tensor, size_bytes: int, within: Pass) -> View:
        store, watch = self._store, self._watch
        saved = store.find(tensor, within)
        if watch is not None:
            watch.enter(size_bytes if saved is None else again_code(saved.number), used=False)
        self._demand.event()
        if saved is None:
            saved = store.save(tensor, size_bytes, within, -1 if watch is None else watch.saved)
            if watch is not None:
                watch.save(saved, tensor)
            self._demand.saved(saved, self.budget_bytes)
        if watch is not None:
            watch.leave()
        return store.view(saved, tensor)

    def _use(self, packed: Any) -> torch.Tensor:
        """A large tensor is needed."""
        store = self._store
        view = type(packed) is View
        if view:
            now = packed.saved.within is store.within()
            code = use_code(packed.saved.number) if now else FOREIGN
        else:
            code = packed[3] if packed[4] is store.within() else FOREIGN
        planned = self._plan
        if planned is not None:
            if planned.steps[self._event].expected != code:
                planned = self._switch(planned, code)
            if planned is not None:
                self._advance(planned, planned.steps[self._event].due)
                self._demand.event()  # of a graph that is retained
            if view and packed.saved.state == AWAY and packed.saved.host is not None:
                self._counts["late"] += 1
        else:
            if self._watch is not None:
                self._watch.enter(code, used=True)
            self._demand.event()
        if not view:
            tensor = whole(packed)
        elif self._retained():
            tensor = self._lend(packed)
        else:
            tensor = store.hand_out(packed)
        if self._watch is not None:
            if view and now:
                self._watch.use(packed.saved)
            self._watch.leave()
        elif planned is not None and self._measured and self._event == len(planned.events):
            self._kinds.measured(planned, self._backend.peak_bytes(), self.budget_bytes)
        return tensor

    def _lend(self, view: View) -> torch.Tensor:
        """In a backward that retains its graph. The datum leaves again, if with another one as
        large the budget would be reached."""
        tensor, saved = self._store.lend(view), view.saved
        if self._demand.saved(saved, self.budget_bytes - saved.size_bytes) and self._deviated:
            self._kinds.retain()
        return tensor

    def _advance(self, planned: Ready, due: Due | None) -> None:
        """The clock goes on by one event, and what is due is done."""
        self._event += 1
        if self._overdue:
            self._catch_up()
        if self._measured:
            self._weigh(planned, due)
        elif due is not None:
            self._carry_out(planned, due)

    def _weigh(self, planned: Ready, due: Due | None) -> None:
        """An event with the count of what is held: what is saved here comes after what is due."""
        store, event = self._store, self._event - 1
        store.beside_bytes = min(planned.beside_bytes[event], store.beside_bytes)
        if due is not None:
            self._carry_out(planned, due)
        store.beside_bytes = planned.beside_bytes[event]
        store.hold(0)

    def _carry_out(self, planned: Ready, due: Due) -> None:
        store = self._store
        for number in due.leave:
            saved = self._followed(number)
            if saved is not None:
                host = store.leave(saved, planned.hosts[number])
                if host is not None:
                    planned.hosts[number] = host
                elif store.pending(saved):
                    self._overdue[number] = planned.hosts[number]
        for number in due.release:
            saved = self._followed(number)
            if saved is not None and number not in self._overdue:
                store.release(saved)
                if saved.recipe is not None and store.pending(saved):
                    self._overdue[number] = None
        for number in due.load:
            self._overdue.pop(number, None)
            saved = self._followed(number)
            if saved is not None:
                store.load(saved)

    def _catch_up(self) -> None:
        """What should have left goes now, if the program has let go."""
        store = self._store
        for number, host in list(self._overdue.items()):
            saved = self._followed(number)
            if saved is not None:
                if host is not None:
                    store.leave(saved, host)
                store.release(saved)
            if saved is None or not store.pending(saved):
                del self._overdue[number]

    def _followed(self, number: int) -> Saved | None:
        reference = self._by_number.get(number)
        return None if reference is None else reference()

    def _switch(self, before: Ready, code: int) -> Ready | None:
        """This pass is another than planned: take the plan of one that began alike, or none."""
        other = self._kinds.branch(before, self._event, code)
        if other is not None and self._on_host_alike(before, other):
            self._plan = other
            return other
        self._drop(before)
        return None

    def _on_host_alike(self, before: Ready, other: Ready) -> bool:
        """What this pass has on the host lies where the other plan has it, too."""
        left = [number for number in before.places if self._has_left(number)]
        return all(other.places.get(number) == before.places[number] for number in left)

    def _has_left(self, number: int) -> bool:
        saved = self._followed(number)
        return saved is not None and saved.host is not None

    def _drop(self, planned: Ready) -> None:
        self._collector.let_go()
        self._overdue.clear()
        self._plan = None
        self._deviated = True
        self._counts["deviations"] += 1
        self._store.beside_bytes = planned.beside_bytes[min(self._event, len(planned.events) - 1)]

    # Passes

    def _begin_pass(self, first: int) -> Pass:
        self._open = True
        self._event = 0
        self._round += 1
        self._boundary = False
        self._by_number.clear()
        self._overdue.clear()
        self._reader.begin()
        self._demand.begin()
        self._deviated = False
        within = self._store.begin()
        candidate = self._kinds.candidate(self._steps, first)
        if candidate is not None and candidate.tried:
            if self.may_plan:
                self._kinds.plan(candidate, self.budget_bytes)
            candidate = None
        for kind in self._kinds:
            if kind.outdated:
                self._kinds.plan(kind, self.budget_bytes)
        alike = self._kinds.alike(first)
        watched = candidate is not None or self._to_be_watched(alike)
        if candidate is not None:
            candidate.trials += 1
            self._trial = candidate
            self._find_norms()
        elif not watched and not self._store.absent:
            self._plan = next((kind.plan for kind in alike if kind.plan is not None), None)
        if watched:
            self._counts["watched"] += 1
            self._watch = Watch(self._backend, self._store, trial=candidate is not None)
            self._stepped = self._steps > 0
        self._measured = self._plan is None or self._plan.tuned < TUNED
        if self._measured:
            self._backend.peak_bytes()  # from here on
        if self._plan is not None and self._kinds.listens(self._plan):
            self._store.waits = Waits(self._backend)
        if self._plan is not None or self._watch is not None:
            self._collector.hold()
        return within

    def _to_be_watched(self, alike: list[PassKind]) -> bool:
        """Whether a pass that begins like these is to be watched, rather than to run under a plan
        of theirs, or without one."""
        attention = self._kinds.attention
        if self._looking:
            asked = attention.asks()
            self._looking -= asked
            return asked
        # What lies in the plans' arena an older graph may still need.
        if any(kind.plan for kind in alike) and not self._store.absent:
            return False
        hopeless = bool(alike) and all(kind.hopeless for kind in alike)
        return not (hopeless and self._round % HOPELESS_EVERY) and attention.asks()

    def _pass_is_over(self) -> None:
        """Nothing that was saved in the present pass is left."""
        self._collector.let_go()
        if self._open and self._plan is None and self._watch is None:
            peak_bytes = self._backend.peak_bytes()
            if peak_bytes is not None:
                self._demand.learn(peak_bytes, self.budget_bytes)
                self._kinds.counted(None, peak_bytes)

    def _end_pass(self) -> None:
        if not self._open:
            return
        self._open = False
        self._collector.let_go()
        self._counts["passes"] += 1
        planned, waits = self._plan, self._store.waits
        self._store.waits = None
        if self._measured:
            held_bytes = self._last_held_peak_bytes = self._store.held_peak_bytes
            if self._backend.used_bytes() is None:  # only the engine's own count is to be had
                self._kinds.counted(planned, held_bytes)
        if planned is not None:
            if self._event < len(planned.events):
                self._counts["deviations"] += 1
                self._deviated = True
            else:
                self._counts["planned"] += 1
                if waits is not None:
                    self._kinds.waited(planned, waits)
        self._misses = max(0.0, self._misses + (1 if self._deviated else -0.5))
        if self._misses >= DEVIATION_PATIENCE:
            self._misses, self._looking = 0.0, LOOK
        if self._watch is not None:
            self._file(self._watch)
        self._watch = self._trial = self._plan = None

    def _file(self, watch: Watch) -> None:
        record = watch.record()
        self._kinds.refused += watch.refused
        if self._trial is not None:
            self._kinds.tried(record)
            return
        self._kinds.watched(record, weighed=self._stepped)
        self._demand.learn(watch.peak_bytes, self.budget_bytes)
        self._kinds.counted(None, watch.peak_bytes)
