"""A budget holds also where the program comes to keep more beside its passes, long after they were
planned: a copy of the best weights, an average of them, the state of a second optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.plan_feedback import CHECK_AFTER
from kilter.memory.plan.problem import Link

WIDTH, ROWS, LAYERS = 64, 256, 12
SAVED_BYTES = 2 * LAYERS * ROWS * WIDTH * 4
LINK = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=1.5e9)


class Allocator(CpuStandIn):
    """Tells what saved tensors take and what the program keeps beside them."""

    def __init__(self) -> None:
        super().__init__(spoil=True)
        self.swapper: Swapper | None = None
        self.beside_bytes = 0
        self.most_bytes = 0
        self.saved_bytes = 0
        """The peak of what the pass that was measured last has saved: in the others the engine does
        not count what it does not follow, where a device's own allocator would."""
        self.begun = 0
        """So often the peak was begun anew."""

    def holds(self, saved_bytes: int) -> None:
        self.used_bytes()

    def used_bytes(self) -> int:
        assert self.swapper is not None
        counts = self.swapper._store.counts
        used_bytes = counts.held_bytes + counts.beside_bytes + self.beside_bytes
        self.most_bytes = max(self.most_bytes, used_bytes)
        return used_bytes

    def peak_so_far_bytes(self) -> int:
        self.used_bytes()
        return max(self.most_bytes, self.saved_bytes + self.beside_bytes)

    def peak_bytes(self) -> int:
        used_bytes = self.used_bytes()
        peak_bytes, self.most_bytes = self.most_bytes, used_bytes
        self.saved_bytes = peak_bytes - self.beside_bytes
        self.begun += 1
        return peak_bytes


class Training:
    def __init__(self, budget_bytes: int) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.backend = Allocator()
        self.swapper = Swapper(self.backend, budget_bytes=budget_bytes, link=LINK, min_bytes=1024)
        self.backend.swapper = self.swapper

        self.begun: list[int] = []

    def train(
        self, steps: int, *, grows: bool = True, shrinks_at: int | None = None
    ) -> list[torch.Tensor]:
        losses = []
        with self.swapper:
            for step in range(steps):
                if grows and step == steps // 3:
                    self.backend.beside_bytes = SAVED_BYTES // 5
                if shrinks_at is not None and step in (1, shrinks_at):
                    self.backend.beside_bytes = SAVED_BYTES // 5 if step == 1 else 0
                self.begun.append(self.backend.begun)
                loss = self.model(torch.randn(ROWS, WIDTH)).square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(loss.detach())
        return losses


@pytest.mark.parametrize("rounds", [3, 9])
def test_a_plan_is_made_anew_for_what_is_left_of_the_budget(rounds: int) -> None:
    budget_bytes = int(0.6 * SAVED_BYTES)
    training = Training(budget_bytes)
    losses = training.train(rounds * 2 * CHECK_AFTER)
    (kind,) = training.swapper._kinds
    assert kind.plan is not None
    assert kind.plan.value.peak_bytes <= budget_bytes - SAVED_BYTES // 5 + 4096
    assert kind.plan.use.peak_bytes <= budget_bytes
    report = training.swapper.report()
    assert report.settled
    assert report.most_bytes > budget_bytes  # which is told: passes before were above it
    plain = Training(2**40).train(rounds * 2 * CHECK_AFTER)
    assert all(torch.equal(a, b) for a, b in zip(losses, plain, strict=True))


def test_a_plan_that_holds_leaves_the_programs_own_peak_alone() -> None:
    """`torch.cuda.max_memory_allocated` is the program's as well."""
    training = Training(int(0.6 * SAVED_BYTES))
    training.train(8 * CHECK_AFTER, grows=False)
    assert training.swapper.report().settled
    assert training.begun[CHECK_AFTER] == training.begun[-1]


def test_a_plan_moves_less_once_the_program_keeps_less_beside_it() -> None:
    """Another training has ended, or a checkpoint was loaded."""
    budget_bytes = int(0.6 * SAVED_BYTES)
    training = Training(budget_bytes)
    losses = training.train(4 * CHECK_AFTER, grows=False, shrinks_at=CHECK_AFTER)
    always = Training(budget_bytes)
    always.train(2 * CHECK_AFTER, grows=False)
    (value,), (as_always,) = (each.swapper.report().plans for each in (training, always))
    assert value.peak_before_bytes == as_always.peak_before_bytes
    assert value.peak_bytes <= budget_bytes
    report = training.swapper.report()
    assert report.settled
    assert report.deviations == 0
    assert report.watched <= 7  # three for the first plan, and as many again
    plain = Training(2**40).train(4 * CHECK_AFTER, grows=False)
    assert all(torch.equal(a, b) for a, b in zip(losses, plain, strict=True))


def test_a_plan_that_held_is_made_for_as_much_less_as_is_needed() -> None:
    """Though plans before it had to be corrected, each by more than the one before."""
    budget_bytes = int(0.6 * SAVED_BYTES)
    training = Training(budget_bytes)
    kinds = training.swapper._kinds

    def corrected(*step: object) -> None:
        if training.swapper.report().planned == CHECK_AFTER // 2:
            for kind in kinds:
                kind.corrections.excesses = 2

    training.optimizer.register_step_post_hook(corrected)
    training.train(18 * CHECK_AFTER)
    (kind,) = kinds
    assert kind.plan is not None
    assert kind.plan.use.peak_bytes <= budget_bytes
    assert kind.corrections.less_bytes <= 1.1 * SAVED_BYTES // 5
