"""The calls of operators that make a tensor again: what the compiled library makes of a resolved
recipe is what was saved, and where anything is otherwise, Python sees to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from tests.memory.test_resolved_recipes import Kept, Passes, Run, after
from tests.memory.test_saved_tensors_compiled import in_backward
from tests.memory.test_swapper_operations import BODIES, Weights, shows_saved
from torch import Tensor

from kilter.memory.engine.operation_graph import HeldSource, OperatorCall, OperatorCalls, Slot
from kilter.memory.engine.recompute import Recipe
from kilter.memory.engine.store import EVICTED, RESIDENT

pytestmark = shows_saved
LEFT_TO_PYTHON = {"ConstantPadNdBackward0", "IndexBackward0"}
"""Their recipes are read anew in each pass."""
STAYS = {"NativeDropoutBackward0"}
"""The mask is the program's as well, as it is called here."""


class Carried(Passes):
    """Passes whose tensors are evicted, and recomputed as backward needs them."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.asked: list[Recipe] = []
        """Python was to carry out these."""
        recompute = self.store.recompute

        def ask(recipe: Recipe) -> Tensor | None:
            self.asked.append(recipe)
            found: Tensor | None = recompute(recipe)
            return found

        self.store.recompute = ask

    def evicted(self, body: Run) -> list[Kept]:
        """A pass in which recipes are found again; what was evicted, in order."""
        for _ in range(3):
            self.run(body)
        for kept in self.kept:
            saved = kept.view.saved
            if saved.recipe is not None and saved.recipe.calls.compiled is not None:
                in_backward(lambda saved=saved: self.store.evict(saved))
        return [kept for kept in self.kept if kept.view.saved.state == EVICTED]


@pytest.fixture
def passes(both: tuple[Any, Any]) -> Carried:
    return Carried(both[0])


def used(kept: Kept) -> Any:
    return in_backward(lambda: kept.walk.at.use(kept.view))


@pytest.mark.parametrize("node", BODIES)
def test_the_library_makes_what_was_saved(passes: Carried, node: str) -> None:
    evicted = passes.evicted(BODIES[node][1])
    assert evicted or node in LEFT_TO_PYTHON | STAYS
    for kept in reversed(evicted):
        assert torch.equal(used(kept), kept.bits)
    assert not passes.asked


@pytest.mark.parametrize("node", BODIES)
def test_what_a_recipe_reads_is_recomputed_before(passes: Carried, node: str) -> None:
    """In the other order each of them needs those that it reads."""
    evicted = passes.evicted(BODIES[node][1])
    for kept in evicted[-1:] + evicted:
        if kept.view.saved.state == EVICTED:
            assert torch.equal(used(kept), kept.bits)
    assert not passes.asked


def test_neither_autocast_nor_gradients_change_what_is_made(passes: Carried) -> None:
    evicted = passes.evicted(after(lambda x, w: w.three(x)))
    for kept in reversed(evicted):
        with torch.autocast("cpu", torch.bfloat16):
            found = used(kept)
        assert found.dtype is torch.float32
        assert not found.requires_grad
        assert torch.equal(found, kept.bits)


def in_bfloat16(x: Tensor, w: Weights) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.silu(w.two(x))


def test_a_bias_is_copied_in_the_type_of_the_product(passes: Carried) -> None:
    evicted = passes.evicted(in_bfloat16)
    product = [one for one in evicted if one.view.saved.recipe.kind == "matrix product"]
    assert len(product) == 1
    recipe = product[0].view.saved.recipe
    (bias,) = [one for one in recipe.given if type(one) is HeldSource]
    assert bias.tensor.dtype is torch.bfloat16
    assert [call.operator for call in recipe.calls.calls] == [torch.ops.aten.addmm.default]
    for kept in reversed(evicted):
        assert torch.equal(used(kept), kept.bits)
    assert not passes.asked


def test_a_parameter_that_is_cast_twice_is_rounded_twice(passes: Carried) -> None:
    def body(x: Tensor, w: Weights) -> Tensor:
        return F.silu(w.one(x).double() + w.two.bias.bfloat16().double())

    evicted = passes.evicted(body)
    assert "add" in {kept.view.saved.recipe.kind for kept in evicted}
    for kept in reversed(evicted):
        assert torch.equal(used(kept), kept.bits)
    assert all(reading.equal for reading in passes.run(body))


def of_another_size(recipe: Recipe) -> None:
    recipe.size = torch.Size((5, 5))


def written_to(recipe: Recipe) -> None:
    for one in recipe.given:
        if type(one) is HeldSource:
            one.version += 1


def without_a_factor(recipe: Recipe) -> None:
    """The operator fails."""
    recipe.given = tuple(
        HeldSource(torch.ones(3), 0) if type(one) is HeldSource else one for one in recipe.given
    )


@pytest.mark.parametrize("spoil", [of_another_size, written_to, without_a_factor])
def test_what_is_not_as_it_was_is_left_to_python(
    passes: Carried, spoil: Callable[[Recipe], None]
) -> None:
    (kept,) = [
        one
        for one in passes.evicted(after(lambda x, w: w.two(x)))
        if one.view.saved.recipe.kind == "matrix product"
    ]
    recipe = kept.view.saved.recipe
    spoil(recipe)
    assert used(kept) is None
    assert passes.asked == [recipe]
    assert kept.view.saved.state == EVICTED
    assert kept.walk.fence.down == (spoil is not written_to)  # that one the program is told


def test_memory_that_is_exhausted_is_taken_once_more(
    passes: Carried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a call of Python's that the library makes."""
    from kilter.memory.engine import operations

    body: Run = lambda x, w: F.silu(w.norm(w.one(x)).bfloat16())  # noqa: E731
    failed: list[bool] = []
    normalise = operations.layer_norm

    def short(*arguments: Any) -> Tensor:
        if len(failed) == 1:
            failed.append(True)
            raise torch.OutOfMemoryError("none left")
        return normalise(*arguments)

    monkeypatch.setattr(operations, "layer_norm", short)
    evicted = passes.evicted(body)
    failed.append(True)
    for kept in reversed(evicted):
        assert torch.equal(used(kept), kept.bits)
        assert kept.view.saved.state == RESIDENT
    assert len(failed) == 2
    assert not passes.asked


# The list in Python


@st.composite
def lists(draw: st.DrawFn) -> tuple[int, list[list[int]], int]:
    """How many tensors are given, what each call reads, and which slot is the result."""
    count = draw(st.integers(1, 3))
    reads = []
    for place in range(draw(st.integers(1, 6))):
        there = [*range(count), *(-1 - before for before in range(place))]
        reads.append(draw(st.lists(st.sampled_from(there), min_size=1, max_size=3)))
    return count, reads, draw(st.sampled_from([-1 - place for place in range(len(reads))]))


@given(lists(), st.booleans())
def test_calls_are_made_in_order_and_hold_nothing_longer_than_it_is_read(
    drawn: tuple[int, list[list[int]], int], in_a_list: bool
) -> None:
    count, reads, result = drawn
    made: list[weakref.ref[Tensor]] = []

    def alive() -> set[int]:
        return {-1 - place for place, one in enumerate(made) if one() is not None}

    def add(*several: Any) -> Tensor:
        later = {number for numbers in reads[len(made) :] for number in numbers} | {result}
        assert alive() <= later
        flat = several[0] if in_a_list else several
        found = torch.stack([*flat]).sum(0) + 2 ** len(made)
        made.append(weakref.ref(found))
        return found

    def call(numbers: list[int]) -> OperatorCall:
        slots = tuple(Slot(number) for number in numbers)
        return OperatorCall(add, ([*slots],) if in_a_list else slots, {}, None)

    expected = {number: torch.tensor(float(number)) for number in range(count)}
    for place, numbers in enumerate(reads):
        expected[-1 - place] = sum((expected[number] for number in numbers), torch.zeros(())) + (
            2**place
        )
    calls = OperatorCalls([call(numbers) for numbers in reads], Slot(result))
    found = calls([expected[number] for number in range(count)])
    assert torch.equal(found, expected[result])
    assert alive() == {result}
