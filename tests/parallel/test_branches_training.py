"""Branches under autograd: the gradients of the loop, or the loop with the reason."""

import copy

import pytest
import torch
from torch import nn

from kilter.parallel import parallel
from kilter.parallel.training import differentiable

MODES = ("auto", "threads", "folded")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def linears(*widths):
    return [nn.Sequential(nn.Linear(8, w), nn.GELU(), nn.Linear(w, 4)) for w in widths]


def gradients(branches, call, *inputs):
    """Outputs and gradients of a loss that weighs every result differently."""
    inputs = [x.clone().requires_grad_(x.requires_grad) for x in inputs]
    made = call(*inputs)
    loss = sum((y * y).sum() * (i + 1) for i, y in enumerate(made))
    weights = [p for b in branches for p in b.parameters() if p.requires_grad]
    leaves = [x for x in inputs if x.requires_grad] + weights
    return [y.detach() for y in made], torch.autograd.grad(loss, leaves)


def same(found, expected):
    for a, b in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def loop(branches):
    return lambda x: tuple(b(x) for b in branches)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("of_input", [True, False])
def test_outputs_and_gradients_are_the_loops(mode, of_input):
    branches = linears(6, 6, 5)
    with parallel(branches, mode=mode) as fast:
        for _ in range(3):
            x = torch.randn(2, 8, requires_grad=of_input)
            same(gradients(branches, fast, x), gradients(branches, loop(branches), x))
        plan = fast.plan()
    if mode != "auto":
        assert plan.chosen == mode, plan
    else:
        assert {t.mode for t in plan.trials if t.refused is None} >= {"serial", "threads"}


def test_training_with_folded_branches_ends_where_the_loop_ends():
    ours = linears(6, 6, 6)
    theirs = copy.deepcopy(ours)

    def train(branches, call):
        optimizer = torch.optim.SGD([p for b in branches for p in b.parameters()], 0.05)
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            x = torch.randn(4, 8, generator=generator)
            optimizer.zero_grad()
            sum(y.pow(2).mean() for y in call(x)).backward()
            optimizer.step()

    with parallel(ours, mode="folded") as fast:
        train(ours, fast)
        assert fast.plan().chosen == "folded", fast.explain()
    train(theirs, loop(theirs))
    for a, b in zip(ours, theirs, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_with_and_without_gradients_are_signatures_of_their_own():
    branches = linears(5, 5)
    x = torch.randn(2, 8)
    with parallel(branches, mode="folded") as fast:
        for _ in range(2):
            assert all(y.requires_grad for y in fast(x))
            with torch.no_grad():
                assert not any(y.requires_grad for y in fast(x))


def test_frozen_and_thawed_weights_are_seen():
    branches = linears(5, 5)
    x = torch.randn(2, 8)
    with parallel(branches, mode="folded") as fast:
        same(gradients(branches, fast, x), gradients(branches, loop(branches), x))
        for on in (False, True):
            branches[0][0].weight.requires_grad_(on)
            same(gradients(branches, fast, x), gradients(branches, loop(branches), x))


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _Teacher(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.body, self.way = nn.Linear(8, 4), way

    def forward(self, x):
        if self.way == "no_grad":
            with torch.no_grad():
                target = self.body(x)
        elif self.way == "custom":
            target = _StraightThrough.apply(self.body(x))
        else:
            target = self.body(x).detach()
        return self.body(x) - target * 0.5


@pytest.mark.parametrize("way", ["no_grad", "detach", "custom"])
def test_a_gradient_that_is_not_that_of_the_operations_leaves_the_loop(way):
    branches = [_Teacher(way), _Teacher(way)]
    x = torch.randn(2, 8, requires_grad=True)
    with parallel(branches, mode="folded") as fast:
        for _ in range(2):
            same(gradients(branches, fast, x), gradients(branches, loop(branches), x))
        assert fast.plan().chosen == "serial"
        assert "autograd" in fast.plan().reason.text


def test_hooks_on_gradients_leave_the_loop_and_run_once():
    branches = linears(5, 5)
    calls = []
    branches[0].register_full_backward_hook(lambda *_: calls.append("module"))
    with parallel(branches, mode="folded") as fast:
        sum(y.sum() for y in fast(torch.randn(2, 8, requires_grad=True))).backward()
        assert calls == ["module"]
        assert "hook" in fast.plan().reason.text
    plain = linears(5, 5)
    plain[0][0].weight.register_hook(lambda g: calls.append("weight"))
    with parallel(plain, mode="folded") as fast:
        sum(y.sum() for y in fast(torch.randn(2, 8))).backward()
        assert calls == ["module", "weight"]
        assert "hook" in fast.plan().reason.text


def test_a_mode_without_gradients_says_so():
    branches = linears(5, 6)
    with parallel(branches, mode="compiled") as fast:
        same(
            gradients(branches, fast, torch.ones(2, 8)),
            gradients(branches, loop(branches), torch.ones(2, 8)),
        )
        assert "no gradients" in fast.explain()


def test_results_without_a_gradient_come_back_as_they_are():
    branches = [lambda x: x.argmax(-1), lambda x: x * 2]
    x = torch.randn(2, 8, requires_grad=True)
    with parallel(branches, mode="folded") as fast:
        for _ in range(2):
            index, y = fast(x)
            assert torch.equal(index, x.argmax(-1))
            (gradient,) = torch.autograd.grad(y.sum(), x)
            assert torch.equal(gradient, torch.full_like(x, 2))


# --- the autograd node, over a step with memory of its own ----------------------------------------


class _Squares:
    """y = w x^2, and a result without a gradient; keeps the last activations only, like a graph."""

    def __init__(self, weight):
        self.weight, self.forwards = weight, 0

    def forward(self, inputs):
        self.forwards += 1
        self.kept = inputs[0].detach().clone()
        return [self.weight.detach() * self.kept**2, self.kept.argmax()]

    def backward(self, gradients):
        (g,) = gradients
        return [2 * self.weight.detach() * self.kept * g, (self.kept**2 * g).sum()]

    def asks(self):
        return [True], [True, False]


def squares():
    weight = nn.Parameter(torch.tensor(3.0))
    step = _Squares(weight)
    return weight, step, differentiable(step, [weight])


def test_a_backward_after_another_forward_uses_its_own_activations():
    weight, step, run = squares()
    inputs = [torch.tensor([float(i), 1.0], requires_grad=True) for i in (1, 2, 5)]
    made = [run([x]) for x in inputs]
    assert [int(found[1]) for found in made] == [0, 0, 0]
    for x, (y, _) in zip(inputs, made, strict=True):
        of_x, of_weight = torch.autograd.grad(y.sum(), [x, weight])
        assert torch.equal(of_x, 6 * x)
        assert torch.equal(of_weight, (x**2).sum().detach())
    assert step.forwards == 3 + 2 + 1  # the last one's were overwritten by the two before


def test_a_weight_that_changes_before_the_backward_is_an_error():
    weight, _, run = squares()
    y, _ = run([torch.ones(2, requires_grad=True)])
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
