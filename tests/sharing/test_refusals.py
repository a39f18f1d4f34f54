"""What cannot be shared is refused in one sentence, and trains on."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))
from ranks import run

SENTENCES = {
    "no-ddp": "not wrapped in torch.nn.parallel.DistributedDataParallel; wrap it",
    "iterable-dataset": "IterableDataset, whose samples have no index; use a map-style",
    "endless-sampler": "the sampler has no length; give it a method __len__",
    "small-batch": "a batch of 1 samples is smaller than the 2 ranks; use a larger batch_size",
    "sum-loss": "sum over the samples of a batch; use the mean",
    "sum-loss-from-autograd": "sum over the samples of a batch; use the mean",
    "drawn-ahead": "drawn before the optimizer has stepped on the one before it",
    "several-loaders": "batches of several DataLoaders side by side; use one at a time",
    "cycle": "kept and trained on again (itertools.cycle does that)",
    "wrapped-late": "wrapped, or sharded, after the shares of another have begun to change",
    "no-sync": "accumulated under no_sync()",
    "accumulation": "fewer optimizer steps than batches",
    "comm-hook": "communication hook of its own",
    "an-error-of-ours": "kilter could not take part (ValueError: no state",
    "ranks-disagree": "the ranks disagree about the model",
    "fsdp1": "wrapped in FullyShardedDataParallel, whose shares cannot be uneven; use fully_shard",
    "ignored-params": "not all parameters are sharded by fully_shard over all ranks",
    "no-gradient-sync": "set_requires_gradient_sync(False), over batches of fixed shares; use a",
}


@pytest.mark.parametrize("kind", SENTENCES)
def test_refused_with_a_sentence_and_trains_on(warm, tmp_path, kind):
    told = run(warm, 2, tmp_path, [[7, 3]], kind, script="refused.py")
    said = [line for line in told[0].splitlines() if line.startswith("kilter:")]
    assert len(said) == 1
    assert SENTENCES[kind] in said[0]
    assert said[0].endswith("the job trains as it would without kilter")
    assert "changes [[0, null]]" in told[0] or "changes" not in told[0]


def test_an_own_sampler_is_right(warm, tmp_path):
    told = run(warm, 2, tmp_path, [[7, 3]], "own-sampler", script="refused.py")
    assert "kilter:" not in told[0]
    assert "[7, 3]" in told[0]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("no-sync-late", "accumulated under no_sync()"),
        ("several-loaders-late", "batches of several DataLoaders side by side"),
    ],
)
def test_what_begins_while_shares_are_uneven_ends_the_sharing(warm, tmp_path, kind, sentence):
    told = run(warm, 2, tmp_path, [[7, 3]], kind, script="refused.py")
    at_once, then = (line for line in told[0].splitlines() if line.startswith("kilter:"))
    assert sentence in at_once
    assert at_once.endswith("until the next pass these are not weighted by their samples")
    assert sentence in then
    assert then.endswith("the job trains as it would without kilter")


@pytest.mark.parametrize(
    ("given", "divides"),
    [({}, False), ({"ignore_index": 0}, True), ({"weight": [0.1, 1.0, 5.0]}, True)],
)
def test_a_mean_over_weights_is_told_from_one_over_samples(given, divides):
    import torch

    from kilter.sharing.elastic.scripts import loss_divides_by_weights, loss_is_sum

    given = {name: torch.tensor(v) if name == "weight" else v for name, v in given.items()}
    scores = torch.zeros(3, 3, requires_grad=True)
    loss = 0.5 * torch.nn.functional.cross_entropy(scores, torch.tensor([0, 1, 2]), **given)
    assert loss_divides_by_weights(loss.grad_fn) == divides
    assert not loss_is_sum(loss.grad_fn)
