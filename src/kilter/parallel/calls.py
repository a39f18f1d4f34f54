"""`parallel(branches)`: the branches of a list or a module run together, with the same numbers.

For each input signature the ways of running are tried once (`prepare`). A later call finds by its
signature what was prepared, launches it, and checks while the device works whether it still holds.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from kilter.core.errors import UsageError
from kilter.core.reasons import Reason
from kilter.observe.torch_internals.branches import pytree
from kilter.parallel.candidates import CompileCache, ParallelOptions, WayRequest
from kilter.parallel.loop import TENSORS, Arguments, Branches, SerialLoop, signature, why_serial
from kilter.parallel.plan import BranchPlan, describe
from kilter.parallel.prepare import Prepared, prepare, serial_plan
from kilter.parallel.watched import (
    WatchedBranches,
    generator_states,
    held_by_several,
    needs_grad,
    versions,
)
from kilter.parallel.ways import WAYS

READMIT = 8
"""So many serial calls of a signature whose graph was evicted come before the graph is captured
again. Without them, more signatures than graphs would spend their time on captures."""
SELF_CHANGES = 3
"""After so many calls that change their own modules such a signature is left to the serial loop."""
UNSERVED = 4
"""So many preparations may have served no call yet. While there are n of them or more, only one in
2^n of the calls that need a preparation gets one: a number that differs in every call must not cost
a preparation each time."""


class Parallel:
    """Branches that run together. Made by `parallel`; called like the module it was made of.

    `with fast: ...` or `close()` ends its threads and gives its graphs' memory back.
    """

    def __init__(self, loop: SerialLoop, options: ParallelOptions) -> None:
        self.loop, self.options = loop, options
        self._cache = CompileCache()
        self._prepared: OrderedDict[Hashable, Prepared] = OrderedDict()
        self._last: Prepared | None = None
        self._fallback: Reason | None = None
        self._preparing = threading.RLock()
        self._state: WatchedBranches | None = None
        self._self_changes = 0
        self._unserved = self._waited = 0
        """So many preparations have served no call, and so many calls had to wait for one."""

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
            state = self._state = WatchedBranches(self.loop.branches)
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
        # Launched first and checked after: the check runs on the host while the device works.
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
        """A call for which nothing is prepared."""
        if self._unserved >= UNSERVED:
            self._waited += 1
            if self._waited < 2 ** min(self._unserved, 30):
                text = f"the last {self._unserved} forms prepared have served no call yet"
                self._fallback = Reason("unserved", str(self._unserved), text)
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
        before = WatchedBranches(self.loop.branches)
        way = WAYS.get(self.options.mode)
        opaque = self.loop.is_list and way is not None and way.calls_branches
        shared = held_by_several(self.loop.branches) if opaque else []
        shared += [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]
        written, drawn = versions(shared), generator_states() if opaque else []
        # The user's own errors come from here, outside every handler of ours.
        inputs, named = arguments
        results = self.loop(*inputs, **named)
        if opaque and versions(shared) != written:
            text = "a branch writes to an input, or to a tensor that another branch holds too"
            self._leave_serial(key, Reason("writes", "", text))
            return results
        if opaque and generator_states() != drawn:
            text = "draws random numbers: branches at once would draw them in any order"
            self._leave_serial(key, Reason("random", "", text))
            return results
        changes = None if opaque else before.changed()
        if changes is not None:  # weights that are made lazily, a cache, a counter
            self._self_changes += 1
            self._state = None
            text = f"the call itself changes something: {changes}"
            self._fallback = Reason("changes_itself", "", text)
            if self._self_changes >= SELF_CHANGES:
                self._leave_serial(key, self._fallback)
            return results
        with self._preparing, torch.inference_mode(False), torch.no_grad():
            # Another thread may close this meanwhile, which takes `_state` away.
            seen = self._state = WatchedBranches(self.loop.branches)
            state = WatchedBranches([]) if opaque else seen
            if records:
                state.watch_gradients()
            request = WayRequest(self.loop, self.options, arguments, state, gradients=records)
            with torch.cuda.device(request.device) if request.on_gpu else nullcontext():
                prepared = prepare(request, self._cache, results, known)
            self._prepared.pop(key, None)
            self._prepared[key] = self._last = prepared
            self._unserved += 1
            self._evict()
        return results

    def _leave_serial(self, key: Hashable, reason: Reason) -> None:
        """Run the calls of a signature as written from now on."""
        self._last = self._prepared[key] = Prepared(serial_plan(reason), WatchedBranches([]))

    def _evict(self) -> None:
        """Keep at most `max_graphs` prepared forms, and the decisions for 16 times as many."""
        most = self.options.max_graphs
        ready = [p for p in list(self._prepared.values()) if p.run is not None]
        for prepared in ready[: max(0, len(ready) - most)]:
            prepared.give_up()
        with suppress(KeyError):  # another thread forgets the rest
            while len(self._prepared) > 16 * most:
                _, prepared = self._prepared.popitem(last=False)
                prepared.give_up()

    def _forget(self) -> None:
        with suppress(KeyError):  # another thread forgets the rest
            while self._prepared:
                _, prepared = self._prepared.popitem()
                prepared.give_up()
        if self._preparing.acquire(blocking=False):  # else another thread captures into it now
            self._cache.pool = None  # without graphs it takes no more captures
            self._preparing.release()

    # --- inspection -------------------------------------------------------------------------------

    def plan(self) -> BranchPlan | None:
        """The decision for the signature called last; None before the first call."""
        if self.options.mode == "serial":
            return serial_plan(Reason("asked_for", "serial", "asked for"))
        return None if self._last is None else self._last.plan

    def explain(self) -> str:
        """Groups, streams, every way that was tried with its time, and why one was chosen."""
        if self._fallback is not None:
            return f"the last call ran serially: {self._fallback.text}"
        plan = self.plan()
        if plan is None:
            return "not called yet: ways of running are tried at the first call"
        return describe(plan)

    def memory_bytes(self) -> int:
        """Device memory that the graphs hold now."""
        pool = self._cache.pool
        return 0 if pool is None else pool.bytes()

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
    input for all of them. Arguments by name are for all branches. It returns a tuple in the order
    of the list. `mode`: `auto` tries the ways that there are and keeps the fastest right one; any
    other way is used if it is right, else the serial loop. `compile`: whether `auto` may use
    `torch.compile`; for each signature it starts nothing that would not be ready within about
    `prepare_budget_s`. `max_graphs`: signatures whose graphs are kept. `fold`: whether constant
    tables and data movement are simplified. Raises `UsageError`; what the branches raise is raised.
    """
    modes = ("auto", "serial", *WAYS)
    if mode not in modes:
        raise UsageError(f"mode {mode!r} is not one of {', '.join(modes)}")
    if max_graphs < 1:
        raise UsageError(f"max_graphs={max_graphs} must be at least 1")
    if streams is not None and streams < 1:
        raise UsageError(f"streams={streams} must be at least 1")
    options = ParallelOptions(
        mode=mode,
        streams=streams,
        compile=compile,
        prepare_budget_s=prepare_budget_s,
        max_graphs=max_graphs,
        fold=fold,
    )
    return Parallel(SerialLoop.of(branches), options)
