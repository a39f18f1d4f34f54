"""Real jobs on gloo whose data ratio changes: the same training as without."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))
from ranks import HERE, TIMEOUT_S, changes, train

PLAN = [[4, 3, 3], [6, 4, 0], [0, 5, 5], [10, 0, 0], [2, 2, 6]]


def difference(a, b):
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def samples_of_epoch(ranks):
    """All samples that were trained on, in one multiset over ranks and epochs."""
    return sorted(itertools.chain.from_iterable(s for rank in ranks for s in rank["seen"]))


@pytest.fixture(scope="module")
def plain(warm, tmp_path_factory):
    return train(warm, 3, tmp_path_factory.mktemp("plain") / "out", None, "--epochs", "4")[0]


def test_any_ratios_train_as_without_kilter(warm, tmp_path, plain):
    """Ranks leave and come back; nothing is lost or seen twice; the state is whole at each end of
    a pass; gradients, learning rate and data are what they were."""
    ranks, told = train(warm, 3, tmp_path / "out", PLAN, "--epochs", "4")
    agreed = changes(told)
    assert [ratios for _, ratios in agreed[1:]] == PLAN
    assert difference(ranks[0]["parameters"], plain[0]["parameters"]) < 1e-5
    assert all(rank["parameters"] == ranks[0]["parameters"] for rank in ranks)
    assert all(difference(rank["averaged"], plain[0]["averaged"]) < 1e-5 for rank in ranks)
    assert samples_of_epoch(ranks) == samples_of_epoch(plain)
    assert {rank["lr"] for rank in ranks} == {plain[0]["lr"]}
    assert all(stale == 0.0 for rank in ranks for stale in rank["stale"])
    # An idle rank really does nothing.
    assert len(ranks[2]["seen"]) < len(plain[2]["seen"])


@pytest.mark.parametrize(
    ("arguments", "plan"),
    [
        (("--sampler", "plain"), [[7, 3], [10, 0], [0, 10], [4, 6]]),
        # torch waits 5 s for each worker at the end of each pass, with gloo's threads beside it.
        (("--drop-last", "--workers", "1", "--epochs", "2"), [[7, 3], [0, 10]]),
        # A rank that counts its batches and was idle for some would break at another iteration.
        (("--break-after", "6"), [[7, 3], [10, 0]]),
        (("--loader-per-epoch", "--samples", "96"), [[7, 3], [10, 0], [4, 6]]),
        # Of seven samples one rank has more than the other, and of the last one all.
        (("--sampler", "plain", "--batch", "7"), [[5, 5], [5, 5]]),
        (("--halves",), [[7, 3], [5, 5], [0, 10]]),
    ],
    ids=[
        "plain-loader",
        "drop-last-and-workers",
        "break",
        "loader-per-epoch",
        "half-and-half-of-an-odd-batch",
        "two-models",
    ],
)
def test_other_ways_to_load(warm, tmp_path, arguments, plan):
    arguments = ("--epochs", "4", "--samples", "120", *arguments)
    alone, _ = train(warm, 2, tmp_path / "alone", None, *arguments)
    ranks, told = train(warm, 2, tmp_path / "shared", plan, *arguments)
    assert len(changes(told)) >= 3
    assert difference(ranks[0]["parameters"], alone[0]["parameters"]) < 1e-5
    assert ranks[0]["parameters"] == ranks[1]["parameters"]
    if "plain" in arguments:  # both ranks drew the same samples: once is enough
        assert len(samples_of_epoch(ranks)) < len(samples_of_epoch(alone))
        assert set(samples_of_epoch(ranks)) == set(samples_of_epoch(alone))
    else:
        assert samples_of_epoch(ranks) == samples_of_epoch(alone)


def test_while_the_split_is_even_nothing_differs_from_plain_ddp(warm, tmp_path):
    """Not in the last bit, and each rank keeps the running statistics of its own samples."""
    arguments = ("--batch-norm", "--samples", "256", "--batch", "16")
    alone, _ = train(warm, 2, tmp_path / "alone", None, *arguments)
    ranks, told = train(warm, 2, tmp_path / "shared", [[5, 5]], *arguments)
    assert len(changes(told)) == 2
    assert alone[0]["buffers"] != alone[1]["buffers"]
    for rank, plain in zip(ranks, alone, strict=True):
        assert rank["parameters"] == plain["parameters"]
        assert rank["buffers"] == plain["buffers"]
        assert rank["seen"] == plain["seen"]


def test_batch_norm_statistics_are_those_of_the_global_batch(warm, tmp_path):
    plan = [[7, 3], [3, 7]]
    arguments = ("--batch-norm", "--epochs", "2", "--samples", "256", "--batch", "16")
    alone, _ = train(warm, 2, tmp_path / "alone", None, *arguments)
    ranks, _ = train(warm, 2, tmp_path / "shared", plan, *arguments)
    assert ranks[0]["buffers"] == ranks[1]["buffers"]
    # The shards normalise by themselves, as under any DDP: close, and not the same.
    assert difference(ranks[0]["parameters"], alone[0]["parameters"]) < 0.2
    assert difference(ranks[0]["buffers"][0], alone[0]["buffers"][0]) < 0.2


def test_ranks_that_share_an_optimizer_are_never_without_samples(warm, tmp_path):
    arguments = ("--zero", "--samples", "120")
    alone, _ = train(warm, 2, tmp_path / "alone", None, *arguments)
    ranks, told = train(warm, 2, tmp_path / "shared", [[7, 3], [4, 6]], *arguments)
    assert "never without samples: that is not possible with ZeroRedundancyOptimizer" in told
    assert difference(ranks[0]["parameters"], alone[0]["parameters"]) < 1e-5


def test_ranks_that_share_batch_statistics_are_never_without_samples(monkeypatch):
    import torch

    from kilter.session.fence import Fence
    from kilter.sharing.elastic import job as jobs

    said = []
    job = jobs.ElasticJob(guard=Fence, may_idle=True, say=said.append)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.SyncBatchNorm(3))
    model.find_unused_parameters = model.static_graph = False  # as in DistributedDataParallel
    job.models.append(model)
    monkeypatch.setattr(jobs, "_world", lambda: 2)
    assert not job._idle_is_possible()
    assert "never without samples: that is not possible with SyncBatchNorm" in said[0]


def test_threads_of_torch_get_the_lock_before_the_interpreter_ends(tmp_path):
    """Or Python would end them in the middle of C++, which aborts the rank. Kilter keeps a process
    group that its script would have freed, and with it these threads."""
    command = [sys.executable, str(HERE / "last_thread_worker.py"), str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, rank], stdout=subprocess.PIPE, text=True) for rank in "01"]
    for rank in ranks:
        assert rank.communicate(timeout=TIMEOUT_S)[0] == "the thread had the lock\n"
        assert rank.returncode == 0
