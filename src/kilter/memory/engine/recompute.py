"""How a saved tensor can be recomputed: a recipe read off the autograd graph that made it.

The node that produced a tensor names the operation, and its own saved inputs are the very tensors
that the operation read, so a recipe is right by construction: there is no matching of shapes or
positions. It is taken anew in every pass, and holds what it reads: by a builder (`schema_rules.py`
and `operations.py` have the operations that are known), or in places that are known from an earlier
pass (`resolved.py`).

An evicted tensor exists as its recipe only, so the sources of the recipe must still be there,
unchanged, when backward needs the tensor. A source is one of

- a saved tensor of the engine whose storage nobody else can reach (checked before evicting);
- a copy of the engine's own: of everything small that the program could write to;
- a large parameter that autograd saved for the same operation, or its cast: if the program writes
  to that, backward fails in the plain run as well;
- a large parameter that autograd did not save. Such a recipe is used inside backward only.
"""

from __future__ import annotations

import math
import sys
import weakref
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from kilter.memory.engine import schema_rules
from kilter.memory.engine.backend import owned
from kilter.memory.engine.leaves import Leaves
from kilter.memory.engine.operation_graph import (
    HeldSource,
    Operator,
    OperatorCall,
    OperatorCalls,
    RecomputeRule,
    Slot,
    operator_of,
)
from kilter.memory.engine.operations import OPERATIONS
from kilter.memory.engine.pass_record import COPIED_SHARE
from kilter.memory.engine.resolved import (
    RecipeTrace,
    SourceKind,
    SourcePlace,
    SourceUse,
    TracedNode,
)
from kilter.memory.engine.small_copies import SmallCopies
from kilter.observe import torch_internals

DEPTH = 5
"""A chain of operations that are not saved in between is at most so long."""
VIEW_DEPTH = 1 / 4
"""What a view counts in that chain: it costs next to nothing."""
HOLDERS = 3
"""A tensor that only autograd and one source hold has so many holders when `_private` looks: our
hook's tuple, the source, and the call that counts."""


Read: TypeAlias = Any
"""This gives a tensor that a recipe reads: a `View` of a saved one, or a `HeldSource`."""


class Recomputable(Protocol):
    """What a recipe reads of a saved tensor of the engine."""

    @property
    def number(self) -> int: ...

    @property
    def cast(self) -> bool:
        """Autograd's cast of a parameter, which autocast holds as well."""

    @property
    def closed(self) -> bool:
        """Only the engine can reach the bytes any more."""

    @property
    def unchanged(self) -> bool:
        """Nobody has written to it since it was saved."""


class Memory(Protocol):
    """Gives what operations saved and produced."""

    def kept_by(
        self, node: Any, name: str, index: int | None
    ) -> tuple[Read, Recomputable | None] | None:
        """What a node saved under an attribute's name (of a list: at this index), and its saved
        tensor (None: a `HeldSource`); None if the node saved nothing there. May raise `Foreign`."""

    def produced_by(self, node: Any) -> tuple[Read, Recomputable] | None:
        """A node's output, if some operation saved it. May raise `Foreign`."""

    def epsilon(self, node: Any, weight: Read | None) -> float | None:
        """Of a layer norm with this weight: its node does not keep it."""

    def alone(self, tensor: torch.Tensor) -> bool:
        """Nobody else holds this tensor's storage."""

    def was_touched(self, tensor: torch.Tensor) -> bool:
        """It may have been written to in this pass without a trace."""


WRITTEN = "kilter.written"
"""A node whose metadata has this key would make another output again than there is now."""


class Foreign(Exception):
    """A recipe cannot be read off this part of the graph: other hooks than ours keep it, it reads
    memory that is not the framework's, or a source was written to already."""


class Unlike(RuntimeError):
    """What a recipe makes is another tensor than the one that was saved."""


class Recipe:
    """Recomputes a tensor. Taken in every pass, for hundreds of tensors, so it is kept small."""

    __slots__ = (
        "calls", "closed", "dtype", "given", "in_backward", "kind", "parameters", "size",
        "sources", "stride", "told",
    )  # fmt: skip

    def __init__(
        self, tensor: torch.Tensor, kind: str, calls: OperatorCalls, reader: Reader
    ) -> None:
        self.calls = calls
        """They make the tensor of what is `given`."""
        self.given = tuple(reader.given)
        """It reads these, in this order."""
        self.kind = kind
        """What the operation is called, for people."""
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.sources = tuple(reader.sources)
        """It reads these saved tensors."""
        self.closed = tuple(reader.closed)
        """Nobody else may be able to reach these of the sources when the bytes are evicted."""
        self.parameters = tuple(reader.parameters)
        """It reads these large parameters where they are."""
        self.in_backward = reader.in_backward
        """The bytes may be evicted inside backward only."""
        self.told = False
        """Whoever may change what it reads has the tensor recomputed before."""

    def read(self) -> list[object]:
        """What must not change before the tensor is recomputed."""
        return [*self.sources, *(root_of(held.tensor) for held in self.parameters)]

    def reference(self, saved: Any) -> Any:
        """Gives the saved tensor that this recomputes."""
        return saved.itself

    def recompute(self, saved: Any) -> list[tuple[Any, torch.Tensor]]:
        """The saved tensor, recomputed."""
        return [(saved, self.make())]

    def ready(self) -> bool:
        """Carried out from now on, it makes what was saved."""
        for datum in self.closed:
            if not datum.closed:
                return False
        for datum in self.sources:
            if not datum.unchanged:
                return False
        for held in self.parameters:
            if held.changed:
                return False
        return not (self.in_backward and torch_internals.current_graph_task() == -1)

    def make(self) -> torch.Tensor:
        """The tensor, in its own layout. May raise `Unlike`."""
        made = self.calls([read() for read in self.given])
        if made.requires_grad:  # nothing was to be done to a parameter
            made = made.detach()
        if made.dtype is not self.dtype or made.size() != self.size:
            raise Unlike(f"made {made.dtype} {tuple(made.size())}, expected {tuple(self.size)}")
        if (
            made.stride() == self.stride
            and made.storage_offset() == 0
            and made.untyped_storage().nbytes() == made.nbytes
        ):
            return made
        out = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=made.device)
        return out.copy_(made)


class _Held(NamedTuple):
    """What a recipe reads beside saved tensors."""

    source: HeldSource
    saved: bool
    """Autograd saved it for the same operation."""
    place: int
    """Among all that the recipe reads."""


class Reader:
    """Reads recipes off the graph, one after the other."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._depth = 0.0
        self.output = 0
        """The builder that begins is to make the output with this number."""
        self._tensor: torch.Tensor | None = None
        """It is that output itself, where it is the tensor that is read."""
        self._trace: RecipeTrace | None = None
        """It notes what the present builder looks at."""
        self.copies = SmallCopies()
        """They are of the small parameters that recipes read, valid for one pass."""
        self.leaves = Leaves()
        self.in_place: dict[int, list[weakref.ref[HeldSource]]] = {}
        """It holds, by identity of a tensor, the sources of this pass that read it without a
        copy."""
        self._held: list[_Held] = []
        self.given: list[Read] = []
        """The present recipe reads these."""
        self._calls: list[OperatorCall] = []
        """It makes these calls."""
        self.sources: list[Recomputable] = []
        self.closed: list[Recomputable] = []
        self.parameters: list[HeldSource] = []
        self.in_backward = False

    def begin(self, library: Any = None) -> None:
        """A pass begins; the compiled library is used if there is one."""
        self.copies.begin(library)
        self.in_place.clear()
        self.leaves.begin()

    def read(self, tensor: torch.Tensor) -> Recipe | None:
        """The recipe of the whole storage behind `tensor`, or None if there is none. The small
        tensors that it reads are copied."""
        return self._read(tensor, resolve=False)

    def resolve(self, tensor: torch.Tensor) -> tuple[Recipe, RecipeTrace] | None:
        """The same, and where it has found what it reads."""
        recipe = self._read(tensor, resolve=True)
        trace, self._trace = self._trace, None
        return None if recipe is None or trace is None else (recipe, trace)

    def _read(self, tensor: torch.Tensor, *, resolve: bool) -> Recipe | None:
        base = tensor._base if tensor._is_view() else tensor
        if base is None or base.storage_offset() != 0:
            return None
        node, storage = base.grad_fn, base.untyped_storage()
        if node is None or storage.nbytes() != base.nbytes:
            return None
        if base is not tensor and storage._cdata != tensor.untyped_storage()._cdata:
            return None
        operation = _rule_of(node)
        if operation is None or (base.output_nr and not operation.many):
            return None
        self._depth = 1.0
        self.output, self._tensor = base.output_nr, base
        self.in_backward = False
        trace = self._trace = RecipeTrace() if resolve else None
        shown = node if trace is None else TracedNode(trace, 0, node)
        try:
            result = operation.build(self, shown, base.dtype, base.size())
            if result is None or not self._own(base.nbytes):
                return None
            return Recipe(base, operation.kind, OperatorCalls(self._calls, result), self)
        except Foreign:
            return None
        finally:  # what is read is held by the recipe alone
            self._tensor = None
            if trace is not None:
                trace.end()
            for found in (
                self.given, self._calls, self._held, self.sources, self.closed, self.parameters
            ):  # fmt: skip
                found.clear()

    def _own(self, size_bytes: int) -> bool:
        """Copy what is small; `False` if something else could be written to."""
        memory, left_bytes = self._memory, COPIED_SHARE * size_bytes
        small: list[_Held] = []
        sized = [(_size_of(one.source), at) for at, one in enumerate(self._held)]
        if len(sized) > 1:
            sized.sort()
        for held_bytes, at in sized:
            one = self._held[at]
            held = one.source
            plain = held.take is None
            if held.changed or (plain and memory.was_touched(held.tensor)):
                return False
            if plain and self._private(held) and memory.alone(held.tensor):
                self.in_place.setdefault(id(held.tensor), []).append(weakref.ref(held))
                self._note_use(one, SourceUse.IN_PLACE)
                continue
            left_bytes -= held_bytes
            if left_bytes >= 0:
                small.append(one)
            elif _parameter_of(held.tensor) is None:
                return False
            else:
                self.parameters.append(held)
                self.in_backward |= not one.saved
                self._note_use(one, SourceUse.PARAMETER)
        for one in small:
            held = one.source
            if held.tensor.untyped_storage().nbytes() == 0:
                return False  # sharding has taken the bytes away
            self._note_use(one, SourceUse.COPIED)
            held.own(self._copy_of(held))
        return True

    def _note_use(self, held: _Held, use: SourceUse) -> None:
        if self._trace is not None:
            self._trace.uses(held.source, held.place, use)

    def _private(self, held: HeldSource) -> bool:
        """No name of the program's is bound to this tensor object (the statistics of a norm, say).
        Several recipes may read it."""
        holders = sys.getrefcount(held.tensor)
        for other in self.in_place.get(id(held.tensor), ()):
            source = other()
            holders -= source is not None and source.tensor is held.tensor
        return holders <= HOLDERS

    def _copy_of(self, held: HeldSource) -> torch.Tensor | None:
        """The copy of a parameter from the beginning of the pass. Who holds its storage beside it
        may have written to it since without a trace."""
        if held.take is not None or not self._memory.alone(held.tensor):
            return None
        return self.copies.of(held.tensor, held.version, held.dtype)

    # For builders

    @property
    def made(self) -> torch.Tensor | None:
        """The tensor that is read, if the builder that begins is to make it."""
        if self._trace is not None:
            self._trace.repeatable = False  # it has other bytes in another pass
        return self._tensor

    def saved(self, node: Any, name: str, index: int | None = None) -> Slot | None:
        """A tensor that a node saved, or this one of a list."""
        found = self._memory.kept_by(_real(node), name, index)
        if index is not None and self._trace is not None:
            self._trace.repeatable = False  # how long the list is would have to be noted
        if found is None:
            self._note(SourceKind.NOTHING, node, name)
            return None
        read, datum = found
        if datum is None:
            _refuse_foreign(read.tensor)
            self._held.append(_Held(read, True, len(self.given)))
            self._note(SourceKind.HELD, node, name)
        else:
            self._reads(datum)
            self._note(SourceKind.SAVED, node, name)
        return self._source(read)

    def value(self, edge: tuple[Any, int]) -> Slot | None:
        """What a node produced: a parameter, something saved, or recomputed from its inputs."""
        node, output = edge
        self._tensor = None
        if node is None:
            return None
        if output != 0:
            return self._made(node, output)
        real = _real(node)
        if real.name() == "torch::autograd::AccumulateGrad":
            _refuse_foreign(real.variable)
            return self._leaf(node, real.variable)
        found = self._memory.produced_by(real)
        if found is None:
            return self._made(node)
        self._reads(found[1])
        self._note(SourceKind.OUTPUT, node)
        return self._source(found[0])

    def epsilon(self, node: Any, weight: Slot | None) -> float | None:
        """Of a layer norm with this weight."""
        place = -1 if weight is None else weight.number
        read = None if weight is None else self.given[place]
        found = self._memory.epsilon(_real(node), read)
        if self._trace is not None:
            self._trace.epsilons.append((node.place, place, found))
        return found

    def call(
        self, operator: Operator, *arguments: Any, output: int | None = None, **keywords: Any
    ) -> Slot:
        """What an operator makes of these, or this one of its outputs."""
        self._calls.append(OperatorCall(operator_of(operator), arguments, keywords, output))
        return Slot(-len(self._calls))

    def cast(self, source: Slot, dtype: torch.dtype) -> Slot:
        """The same numbers in this type. A parameter's copy has that type from the beginning."""
        read = self.given[source.number] if source.number >= 0 else None
        if type(read) is not HeldSource or read.dtype not in (None, dtype):
            return self.call(torch.ops.aten.to.dtype, source, dtype)
        if read.tensor.dtype is not dtype:
            read.dtype = dtype
        return source

    def _source(self, read: Read) -> Slot:
        self.given.append(read)
        return Slot(len(self.given) - 1)

    def _reads(self, datum: Recomputable) -> None:
        self.sources.append(datum)
        if not datum.cast:
            self.closed.append(datum)

    def _note(self, kind: SourceKind, node: Any, name: str = "") -> None:
        if self._trace is not None:
            self._trace.found.append(SourcePlace(kind, node.place, name))

    def _leaf(self, node: Any, parameter: torch.Tensor) -> Slot:
        held = self._unwritten(parameter)
        self._held.append(_Held(held, False, len(self.given)))
        self._note(SourceKind.LEAF, node)
        return self._source(held)

    def _unwritten(self, parameter: torch.Tensor) -> HeldSource:
        held = self.leaves.unwritten(parameter)
        if held is None:
            raise Foreign("the program has written to a parameter in this pass")
        return held

    def _made(self, node: Any, output: int = 0) -> Slot | None:
        real = _real(node)
        operation = _rule_of(real)
        if self._depth > DEPTH or operation is None or (output and not operation.many):
            return None
        if WRITTEN in real.metadata:
            raise Foreign("the program has written to what an operation has made")
        like = node._input_metadata[output]  # what comes into it in backward is what it gave
        deeper = VIEW_DEPTH if operation.kind == "view" else 1.0
        self._depth += deeper
        self.output = output
        made = operation.build(self, node, like.dtype, tuple(like.shape))
        self._depth -= deeper
        return made

    # For the compiled library, which finds a resolved recipe again

    def epsilon_again(self, node: Any, weight: HeldSource | None) -> float | None:
        return self._memory.epsilon(node, weight)

    def leaf_again(self, parameter: torch.Tensor) -> HeldSource | None:
        """To read this parameter; None if the recipe cannot."""
        try:
            _refuse_foreign(parameter)
            return self._unwritten(parameter)
        except Foreign:
            return None


def _rule_of(node: Any) -> RecomputeRule | None:
    return OPERATIONS.get(node.name()) or schema_rules.rule_of(node)


def _real(node: Any) -> Any:
    """The node that a builder was shown."""
    return node.real if type(node) is TracedNode else node


def _size_of(held: HeldSource) -> float:
    """Bytes; infinite for a parameter that may be on the host, since reading it would fetch it."""
    plain = type(held.tensor) in (torch.Tensor, torch.nn.Parameter)
    return held.tensor.nbytes if plain and held.take is None else math.inf


def _refuse_foreign(tensor: torch.Tensor) -> None:
    """`Foreign` for memory that others may have written to by the time a recipe reads it. (A
    parameter that is offloaded has a class of its own, and its memory is the framework's.)"""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if plain and tensor.layout is not torch.strided:
        raise Foreign("reads a tensor that is not dense")
    if plain and not owned(tensor.untyped_storage(), on_cuda=tensor.is_cuda):
        raise Foreign("reads memory that is not the framework's")


def _parameter_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What an optimizer may update, perhaps without moving a version. Autograd saves a view of it;
    a parameter that is on the host has a class of its own, and reading it would fetch it."""
    root = root_of(tensor)
    if type(root) is not torch.Tensor or (root.is_leaf and root.requires_grad):
        return root
    return None


def root_of(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter, where autograd saved a view of it."""
    base = tensor._base if type(tensor) is torch.Tensor else None
    return tensor if base is None else base
