"""In the middle of a governed run, model and optimizer are what they are in the plain run: they are
pickled, scripted, exported and copied alike, and load where there is no kilter.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import kilter
from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.state import StateMover
from kilter.memory.engine.weights import WeightMover
from kilter.memory.plan.problem import H200_PCIE5, Link

MOMENTS = ("before forward", "before backward", "before the step", "after the step")
WIDTH = 32
SHOWS_SAVED = hasattr(torch._C._autograd.SavedTensor, "data")
"""PyTorch 2.8 does not show what its nodes saved, so that little is recomputed."""
SLOW = Link(to_host_bytes_per_s=1e4, to_device_bytes_per_s=1e4, both_bytes_per_s=2e4)
"""What can be recomputed is."""
LOOKED_AT = range(11, 19)
"""Iterations, each at one moment, so that no look finds what an earlier one of its iteration has
brought back; at each moment in two of them."""


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    """Weights stay in a process that compiles, and other tests do."""
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None:
        compiler.counters.clear()


def network() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [
        layer
        for number in range(4)
        for layer in (
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH, elementwise_affine=bool(number % 2)),
            nn.GELU(),
        )
    ]
    return nn.Sequential(*layers)


class Engines(ExitStack):
    """All movers, each with something to do."""

    def __init__(self) -> None:
        super().__init__()
        self.swapper = Swapper(CpuStandIn(), budget_bytes=40_000, link=SLOW, min_bytes=256)
        self.weights = WeightMover(CpuStandIn(), link=H200_PCIE5, min_bytes=256, own_hooks=False)

        def before_update(parameters: Any) -> None:
            found = list(parameters)
            self.swapper.before_update(found)
            self.weights.before_update(found)

        self.state = StateMover(
            CpuStandIn(),
            link=H200_PCIE5,
            room_bytes=0,
            bucket_bytes=2 * 4 * WIDTH * WIDTH,
            min_bytes=256,
            before_update=before_update,
        )

    def __enter__(self) -> Engines:
        self.enter_context(self.state)
        self.enter_context(self.swapper)
        self.enter_context(self.weights)
        assert self.swapper.hooks.stand_behind(self.weights.around)
        self.callback(lambda: self.swapper.hooks.stand_behind(lambda pack, unpack: (pack, unpack)))
        return self

    def check(self) -> None:
        assert self.swapper.report().recomputed > 0 or not SHOWS_SAVED
        assert self.weights.report().most_offloaded_bytes > 0
        assert self.state.report().offloaded_bytes > 0


def moments(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str]]:
    for number in range(20):
        torch.manual_seed(number)
        yield number, MOMENTS[0]
        loss = net(torch.randn(64, WIDTH)).square().mean()
        yield number, MOMENTS[1]
        loss.backward()
        yield number, MOMENTS[2]
        optimizer.step()
        optimizer.zero_grad()
        yield number, MOMENTS[3]


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def values_of(net: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in net.state_dict().values()]


def scripted(net: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        made = torch.jit.script(net)
    with torch.no_grad():
        return [made(torch.ones(2, WIDTH)), *values_of(made)]


def traced(net: nn.Module) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", DeprecationWarning)
        made = torch.jit.trace(net, torch.ones(2, WIDTH))
        return [made(torch.ones(2, WIDTH)), *values_of(made)]


def exported(net: nn.Module) -> Any:
    made = torch.export.export(net, (torch.ones(2, WIDTH),))
    with torch.no_grad():
        found = made.module()(torch.ones(2, WIDTH))
    return [[node.name for node in made.graph.nodes], found, *made.state_dict.values()]


def looked_at(net: nn.Module) -> Any:
    hooks = [name for name in vars(nn.Module()) if "hooks" in name]
    return [
        [type(module).__qualname__ for module in net.modules()],
        [sorted(vars(module)) for module in net.modules()],
        [[len(getattr(module, name)) for name in hooks] for module in net.modules()],
        [sorted(vars(p)) for p in net.parameters()],
        [p._backward_hooks for p in net.parameters()],
    ]


USES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "deepcopy": lambda net, _: values_of(copy.deepcopy(net)),
    "pickle": lambda net, _: values_of(pickle.loads(pickle.dumps(net))),
    "script": lambda net, _: scripted(net),
    "trace": lambda net, _: traced(net),
    "export": lambda net, _: exported(net),
    "look": lambda net, _: looked_at(net),
    "optimizer": lambda _, optimizer: list(copy.deepcopy(optimizer).state.values()),
    "state_dict": lambda net, optimizer: copy.deepcopy([net.state_dict(), optimizer.state_dict()]),
    "classes": lambda _, optimizer: [
        [type(value) for value in (optimizer, optimizer.state, *optimizer.state.values())],
        [type(value) for state in optimizer.state.values() for value in state.values()],
        sorted(vars(optimizer)),
    ],
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return type(one) is type(other) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def looks(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The moments to look at, in the middle of a training."""
    for number, moment in moments(net, optimizer):
        if number in LOOKED_AT and moment == MOMENTS[number % len(MOMENTS)]:
            yield


@pytest.mark.parametrize("use", USES)
def test_used_in_the_middle_of_a_run(use: str) -> None:
    found = []
    for engines in (ExitStack(), Engines()):
        net = network()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        seen: list[Any] = []
        with engines:
            for _ in looks(net, optimizer):
                if isinstance(engines, Engines):
                    engines.check()
                seen.append(USES[use](net, optimizer))
        found.append([seen, values_of(net)])
    assert same(*found)


PLAIN = """
import io, pickle, sys, torch
sys.modules["kilter"] = None  # whoever imports it is told that there is none
for data in pickle.load(open(sys.argv[1], "rb")):
    torch.load(io.BytesIO(data), weights_only=False)
"""


def test_files_load_without_kilter(tmp_path: Path) -> None:
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    files = []
    with Engines() as engines:
        for _ in looks(net, optimizer):
            engines.check()
            parameters = list(net.parameters())
            files += map(saved, (net, optimizer, optimizer.state, parameters, net.state_dict()))
    path = tmp_path / "all.pickle"
    path.write_bytes(pickle.dumps(files))
    subprocess.run([sys.executable, "-I", "-c", PLAIN, str(path)], check=True, timeout=900)


def swapped_in_the_middle(governed: bool) -> tuple[list[Tensor], int]:
    """What a training ends with whose parameters change places with new ones, and how many tensors
    were recomputed."""
    torch.manual_seed(3)
    net = nn.Sequential(*(m for _ in range(5) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    swapper = Swapper(CpuStandIn(), budget_bytes=40_000, link=SLOW, min_bytes=256)
    state = StateMover(CpuStandIn(), link=H200_PCIE5, room_bytes=0, min_bytes=256)
    with ExitStack() as engines:
        if governed:
            engines.enter_context(state)
            engines.enter_context(swapper)
        for number in range(20):
            torch.manual_seed(number)
            net(torch.randn(64, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number in (10, 15):
                net.double().float()
                other = nn.Parameter(2 * net[0].weight.detach())
                torch.utils.swap_tensors(net[0].weight, other)
    values = [*net.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    return [value.detach().clone() for value in values], swapper.report().recomputed


def test_parameters_may_be_swapped() -> None:
    """`torch.utils.swap_tensors` refuses tensors to which somebody has a weak reference."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        plain, _ = swapped_in_the_middle(governed=False)
        ours, recomputed = swapped_in_the_middle(governed=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert same(ours, plain)
    assert recomputed > 0 or not SHOWS_SAVED


def test_a_mode_of_the_program_sees_nothing_at_the_end_of_an_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also once there is a plan, when what is in force is looked at after each step."""
    monkeypatch.chdir(tmp_path)

    class Counts(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Counter[str] = Counter()

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen[str(function)] += 1
            return function(*args, **(kwargs or {}))

    def train() -> Counter[str]:
        weight = torch.nn.Parameter(torch.full((512, 512), 0.01))
        optimizer = torch.optim.SGD([weight], lr=0.01)
        x = torch.ones(512, 512)
        for _ in range(12):
            with Counts() as mode:
                y = x @ weight
                for _ in range(4):
                    y = y.sin()
                y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return mode.seen

    plain = train()
    with kilter.govern(memory_budget="3MiB", device="null", out="run"):
        governed = train()
    assert json.loads(Path("run/report.json").read_bytes())["memory"]["pass_out_bytes"] > 0
    assert governed == plain
