"""A step of work as pieces: a `BranchProgram` is a list of steps, and the units of one step need
nothing from each other. Every way runs such a program; ways differ in what runs the units, and on
which thread or stream.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

BranchCall = Callable[..., Any]
RunStep = Callable[[int, "BranchProgram", list[Tensor | None]], None]
"""It runs step `i` of a program: it reads the units' slots and writes their results."""


@dataclass(frozen=True)
class Unit:
    """A piece of work: tensors in, a tuple of tensors out."""

    run: BranchCall
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    key: Hashable
    """Units with equal keys do the same to tensors of the same shapes, strides and dtypes."""
    name: str
    graph: fx.GraphModule | None = None
    """It has the unit's operations; None where there is nothing to compile."""
    work: float = 1.0
    """It estimates the unit's share of the time, and is used until the unit is measured."""
    members: int = 1
    """The unit has so many branches: more than one where a kernel runs several together."""
    opaque: bool = False
    """It is a callable of the user's that is called and not traced: a graph might not hold its
    work."""


@dataclass(frozen=True)
class BranchProgram:
    """Steps in order; inside a step, units in the order of the serial loop."""

    slots: int
    inputs: tuple[int, ...]
    constants: tuple[tuple[int, Tensor], ...]
    """These slots hold weights, buffers and tables: read in place, never copied."""
    steps: tuple[tuple[Unit, ...], ...]
    outputs: tuple[int, ...]
    ahead: tuple[tuple[int, Unit], ...] = ()
    """Each is a step and a unit: work that may start with that step and is needed by a later step
    only."""

    def needed(self, unit: Unit) -> int:
        """The first step that reads what a unit of `ahead` writes."""
        made = set(unit.writes)
        readers = (i for i, s in enumerate(self.steps) if any(made & set(u.reads) for u in s))
        return next(readers, len(self.steps) - 1)

    def units(self) -> Iterator[Unit]:
        for step in self.steps:
            yield from step

    def in_line(self) -> BranchProgram:
        """The same program with the units of `ahead` as steps where they are needed."""
        if not self.ahead:
            return self
        steps: list[tuple[Unit, ...]] = []
        for index, step in enumerate(self.steps):
            steps += [(unit,) for _, unit in self.ahead if self.needed(unit) == index]
            steps.append(step)
        return replace(self, steps=tuple(steps), ahead=())

    def with_weights(self, convert: Callable[[Tensor], Tensor]) -> BranchProgram:
        """The same program over other tensors in place of its constants."""
        return replace(self, constants=tuple((slot, convert(t)) for slot, t in self.constants))

    def with_units(self, convert: Callable[[Unit], Unit]) -> BranchProgram:
        """The same program with every unit of its steps converted."""
        return replace(self, steps=tuple(tuple(map(convert, step)) for step in self.steps))

    @property
    def forks(self) -> bool:
        """Whether any step has units that can run together."""
        return any(len(step) > 1 for step in self.steps)

    @property
    def branches(self) -> int:
        return sum(unit.members for step in self.steps if len(step) > 1 for unit in step)

    @property
    def widest(self) -> int:
        """Index of the step with the most units."""
        return max(range(len(self.steps)), key=lambda i: len(self.steps[i]), default=0)

    def execute(self, inputs: Sequence[Tensor], run_step: RunStep) -> list[Tensor]:
        """Run all steps. A tensor is dropped only after the step that read it last was joined:
        earlier, a side stream could be given its memory while another stream still reads it."""
        environment: list[Tensor | None] = [None] * self.slots
        for slot, tensor in self.constants:
            environment[slot] = tensor
        for slot, tensor in zip(self.inputs, inputs, strict=True):
            environment[slot] = tensor
        last = self.last_uses()
        for index in range(len(self.steps)):
            run_step(index, self, environment)
            for slot in last[index]:
                environment[slot] = None
        return [environment[slot] for slot in self.outputs]

    def last_uses(self) -> list[list[int]]:
        """For each step the slots that nothing reads after it."""
        last: dict[int, int] = {}
        for index, step in enumerate(self.steps):
            for unit in step:
                for slot in (*unit.reads, *unit.writes):
                    last[slot] = index
        for _, unit in self.ahead:
            joined = self.needed(unit)
            for slot in (*unit.reads, *unit.writes):
                last[slot] = max(last.get(slot, 0), joined)
        kept = {slot for slot, _ in self.constants} | set(self.outputs) | set(self.inputs)
        ends: list[list[int]] = [[] for _ in self.steps]
        for slot, index in last.items():
            if slot not in kept:
                ends[index].append(slot)
        return ends


def arguments(unit: Unit, environment: list[Tensor | None]) -> list[Any]:
    return [environment[slot] for slot in unit.reads]


def store(unit: Unit, results: Any, environment: list[Tensor | None]) -> None:
    """Put a unit's results where other units read them."""
    for slot, tensor in zip(unit.writes, results, strict=True):
        environment[slot] = tensor


def run_unit(unit: Unit, environment: list[Tensor | None]) -> None:
    """Run a unit on the current thread and stream."""
    store(unit, unit.run(*arguments(unit, environment)), environment)


def run_in_order(index: int, program: BranchProgram, environment: list[Tensor | None]) -> None:
    """The serial loop."""
    for unit in program.steps[index]:
        run_unit(unit, environment)


def laid_like(made: Sequence[Tensor], strides: Sequence[Sequence[int]]) -> list[Tensor]:
    """The results with the strides that the serial loop's results have: the caller's next
    operation, a view for example, may need them."""

    def fits(t: Tensor, wanted: Sequence[int]) -> bool:
        return all(n < 2 or a == b for n, a, b in zip(t.shape, t.stride(), wanted, strict=True))

    return [
        t if fits(t, wanted) else t.new_empty_strided(t.shape, wanted).copy_(t)
        for t, wanted in zip(made, strides, strict=True)
    ]


def from_callables(
    functions: Sequence[BranchCall], splits: Sequence[Sequence[int]], count: int
) -> BranchProgram:
    """One step: each function reads the inputs at its positions and returns one value."""
    units = tuple(
        Unit(
            run=lambda *args, function=function: (function(*args),),
            reads=tuple(reads),
            writes=(count + number,),
            key=("callable", number),
            name=f"branch {number}",
            opaque=True,
        )
        for number, (function, reads) in enumerate(zip(functions, splits, strict=True))
    )
    return BranchProgram(
        slots=count + len(units),
        inputs=tuple(range(count)),
        constants=(),
        steps=(units,),
        outputs=tuple(range(count, count + len(units))),
    )
