"""The compiler's partitioner: which of a region's tensors are saved for backward.

`activation_memory_budget` is the fraction of them that it keeps. Of operations that draw random
numbers it keeps no record: below a fraction of 1 it may choose to run a dropout again in backward,
with another mask, and gradients are wrong without a word (PyTorch 2.13 with `aot_eager`). So what
must not run twice is marked before it chooses, and its choice is looked through.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kilter.observe import torch_internals

AT_ONCE = "force_non_lazy_backward_lowering"
"""By this setting backward is compiled together with forward. Else it is compiled when it runs
first, where no error is suppressed."""
PURE = ("aten", "prims")
"""Operations of these namespaces that draw nothing compute the same again from the same."""


class Partitioner:
    """Sets the fraction. `ask` calls a function and returns its result in a list, or an empty one
    where that went wrong."""

    def __init__(self, ask: Callable[..., list[Any]]) -> None:
        self._ask = ask
        self._plain: Any = None
        """It is the partitioner's own function; None: ours is not in its place."""
        self._theirs: list[tuple[Any, str, Any]] = []
        """It holds settings of the program's, while ours are in their place."""
        self._usual = 0
        """So many frames cannot be compiled, of all that the program calls."""
        self._before = 0

    def enter(self) -> str:
        """Take the place of the function that chooses. Why not, else empty."""
        torch = sys.modules["torch"]
        ranks = torch.distributed
        if ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1:
            return "the job has several processes"
        try:
            fraction = torch_internals.functorch_config.activation_memory_budget
            holder, name = torch_internals.holder_of("choose_saved_values")
            plain = getattr(holder, name)
        except (AttributeError, ImportError):
            return "this PyTorch has no such setting"
        if not hasattr(torch_internals.functorch_config, AT_ONCE):  # PyTorch 2.8
            return "this PyTorch compiles backward where an error would end the training"
        if fraction != 1.0:
            return f"the program has set {fraction:g}"
        if getattr(torch_internals.dynamo_config, "fail_on_recompile_limit_hit", False):
            return "the program is to end where it compiles too often"
        ask = self._ask

        def choose(graph: Any, nodes: Any, memory_budget: float = 1.0) -> Any:
            if memory_budget < 1:
                found = ask(_chosen, plain, graph, nodes, memory_budget)
                if found and found[0] is not None:
                    return found[0]
            return plain(graph, nodes, memory_budget=1.0)

        self._usual = _failed()
        self._plain, self._ours = plain, choose
        setattr(holder, name, choose)
        return ""

    def leave(self) -> None:
        """What is compiled from here on is the program's own."""
        if self._plain is None:
            return
        holder, name = torch_internals.holder_of("choose_saved_values")
        if getattr(holder, name) is self._ours:
            setattr(holder, name, self._plain)
        self._plain = None
        self._give_back()
        torch_internals.functorch_config.activation_memory_budget = 1.0

    def set(self, fraction: float) -> None:
        """Everything is compiled anew where it is called next, under this fraction. A region that
        cannot be compiled so runs as it is written, and does not end the program."""
        torch_internals.functorch_config.activation_memory_budget = fraction
        self._before = _failed()
        self._give_back()
        if fraction < 1:
            self._put(torch_internals.dynamo_config, "suppress_errors")
            self._put(torch_internals.functorch_config, AT_ONCE)
        sys.modules["torch"].compiler.reset()

    def compiled(self) -> bool:
        """All has been compiled since `set`: whether as much of it could be as before."""
        return _failed() - self._before <= self._usual

    def _put(self, config: Any, name: str) -> None:
        self._theirs.append((config, name, getattr(config, name)))
        setattr(config, name, True)

    def _give_back(self) -> None:
        while self._theirs:
            setattr(*self._theirs.pop())


def _failed() -> int:
    frames = torch_internals.compile_counters["frames"]
    return int(frames["total"] - frames["ok"])


def _chosen(plain: Any, graph: Any, nodes: Any, fraction: float) -> Any:
    """What is saved under this fraction; None if something would run again that must not."""
    must_save = sys.modules["torch"].utils.checkpoint.CheckpointPolicy.MUST_SAVE
    for node in graph.nodes:
        if _once(node):
            node.meta.setdefault("recompute", must_save)
    saved = plain(graph, nodes, memory_budget=fraction)
    known, seen, backward = {*saved}, set(), nodes.required_bw_nodes
    due = [before for node in backward if node.op != "output" for before in node.all_input_nodes]
    while due:
        node = due.pop()
        if node in known or node in seen or node in backward:
            continue
        seen.add(node)
        due += node.all_input_nodes
    if any(_once(node) and node.meta.get("recompute") is must_save for node in seen):
        return None
    return saved


def _once(node: Any) -> bool:
    """Run again, the node may give something else, or do something else besides."""
    namespace = getattr(node.target, "namespace", None)
    if node.op != "call_function" or namespace is None:
        return False  # arithmetic with sizes, or one of several results
    seeded = sys.modules["torch"].Tag.nondeterministic_seeded
    return namespace not in PURE or seeded in node.target.tags
