"""A memory budget under what people's training loops do: the numbers are those of the plain run.

Every loop runs twice, plainly and governed, and all losses and parameters are compared bit by bit.
Without a GPU the device is a stand-in that fills memory given up with a pattern that no result
survives.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kilter
from kilter.core.events import AnyEvent, Failed, Fitted, Moved, read_events
from kilter.testing.stand_in import small_tensors
from kilter.testing.warm_python import WarmPython

WIDTH, ROWS = 64, 512
ACTIVATION_BYTES = 4 * WIDTH * ROWS
"""128 KiB: smaller data are left alone, here in place of those below 1 MiB."""
Train = Callable[[], list[bytes]]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("KILTER", "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    undo = small_tensors(ACTIVATION_BYTES)
    yield
    undo()


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.drop, self.down = nn.Dropout(0.1), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def net(blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(WIDTH, 8))


def raw(*tensors: torch.Tensor) -> list[bytes]:
    return [t.detach().float().contiguous().numpy().tobytes() for t in tensors]


def batch(step: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))


def loop(
    model: nn.Module, step: Callable[[nn.Module, torch.optim.Optimizer, int], torch.Tensor], n: int
) -> list[bytes]:
    """Losses, and the parameters at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    losses = [step(model, optimizer, i) for i in range(n)]
    return raw(*losses, *model.parameters())


def ordinary(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(batch(i)).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def events(run: Path | None) -> list[AnyEvent]:
    assert run is not None
    return list(read_events(run / "events-rank0.jsonl"))


def same(train: Train, *, budget: str = "50%", planned: bool = True, kept: bool = True) -> Moved:
    """Run it plainly and governed; what was moved. `kept`: no pass may exceed the budget."""
    plain = train()
    with kilter.govern(memory_budget=budget, device="null", out="run") as job:
        governed = train()
    assert governed == plain
    record = events(job.run)
    assert [event for event in record if isinstance(event, Failed)] == []
    (*_, moved) = (event for event in record if isinstance(event, Moved))
    if planned:
        assert any(isinstance(event, Fitted) for event in record)
        assert moved.planned > 0
        assert moved.out_bytes > 0
        assert moved.peak_bytes is not None
        assert moved.budget_bytes is not None
        assert moved.peak_bytes <= moved.budget_bytes or not kept
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    return moved


def test_an_ordinary_loop() -> None:
    plain = loop(net(), ordinary, 14)
    moved = same(lambda: loop(net(), ordinary, 14))
    assert loop(net(), ordinary, 14) == plain  # nothing stays behind
    assert moved.plain_peak_seen
    assert moved.deviations == 0
    assert moved.late == 0


def test_a_budget_in_bytes_holds_from_the_first_iteration_on() -> None:
    moved = same(lambda: loop(net(), ordinary, 12), budget="1.5MiB")
    assert moved.budget_bytes == 12 * ACTIVATION_BYTES
    assert not moved.plain_peak_seen
    assert moved.spilled > 0


def test_gradient_accumulation() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> torch.Tensor:
        optimizer.zero_grad()
        for part in range(3):
            loss = model(batch(3 * i + part)).square().mean() / 3
            loss.backward()
        optimizer.step()
        return loss

    same(lambda: loop(net(), step, 10))


def test_autocast_and_a_gradient_scaler_that_skips_steps() -> None:
    def train() -> list[bytes]:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=4)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.cat(batch(i, 2 * ROWS).chunk(4, 1))).float().square().mean()
            scaled = scaler.scale(loss * float("inf") if i == 9 else loss)
            scaled.backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss

        torch.manual_seed(0)
        narrow = nn.Sequential(Block(WIDTH // 4), nn.GELU())  # bfloat16 is slow on CPUs
        return loop(narrow, step, 12)

    same(train)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_in_the_users_code(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            for number, layer in enumerate(self.inner):
                x = layer(x) if number % 2 else checkpoint(layer, x, use_reentrant=reentrant)
            return x

    same(lambda: loop(Checkpointed(), ordinary, 14), budget="70%", planned=False)


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inner = nn.Embedding(512, WIDTH), net(3)[:-1]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            index = x[:, 0].abs().mul(100).long().clamp(max=511)
            return nn.functional.linear(self.inner(self.table(index)), self.table.weight)

    def train() -> list[bytes]:
        torch.manual_seed(0)
        return loop(Tied(), ordinary, 12)

    same(train)


def test_evaluation_between_steps() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> torch.Tensor:
        loss = ordinary(model, optimizer, i)
        if i % 3 == 0:
            model.eval()
            with torch.no_grad():
                loss = loss + model(batch(1000 + i)).square().mean()
            held = model(batch(2000 + i)).square().mean()  # with a graph that nobody walks
            loss = loss + held.detach()
            model.train()
        return loss

    # A graph that no backward pass follows has no plan of its own, and its pass exceeds the budget.
    moved = same(lambda: loop(net(), step, 18), kept=False)
    assert moved.peak_bytes is not None
    assert moved.plain_peak_bytes is not None
    assert moved.peak_bytes < moved.plain_peak_bytes


def test_a_checkpoint_is_saved_while_data_are_away_and_loaded_again() -> None:
    def train() -> list[bytes]:
        model, saved = net(), io.BytesIO()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(1)
        losses = []
        for i in range(14):
            optimizer.zero_grad()
            loss = model(batch(i)).square().mean()
            if i == 10:  # between forward and backward
                torch.save({"model": model.state_dict(), "opt": optimizer.state_dict()}, saved)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        found = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["opt"])
        losses += [ordinary(model, optimizer, i) for i in range(3)]
        return raw(*losses, *model.parameters())

    same(train)


def test_an_exception_in_the_middle_of_forward_and_going_on() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = net(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            for number, layer in enumerate(self.inner):
                if self.calls % 9 == 0 and number == 3:
                    raise OSError("the reader of the data failed")
                x = layer(x)
            return x

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> torch.Tensor:
        try:
            return ordinary(model, optimizer, i)
        except OSError:
            return torch.zeros(())

    same(lambda: loop(Fails(), step, 20))


def test_sizes_that_change() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch(i, ROWS if i % 2 else ROWS + 64)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    same(lambda: loop(net(), step, 24))


def test_convolutions_with_batch_norm() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.relu(x + self.norm(self.first(x)), inplace=True)

    def train() -> list[bytes]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Residual() for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        losses = []
        for i in range(12):
            optimizer.zero_grad()
            x = torch.randn(2, 16, 32, 32, generator=torch.Generator().manual_seed(i))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return raw(*losses, *model.parameters(), *model.buffers())

    same(train)


def test_two_graphs_at_once_and_a_second_backward() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> torch.Tensor:
        optimizer.zero_grad()
        first, second = model(batch(i)).square().mean(), model(batch(i + 100)).abs().mean()
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        optimizer.step()
        return first + second

    same(lambda: loop(net(2), step, 14), budget="70%")


def test_gradients_of_gradients() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> torch.Tensor:
        optimizer.zero_grad()
        x = batch(i).requires_grad_()
        out = model(x).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out + slope.square().sum()
        loss.backward()
        optimizer.step()
        return loss

    same(lambda: loop(net(2), step, 14), budget="70%", planned=False)


def test_functional_transforms_still_work() -> None:
    """`torch.func.grad` refuses hooks on saved tensors; ours step out of its way."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> torch.Tensor:
        loss = ordinary(model, optimizer, i)
        values = dict(model.named_parameters())
        slopes = torch.func.grad(
            lambda p: torch.func.functional_call(model, p, batch(i)).square().mean()
        )(values)
        return loss + sum(slope.sum() for slope in slopes.values())

    same(lambda: loop(net(2), step, 12), budget="70%")


def test_a_program_whose_first_large_tensor_is_saved_within_a_backward() -> None:
    """What happens to a thread's hooks within a backward is undone when it ends."""

    def train() -> list[bytes]:
        model = net(2)
        values = dict(model.named_parameters())
        found, pull = torch.func.vjp(
            lambda p: torch.func.functional_call(model, p, batch(0)), values
        )
        (slopes,) = pull(torch.ones_like(found))  # of parameters that need gradients themselves
        first = raw(found, *slopes.values())
        del found, pull, slopes
        return first + loop(model, ordinary, 14)

    same(train)


def test_the_programs_own_hooks_on_saved_tensors_come_first() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> torch.Tensor:
        optimizer.zero_grad()
        x = model[0](batch(i))
        with torch.autograd.graph.save_on_cpu():
            x = model[1](x)
        loss = model[2:](x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    same(lambda: loop(net(), step, 14), budget="70%")


def test_a_training_in_another_thread() -> None:
    def train() -> list[bytes]:
        found: list[bytes] = []
        thread = threading.Thread(target=lambda: found.extend(loop(net(), ordinary, 14)))
        thread.start()
        thread.join()
        return found

    same(train)


def test_a_transformer_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers", reason="not a dependency")
    config = transformers.GPT2Config(
        n_layer=3, n_head=4, n_embd=128, vocab_size=512, n_positions=256, use_cache=False
    )

    def train() -> list[bytes]:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for i in range(18):
            optimizer.zero_grad()
            tokens = torch.randint(0, 512, (2, 256), generator=torch.Generator().manual_seed(i))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return raw(*losses, *model.parameters())

    same(train)


# Several processes, started by torchrun, talking through gloo

HEAD = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
model = nn.Sequential(*(Block() for _ in range(4)))
"""
TAIL = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(rank)
losses = []
for _ in range(14):
    optimizer.zero_grad()
    loss = model(torch.randn(512, 64, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item().hex())
total = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
losses += [p.double().sum().item().hex() for p in total]
with open(f"{sys.argv[1]}-{rank}", "w") as file:
    file.write(" ".join(losses))
dist.barrier()
if sys.argv[1] == "plain":
    os._exit(0)  # gloo's threads sometimes abort a process that is done and ends as usual
dist.destroy_process_group()
"""


def both_ranks(warm: WarmPython, tmp_path: Path, wrap: str) -> tuple[list[Moved], str]:
    """Run it plainly and governed; what each rank moved, and stderr."""
    script = tmp_path / "train.py"
    script.write_text(HEAD + wrap + TAIL)
    small = ("-m", "kilter.testing.stand_in", "--min-bytes", str(ACTIVATION_BYTES))
    ours = (*small, "run", "--memory-budget", "50%", "--device", "null", "--out", "run")
    for command in (("train.py", "plain"), (*ours, "train.py", "governed")):
        ranks = warm.run_ranks(2, command, cwd=tmp_path)
        assert [done.returncode for done in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    said = ranks[0].stderr + ranks[1].stderr
    moved = []
    for rank in range(2):
        assert (tmp_path / f"plain-{rank}").read_text() == (
            tmp_path / f"governed-{rank}"
        ).read_text()
        record = list(read_events(tmp_path / "run" / f"events-rank{rank}.jsonl"))
        assert [event for event in record if isinstance(event, Failed)] == []
        moved.append([event for event in record if isinstance(event, Moved)][-1])
    return moved, said


def test_distributed_data_parallel(tmp_path: Path, warm: WarmPython) -> None:
    wrap = "model = nn.parallel.DistributedDataParallel(model)\n"
    moved, said = both_ranks(warm, tmp_path, wrap)
    assert all(one.planned > 0 and one.out_bytes > 0 for one in moved)
    assert "ranks: peak of each: 0: " in said
    assert said.count("kilter: memory: peak") == 1


def test_fully_sharded_data_parallel(tmp_path: Path, warm: WarmPython) -> None:
    wrap = """
from torch.distributed.fsdp import fully_shard
for block in model:
    fully_shard(block)
fully_shard(model)
"""
    moved, _ = both_ranks(warm, tmp_path, wrap)
    assert all(one.planned > 0 and one.out_bytes > 0 for one in moved)


def test_a_script_that_ends_while_it_runs_without_us_leaves_no_hooks() -> None:
    with kilter.govern(memory_budget="50%", device="null", out="run"):
        loop(net(), ordinary, 5)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


# Compiled


@pytest.fixture
def compiler() -> Iterator[None]:
    """Leaves no trace of itself: engines look whether the program compiles."""
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler itself
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python")
@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # other tests of a worker leave hooks
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_modules(whole: bool) -> None:
    """Autograd sees one operation for each compiled region. What regions save moves like anything
    else, and the compiler has them save less; while it is asked how much less, nothing changes."""

    def train() -> list[bytes]:
        torch._dynamo.reset()
        model: nn.Module = net()
        if whole:
            model = torch.compile(model, backend="aot_eager")
        else:
            for block in model.children():
                block.compile(backend="aot_eager")
        return loop(model, ordinary, 14)

    assert same(train, planned=False, budget="60%").compiled
