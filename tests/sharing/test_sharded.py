"""Jobs sharded by `fully_shard` (FSDP2): uneven shares train as the even run does."""

import itertools
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))
from ranks import changes, train

from kilter.sharing.elastic.schedule import GlobalBatches

PLAN = [[7, 3], [1, 9], [9, 1]]
weighed = pytest.mark.skipif(
    not hasattr(
        pytest.importorskip("torch.distributed.fsdp").FSDPModule, "set_custom_reduce_scatter"
    ),
    reason="this PyTorch cannot weight the gradients of fully_shard; kilter says so",
)


def losses_of_global_batches(ranks):
    """The mean over the samples of all ranks, step by step."""
    steps = zip(*(zip(rank["losses"], rank["seen"], strict=True) for rank in ranks), strict=True)
    for step in steps:
        counts = [len(seen) for _, seen in step]
        yield sum(loss * n for (loss, _), n in zip(step, counts, strict=True)) / sum(counts)


@weighed
@pytest.mark.parametrize("sampler", ["distributed", "plain"])
def test_uneven_shares_of_a_sharded_model_train_as_even_ones(warm, tmp_path, sampler):
    """49 samples and a plain loader leave a last batch with one sample for both ranks."""
    samples = "49" if sampler == "plain" else "120"
    arguments = ("--sharded", "--epochs", "3", "--samples", samples, "--sampler", sampler)
    even, _ = train(warm, 2, tmp_path / "even", None, *arguments)
    uneven, told = train(warm, 2, tmp_path / "uneven", PLAN, *arguments)
    assert [ratios for _, ratios in changes(told)[1:]] == PLAN
    assert uneven[0]["parameters"] == uneven[1]["parameters"]
    assert uneven[0]["parameters"] == pytest.approx(even[0]["parameters"], abs=1e-6)
    assert list(losses_of_global_batches(uneven)) == pytest.approx(
        list(losses_of_global_batches(even)), abs=1e-6
    )
    counts = {tuple(len(rank["seen"][step]) for rank in uneven) for step in range(5, 15)}
    assert any(a != b for a, b in counts)
    assert all(counts_of_rank > 0 for counts_of_rank in itertools.chain.from_iterable(counts))


@weighed
def test_the_user_is_told_once_that_no_rank_is_ever_without_samples(warm, tmp_path):
    _, told = train(warm, 2, tmp_path / "out", [[7, 3]], "--sharded", "--samples", "120")
    said = [line for line in told.splitlines() if line.startswith("kilter:")]
    assert said == [
        "kilter: every rank of this job keeps a ratio of 1 to 10, because each holds a part of "
        "the parameters (fully_shard)"
    ]


def test_a_batch_smaller_than_the_ranks_is_not_divided_where_no_rank_may_be_idle():
    drawn = [[[0, 1], [4]], [[0, 1], [4]], [[0, 1], [4]]]
    for ratios in [(8, 1, 1), (1, 1, 8)]:
        last = GlobalBatches(drawn, may_idle=False)
        assert [last.mine(1, ratios, rank) for rank in range(3)] == [[4]] * 3
        assert last.counts(1, ratios) == (1, 1, 1)
        assert 0 in GlobalBatches(drawn).counts(1, ratios)
