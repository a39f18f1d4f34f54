"""The loss curve of a job whose data ratio changes is that of the job without kilter, or
kilter says why it is not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FSDPModule = pytest.importorskip("torch.distributed.fsdp").FSDPModule
HERE = Path(__file__).parent
BENCHMARK = HERE.parents[1] / "benchmarks" / "share_losses.py"


def test_the_loss_curve_is_that_of_the_solo_run():
    """With clipping, a gradient scaler, learning rates by step and by epoch, and idle ranks."""
    command = [sys.executable, str(BENCHMARK), "--epochs", "3", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stderr[-4000:]
    rows = json.loads(ended.stdout.splitlines()[-1])["rows"]  # after what gloo prints in torch 2.8
    assert len(rows) == 4
    for row in rows:
        assert row["repeats_within"] == 0.0, row  # else the difference would say nothing
        assert row["changes"] >= 5, row
        assert row["idle_steps"] > 5, row
        assert row["last_loss"] < 0.3 * row["first_loss"], row
        if row["case"] == "batchnorm":
            assert 1e-4 < row["max_difference"] < 0.3, row
        else:
            assert row["max_difference"] < 1e-4, row


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    out = tmp_path_factory.mktemp("losses") / "found.json"
    command = [sys.executable, str(HERE / "losses_worker.py"), str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    "kind",
    [
        "sum",
        "sum by a constant",
        "sum by samples",
        "batchmean",
        "mean and sum",
        "mean, then sum",
        "weight decay",
        "smoothed",
        "in the model, beside outputs",
        "accumulated",
        "accumulated later",
        "accumulated later, summed up each time",
        pytest.param(
            "sharded, accumulated later",
            marks=pytest.mark.skipif(
                not hasattr(FSDPModule, "set_custom_reduce_scatter"),
                reason="this PyTorch cannot weight the gradients of fully_shard; kilter says so",
            ),
        ),
    ],
)
def test_sums_and_accumulated_gradients_are_those_of_the_solo_run(kinds, kind):
    row = kinds[kind]
    assert row["changes"] == 3, row
    assert row["parameter"] < 1e-6, row
    assert row["loss"] < 1e-6 or "sum" in kind, (
        row
    )  # the loss of a sum depends on how many it is of
    assert not [line for line in row["said"] if "keeps a ratio of 1 to 10" not in line]


@pytest.mark.parametrize("kind", ["norm", "contrastive", "negatives from the batch"])
def test_a_loss_between_the_samples_of_a_batch_is_refused(kinds, kind):
    row = kinds[kind]
    assert (row["changes"], row["parameter"], row["loss"]) == (0, 0.0, 0.0)
    (said,) = row["said"]
    assert "depends on the others of its batch" in said
    assert said.endswith("the job trains as it would without kilter")


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("weighted", "divided by the weights of its targets (ignore_index, weight, a count of"),
        (
            "in the model, alone",
            "whether this one is cannot be seen. If it is not, start the script with torchrun",
        ),
        ("largest", "from here on the shares of the ranks are uneven: gradients are weighted as"),
    ],
)
def test_a_loss_that_is_no_mean_or_cannot_be_seen_to_be_one_is_told_once(kinds, kind, sentence):
    (said,) = kinds[kind]["said"]
    assert sentence in said
    assert kinds[kind]["changes"] == 3


def judged(loss_of, rows=8, classes=3):
    """What `look` makes of a loss of the outputs of a layer."""
    import torch

    from kilter.sharing.elastic.losses import Losses

    said = []
    losses = Losses(said.append)
    layer = torch.nn.Linear(4, classes)
    losses.outputs = [layer(torch.linspace(-1, 1, rows * 4).view(rows, 4))]
    refused = losses.look([loss_of(losses.outputs[0], layer)], 8, lambda: 1.0)
    return "refused" if refused else "told" if said or losses.note else "a mean"


LOSSES = {
    "cross_entropy(out, y)": "a mean",
    "cross_entropy(out, y, label_smoothing=0.1)": "a mean",
    "cross_entropy(out, y) / 4 * tensor(1024.0)": "a mean",
    "cross_entropy(out, y, ignore_index=0)": "told",
    "cross_entropy(out, y, weight=tensor([1.0, 2.0, 3.0]))": "told",
    "binary_cross_entropy_with_logits(out, t, pos_weight=tensor(2.0))": "a mean",
    "kl_div(out.log_softmax(1), t, reduction='batchmean')": "a mean",
    "mse_loss(out, t) + 0.1 * out.abs().mean() - (out * t).sum(1).mean(0)": "a mean",
    "mse_loss(out, t) + 0.1 * layer.weight.norm()": "a mean",
    "relu(1 - out).mean()": "a mean",
    "out.norm(dim=1).mean()": "a mean",
    "out.norm()": "refused",
    "mse_loss(out, t).sqrt()": "refused",
    "out.logsumexp(0).mean()": "refused",
    "mse_loss(out, t) + out.var(0).mean()": "refused",
    "1 - (out * t).sum() / (out + t).sum()": "refused",
    "cross_entropy(out @ out.T, arange(8))": "refused",
    "cross_entropy(out @ t.T, arange(8))": "refused",
    "out.abs().max()": "told",
    "sum(mse_loss(out[i], t[i]) for i in range(8)) / 8": "told",
    "layer.weight.norm()": "told",
}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_a_loss_is_seen_to_be(loss):
    import torch
    from torch.nn import functional

    names = vars(torch) | vars(functional)
    values = {"sum": sum, "range": range, "y": torch.arange(8) % 3}
    values["t"] = torch.linspace(0.1, 1, 24).view(8, 3)

    def loss_of(out, layer):
        return eval(loss, names | values | {"out": out, "layer": layer})

    assert judged(loss_of) == LOSSES[loss]


@pytest.mark.parametrize(
    ("rows", "loss"),
    [
        (24, "triplet_margin_loss(out[:8], out[8:16], out[16:])"),  # three batches in one
        (16, "cosine_embedding_loss(out[::2], out[1::2], ones(8))"),  # two views side by side
    ],
)
def test_a_loss_of_several_rows_for_each_sample_is_no_loss_between_samples(rows, loss):
    import torch
    from torch.nn import functional

    names = vars(torch) | vars(functional)
    assert judged(lambda out, layer: eval(loss, names | {"out": out}), rows) == "a mean"


def test_an_autograd_function_of_the_program_is_not_called_once_more():
    import torch

    from kilter.sharing.elastic.losses import mixes_samples

    calls = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            calls.append(gradient)
            return gradient

    out = torch.nn.Linear(4, 3)(torch.randn(8, 4))
    assert mixes_samples([out.norm()], [out], 8) is True
    assert mixes_samples([Counted.apply(out).norm()], [out], 8) is None
    assert calls == []
