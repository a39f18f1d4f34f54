"""A recipe that was resolved in one pass is found again in the next ones by the compiled library,
as Python reads it, and is read anew where anything is not as it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.memory.test_saved_tensors_compiled import Walk
from tests.memory.test_swapper_operations import BODIES, MIN_BYTES, WIDTH, Weights, shows_saved
from torch import Tensor, nn

from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.operation_graph import HeldSource
from kilter.memory.engine.position import StepKind
from kilter.memory.engine.recompute import Reader, Recipe
from kilter.memory.engine.resolved import MISSES, ResolvedRecipes
from kilter.memory.engine.store import View, kept
from kilter.memory.engine.tensor_hooks import TensorHooks
from kilter.memory.plan.problem import Link

pytestmark = shows_saved
Run = Callable[[Tensor, Weights], Tensor]


class Reading(NamedTuple):
    """Of one tensor that a pass has saved."""

    recipe: Recipe | None
    by_library: bool
    as_python: bool
    """Python reads the same at this place."""
    equal: bool
    """It makes the bits that were saved."""


class Kept(NamedTuple):
    """A tensor that a pass has saved, until backward needs it."""

    walk: Walk
    view: View
    bits: Tensor


class Passes:
    """Passes of one model under a plan that would recompute all that it saves."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.store = engine, engine._store
        self.reader = Reader(self.store)
        torch.manual_seed(0)
        self.weights = Weights()
        self.input = torch.randn(96, WIDTH)
        self.resolved: list[ResolvedRecipes] = []
        self.stepped_aside = False
        self.alive: list[Any] = []
        """What the last pass saved stays until the next one, as in a training."""
        self.kept: list[Kept] = []

    def run(self, body: Run) -> list[Reading]:
        """One pass; what was read for each tensor that it saved."""
        self.store.norms.find()
        within = self.store.begin()
        self.reader.begin()
        before, self.alive = self.alive, []
        found: list[Reading] = []
        self.kept.clear()

        def save(tensor: Tensor, size_bytes: int, key: int) -> Any:
            place = len(found)
            if place == len(self.resolved):
                self.resolved.append(ResolvedRecipes())
            known, asked = self.resolved[place], []

            def read(one: Tensor) -> Recipe | None:
                asked.append(one)
                return known.read(self.reader, one, 0, self.store.compiled)

            expected = self.reader.read(tensor)
            kind, version = StepKind.RECOMPUTED, tensor._version
            walk = Walk(
                self.engine,
                kind,
                size_bytes=size_bytes,
                read=True,
                version=version,
                within=within,
                recipe_of=read,
                recipes=known.by_number,
            )
            bits = tensor.detach().clone()
            packed = walk.at.save(tensor)
            self.stepped_aside |= walk.fence.down
            if walk.fence.down:
                return kept(tensor)
            if type(packed) is not View:  # saved once more
                return self.store.view(self.store.find(tensor, key, within), tensor)
            self.alive.append(packed.saved)
            self.kept.append(Kept(walk, packed, bits))
            recipe = packed.saved.recipe
            alike = seen(recipe) == seen(expected)
            del expected
            with torch.no_grad():
                equal = recipe is None or same_bits(recipe.make(), bits, tensor)
            found.append(Reading(recipe, not asked, alike, equal))
            return packed

        hooks = TensorHooks(
            self.store, torch.device("cpu"), MIN_BYTES, save, self.store.hand_out, None
        )
        self.store.unpack_hooks = (hooks._unpack,)
        zero = self.weights.words.weight.sum() * 0
        with torch.autograd.graph.saved_tensors_hooks(hooks._pack, *self.store.unpack_hooks):
            result = body((self.input.requires_grad_() + zero).sin(), self.weights)
        self.alive.append(result)
        del before
        return found


def seen(recipe: Recipe | None) -> Any:
    """What a recipe reads, and makes."""
    if recipe is None:
        return None
    given = [
        one.tensor.tolist() if type(one) is HeldSource else tuple(one[2:]) for one in recipe.given
    ]
    kinds = [type(one) for one in recipe.given]
    parameters = [id(one.tensor) for one in recipe.parameters]
    layout = recipe.kind, recipe.dtype, recipe.size, recipe.stride
    numbers = [[one.key for one in several] for several in (recipe.sources, recipe.closed)]
    return kinds, given, parameters, layout, numbers, recipe.in_backward, recipe.told


def same_bits(made: Tensor, bits: Tensor, tensor: Tensor) -> bool:
    whole = tensor if tensor._base is None else tensor._base
    return made.dtype is whole.dtype and torch.equal(
        made.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()), bits
    )


@pytest.fixture
def passes(both: tuple[Any, Any]) -> Passes:
    return Passes(both[0])


@pytest.mark.parametrize("node", BODIES)
def test_it_is_found_again_as_python_reads_it(passes: Passes, node: str) -> None:
    body = BODIES[node][1]
    passes.run(body)
    again = passes.run(body)  # from here on there are copies of small parameters
    again = passes.run(body)
    assert all(one.as_python and one.equal for one in again)
    assert any(one.recipe is not None for one in again)
    read = {one.recipe.kind for one in again if one.recipe is not None and not one.by_library}
    assert read <= {"padding", "index"}  # their bits are not in the graph


def after(operation: Callable[[Tensor, Weights], Tensor]) -> Run:
    """The operation on a product; what it makes is saved."""
    return lambda x, w: F.silu(operation(w.one(x), w))


def of_planes(x: Tensor, w: Weights) -> Tensor:
    return w.group(x.view(2, 4, 12, WIDTH))


def squares(x: Tensor) -> Tensor:
    return x.view(2, WIDTH, WIDTH)


OTHERS: dict[str, tuple[Run, Run]] = {
    "operation": (after(lambda x, w: x.sigmoid()), after(lambda x, w: x.tanh())),
    "exponent": (after(lambda x, w: x**3), after(lambda x, w: x**2)),
    "sign of a zero": (
        after(lambda x, w: x.clamp(min=0.0)),
        after(lambda x, w: x.clamp(min=-0.0)),
    ),
    "slope": (
        after(lambda x, w: F.leaky_relu(x, 0.1)),
        after(lambda x, w: F.leaky_relu(x, 0.2)),
    ),
    "order of dimensions": (
        after(lambda x, w: x + squares(x).permute(0, 1, 2).reshape(96, WIDTH)),
        after(lambda x, w: x + squares(x).permute(0, 2, 1).reshape(96, WIDTH)),
    ),
    "share that is dropped": (
        after(lambda x, w: torch.native_dropout(x, 0.3, True)[0]),
        after(lambda x, w: torch.native_dropout(x, 0.6, True)[0]),
    ),
    "part": (
        after(lambda x, w: x + w.three(x).chunk(3, -1)[0]),
        after(lambda x, w: x + w.three(x).chunk(3, -1)[1]),
    ),
    "shape on the way": (
        after(lambda x, w: x + x.view(-1, 2).relu().view(96, WIDTH)),
        after(lambda x, w: x + x.view(-1, 4).relu().view(96, WIDTH)),
    ),
    "number of operands": (
        after(lambda x, w: torch.cat([x[:48], x[:24], x[:24]])),
        after(lambda x, w: torch.cat([x[:48], x[:48]])),
    ),
    "type in between": (
        after(lambda x, w: x.double().relu().float()),
        after(lambda x, w: x.bfloat16().relu().float()),
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_it_is_read_anew_for_another(passes: Passes, other: str) -> None:
    first, second = OTHERS[other]
    for body in (first, first, first):
        before = passes.run(body)
    assert any(one.by_library for one in before)
    changed = passes.run(second)
    assert all(one.as_python and one.equal for one in changed)
    assert any(one.recipe is not None and not one.by_library for one in changed)


def write_to_bias(w: Weights) -> None:
    with torch.no_grad():
        w.group.bias.add_(0.5)


CHANGES: dict[str, tuple[Run, Callable[[Passes], object]]] = {
    "the epsilon": (
        after(lambda x, w: w.norm(x)),
        lambda passes: setattr(passes.weights.norm, "eps", 0.1),
    ),
    "that there is a bias": (
        after(lambda x, w: w.norm(x)),
        lambda passes: setattr(passes.weights.norm, "bias", None),
    ),
    "the weight": (
        after(lambda x, w: w.norm(x)),
        lambda passes: setattr(passes.weights.norm, "weight", nn.Parameter(torch.rand(WIDTH))),
    ),
    "who holds a parameter": (
        after(lambda x, w: w.norm(x)),
        lambda passes: setattr(passes, "alias", passes.weights.norm.weight.detach()),
    ),
    "a parameter since the last pass": (
        after(lambda x, w: w.norm(x)),
        lambda passes: nn.init.ones_(passes.weights.norm.weight),
    ),
    "the memory of a parameter": (
        after(lambda x, w: w.norm(x)),
        lambda passes: setattr(passes.weights.norm.weight, "data", torch.rand(WIDTH)),
    ),
    "a parameter that is not saved, since the last pass": (
        after(of_planes),
        lambda passes: write_to_bias(passes.weights),
    ),
    "a parameter that is not saved": (
        after(of_planes),
        lambda passes: setattr(passes.weights.group, "bias", nn.Parameter(torch.rand(4))),
    ),
    "the memory of a parameter that is not saved": (
        after(of_planes),
        lambda passes: setattr(passes.weights.group.bias, "data", torch.rand(4)),
    ),
    "that a parameter is one": (
        after(lambda x, w: of_planes(x, w)),
        lambda passes: passes.weights.group.bias.requires_grad_(False),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_it_reads_is_found_although_the_program_changed(passes: Passes, change: str) -> None:
    body, make = CHANGES[change]
    for _ in range(3):
        passes.run(body)
    make(passes)
    for _ in range(2):
        assert all(one.as_python and one.equal for one in passes.run(body))


def test_it_is_not_recomputed_from_a_parameter_that_was_written_to_in_the_pass(
    passes: Passes,
) -> None:
    def body(x: Tensor, w: Weights, write: bool = False) -> Tensor:
        y = of_planes(w.one(x), w)
        if write:
            write_to_bias(w)
        return F.silu(y)

    for _ in range(3):
        before = passes.run(body)
    assert any(r.recipe and r.recipe.kind == "group norm" for r in before)
    found = passes.run(lambda x, w: body(x, w, write=True))
    assert all(one.as_python and one.equal for one in found)
    assert not any(r.recipe and r.recipe.kind == "group norm" for r in found)


def test_nothing_is_found_where_the_program_may_have_written_without_a_trace(
    passes: Passes,
) -> None:
    body = after(lambda x, w: w.norm(x))

    def touched(x: Tensor, w: Weights) -> Tensor:
        passes.store.touched(w.two.weight)
        return body(x, w)

    for _ in range(3):
        passes.run(body)
    found = passes.run(touched)
    assert not any(one.by_library for one in found)
    assert all(one.equal for one in found)


def test_what_changes_in_each_pass_is_left_to_its_builder(passes: Passes) -> None:
    bodies = [after(lambda x, w, power=power: x**power) for power in (2, 3)]
    for _ in range(1 + MISSES):
        for body in bodies:
            found = passes.run(body)
            assert all(one.as_python and one.equal for one in found)
    (place,) = [at for at, one in enumerate(found) if one.recipe and one.recipe.kind == "pow"]
    assert not passes.resolved[place].by_number
    assert passes.resolved[place - 1].by_number


class OwnParameter(nn.Parameter):
    """A parameter of the program's own class: Python is asked for it."""


def of_own_parameter(x: Tensor, w: Weights) -> Tensor:
    if type(w.group.bias) is nn.Parameter:
        w.group.bias = OwnParameter(w.group.bias.detach())
    return of_planes(x, w)


ASKED: dict[str, Run] = {
    "epsilon_again": after(lambda x, w: w.norm(x)),
    "leaf_again": after(of_own_parameter),
}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("asked", ASKED)
def test_an_error_in_what_python_is_asked_goes_to_the_fence(
    passes: Passes, asked: str, error: type[BaseException]
) -> None:
    """Ours ends there, and autograd keeps the tensor; what the program raises passes."""

    def fail(*_: object) -> None:
        raise error

    for _ in range(3):
        before = passes.run(ASKED[asked])
    assert any(one.by_library for one in before)
    setattr(passes.reader, asked, fail)
    with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else nullcontext():
        passes.run(ASKED[asked])
        assert passes.stepped_aside


def test_a_resolved_recipe_holds_nothing_of_its_pass(passes: Passes) -> None:
    body = after(lambda x, w: w.norm(x) + x.sigmoid())
    passes.run(body)
    references = [weakref.ref(one) for one in passes.alive if not isinstance(one, Tensor)]
    assert len(references) > 2
    passes.run(lambda x, w: x)
    passes.alive.clear()
    gc.collect()  # of this test's own passes
    assert all(reference() is None for reference in references)


class Canary:
    """It is gone with the node that it is noted at."""


def test_a_graph_whose_recipe_was_resolved_is_held_by_no_cycle(passes: Passes) -> None:
    """While a pass is under way the collector does not run."""
    weight = nn.Parameter(torch.randn(96, WIDTH))
    tensor = (weight.relu() * 2.0).exp()
    assert tensor.grad_fn is not None
    before, _ = tensor.grad_fn.next_functions[0]
    assert before is not None
    canary = before.metadata["canary"] = Canary()
    noted = weakref.ref(canary)
    gc.collect()
    gc.disable()
    try:
        found = passes.reader.resolve(tensor)
        assert found is not None
        assert found[1].counts, "its builder has looked at edges"
        del tensor, before, canary
        assert noted() is None
    finally:
        gc.enable()


def test_under_a_plan_a_recipe_is_read_by_its_builder_once(
    both: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole engine: losses as without it."""
    read: list[Tensor] = []
    read_once = Reader._read

    def count(reader: Reader, tensor: Tensor, *, resolve: bool) -> Recipe | None:
        read.append(tensor)
        return read_once(reader, tensor, resolve=resolve)

    monkeypatch.setattr(Reader, "_read", count)

    def train(engine: Swapper | None) -> tuple[list[Tensor], list[int]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, counts = [], []
        with engine or nullcontext():
            for _ in range(12):
                read.clear()
                loss = model(torch.randn(256, 64)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                counts.append(len(read))
        return losses, counts

    slow = Link(to_host_bytes_per_s=1e6, to_device_bytes_per_s=1e6, both_bytes_per_s=2e6)
    engine = Swapper(CpuStandIn(), budget_bytes=400_000, link=slow, min_bytes=MIN_BYTES)
    losses, counts = train(engine)
    assert engine.report().recomputed
    assert max(counts) > 0
    assert counts[-3:] == [0, 0, 0]
    assert all(torch.equal(*pair) for pair in zip(losses, train(None)[0], strict=True))
