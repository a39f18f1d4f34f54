"""`kilter.size`: what it finds from shapes is what the engine observes on real data."""

from __future__ import annotations

import copy
import functools
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import kilter
from kilter.app.cli import size
from kilter.app.cli.main import main
from kilter.core.errors import UsageError
from kilter.core.label import Label
from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.plan.problem import H200_PCIE5
from kilter.memory.size import MOST_BATCH, LargestBatch, largest_batch

WIDTH = 512
SQUARE = WIDTH * WIDTH * 4


class Net(nn.Module):
    """A chain, a residual, a view, a storage saved twice, batch norm, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.batch = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        h = torch.nn.functional.gelu(h) * h + h.t().exp()
        return self.tied(self.batch(self.down(h)).relu()) + x


def observed(net: nn.Module, x: torch.Tensor) -> object:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    swapper = Swapper(CpuStandIn(), budget_bytes=10**12, link=H200_PCIE5)
    with swapper:
        for _ in range(8):
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (found,) = swapper.records()
    return found


@pytest.mark.usefixtures("recorder")
def test_the_same_events_and_data_as_in_a_real_pass() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(WIDTH, WIDTH)
    real = observed(net, x)
    found = kilter.size(net, x, optimizer="sgd", autocast="off").shapes.record
    assert found.events == real.events
    assert found.names == real.names
    assert [d.size_bytes for d in found.data] == [d.size_bytes for d in real.data]
    assert [d.needed_at for d in found.data] == [d.needed_at for d in real.data]
    assert [d.free_at for d in found.data] == [d.free_at for d in real.data]
    assert [d.recipe for d in found.data] == [d.recipe for d in real.data]


def test_what_a_chain_takes_by_hand() -> None:
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    x = torch.randn(WIDTH, WIDTH)
    found = kilter.size(net, x, optimizer="sgd-momentum", autocast="off", loss=lambda y: y.sum())
    shapes = found.shapes
    assert shapes.weights_bytes == shapes.gradients_bytes == shapes.state_bytes == 6 * SQUARE
    assert shapes.inputs_bytes == SQUARE
    assert shapes.saved_bytes == 6 * SQUARE  # the input, and what five of the layers returned
    # From backward's first layer on: weights, momentum, what is saved (each layer's goes when its
    # gradient comes), a gradient of a weight, and the gradients of a layer's input and output.
    assert found.peak_bytes == pytest.approx((6 + 6 + 6 + 3) * SQUARE, abs=1024)
    assert found.label is Label.SIMULATED


def test_nothing_is_allocated_and_the_model_is_as_it_was() -> None:
    net, x = Net(), torch.randn(WIDTH, WIDTH)
    before = copy.deepcopy(net.state_dict())
    kilter.size(net, x)
    after = net.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in net.parameters())
    with torch.device("meta"):  # more than any machine has
        huge = nn.Sequential(*(nn.Linear(2**17, 2**17) for _ in range(4)))
        tokens = torch.randn(2**14, 2**17)
    assert kilter.size(huge, tokens).peak_bytes > 2**40


class Checkpointed(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def test_blocks_that_are_checkpointed_under_autocast() -> None:
    """They run again in backward, with the casts of the same weights."""
    x = torch.randn(4 * WIDTH, WIDTH)
    plain, again = (
        kilter.size(Checkpointed(checkpointed=checkpointed), x) for checkpointed in (False, True)
    )
    assert again.shapes.saved_bytes < plain.shapes.saved_bytes / 2
    assert again.peak_bytes < plain.peak_bytes
    assert again.shapes.gradients_bytes == plain.shapes.gradients_bytes


class Attending(nn.Module):
    def __init__(self, dropout: float, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, dropout, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.attention(x, x, x, need_weights=self.need_weights)[0]
        return found


def test_attention_keeps_its_matrix_only_where_a_gpu_does() -> None:
    """With dropout a CPU has no kernel that computes attention without it."""
    x = torch.randn(4, WIDTH, 64)
    matrix_bytes = 4 * 4 * SQUARE
    kernel, dropped, weights = (
        kilter.size(Attending(*how), x, autocast="off").shapes.saved_bytes
        for how in ((0.0, False), (0.1, False), (0.1, True))
    )
    assert kernel == dropped < matrix_bytes < weights


def test_meta_tensors_that_only_the_loss_knows() -> None:
    with torch.device("meta"):
        net, x, labels = nn.Linear(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH), torch.zeros(WIDTH)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, labels.long())

    found = kilter.size(net, x, loss=loss, autocast="off")
    assert found.peak_bytes > found.shapes.weights_bytes * 4


def test_the_models_own_loss_is_taken() -> None:
    class Answer(dict):  # type: ignore[type-arg]
        loss: torch.Tensor

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Answer:
            out = self.layer(x)
            answer = Answer(logits=out)
            answer.loss = (out - labels).square().mean()
            return answer

    x = torch.randn(WIDTH, WIDTH)
    found = kilter.size(WithLoss(), x=x, labels=x, autocast="off")
    assert any("Pow" in name for name in found.shapes.record.names)


def test_a_budget_is_met_by_moving_as_little_as_does_it() -> None:
    layers = [m for _ in range(16) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    found = kilter.size(nn.Sequential(*layers), torch.randn(16 * WIDTH, WIDTH), optimizer="adamw")
    fits = found.fit(found.peak_bytes)
    assert fits.fits
    assert fits.plan is None
    least = found.least_bytes
    assert [size for _, size in least] == sorted((size for _, size in least), reverse=True)
    between = found.fit((found.peak_bytes + least[0][1]) // 2)
    assert between.fits
    assert between.how == "activations offloaded or recomputed"
    assert between.plan is not None
    assert between.plan.iteration_s >= between.compute_s * (1 - 1e-9)
    assert between.plan.peak_bytes <= between.budget_bytes
    assert between.division is not None
    assert between.division.pieces in (2, 4)
    assert between.division.plan.swapped == between.division.plan.recomputed == 0
    deeper = found.fit(int(1.05 * least[-1][1]))
    assert deeper.fits
    assert "optimizer state on the host" in deeper.how
    never = found.fit(least[-1][1] // 2)
    assert not never.fits
    assert never.plan is None


def test_no_pieces_where_batch_norm_would_see_another_batch() -> None:
    layers = (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU())
    found = kilter.size(nn.Sequential(*layers * 4), torch.randn(16 * WIDTH, WIDTH))
    fit = found.fit((found.peak_bytes + found.least_bytes[0][1]) // 2)
    assert fit.fits
    assert fit.division is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "lion"}, "adamw"),
        ({"autocast": "fp8"}, "bf16"),
        ({"loss": lambda y: y.sum() * y.max().item()}, "only real data have"),
    ],
)
def test_what_cannot_be_sized_is_said(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        kilter.size(nn.Linear(8, 8), torch.randn(4, 8), **options)


def test_nothing_to_train_is_said() -> None:
    with pytest.raises(UsageError, match="no parameter that is trained"):
        kilter.size(nn.Linear(8, 8).requires_grad_(False), torch.randn(4, 8))
    with pytest.raises(UsageError, match="no tensor with a gradient: give a loss"):
        kilter.size(_Integers(), torch.randn(4, 8))


def test_an_error_of_the_model_is_raised_and_not_logged_as_well(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(RuntimeError, match="reduction dim"):
        kilter.size(nn.Linear(8, 8), torch.randn(4, 9))
    assert "Traceback" not in caplog.text


class _Integers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).argmax(1)


SCRIPT = """
import torch
from torch import nn

def make(batch=512):
    net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))
    x = torch.randn(batch, 1024)
    assert x.is_meta and net[0].weight.is_meta
    return net, x

def wrong():
    return nn.Linear(2, 2)

def no_loss():
    return nn.Linear(2, 2), torch.randn(2, 2), 5

value = 3
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "sized_models.py"
    path.write_text(SCRIPT)
    return path


def test_the_verb_prints_each_batch(script, capsys, monkeypatch) -> None:
    monkeypatch.setattr(size, "largest_batch", lambda sized, budget_bytes: None)
    assert main(["size", f"{script}:make", "--batch", "256,512", "--memory-budget", "256MiB"]) == 0
    out = capsys.readouterr().out
    assert "batch 256" in out
    assert "batch 512" in out
    assert "fits as it is" in out


def test_the_verb_in_json(script, capsys) -> None:
    assert main(["size", f"{script}:make", "--memory-budget", "75%", "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "kilter.size/1"
    assert found["label"] == "simulated"
    (row,) = found["rows"]
    assert row["weights_bytes"] == 3 * 4 * (1024 * 1024 + 1024)
    assert row["fit"]["budget_bytes"] == int(0.75 * row["peak_bytes"])
    assert [line["bytes"] for line in row["least_bytes"]]


def test_a_budget_that_nothing_meets_is_exit_code_1(script, capsys) -> None:
    assert main(["size", f"{script}:make", "--memory-budget", "2MiB"]) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{script}"], "FILE.py:FUNCTION"),
        (["{script}:nothing"], "has no function nothing"),
        (["{script}:value"], "has no function value"),
        (["{script}:wrong"], "must return a model"),
        (["missing.py:make"], "can't open file"),
        (["no_such_module_here:make"], "there is no module"),
        (["{script}:no_loss"], "the loss is a int"),
        (["{script}:make", "--batch", "a,b"], "write sizes like"),
        (["{script}:make", "--batch", "0"], "at least one sample"),
        (["{script}:make", "--memory-budget", "auto"], "give a size or a share"),
        (["{script}:make", "--memory-budget", "lots"], "is not a memory budget"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(script, capsys, arguments, words) -> None:
    assert main(["size", *(text.format(script=script) for text in arguments)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


TINY = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1)), (torch.randn(4, 10),)

def needs(width):
    return make()

def batched(batch=8):
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
    return model, (torch.randn(batch, 64),)

def two():
    return *make(), lambda y, target: y.sum()

def nothing():
    return *make(), lambda y: None

def sparse():
    return nn.Embedding(10, 64, sparse=True), (torch.randint(10, (4,)),)

def prints():
    print("made")
    return make()

def ignores(batch=8):
    return make()

class Complex(nn.Linear):
    def forward(self, x):
        return super().forward(x).to(torch.complex64)

def imaginary():
    return Complex(4, 4), (torch.randn(2, 4),)

class Hooked(nn.Linear):
    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)

def hooked():
    return Hooked(4, 4), (torch.randn(2, 4),)
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    (tmp_path / "tiny.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)


def test_a_model_without_a_tensor_of_a_mebibyte_has_a_size(tiny, capsys):
    assert main(["size", "tiny.py:make", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    weights = 4 * (10 * 10 + 10 + 10 + 1)
    assert row["weights_bytes"] == row["gradients_bytes"] == weights
    # more than weights, gradients and AdamW's two moments, which its step needs all at once
    assert row["peak_bytes"] >= 4 * weights
    assert row["least_bytes"][-1]["bytes"] <= row["peak_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny.py:needs"], "needs is called without arguments: missing a required argument"),
        (["tiny.py:make", "--batch", "4"], "make is called with batch=N alone: got an unexpected"),
        (["tiny.py:two"], "the loss has to take the model's output alone"),
        (["tiny.py:nothing"], "the loss has to be a tensor; it is a NoneType"),
        (["tiny.py:sparse"], "makes a sparse tensor: its memory cannot be known from shapes"),
        (["tiny.py:imaginary"], "the model returns complex tensors alone: give a loss, which has"),
        (["tiny.py:hooked"], "or saved-tensor hooks of the model itself (save_on_cpu, say) take"),
    ],
)
def test_a_builder_that_cannot_be_used_is_one_sentence(tiny, arguments, message, capsys):
    assert main(["size", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_what_the_builder_prints_is_no_part_of_the_json(tiny, capsys):
    assert main(["size", "tiny.py:prints", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["schema"] == "kilter.size/1"
    assert told.err == "made\n"


def test_the_largest_batch_that_fits_is_the_answer(tiny, capsys, monkeypatch):
    budget_bytes = 4 * 2**20
    found = {}  # searched for once

    def searched(sized, budget):
        return found.get(budget) or found.setdefault(budget, largest_batch(sized, budget))

    monkeypatch.setattr(size, "largest_batch", searched)
    assert main(["size", "tiny.py:batched", "--memory-budget", str(budget_bytes), "--json"]) == 0
    largest = json.loads(capsys.readouterr().out)["largest_batch"]
    count = largest["as_it_is"]
    assert 0 < count <= largest["with_plan"]
    assert main(["size", "tiny.py:batched", "--memory-budget", "4MiB"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"largest batch      {count} as it")
    sizes = f"{count},{count + 1},{largest['with_plan']},{largest['with_plan'] + 1}"
    asked = ["--batch", sizes, "--memory-budget", str(budget_bytes), "--json"]
    assert main(["size", "tiny.py:batched", *asked]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["peak_bytes"] <= budget_bytes for row in rows[:2]] == [True, False]
    assert [row["fit"]["fits"] for row in rows[2:]] == [True, False]


def test_a_batch_that_changes_nothing_has_no_largest(tiny, capsys):
    assert main(["size", "tiny.py:ignores", "--memory-budget", "1GiB"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "largest" in line)
    assert line.split(maxsplit=2)[2].startswith("unknown: ")


def test_no_pieces_of_a_batch_are_looked_for_in_search_of_the_largest(monkeypatch):
    """For thousands of samples that takes longer than all the rest."""
    net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    sized = functools.cache(lambda batch: kilter.size(net, torch.randn(batch, 512)))
    monkeypatch.setattr(size.Size, "_divided", lambda *_: pytest.fail("pieces were looked for"))
    found = largest_batch(sized, sized(8).peak_bytes + 8 * 2**20)
    assert found is not None
    assert 8 < found.as_it_is < found.with_plan


BROKEN = """
import sys
import torch
from torch import nn

def unnamed():
    return nothing

def ends():
    sys.exit(5)

class Model(nn.Linear):
    def forward(self, x):
        return self.missing(x)

def model():
    return Model(4, 4), (torch.randn(2, 4),)

def shapes():
    return nn.Linear(4, 4), (torch.randn(2, 5),)

def lines():
    raise ValueError("one\\nanother")
"""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("unnamed", "unnamed on the meta device failed in broken.py, line 7: NameError: name 'not"),
        ("ends", "ends on the meta device failed in broken.py, line 10: SystemExit: 5"),
        ("model", "the model of broken.py:model failed in broken.py, line 14: AttributeError: 'Mo"),
        ("shapes", "of the model of broken.py:shapes failed: RuntimeError: "),
        ("lines", "failed in broken.py, line 23: ValueError: one another"),
    ],
)
def test_an_error_of_the_users_code_is_one_sentence(tmp_path, monkeypatch, capsys, what, words):
    """With an exit code of its own: 1 is the answer that a model does not fit."""
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    assert main(["size", f"broken.py:{what}"]) == 3
    told = capsys.readouterr().err.splitlines()
    assert words in told[-1]


@pytest.mark.parametrize("text", ["def make(:\n", "import no_such_module_here\n", "1 / 0\n"])
@pytest.mark.parametrize("place", ["cannot.py", "cannot"])
def test_a_file_that_cannot_be_imported_is_one_sentence(tmp_path, monkeypatch, capsys, text, place):
    (tmp_path / "cannot.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "cannot", raising=False)
    assert main(["size", f"{place}:make"]) == 3
    told = capsys.readouterr().err
    assert told.startswith(f"kilter size: the import of {place} failed")
    assert told.count("\n") == 1


@pytest.mark.parametrize("largest", [0, 1, 7, 8, 9, 17, 35914, MOST_BATCH])
@pytest.mark.parametrize(
    "grown", [lambda x: x, lambda x: x**3, lambda x: x**0.3, lambda x: 0.9 if x < 1 else 1.1]
)
def test_the_largest_batch_however_sizes_grow(largest, grown):
    budget_bytes = 2**40

    def sized(batch):
        peak_bytes = int(budget_bytes * grown(batch / (largest + 0.5)))
        fits = peak_bytes <= budget_bytes
        return SimpleNamespace(
            peak_bytes=peak_bytes,
            least_bytes=[("", peak_bytes)],
            moved=lambda budget_bytes: SimpleNamespace(fits=fits, how=""),
            as_json=lambda: batch,
        )

    assert largest_batch(sized, budget_bytes).as_it_is == largest


def test_where_the_search_ends_no_batch_is_called_the_largest():
    def told(plain, moved):
        return str(LargestBatch(budget_bytes=2**30, as_it_is=plain, with_plan=moved, how="plan"))

    assert told(MOST_BATCH, MOST_BATCH).startswith(f"{MOST_BATCH} or more as it is (")
    assert told(7, MOST_BATCH).startswith(f"7 as it is, {MOST_BATCH} or more with plan (")
    assert told(0, 7).startswith("none as it is, 7 with plan (")
