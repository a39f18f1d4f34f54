"""Jobs that use `torch.compile`: the compiler is told which fraction to save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config, partitioners

import kilter
from kilter.core.events import Moved, read_events
from kilter.observe.torch_internals.partitioner import AT_ONCE
from kilter.testing.stand_in import small_tensors

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # of the compiler itself
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python"),
    pytest.mark.filterwarnings("ignore:Using `torch.compile"),
    pytest.mark.skipif(
        not hasattr(config, AT_ONCE),
        reason="this PyTorch compiles backward where an error would end the training",
    ),
]
WIDTH, ROWS = 128, 256
ACTIVATION_BYTES = 4 * WIDTH * ROWS


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """Leaves no trace of itself: engines look whether the program compiles."""
    torch._dynamo.reset()
    undo = small_tensors(ACTIVATION_BYTES)
    yield
    undo()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def train(backend: Any = "aot_eager", steps: int = 30) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block())
    compiled = torch.compile(net, backend=backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    found: list[Tensor] = []
    for _ in range(steps):
        loss = compiled(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, torch.get_rng_state()]


def governed(out: Path, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Moved]:
    with kilter.govern(memory_budget="60%", device="null", out=out):
        found = run()
    (events,) = out.glob("events*.jsonl")
    return found, [event for event in read_events(events) if isinstance(event, Moved)][-1]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_compiled_job_keeps_its_budget_by_the_compilers_own_planner(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One region for the whole model, in which nothing can be given up from outside. The fraction
    is measured, and masks of dropout are not drawn a second time."""
    plain = train()
    found, moved = governed(tmp_path / "run", train)
    assert same(found, plain)
    assert moved.budget_bytes is not None
    assert moved.plain_peak_bytes is not None
    assert moved.peak_bytes is not None
    assert 0 < moved.peak_bytes <= moved.budget_bytes < moved.plain_peak_bytes
    assert "is in force; peaks measured:" in moved.compiled
    said = capfd.readouterr().err
    assert "compiled: activation_memory_budget of torch.compile: 0." in said
    assert "the job fits" not in said
    assert config.activation_memory_budget == 1.0


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_fraction_that_cannot_be_compiled_is_taken_back(tmp_path: Path, part: str) -> None:
    """The regions run as they are written meanwhile."""

    def compiler(graph: Any, inputs: Any, *, of: str) -> Any:
        if config.activation_memory_budget < 1 and part == of:
            raise RuntimeError("the compiler has no such kernel")
        return boxed_nop(graph, inputs)

    backend = aot_autograd(
        fw_compiler=partial(compiler, of="forward"),
        bw_compiler=partial(compiler, of="backward"),
        partition_fn=partitioners.min_cut_rematerialization_partition,
    )
    plain = train(backend, 20)
    found, moved = governed(tmp_path / "run", lambda: train(backend, 20))
    assert same(found, plain)
    assert "1 is in force" in moved.compiled


def test_an_error_of_the_partitioner_leaves_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = partitioners.choose_saved_values_set

    def broken(graph: Any, nodes: Any, memory_budget: float = 1.0) -> Any:
        if memory_budget < 1:
            raise ZeroDivisionError("in the solver")
        return choose(graph, nodes, memory_budget=memory_budget)

    monkeypatch.setattr(partitioners, "choose_saved_values_set", broken)
    plain = train(steps=14)
    found, _ = governed(tmp_path / "run", lambda: train(steps=14))
    assert same(found, plain)
    assert config.activation_memory_budget == 1.0


def test_what_the_program_has_set_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # Not by `monkeypatch`, which deletes the setting afterwards: torch has none then.
    with config.patch(activation_memory_budget=0.9):
        _, moved = governed(tmp_path / "run", lambda: train(steps=14))
        assert not moved.compiled
        assert "the program has set 0.9" in capfd.readouterr().err
        assert config.activation_memory_budget == 0.9


def test_segments_do_not_stand_in_the_compilers_way(tmp_path: Path) -> None:
    """A part of the model that is compiled while calls of modules are recorded is one graph, and
    so is what is compiled anew."""
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph

    def run() -> list[Tensor]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        net = nn.Sequential(Block(), Block(), Block(), Block())
        head = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Tanh())
        compiled = torch.compile(head, backend=backend, fullgraph=True)
        optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=1e-2)
        found: list[Tensor] = []
        for step in range(18):
            x = net(torch.randn(ROWS, WIDTH))
            loss = (compiled if step > 14 else head)(x).square().mean()
            loss.backward()
            found.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return found

    plain = run()
    expected, graphs[:] = list(graphs), []
    with kilter.govern(
        memory_budget="60%", recompute="segments", device="null", out=tmp_path / "run"
    ):
        assert same(run(), plain)
    assert graphs == expected
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
