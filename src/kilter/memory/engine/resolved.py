"""Where in autograd's graph a recipe has found what it reads.

A recipe is resolved once: its builder is shown nodes that note what it looks at. In later passes
the compiled library (`resolved.h`) compares that part of the graph and takes what is read from the
same places, and no builder is asked. Where something is not as it was, the recipe is read anew.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from kilter.memory.engine.operation_graph import HeldSource
    from kilter.memory.engine.recompute import Reader, Recipe

MISSES = 3
"""A recipe that was not found again so often is read by its builder from then on."""
_PLAIN = (bool, int, float, str, type(None))


class SourceKind(IntEnum):
    """What was found at a place of the graph."""

    NOTHING = 0
    """The node has saved nothing there."""
    SAVED = 1
    """A tensor of the engine that the node saved."""
    OUTPUT = 2
    """The node's own output, which some operation saved."""
    HELD = 3
    """What autograd itself holds for the node."""
    LEAF = 4
    """The parameter whose gradient the node accumulates."""


class SourceUse(IntEnum):
    """How a recipe reads what the engine has not saved."""

    IN_PLACE = 0
    COPIED = 1
    PARAMETER = 2


class SourcePlace(NamedTuple):
    """A source of a recipe, or what it looked for in vain."""

    kind: SourceKind
    node: int
    name: str = ""
    use: SourceUse = SourceUse.IN_PLACE
    size_bytes: int = 0
    dtype: torch.dtype | None = None
    """It is read in this type; None: as it is."""


class RecipeTrace:
    """What the builder of one recipe has looked at."""

    def __init__(self) -> None:
        self.nodes: list[tuple[int, int]] = [(-1, -1)]
        """Each has the place of the node before it, and the number of the edge that leads from that
        one to it, or to nothing. The first one made the tensor."""
        self.counts: list[tuple[int, int]] = []
        """Of the node at a place, how many edges lead from it."""
        self.numbers: list[tuple[int, str, Any]] = []
        """Of the node at a place, an attribute and its value."""
        self.shapes: list[tuple[int, int]] = []
        """The type and size of a node's output with this number."""
        self.epsilons: list[tuple[int, int, float | None]] = []
        """Of the norm at a place, with this source as its weight (-1: none)."""
        self.found: list[SourcePlace] = []
        self.repeatable = True
        """All that the builder looked at is noted."""
        self._edges: dict[int, tuple[tuple[TracedNode | None, int], ...]] = {}

    def edges_of(self, place: int, node: Any) -> tuple[tuple[TracedNode | None, int], ...]:
        """The edges from a node to those whose results it read."""
        if place not in self._edges:
            found: list[tuple[TracedNode | None, int]] = []
            for number, (behind, output) in enumerate(node.next_functions):
                traced = None if behind is None else TracedNode(self, len(self.nodes), behind)
                self.nodes.append((place, number))
                found.append((traced, output))
            self._edges[place] = tuple(found)
            self.counts.append((place, len(found)))
        return self._edges[place]

    def end(self) -> None:
        """The builder has ended. The graph must not be held by a cycle: in passes under a plan the
        collector does not run."""
        self._edges.clear()

    def note(self, place: int, name: str, value: Any) -> None:
        """The builder has read this attribute of a node."""
        if name == "_input_metadata":
            self.shapes += [(place, output) for output in range(len(value))]
        elif name.startswith("_saved_") and _is_plain(value):
            self.numbers.append((place, name, value))
        else:
            self.repeatable = False

    def uses(self, held: HeldSource, place: int, use: SourceUse) -> None:
        """The source at this place, among all that the recipe reads, is read so."""
        there = [at for at, one in enumerate(self.found) if one.kind is not SourceKind.NOTHING]
        found = self.found[there[place]]
        self.found[there[place]] = found._replace(
            use=use, size_bytes=held.tensor.nbytes, dtype=held.dtype
        )
        if held.take is not None or (found.kind is SourceKind.LEAF and use is SourceUse.IN_PLACE):
            self.repeatable = False


class TracedNode:
    """A node of autograd's graph as a builder sees it."""

    __slots__ = ("_trace", "place", "real")

    def __init__(self, trace: RecipeTrace, place: int, real: Any) -> None:
        self._trace = trace
        self.place = place
        """Among the nodes of the trace."""
        self.real = real

    def name(self) -> str:
        """(A node at a place is of one type in all passes.)"""
        return str(self.real.name())

    @property
    def next_functions(self) -> tuple[tuple[TracedNode | None, int], ...]:
        return self._trace.edges_of(self.place, self.real)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.real, name)
        self._trace.note(self.place, name, value)
        return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


class ResolvedRecipes:
    """The recipes of one plan, by number of their tensor."""

    def __init__(self, *, seldom: bool = False) -> None:
        """`seldom`: there may be no other pass under this plan. Recipes are resolved in a second
        one."""
        self.by_number: dict[int, Any] = {}
        """The compiled library looks here first."""
        self._misses: dict[int, int] = {}
        self._begin = -2 if seldom else -1

    def read(
        self, reader: Reader, tensor: torch.Tensor, number: int, library: Any
    ) -> Recipe | None:
        """The recipe of a tensor which the compiled library has not found here."""
        misses = self._misses[number] = self._misses.get(number, self._begin) + 1
        self.by_number.pop(number, None)
        if library is None or not 0 <= misses < MISSES:
            return reader.read(tensor)
        found = reader.resolve(tensor)
        if found is None:
            return None
        recipe, trace = found
        if trace.repeatable:
            self.by_number[number] = library.ResolvedRecipe(reader, tensor, recipe, trace)
        return recipe
