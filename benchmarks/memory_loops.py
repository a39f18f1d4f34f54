"""What loops of many kinds take of a memory budget, iteration by iteration.

    python benchmarks/memory_loops.py [--only dcgan,sam] [--iterations 40] [--shares 0.75,0.6]

Each loop trains small networks on a CPU, once with everything kept and once under each share of
its peak. Printed is what the engine counts of saved tensors over the budget (simulated: the
stand-in for a device evicts at once): the most, in how many iterations it is above 1.02, and the
most of the last ten. What a plan leaves to autograd is not in that count, so the figures judge
passes that are watched, tried, or offloaded on demand; a plan's own peak is in its report.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.plan.problem import Link

WIDTH, ROWS, BLOCKS = 32, 128, 8
DATUM_BYTES = 4 * WIDTH * ROWS
LINK = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
WARM_UP = 6
ABOVE = 1.02
LAST = 10

Iteration = Callable[[int], None]


class Weighed(CpuStandIn):
    """Notes what saved tensors take."""

    def __init__(self) -> None:
        super().__init__(spoil=True)
        self.most_bytes = 0

    def holds(self, held_bytes: int) -> None:
        self.most_bytes = max(self.most_bytes, held_bytes)


def network() -> nn.Sequential:
    blocks = [
        layer
        for _ in range(BLOCKS)
        for layer in (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
    ]
    return nn.Sequential(*blocks)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def trained(loss: Tensor, *optimizers: torch.optim.Optimizer) -> None:
    """A backward, and a step of the first of these; gradients of all are dropped."""
    loss.backward()
    optimizers[0].step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def dcgan() -> Iteration:
    """The generator's graph is made before the critic steps, and is used after it."""
    critic, generator = network(), network()
    of_critic, of_generator = adam(critic), adam(generator)

    def iteration(number: int) -> None:
        critic(batch()).square().mean().backward()
        made = generator(batch())
        critic(made.detach()).mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        trained(-critic(made).mean(), of_generator, of_critic)

    return iteration


def penalty(every: int) -> Callable[[], Iteration]:
    """Of the critic's passes one in so many has a penalty on its gradient."""

    def make() -> Iteration:
        critic, generator = network(), network()
        of_critic, of_generator = adam(critic), adam(generator)

        def iteration(number: int) -> None:
            for turn in range(2):
                x = batch()
                loss = critic(x).square().mean()
                if (2 * number + turn) % every == 0:
                    x.requires_grad_()
                    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
                    loss = loss + slope.square().mean()
                trained(loss, of_critic)
            trained(-critic(generator(batch())).mean(), of_generator, of_critic)

        return iteration

    return make


def evaluation(*, no_grad: bool) -> Callable[[], Iteration]:
    def make() -> Iteration:
        model = network()
        optimizer = adam(model)

        def iteration(number: int) -> None:
            trained(model(batch()).square().mean(), optimizer)
            if number % 3 == 2:
                with torch.set_grad_enabled(not no_grad):
                    model(batch()).sum().item()

        return iteration

    return make


def accumulation() -> Iteration:
    model = network()
    optimizer = adam(model)

    def iteration(number: int) -> None:
        for _ in range(3):
            model(batch()).square().mean().backward()
        trained(model(batch()).square().mean(), optimizer)

    return iteration


def two_models() -> Iteration:
    pairs = [(model, adam(model)) for model in (network(), network())]

    def iteration(number: int) -> None:
        for (model, optimizer), rows in zip(pairs, (ROWS, ROWS // 2), strict=True):
            trained(model(torch.randn(rows, WIDTH)).square().mean(), optimizer)

    return iteration


def teacher() -> Iteration:
    model, other = network(), network()
    optimizer = adam(model)

    def iteration(number: int) -> None:
        with torch.no_grad():
            wanted = other(batch())
        trained((model(batch()) - wanted).square().mean(), optimizer)

    return iteration


def actor_and_critic() -> Iteration:
    actor, critic = network(), network()
    of_actor, of_critic = adam(actor), adam(critic)

    def iteration(number: int) -> None:
        state = batch()
        with torch.no_grad():
            wanted = critic(actor(state))
        trained((critic(state) - wanted).square().mean(), of_critic)
        if number % 2:
            trained(-critic(actor(state)).mean(), of_actor, of_critic)

    return iteration


def retained() -> Iteration:
    """The losses of the last two iterations are kept with their graphs."""
    model = network()
    optimizer = adam(model)
    losses: list[Tensor] = []

    def iteration(number: int) -> None:
        loss = model(batch()).square().mean()
        loss.backward(retain_graph=True)
        losses.append(loss)
        del losses[:-2]
        optimizer.step()
        optimizer.zero_grad()

    return iteration


def truncated() -> Iteration:
    """Backpropagation through two steps in time."""
    model = network()
    optimizer = adam(model)
    state = [torch.zeros(ROWS, WIDTH)]

    def iteration(number: int) -> None:
        x = state[0].detach()
        for _ in range(2):
            x = model(x + batch())
        state[0] = x
        trained(x.square().mean(), optimizer)

    return iteration


def sam() -> Iteration:
    """Sharpness-aware minimization: the gradient at a place beside the weights."""
    model = network()
    optimizer = adam(model)

    def iteration(number: int) -> None:
        x = batch()
        model(x).square().mean().backward()
        moves = [1e-3 * p.grad for p in model.parameters() if p.grad is not None]
        optimizer.zero_grad()
        for sign in (1, -1):
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter.add_(sign * move)
            if sign == 1:
                model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return iteration


def maml() -> Iteration:
    """Three inner steps, through which the outer gradient goes."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = adam(model)

    def loss_of(weights: dict[str, Tensor]) -> Tensor:
        made: Tensor = torch.func.functional_call(model, weights, (batch(),))
        return made.square().mean()

    def iteration(number: int) -> None:
        weights: dict[str, Tensor] = dict(model.named_parameters())
        for _ in range(3):
            found = torch.autograd.grad(loss_of(weights), [*weights.values()], create_graph=True)
            pairs = zip(weights.items(), found, strict=True)
            weights = {name: weight - 0.01 * slope for (name, weight), slope in pairs}
        trained(loss_of(weights), optimizer)

    return iteration


LOOPS: dict[str, Callable[[], Iteration]] = {
    "dcgan": dcgan,
    "penalty in every pass": penalty(1),
    "penalty in one of 4": penalty(4),
    "penalty in one of 16": penalty(16),
    "evaluation": evaluation(no_grad=True),
    "evaluation with gradients": evaluation(no_grad=False),
    "accumulation": accumulation,
    "two models": two_models,
    "teacher": teacher,
    "actor and critic": actor_and_critic,
    "retained graphs": retained,
    "truncated": truncated,
    "sam": sam,
    "maml": maml,
}


def taken(
    make: Callable[[], Iteration], budget_bytes: int, iterations: int
) -> tuple[list[int], Any]:
    """What saved tensors take in each iteration under this budget, and the report."""
    torch.manual_seed(0)
    backend, most_bytes = Weighed(), list[int]()
    with Swapper(backend, budget_bytes=budget_bytes, link=LINK, min_bytes=DATUM_BYTES) as swapper:
        iteration = make()
        for number in range(iterations):
            backend.most_bytes = 0
            iteration(number)
            most_bytes.append(backend.most_bytes)
        return most_bytes, swapper.report()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="loops, separated by commas")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--shares", default="0.75,0.6")
    args = parser.parse_args()
    for name in args.only.split(",") if args.only else LOOPS:
        peak_bytes = max(taken(LOOPS[name], 2**60, WARM_UP)[0])
        for share in map(float, args.shares.split(",")):
            budget_bytes = int(share * peak_bytes)
            most_bytes, report = taken(LOOPS[name], budget_bytes, args.iterations)
            over = [found / budget_bytes for found in most_bytes]
            print(
                f"{name} at {share:.0%}: at most {max(over):.2f} of the budget (iteration "
                f"{over.index(max(over))}), above {ABOVE} in {sum(one > ABOVE for one in over)}, "
                f"at last {max(over[-LAST:]):.2f}; {report.planned} of {report.passes} passes "
                f"planned [simulated]",
                flush=True,
            )


if __name__ == "__main__":
    main()
