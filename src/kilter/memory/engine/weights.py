"""Weights are offloaded after their use in forward and prefetched for backward.

The host has a copy of a weight's value since its last update, so offloading copies nothing. An
offloaded weight is an `OffloadedParameter` (`offloaded_parameter.py`): it is fetched before anybody
reads it. The schedule is a list of moves for two kinds of *ticks*: a module has run, a gradient has
arrived. It is planned from passes that were watched (`memory/plan/weights.py`) and decides only
when weights move: a weight that is needed is fetched, planned or not, and one whose bytes anybody
might reach in another way is not offloaded.

Here are the hooks. `weight_planner.py` follows the passes and has the plan, `weight_store.py` moves
the bytes and says which weights have to stay, `weight_updates.py` copies what was updated,
`module_weights.py` finds the weights, and `saved_weights.py` is for what autograd saves of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
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
from kilter.memory.engine.module_weights import ModuleWeights
from kilter.memory.engine.moved_weight import MovedWeight
from kilter.memory.engine.offloaded_parameter import AccessGuards, WeightsMoved
from kilter.memory.engine.saved_weights import SavedWeights
from kilter.memory.engine.store import kept, whole
from kilter.memory.engine.weight_pass import Tick
from kilter.memory.engine.weight_planner import WeightPlanner
from kilter.memory.engine.weight_store import WeightStore
from kilter.memory.engine.weight_updates import WeightUpdates
from kilter.memory.plan.problem import Link
from kilter.memory.plan.weights import WeightPlan
from kilter.observe import optimizer_steps, torch_internals

if TYPE_CHECKING:
    from kilter.session.fence import Fence

FALSIFIED = "weights were written to past the framework, by their address"
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


class WeightMover(AbstractContextManager["WeightMover"]):
    """Keeps weights on the host over the end of forward, where training's memory peaks.

    At least `offloaded_bytes` are on the host then, if there are so many; weights below `min_bytes`
    stay. Without `own_hooks` the caller wraps its hooks on saved tensors in `around`.
    `changed` is called when weights take another amount of memory from now on.
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
        self._own_hooks = own_hooks
        self._changed = changed or (lambda: None)
        self._fence = fence
        self._installed = ExitStack()
        self._stopped = False
        self._refused: dict[Reason, None] = {}
        self._store = WeightStore(backend, late=self._was_late, say=self._say)
        self._saved = SavedWeights(self._store)
        self._planner = WeightPlanner(backend, link, offloaded_bytes)
        self._updates = WeightUpdates(self._store)
        arrived = torch.compiler.disable(self._fenced(self._arrived))
        self._met = ModuleWeights(self._store, backend.device, min_bytes, arrived)
        self.around = self._saved.around
        self.make_room = self._planner.make_room
        self.before_update = self._updates.before_update

    # Begin and end

    def __enter__(self) -> WeightMover:
        enter, at_exit = self._installed.enter_context, self._installed.callback
        enter(AccessGuards(self._store, self.stop))
        at_exit(self._met.close)
        at_exit(register_module_forward_pre_hook(self._met.fetch).remove)
        at_exit(register_module_forward_hook(self._fenced(self._after_module)).remove)
        at_exit(
            optimizer_steps.listen(
                before=self._updates.before_step, after=self._fenced(self._after_step), first=True
            )
        )
        if self._own_hooks:
            enter(torch.autograd.graph.saved_tensors_hooks(*self.around(kept, whole)))
        return self

    def __exit__(self, *exception: object) -> None:
        """Have all weights on the device."""
        self._changed = lambda: None
        self.stop()
        self._installed.close()
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
        self._store.check.compare()
        self._planner.schedule = None
        self._updates.updated.clear()
        if self._store.moved:
            self._store.modules.synchronize()
            self._changed()

    def _check(self) -> None:
        """Raise `WeightsMoved` if a weight differed from its copy when it was offloaded."""
        if self._store.check.falsified():
            self.stop()
            raise WeightsMoved(FALSIFIED)

    def report(self) -> WeightReport:
        schedule = self._planner.schedule
        plan = None if schedule is None else schedule.plan
        return WeightReport(
            moving=plan is not None,
            weights=0 if plan is None else len(plan.moved),
            offloaded_bytes=0 if plan is None else plan.offloaded_bytes,
            plan=plan,
            refused=tuple(self._refused),
            **asdict(self._store.counts),
        )

    def _say(self, reason: Reason) -> None:
        self._refused[reason] = None

    def _fenced(self, hook: Callable[..., None]) -> Callable[..., None]:
        """A hook behind the fence: after an error of ours, all weights are copied back and stay."""
        return fenced_hook(self._fence, hook, WeightsMoved, self.stop)

    # Ticks

    def _was_late(self, weight: MovedWeight) -> None:
        """The program needs a weight that is not being prefetched."""
        if self._stopped or self._saved.reading:
            return
        self._store.counts.late += 1
        if self._planner.late(weight):
            self._say(messages.READ_LATER)

    def _after_module(self, module: Any, inputs: Any, output: Any) -> None:
        if self._stopped or not module._parameters or not torch.is_grad_enabled():
            return
        if torch_internals.current_node() is not None:
            return  # recomputed in backward
        mine = self._met.of_module(module)
        if not mine:
            return
        if self._planner.present.ended:
            self._begin_pass()
            if self._stopped:
                return
        tick = self._tick("forward", module)
        if self._planner.schedule is not None:
            for weight in self._planner.schedule.release.get(tick, ()):
                self._store.offload(weight)

    def _arrived(self, parameter: Any) -> None:
        """A gradient was accumulated."""
        present = self._planner.present
        if self._stopped or not present.number:
            return
        if present.turn is None:
            present.turn = len(present.ticks)
        tick = self._tick("backward", parameter)
        self._store.check.compare()
        self._updates.publish(len(present.ticks) - 1)
        if self._planner.schedule is not None:
            for weight in self._planner.schedule.load.get(tick, ()):
                self._store.prefetch(weight)

    def _tick(self, what: str, whose: Any) -> Tick:
        tick = self._planner.present.add(what, id(whose), self._backend.mark)
        if not self._store.modules.note():
            self.stop(messages.SEVERAL_STREAMS)
        return tick

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._updates.updated.clear()
        if self._stopped:
            return
        self._planner.present.steps += 1
        self._updates.after_step(optimizer)
        if self._planner.is_due():
            self._make_plan()

    # Passes

    def _begin_pass(self) -> None:
        """The first module of a forward has run."""
        self._check()
        reason = unfit()
        if reason is not None:
            self.stop(reason)
            return
        self._planner.begin_pass()
        self._store.fetch_all()  # weights that no backward has needed
        self._store.check.compare()

    def _make_plan(self) -> None:
        """Between two passes."""
        if not self._store.moved and graphs_may_exist(self._backend.device):
            self.stop(messages.GRAPHS_BEFORE)
            return
        schedule = self._planner.plan(self._store.weights.values(), self._met.used_by)
        for weights_here in schedule.release.values():
            for weight in weights_here:
                if weight.copy is None:
                    self._store.copy_out(weight)
        self._changed()


def unfit() -> Reason | None:
    """Why weights have to stay in this job."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return messages.OTHER_PROCESSES
    if torch_internals.anything_compiled():
        return messages.COMPILES
    return None


def graphs_may_exist(device: torch.device) -> bool:
    """A CUDA graph keeps its memory in a pool of its own as long as it lives, and so it shows even
    if nobody was there when it was captured. Other private pools look the same."""
    if device.type != "cuda":
        return False
    pools = {segment.get("segment_pool_id", (0, 0)) for segment in torch.cuda.memory_snapshot()}
    return bool(pools - {(0, 0)})
