"""`parallel(branches)`: the branches of a list or a module run together, with the same numbers.

For each input signature the ways of running are tried once (`prepare`). A later call finds what was
prepared by its signature, launches it, and judges while the device works whether it still holds.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from kilter.act.branches.capture import pool_bytes
from kilter.act.branches.loop import TENSORS, Arguments, Branches, Loop, signature, why_serial
from kilter.act.branches.parts import Options, Parts, Workshop
from kilter.act.branches.prepare import MODES, Prepared, prepare, serial_plan
from kilter.act.branches.state import State, held_by_several, needs_grad, versions
from kilter.core.errors import UsageError
from kilter.plan.branches import BranchPlan, describe

READMIT = 8
"""Calls that a signature whose graph was evicted runs serially before it is captured again, so
that more signatures than graphs do not spend their time on captures."""
RESTLESS = 3
"""Calls that change their own modules before such a signature is left to the serial loop."""
PATIENCE = 4
"""Preparations that may wait to serve their first call at once; while there are more, only every
2nd to the power of their number of the calls that would be prepared is. A number that is another
one at every call must not cost a preparation each."""


class Parallel:
    """Branches made to run together. Made by `parallel`; call it like the module it was made of.

    `with fast: ...` or `close()` ends its threads and gives its graphs' memory back.
    """

    def __init__(self, loop: Loop, options: Options) -> None:
        self.loop, self.options = loop, options
        self._workshop = Workshop()
        self._prepared: OrderedDict[Hashable, Prepared] = OrderedDict()
        self._last: Prepared | None = None
        self._fallback: str | None = None
        self._preparing = threading.RLock()
        self._state: State | None = None
        self._restless = 0
        self._unserved = self._waited = 0
        """Preparations that have served no call, and calls that waited for that."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what was saved and loaded, is prepared anew."""
        return Parallel, (self.loop, self.options)

    # --- calling ----------------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self.options.mode == "serial" or torch.compiler.is_compiling():
            return self.loop(*inputs, **named)
        leaves: Any = inputs
        spec: Hashable = None
        tensors: Any = inputs
        if named or any(type(x) not in TENSORS for x in inputs):
            leaves, spec = pytree.tree_flatten((inputs, named))
            tensors = [x for x in leaves if isinstance(x, Tensor)]
        state = self._state
        if state is None:
            state = self._state = State(self.loop.branches)
        self._fallback = why_serial(leaves, tensors)
        if self._fallback is not None:
            return self.loop(*inputs, **named)
        records = needs_grad(state, tensors)
        gradients = tuple(t.requires_grad for t in tensors) if records else None
        key = signature(leaves, spec, gradients)
        found = self._prepared.get(key)
        if found is None:
            return self._first(key, (inputs, named), records)
        if found.run is None and found.release is not None:
            found.absent += 1
            if found.absent > READMIT and found.state.changed() is None:
                return self._prepare(key, (inputs, named), records, known=found.plan)
        self._last = found
        # Launched first and judged after: the check runs on the host while the device works.
        results = None if found.run is None else found.run(tensors)
        if found.state.changed() is not None:
            self._forget()
            return self._first(key, (inputs, named), records)
        if not found.served:
            found.served, self._unserved = True, max(0, self._unserved - 1)
        with suppress(KeyError):  # another thread has just forgotten it
            self._prepared.move_to_end(key)
        return self.loop(*inputs, **named) if results is None else found.assemble(results)

    # --- preparing --------------------------------------------------------------------------------

    def _first(self, key: Hashable, arguments: Arguments, records: bool) -> Any:
        """A call that nothing is prepared for."""
        if self._unserved >= PATIENCE:
            self._waited += 1
            if self._waited < 2 ** min(self._unserved, 30):
                self._fallback = f"the last {self._unserved} forms prepared have served no call yet"
                inputs, named = arguments
                return self.loop(*inputs, **named)
        self._waited = 0
        return self._prepare(key, arguments, records)

    def _prepare(
        self,
        key: Hashable,
        arguments: Arguments,
        records: bool,
        known: BranchPlan | None = None,
    ) -> Any:
        before = State(self.loop.branches)
        # The user's own errors come from here, outside every handler of ours.
        inputs, named = arguments
        opaque = self.loop.is_list and self.options.mode in ("threads", "streams")
        shared = held_by_several(self.loop.branches) if opaque else []
        shared += [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]
        written = versions(shared)
        results = self.loop(*inputs, **named)
        if opaque and versions(shared) != written:
            reason = "a branch writes to an input, or to a tensor that another branch holds too"
            self._last = self._prepared[key] = Prepared(serial_plan(reason), State([]))
            return results
        changes = None if opaque else before.changed()
        if changes is not None:  # lazily made weights, a cache, a counter
            self._restless += 1
            self._state = None
            self._fallback = f"the call itself changes something: {changes}"
            if self._restless >= RESTLESS:
                self._last = Prepared(serial_plan(self._fallback), State([]))
                self._prepared[key] = self._last
            return results
        with self._preparing, torch.inference_mode(False), torch.no_grad():
            self._state = State(self.loop.branches)
            state = State([]) if opaque else self._state
            if records:
                state.watch_gradients()
            parts = Parts(
                self.loop, self.options, self._workshop, arguments, state, gradients=records
            )
            if parts.on_gpu:
                with torch.cuda.device(parts.device):
                    prepared = prepare(parts, results, known)
            else:
                prepared = prepare(parts, results, known)
            self._prepared.pop(key, None)
            self._prepared[key] = self._last = prepared
            self._unserved += 1
            self._evict()
        return results

    def _evict(self) -> None:
        """Keep at most `max_graphs` prepared forms, and the decisions of some more."""
        most = self.options.max_graphs
        ready = [p for p in list(self._prepared.values()) if p.run is not None]
        for prepared in ready[: max(0, len(ready) - most)]:
            prepared.give_up()
        while len(self._prepared) > 16 * most:
            _, prepared = self._prepared.popitem(last=False)
            prepared.give_up()

    def _forget(self) -> None:
        with suppress(KeyError):  # another thread forgets the rest
            while self._prepared:
                _, prepared = self._prepared.popitem()
                prepared.give_up()

    # --- looking ----------------------------------------------------------------------------------

    def plan(self) -> BranchPlan | None:
        """What was decided for the signature called last; None before the first call."""
        return None if self._last is None else self._last.plan

    def explain(self) -> str:
        """Groups, streams, every way that was tried with its time, and why this one was chosen."""
        if self._fallback is not None:
            return f"the last call ran serially: {self._fallback}"
        plan = self.plan()
        if plan is None:
            return "not called yet: ways of running are tried at the first call"
        return describe(plan)

    def memory_bytes(self) -> int:
        """Device memory that the graphs hold now."""
        pool = self._workshop.pool
        return 0 if pool is None else pool_bytes(pool)

    def close(self) -> None:
        """End the threads and give the graphs' memory back; the next call prepares anew."""
        self._forget()
        self._last, self._state = None, None

    def __enter__(self) -> Parallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def parallel(
    branches: Branches,
    *,
    mode: str = "auto",
    streams: int | None = None,
    compile: bool = True,
    prepare_budget_s: float = 20.0,
    max_graphs: int = 16,
    fold: bool = True,
) -> Parallel:
    """Run independent branches together, with the numbers of the serial loop.

    `branches`: a list of modules or callables, or one module whose branches are found by tracing.
    A list is called with one input for each branch (a tuple is several arguments), or with one
    input for all of them, arguments by name are for all, and returns a tuple in the same order.
    `mode`: `auto` tries what there is
    and keeps the fastest right one; any other mode is used if it is right, else serial. `compile`:
    whether `auto` may use `torch.compile`; for each signature it starts nothing that would
    not be ready within about `prepare_budget_s`. `max_graphs`: signatures whose graphs are kept.
    `fold`: whether constant tables and data movement are simplified. Raises `UsageError`; what the
    branches raise is raised.
    """
    if mode not in MODES:
        raise UsageError(f"mode {mode!r} is not one of {', '.join(MODES)}")
    if max_graphs < 1:
        raise UsageError(f"max_graphs={max_graphs} must be at least 1")
    if streams is not None and streams < 1:
        raise UsageError(f"streams={streams} must be at least 1")
    options = Options(
        mode=mode,
        streams=streams,
        compile=compile,
        prepare_budget_s=prepare_budget_s,
        max_graphs=max_graphs,
        fold=fold,
    )
    return Parallel(Loop.of(branches), options)
