"""Weights are offloaded after their use in forward and prefetched for backward.

The host has a copy of a weight's value since its last update, so offloading copies nothing. An
offloaded weight is an `OffloadedParameter` (`offloaded_parameter.py`): it is fetched before anybody
reads it. The schedule is a list of moves for two kinds of *ticks*: a module has run, a gradient has
arrived. It is planned from passes that were watched (`memory/plan/weights.py`) and decides only
when weights move: a weight that is needed is fetched, planned or not, and one whose bytes anybody
might reach in another way is not offloaded.

`weight_store.py` moves the bytes and says which weights have to stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from kilter.core.reasons import Reason
from kilter.core.units import MIB
from kilter.memory import messages
from kilter.memory.engine.backend import Backend
from kilter.memory.engine.fenced_hook import fenced_hook
from kilter.memory.engine.modified import Modified
from kilter.memory.engine.offloaded_parameter import AccessGuards, WeightsMoved
from kilter.memory.engine.store import kept, original_of, whole
from kilter.memory.engine.weight_pass import RepeatedPass, Tick, WeightPass, WeightSchedule
from kilter.memory.engine.weight_store import MovedWeight, WeightStore
from kilter.memory.plan.problem import Link
from kilter.memory.plan.weights import WeightPlan
from kilter.observe import optimizer_steps, torch_internals

if TYPE_CHECKING:
    from kilter.session.fence import Fence

WATCHED_PASSES = 2
"""So many passes of one kind are watched before weights are offloaded."""
FALSIFIED = "weights were written to past the framework, by their address"
FAST_MODULES = (
    torch.nn.TransformerEncoder,
    torch.nn.TransformerEncoderLayer,
    torch.nn.MultiheadAttention,
)
"""These modules may compute in C++ with the weights of the modules below them, which do not run."""
ALL = 2**62
"""With so many bytes, every weight that can be offloaded is meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReport:
    """What happened so far, and how it stands now."""

    moving: bool
    weights: int
    """How many are offloaded under the present plan."""
    offloaded_bytes: int
    """So much is offloaded at the end of forward, by the present plan."""
    most_offloaded_bytes: int
    """At most this was ever offloaded at one time."""
    late: int
    """So many times a weight was needed while it was offloaded and not being prefetched."""
    stayed: int
    """So many times a weight could not be offloaded because something else held its bytes."""
    out_bytes: int
    in_bytes: int
    host_bytes: int
    plan: WeightPlan | None
    refused: tuple[Reason, ...]


class SavedView:
    """A view of a weight that autograd saved, without holding its bytes. A call takes the view
    anew; to recipes it is a source that reads the parameter."""

    __slots__ = ("_fetch", "_parameter", "_size", "_start", "_stride", "_version")

    def __init__(self, view: torch.Tensor, fetch: Callable[[Any], None]) -> None:
        self._parameter = view._base
        self._size, self._stride, self._start = view.size(), view.stride(), view.storage_offset()
        self._version = view._version
        self._fetch = fetch

    def __call__(self) -> torch.Tensor:
        parameter: Any = self._parameter
        if parameter._version != self._version:
            raise Modified(parameter, self._version)
        self._fetch(parameter)
        view: torch.Tensor = parameter.detach().as_strided(self._size, self._stride, self._start)
        return view

    def __getitem__(self, index: int) -> Any:
        return (self._parameter, self._version)[index]


class ModuleWeights:
    """The weights of the modules that have run. `arrived` is put as a hook on the gradient of one
    parameter of each module: it shows when backward needs the module's weights."""

    def __init__(
        self,
        store: WeightStore,
        device: torch.device,
        min_bytes: int,
        arrived: Callable[[Any], None],
    ) -> None:
        self._store = store
        self._device = device
        self._min_bytes = min_bytes
        self._arrived = arrived
        self._known: dict[int, weakref.ref[Any]] = {}
        """These parameters were seen."""
        self._handles: list[Any] = []
        self.used_by: dict[int, list[MovedWeight]] = {}
        """It has, by module, its weights that may be offloaded."""

    def of_module(self, module: Any) -> list[MovedWeight]:
        """The weights of this module, found when it first runs."""
        mine = []
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            found = self._known.get(id(parameter))
            if found is None or found() is not parameter:
                self._known[id(parameter)] = weakref.ref(parameter)
                self._meet(parameter, module)
            weight = self._store.weights.get(id(parameter))
            if weight is not None:
                mine.append(weight)
        if mine:
            self.used_by[id(module)] = mine
        return mine

    def _meet(self, parameter: Any, module: Any) -> None:
        trained = [
            p
            for p in module._parameters.values()
            if p is not None and p.requires_grad and p.is_leaf
        ]
        marker = max(trained, key=lambda p: p.numel(), default=None)
        if marker is parameter:
            self._handles.append(marker.register_post_accumulate_grad_hook(self._arrived))
        if (
            type(parameter) is not torch.nn.Parameter
            or not parameter.is_leaf
            or parameter.device != self._device
            or parameter.layout is not torch.strided
            or parameter.is_conj()
            or parameter.is_neg()
            or parameter.nbytes < self._min_bytes
            or parameter.untyped_storage().nbytes() != parameter.nbytes
        ):
            return
        weight = self._store.add(parameter)
        if marker is not None:
            weight.marker = id(marker)

    def close(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()


class WeightMover(AbstractContextManager["WeightMover"]):
    """Keeps weights on the host over the end of forward, where training's memory peaks.

    At least `offloaded_bytes` are on the host then, if there are so many; weights below `min_bytes`
    stay. Without `own_hooks` the caller wraps its hooks on saved tensors in `around`.
    `changed` is called when weights take another amount of memory from now on.

    The store, the present pass, the repeated pass and the weights of modules are objects of their
    own. It still has more attributes than most classes: the caller's arguments, the hooks, and the
    state between the hooks, most of which read nearly all of it.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        link: Link,
        offloaded_bytes: int = ALL,
        min_bytes: int = MIB,
        own_hooks: bool = True,
        changed: Callable[[], None] | None = None,
        fence: Fence | None = None,
    ) -> None:
        self._backend = backend
        self._link = link
        self._offload_bytes = offloaded_bytes
        self._min_bytes = min_bytes
        self._own_hooks = own_hooks
        self._changed = changed or (lambda: None)
        self._fence = fence
        self._handles: list[Any] = []
        self._leave_steps: Callable[[], None] = lambda: None
        self._hooks: Any = None
        self._stopped = False
        self._reading = False
        """Weights are read by our own hooks at this moment, not by the program."""
        self._late = 0
        self._pass = WeightPass()
        self._steps = 0
        self._iteration_ended = True
        """An optimizer has stepped, and no module has run since."""
        self._updated: list[MovedWeight] = []
        """These weights were updated in backward and not copied yet."""
        self._repeated = RepeatedPass()
        self._anew = False
        """After the next step a plan is made."""
        self._schedule: WeightSchedule | None = None
        self._refused: dict[Reason, None] = {}

    # Begin and end

    def __enter__(self) -> WeightMover:
        store = self._store = WeightStore(self._backend, late=self._was_late, say=self._say)
        self._doors = AccessGuards(
            fetch=store.fetch,
            fetch_all=self.stop,
            wrote=store.wrote,
            moved=lambda: store.moved,
            foreign=store.foreign,
        )
        self._doors.__enter__()
        arrived = torch.compiler.disable(self._fenced(self._arrived))
        self._met = ModuleWeights(store, self._backend.device, self._min_bytes, arrived)
        self._handles = [
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(self._fenced(self._after_module)),
        ]
        self._leave_steps = optimizer_steps.listen(
            before=self._before_step, after=self._fenced(self._after_step), first=True
        )
        if self._own_hooks:
            self._hooks = torch.autograd.graph.saved_tensors_hooks(*self.around(kept, whole))
            self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Have all weights on the device."""
        self._changed = lambda: None
        self.stop()
        if self._hooks is not None:
            self._hooks.__exit__(*exception)
        for handle in self._handles:
            handle.remove()
        self._leave_steps()
        self._met.close()
        self._doors.__exit__()
        self._backend.close()
        if not exception or exception[0] is None:
            self._check()

    def stop(self, reason: Reason | None = None) -> None:
        """Make all weights resident from now on, for good."""
        if reason is not None:
            self._say(messages.weights_stay(reason))
        if self._stopped:
            return
        self._stopped = True
        self._store.fetch_all()
        self._store.compare()
        self._store.settle()
        self._schedule = None
        self._updated.clear()
        if self._store.moved:
            self._changed()

    def _check(self) -> None:
        """Raise `WeightsMoved` if a weight differed from its copy when it was offloaded."""
        if self._store.falsified():
            self.stop()
            raise WeightsMoved(FALSIFIED)

    def make_room(self, offloaded_bytes: int) -> None:
        """From the next pass on, have `offloaded_bytes` offloaded at the end of forward."""
        self._offload_bytes = offloaded_bytes
        self._anew = True

    def report(self) -> WeightReport:
        plan, store = None if self._schedule is None else self._schedule.plan, self._store
        return WeightReport(
            moving=plan is not None,
            weights=0 if plan is None else len(plan.moved),
            offloaded_bytes=0 if plan is None else plan.offloaded_bytes,
            most_offloaded_bytes=store.most_offloaded_bytes,
            late=self._late,
            stayed=store.stayed,
            out_bytes=store.out_bytes,
            in_bytes=store.in_bytes,
            host_bytes=store.host_bytes,
            plan=plan,
            refused=tuple(self._refused),
        )

    def _say(self, reason: Reason) -> None:
        self._refused[reason] = None

    def _fenced(self, hook: Callable[..., None]) -> Callable[..., None]:
        """A hook behind the fence: after an error of ours, all weights are copied back and stay."""
        return fenced_hook(self._fence, hook, WeightsMoved, self.stop)

    # Reads by the program

    def _was_late(self, weight: MovedWeight) -> None:
        """A weight is needed that is not being prefetched: the next plan prefetches it in time."""
        if self._stopped or self._reading:
            return
        self._late += 1
        now = len(self._pass.ticks)
        if self._pass.turn is not None:
            weight.needed_at = now if weight.needed_at is None else min(now, weight.needed_at)
            self._anew = True
        elif weight.asked_in == self._pass.number - 1:
            weight.stays = True
            self._say(messages.READ_LATER)
            self._anew = True
        else:
            weight.asked_in = self._pass.number

    def around(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> Any:
        """Hooks on saved tensors that hold no bytes of weights and return resident weights only."""
        store, plain_class = self._store, torch.nn.Parameter

        def pack_weight(tensor: torch.Tensor) -> Any:
            base = tensor._base
            if type(base) is plain_class and store.weights.get(id(base)) and _strided(tensor, base):
                return SavedView(tensor, store.fetch)
            self._reading = True  # perhaps by a recipe that is being read
            try:
                return pack(tensor)
            finally:
                self._reading = False

        def unpack_weight(packed: Any) -> torch.Tensor:
            try:
                tensor: torch.Tensor = packed() if type(packed) is SavedView else unpack(packed)
            except Modified as error:
                error.raise_in_the_program(
                    packed, None if type(packed) is SavedView else original_of(packed)
                )
            if type(packed) is not SavedView:
                store.fetch(tensor)
            return tensor

        return pack_weight, unpack_weight

    # Ticks

    def _before_module(self, module: Any, inputs: Any) -> None:
        """Fetch the weights of a module that is about to run: some modules look at their class."""
        if not self._store.offloaded:
            return
        for parameter in module._parameters.values():
            self._store.fetch(parameter)
        if isinstance(module, FAST_MODULES):
            for parameter in module.parameters():
                self._store.fetch(parameter)

    def _after_module(self, module: Any, inputs: Any, output: Any) -> None:
        if self._stopped or not module._parameters or not torch.is_grad_enabled():
            return
        if torch_internals.current_node() is not None:
            return  # recomputed in backward
        mine = self._met.of_module(module)
        if not mine:
            return
        if self._iteration_ended or self._pass.turn is not None or not self._pass.number:
            self._begin_pass()
            if self._stopped:
                return
        tick = self._tick("forward", module)
        if self._schedule is not None:
            for weight in self._schedule.release.get(tick, ()):
                self._store.offload(weight)

    def _arrived(self, parameter: Any) -> None:
        """A gradient was accumulated."""
        if self._stopped or not self._pass.number:
            return
        if self._pass.turn is None:
            self._pass.turn = len(self._pass.ticks)
        tick = self._tick("backward", parameter)
        self._store.compare()
        self._publish()
        if self._schedule is not None:
            for weight in self._schedule.load.get(tick, ()):
                self._store.prefetch(weight)

    def _tick(self, what: str, whose: Any) -> Tick:
        tick = self._pass.add(what, id(whose), self._backend.mark)
        if self._backend.device.type == "cuda":
            if self._store.stream is None:
                self._store.stream = torch.cuda.current_stream(self._backend.device)
            elif self._store.on_other_stream():
                self.stop(messages.SEVERAL_STREAMS)
        return tick

    # Passes

    def _begin_pass(self) -> None:
        """The first module of a forward has run."""
        self._check()
        reason = self._unfit()
        if reason is not None:
            self.stop(reason)
            return
        planned = self._schedule is not None
        if self._pass.timed and self._pass.turn is not None and self._steps:
            end = self._backend.mark()
            elapsed_s = self._backend.elapsed_s
            self._anew |= self._repeated.add(self._pass, end, elapsed_s, planned=planned)
        self._store.fetch_all()  # weights that no backward has needed
        self._store.compare()
        self._pass.begin(timed=not planned or self._repeated.wants_times)
        self._iteration_ended = False

    def _unfit(self) -> Reason | None:
        """Why weights have to stay in this job."""
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return messages.OTHER_PROCESSES
        if torch_internals.anything_compiled():
            return messages.COMPILES
        return None

    def _make_plan(self) -> None:
        """Between two passes."""
        self._anew = False
        if not self._store.moved and graphs_may_exist(self._backend.device):
            self.stop(messages.GRAPHS_BEFORE)
            return
        self._schedule = self._repeated.schedule(
            self._store.weights.values(),
            self._met.used_by,
            offloaded_bytes=self._offload_bytes,
            link=self._link,
        )
        for weights_here in self._schedule.release.values():
            for weight in weights_here:
                if weight.version < 0:
                    self._store.copy_out(weight)
        self._changed()

    # Updates

    def before_update(self, parameters: Iterable[torch.Tensor]) -> None:
        """These are updated now, inside backward or a step. They have to be resident and of their
        own class, which optimizers look at."""
        for parameter in parameters:
            self._store.fetch(parameter)
            weight = self._store.weights.get(id(parameter))
            if weight is not None:
                weight.lent = True
                self._updated.append(weight)

    def _publish(self) -> None:
        """Copy what was updated since the last gradient arrived."""
        for weight in self._updated:
            weight.updated_at = len(self._pass.ticks) - 1
            if weight.version >= 0:
                self._store.copy_out(weight)
                weight.published = True
        self._updated.clear()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._store.offloaded:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._store.fetch(parameter)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Copy what the optimizer wrote, also where no version shows it."""
        self._steps += 1
        self._iteration_ended = True
        self._updated.clear()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                weight = self._store.weights.get(id(parameter))
                if weight is None or weight.version < 0:
                    continue
                if not weight.published or parameter._version != weight.version or weight.lent:
                    self._store.copy_out(weight)
                weight.published = False
        if self._anew and not self._stopped and self._repeated.seen >= WATCHED_PASSES:
            self._make_plan()


def graphs_may_exist(device: torch.device) -> bool:
    """A CUDA graph keeps its memory in a pool of its own as long as it lives, and so it shows even
    if nobody was there when it was captured. Other private pools look the same."""
    if device.type != "cuda":
        return False
    pools = {segment.get("segment_pool_id", (0, 0)) for segment in torch.cuda.memory_snapshot()}
    return bool(pools - {(0, 0)})


def _strided(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Size and strides describe the view completely."""
    return view.dtype == base.dtype and not view.is_conj() and not view.is_neg()
