"""`kilter.divided`: the gradients of the whole batch, from pieces of it."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import kilter
from kilter.core.errors import UsageError


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3)).double()


def data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 8, dtype=torch.double), torch.randint(3, (samples,))


@given(st.integers(1, 13), st.integers(1, 16), st.sampled_from(["mean", "sum"]))
def test_loss_and_gradients_are_those_of_the_whole_batch(samples, pieces, reduction) -> None:
    whole, parts = net(), net()
    x, y = data(samples)
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    loss = criterion(whole(x), y)
    loss.backward()
    in_pieces = kilter.divided(
        lambda x, y: criterion(parts(x), y), pieces=pieces, reduction=reduction
    )
    found = in_pieces(x, y)
    assert in_pieces.pieces == min(samples, pieces)
    assert not found.requires_grad
    torch.testing.assert_close(found, loss.detach())
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_one_piece_is_the_plain_step_bit_for_bit() -> None:
    whole, parts = net(), net()
    x, y = data(10)
    nn.functional.cross_entropy(whole(x), y).backward()
    kilter.divided(lambda x, y: nn.functional.cross_entropy(parts(x), y), pieces=1)(x, y)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_gradients_that_were_there_are_added_to() -> None:
    model = net()
    x, y = data(6)
    in_pieces = kilter.divided(lambda x, y: nn.functional.cross_entropy(model(x), y), pieces=3)
    in_pieces(x, y)
    once = [p.grad.clone() for p in model.parameters()]
    in_pieces(x, y)
    for p, grad in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * grad)


def test_only_a_piece_is_alive_at_a_time() -> None:
    model, alive = net(), []
    held = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal held
        held += 1
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal held
        held = 0
        return tensor

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        alive.append((held, len(x)))
        return loss

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        kilter.divided(loss_of, pieces=4)(*data(10))
    assert [count for _, count in alive] == [3, 3, 2, 2]
    assert len({saved for saved, _ in alive}) == 1, "each piece begins with nothing kept"


def test_a_batch_of_names_and_things_that_are_no_tensors() -> None:
    model, seen = net(), []

    def loss_of(batch: dict[str, torch.Tensor], *, weight: float, scale: torch.Tensor):
        seen.append(weight)
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"]) * weight * scale

    x, y = data(5)
    scale = torch.tensor(2.0)  # no samples in it: every piece gets it
    kilter.divided(loss_of, pieces=2)({"x": x, "y": y}, weight=0.5, scale=scale)
    assert seen == [0.5, 0.5]


def test_batch_norm_is_refused_before_it_did_anything() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    before = copy.deepcopy(model.state_dict())

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    x = torch.randn(8, 8)
    with pytest.raises(UsageError, match="statistics of a piece"):
        kilter.divided(loss_of, pieces=2)(x)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    kilter.divided(loss_of, pieces=1)(x)  # one piece is the whole batch
    allowed = kilter.divided(loss_of, pieces=2, allow_batch_norm=True)
    allowed(x)
    assert "batch norm statistics of a piece" in allowed.explain()
    model.eval()
    kilter.divided(loss_of, pieces=2)(x)


def test_dropout_is_said() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5))
    in_pieces = kilter.divided(lambda x: model(x).square().mean(), pieces=2)
    assert in_pieces.explain() == "no batch so far"
    in_pieces(torch.randn(6, 8))
    assert "2 pieces of 3" in in_pieces.explain()
    assert "dropout masks" in in_pieces.explain()
    model.eval()
    in_pieces(torch.randn(6, 8))
    assert "dropout masks" not in in_pieces.explain()  # of the last batch


def test_a_scaler_has_its_say() -> None:
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = data(6)
    plain = kilter.divided(lambda x, y: nn.functional.cross_entropy(model(x), y), pieces=2)
    plain(x, y)
    once = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    scaled = kilter.divided(
        lambda x, y: nn.functional.cross_entropy(model(x), y),
        pieces=2,
        backward=lambda loss: scaler.scale(loss).backward(),
    )
    scaled(x, y)
    for p, grad in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 4 * grad)


def test_processes_exchange_gradients_once(tmp_path) -> None:
    distributed = torch.distributed
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = nn.parallel.DistributedDataParallel(net())
        exchanged = []

        def exchange(state, bucket):
            exchanged.append(bucket)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model.register_comm_hook(None, exchange)
        x, y = data(9)
        in_pieces = kilter.divided(lambda x, y: nn.functional.cross_entropy(model(x), y), pieces=3)
        in_pieces(x, y)
        assert len(exchanged) == 1
        whole = net()
        nn.functional.cross_entropy(whole(x), y).backward()
        for a, b in zip(whole.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        assert model.require_backward_grad_sync
    finally:
        distributed.destroy_process_group()


def test_an_error_of_the_program_is_the_programs() -> None:
    model = net()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        kilter.divided(loss_of, pieces=2)(*data(4))
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    before = len(hooks)
    kilter.divided(lambda x, y: model(x).sum(), pieces=2)(*data(4))
    assert len(hooks) == before


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda f: kilter.divided(f, pieces=0), "pieces=0: write a whole number"),
        (lambda f: kilter.divided(f, pieces="2"), "pieces='2': write a whole number"),
        (lambda f: kilter.divided(f, pieces=1.5), "pieces=1.5: write a whole number"),
        (lambda f: kilter.divided(f, reduction="none"), "mean, sum"),
        (lambda f: kilter.divided(f, memory_budget="lots"), "not a memory budget"),
        (lambda f: kilter.divided(f)(*data(4)), "give pieces=N"),
        (lambda f: kilter.divided(f, pieces=2)(torch.ones(3, 8), torch.ones(4)), "first dim"),
        (lambda f: kilter.divided(f, pieces=2)(3), "no tensors"),
        (lambda f: kilter.divided(lambda x, y: x, pieces=2)(*data(4)), "one element"),
        (lambda f: kilter.divided(f, pieces=2)(*data(0)), "batch is empty"),
    ],
)
def test_wrong_use_is_said(make, words) -> None:
    model = net()
    with pytest.raises(UsageError, match=words):
        make(lambda x, y: nn.functional.cross_entropy(model(x), y))
