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
    "drawn-ahead": "drawn before the backward pass of the one before it",
    "drawn-before-backward": "drawn before the backward pass of the one before it",
    "several-loaders": "batches of several DataLoaders side by side; use one at a time",
    "cycle": "kept and trained on again (itertools.cycle does that)",
    "wrapped-late": "wrapped, or sharded, after the shares of another have begun to change",
    "no-sync": "accumulated over several batches, of which a rank without samples would miss some",
    "accumulation": "leave --idle-ranks (idle_ranks=True) out, or use a larger batch_size",
    "comm-hook": "communication hook of its own",
    "an-error-of-ours": "kilter could not take part (ValueError: no state",
    "ranks-disagree": "the ranks disagree about the model",
    "fsdp1": "wrapped in FullyShardedDataParallel, whose shares cannot be uneven; use fully_shard",
    "ignored-params": "not all parameters are sharded by fully_shard over all ranks",
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
    ("kind", "sentence", "until"),
    [
        ("no-sync-late", "gradients are accumulated", "the data ratio stays as it is"),
        (
            "several-loaders-late",
            "batches of several DataLoaders side by side",
            "these are not weighted by their samples",
        ),
    ],
)
def test_what_begins_while_shares_are_uneven_ends_the_sharing(
    warm, tmp_path, kind, sentence, until
):
    told = run(warm, 2, tmp_path, [[7, 3]], kind, script="refused.py")
    at_once, then = (line for line in told[0].splitlines() if line.startswith("kilter:"))
    assert sentence in at_once
    assert at_once.endswith(f"until the next pass {until}")
    assert sentence in then
    assert then.endswith("the job trains as it would without kilter")
