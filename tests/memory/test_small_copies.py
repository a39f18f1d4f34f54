"""Copies of small parameters, which recipes read: whatever the program does to a parameter during
a pass, the numbers are those of the plain run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.memory.steady_stand_in import SteadyStandIn
from tests.memory.test_swapper_operations import shows_saved
from torch import nn

from kilter.memory.engine import Swapper
from kilter.memory.engine.operation_graph import HeldSource
from kilter.memory.engine.recompute import Reader, Recipe
from kilter.memory.engine.segments import ModuleCalls
from kilter.memory.engine.small_copies import SmallCopies
from kilter.memory.engine.store import Store
from kilter.memory.plan.problem import Link

SLOW = Link(to_host_bytes_per_s=1e6, to_device_bytes_per_s=1e6, both_bytes_per_s=2e6)
LAYERS, WIDTH, ROWS, PASSES = 8, 64, 256, 14
Begin = Callable[[SmallCopies], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.disturb: Callable[[nn.Parameter, int], None] = lambda bias, number: None
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            self.disturb(layer.bias, self.passes)
            x = torch.sigmoid(layer(x)) * torch.tanh(x)
        self.passes += 1
        return x


def train(disturb: Callable[[nn.Parameter, int], None], share: float | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    model.disturb = disturb
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = 10**12 if share is None else int(share * 12 * LAYERS * WIDTH * ROWS)
    engine = Swapper(SteadyStandIn(), budget_bytes=budget, link=SLOW, min_bytes=16_384)
    seen = []
    with nullcontext() if share is None else engine:
        for _ in range(PASSES):
            loss = model(torch.randn(ROWS, WIDTH)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        assert share is None or engine.report().plans
    return [*seen, *(p.detach() for p in model.parameters())]


def nothing(bias: nn.Parameter, number: int) -> None:
    pass


def in_place(bias: nn.Parameter, number: int) -> None:
    if number % 3 == 1:
        with torch.no_grad():
            bias.mul_(0.9)


def through_data(bias: nn.Parameter, number: int) -> None:
    if number % 3 == 1:
        bias.data.add_(0.1)


def other_data(bias: nn.Parameter, number: int) -> None:
    if number % 3 == 1:
        bias.data = bias.data * 0.9


def by_kept_data() -> Callable[[nn.Parameter, int], None]:
    """The `.data` of an earlier pass is written to."""
    held: dict[int, torch.Tensor] = {}

    def by_kept_data(bias: nn.Parameter, number: int) -> None:
        if number == 8:
            held[id(bias)] = bias.data
        if number > 9:
            held[id(bias)].mul_(0.9)

    return by_kept_data


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each copy that a recipe asked for, whether it was there."""
    asked: list[bool] = []
    of = SmallCopies.of

    def counted(self: SmallCopies, tensor: torch.Tensor, *how: Any) -> torch.Tensor | None:
        found = of(self, tensor, *how)
        asked.append(found is not None)
        return found

    monkeypatch.setattr(SmallCopies, "of", counted)
    return asked


DISTURBANCES = {
    "nothing": lambda: nothing,
    "in place": lambda: in_place,
    "through data": lambda: through_data,
    "other data": lambda: other_data,
    "by kept data": by_kept_data,
}


@shows_saved
@pytest.mark.parametrize("name", DISTURBANCES)
def test_numbers_are_plains_whatever_is_done_to_a_bias(name: str, given: list[bool]) -> None:
    plain, governed = (train(DISTURBANCES[name](), share) for share in (None, 0.6))
    assert all(torch.equal(one, other) for one, other in zip(plain, governed, strict=True))
    assert any(given), "no recipe was given a copy"


@pytest.fixture(params=["library", "python"])
def begin(request: pytest.FixtureRequest, both: tuple[Any, Any]) -> Begin:
    """Begins a pass, with the compiled library and without."""
    library = both[0]._store.compiled if request.param == "library" else None
    return lambda copies: copies.begin(library)


def test_copies_are_made_when_a_pass_begins_each_in_a_storage_of_its_own(begin: Begin) -> None:
    parameters = [nn.Parameter(torch.randn(3 + n)) for n in range(3)]
    copies = SmallCopies()
    begin(copies)
    assert [copies.of(p, p._version) for p in parameters] == [None] * 3
    begin(copies)
    found = [copies.of(p, p._version) for p in parameters]
    assert all(
        one is not None and torch.equal(one, p) for one, p in zip(found, parameters, strict=True)
    )
    stored = [one.untyped_storage() for one in found if one is not None]
    assert [one.nbytes() for one in stored] == [parameter.nbytes for parameter in parameters]
    with torch.no_grad():
        parameters[1].zero_()
    assert copies.of(parameters[1], parameters[1]._version) is None
    assert found[1] is not None
    assert found[1].any(), "an older recipe reads what was there"


def test_memory_of_copies_is_used_again_once_no_recipe_reads_them(begin: Begin) -> None:
    copies, parameters = SmallCopies(), [nn.Parameter(torch.randn(8)) for _ in range(3)]

    def read() -> list[torch.Tensor]:
        found = [copies.of(parameter, parameter._version) for parameter in parameters]
        return [one for one in found if one is not None]

    read()
    begin(copies)
    held, *others = read()
    places, bits = [one.data_ptr() for one in others], held.clone()
    del others
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(2)
    begin(copies)
    first, *others = read()
    assert torch.equal(held, bits)
    assert first.data_ptr() != held.data_ptr()
    assert [one.data_ptr() for one in others] == places
    assert all(torch.equal(*pair) for pair in zip([first, *others], parameters, strict=True))


@pytest.mark.parametrize("other", [torch.randn(4), torch.randn(8).double()], ids=["size", "type"])
def test_memory_of_copies_is_not_used_for_another(begin: Begin, other: torch.Tensor) -> None:
    copies, parameter = SmallCopies(), nn.Parameter(torch.randn(8))
    copies.of(parameter, parameter._version)
    begin(copies)
    assert copies.of(parameter, parameter._version) is not None
    parameter.data = other
    begin(copies)
    found = copies.of(parameter, parameter._version)
    assert found is not None
    assert found.dtype is other.dtype
    assert torch.equal(found, other)


def test_a_parameter_that_is_not_read_any_more_is_let_go(begin: Begin) -> None:
    copies = SmallCopies()
    copies.of(nn.Parameter(torch.ones(2)), 0)
    for _ in range(8):
        begin(copies)
    assert not copies._wanted


def test_a_parameter_whose_bytes_were_taken_away_is_not_copied(begin: Begin) -> None:
    copies = SmallCopies()
    parameter = nn.Parameter(torch.ones(2))
    copies.of(parameter, 0)
    parameter.untyped_storage().resize_(0)
    begin(copies)
    assert copies.of(parameter, parameter._version) is None


def test_copies_are_made_in_the_type_in_which_they_are_read(begin: Begin) -> None:
    copies, parameter = SmallCopies(), nn.Parameter(torch.randn(8))
    types = [None, torch.bfloat16, torch.float64]
    for dtype in types:
        copies.of(parameter, parameter._version, dtype)
    begin(copies)
    for dtype in types:
        found = copies.of(parameter, parameter._version, dtype)
        assert found is not None
        assert found.dtype is (dtype or torch.float32)
        assert torch.equal(found, parameter.to(found.dtype))


def test_statistics_that_several_recipes_read_are_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under autocast each of three linear layers casts what the norm before them has made."""
    copied = []
    own = HeldSource.own

    def counted(self: HeldSource, copy: torch.Tensor | None) -> None:
        if not isinstance(self.tensor, nn.Parameter):
            copied.append(tuple(self.tensor.size()))
        own(self, copy)

    monkeypatch.setattr(HeldSource, "own", counted)
    torch.manual_seed(0)
    norm, parts = nn.LayerNorm(WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    reads = []

    def read(self: Reader, tensor: torch.Tensor) -> Recipe | None:
        recipe = found(self, tensor)
        reads.append(recipe is not None and recipe.kind)
        return recipe

    found = Reader.read
    monkeypatch.setattr(Reader, "read", read)
    with Swapper(SteadyStandIn(), budget_bytes=10**12, link=SLOW, min_bytes=4096):
        for _ in range(8):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16):
                y = norm(x)
                loss = sum(part(y).square().sum() for part in parts)
            loss.backward()
    assert reads.count("cast") >= 3, "the casts have recipes"
    assert not copied


@pytest.mark.parametrize("begin", [0, 2])
def test_a_recomputed_call_reads_a_copy_of_the_whole_storage(begin: int) -> None:
    """Operations are run again on storages, so an offset has to be the same in the copy."""
    parameter = nn.Parameter(torch.randn(begin + 4)[begin:])
    copies = SmallCopies()
    copies.begin()
    copies.of(parameter, parameter._version)
    copies.begin()
    backend = SteadyStandIn()
    calls = ModuleCalls(Store(backend), copies, lambda m: None, lambda c, r: None)
    copy = calls.copy_of(parameter).tensor
    assert torch.equal(copy, parameter)
    assert copy.storage_offset() == begin
    assert copy.untyped_storage().nbytes() == parameter.untyped_storage().nbytes()
