"""Gradients and optimizer state make room: below what activations can give, and from the start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from kilter.core.units import MIB
from kilter.memory import messages
from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.governed_optimizer import GovernedOptimizer
from kilter.memory.plan.problem import H200_PCIE5, Problem
from kilter.memory.plan.state import Bucket, StatePlan, stream
from kilter.memory.state_and_weights import StateAndWeightPolicy, words
from kilter.session.fence import Fence

WIDTH = 256
LAYERS = 6
STATE_BYTES = 2 * 4 * WIDTH * WIDTH * LAYERS
"""Of the weights; what is smaller stays."""
STEP_BUDGET_BYTES = int(1.3 * STATE_BYTES) + 3 * MIB // 2
"""Passes keep it; a step that takes more than 0.8 of the state beside it does not."""


class Weighed(CpuStandIn):
    """Tells what saved data and optimizer state take, as a device's allocator would."""

    def __init__(self) -> None:
        super().__init__()
        self.swapper: Any = None
        self.floor: Any = None
        self.most_bytes = 0
        self.step_takes: Callable[[int], float] = lambda state_bytes: 0.0
        """A step takes so much temporary memory, given how much state it finds on the device."""

    def govern(self, swapper: Swapper, floor: StateAndWeightPolicy) -> None:
        self.swapper, self.floor = swapper, floor

    def holds(self, saved_bytes: int) -> None:
        self.used_bytes()

    def used_bytes(self) -> int:
        mover = self.floor and self.floor.mover
        state_bytes = mover._stream.held_bytes if mover else STATE_BYTES
        store = self.swapper._store
        used_bytes = int(state_bytes + store.counts.held_bytes + store.counts.beside_bytes)
        self.most_bytes = max(self.most_bytes, used_bytes)
        return used_bytes

    def peak_bytes(self) -> int:
        used_bytes = self.used_bytes()
        peak_bytes, self.most_bytes = self.most_bytes, used_bytes
        return peak_bytes

    def peak_so_far_bytes(self) -> int:
        self.used_bytes()
        return self.most_bytes

    def steps(self, *_: object) -> None:
        """The optimizer's step begins."""
        mover = self.floor.mover
        state_bytes = mover._stream.held_bytes if mover else STATE_BYTES
        step_bytes = self.used_bytes() + int(self.step_takes(state_bytes))
        self.most_bytes = max(self.most_bytes, step_bytes)


def fail(where: str, error: str) -> None:
    raise AssertionError(f"{where}: {error}")


def train(
    steps: int,
    budget_bytes: int | None = None,
    gradients: str = "auto",
    crowded: bool = False,
    begun_bytes: int = 0,
    streaming_s: float = 1.0,
    first_batch: int = 256,
    begins_after: int = 0,
    smaller_from: int | None = None,
    step_takes: Callable[[int], float] | None = None,
) -> tuple[list[bytes], StateAndWeightPolicy | None, Swapper | None]:
    """A training under a swapper and a floor, or plain. The budget may be in force only after some
    iterations, as a share is."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []

    def step() -> None:
        smaller = smaller_from is not None and len(losses) >= smaller_from
        batch = 64 if smaller else 256 if losses else first_batch
        loss = model(torch.randn(batch, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().numpy().tobytes())

    fence = Fence(fail)
    made = swapper = None
    if budget_bytes is None:
        for _ in range(steps):
            step()
    else:
        backend = Weighed()
        begin_bytes = 2**40 if begins_after else budget_bytes
        swapper = Swapper(backend, budget_bytes=begin_bytes, link=H200_PCIE5, min_bytes=1024)
        made = StateAndWeightPolicy(
            swapper, CpuStandIn, H200_PCIE5, fence, gradients=gradients, min_bytes=1024
        )
        backend.govern(swapper, made)
        backend.step_takes = step_takes or backend.step_takes
        optimizer.register_step_pre_hook(backend.steps)
        with swapper:
            now_s = 0.0

            def iteration_ended(*_: object) -> None:
                nonlocal now_s
                away = made.report is not None and made.report.offloaded_bytes > 0
                now_s += streaming_s if away else 1.0
                if len(losses) < begins_after:
                    return
                if begins_after and len(losses) == begins_after:
                    swapper.limit(budget_bytes)
                if len(losses) == smaller_from:
                    swapper.exchange(None)
                    made.activations_are_smaller()
                made.iteration_ended(swapper.report(), budget_bytes, now_s)

            handle = register_optimizer_step_post_hook(iteration_ended)  # where a session tells it
            made.begin(STATE_BYTES // 2 if crowded else begun_bytes, budget_bytes)
            for _ in range(steps):
                step()
            handle.remove()
            made.close()
    assert not fence.down
    return losses + [p.detach().numpy().tobytes() for p in model.parameters()], made, swapper


@cache
def plain(steps: int) -> list[bytes]:
    """What comes of the training without kilter."""
    return train(steps)[0]


def test_gradients_stay_where_feature_maps_alone_meet_the_budget() -> None:
    values, made, swapper = train(20, STATE_BYTES + 2 * MIB)
    assert values == plain(20)
    assert made is not None
    assert swapper is not None
    assert made.settled
    assert made.report is None
    assert swapper.report().planned > 5


def test_a_larger_pass_that_never_comes_again_is_not_waited_for() -> None:
    values, made, swapper = train(20, STATE_BYTES // 2, first_batch=512, begins_after=3)
    assert values == train(20, first_batch=512)[0]
    assert made is not None
    assert swapper is not None
    assert made.report is not None
    assert made.report.offloaded_bytes > 0
    assert swapper.report().planned > 5


def test_asked_for_gradients_go_where_feature_maps_cost() -> None:
    values, made, swapper = train(40, STATE_BYTES + 2 * MIB, "consume")
    assert values == plain(40)
    assert made is not None
    assert swapper is not None
    assert made.settled
    report = made.report
    assert report is not None
    assert report.consuming
    assert words(report).startswith("gradients are used up as they arrive")
    assert swapper.report().planned > 5


def test_so_much_state_streams_as_is_missing() -> None:
    values, made, swapper = train(60, STATE_BYTES - MIB, "consume")
    assert values == plain(60)
    assert made is not None
    assert swapper is not None
    report = made.report
    assert report is not None
    assert report.consuming
    assert made.streaming.plan is not None
    assert report.offloaded_bytes >= MIB
    assert "of optimizer state are on the host" in words(report)
    assert "the step waits" not in words(report)  # visits are in backward, which is planned
    in_step = words(replace(report, step_wait_s=0.03))
    assert "on the host, for which the step waits 30 ms [simulated]" in in_step
    assert made.settled
    assert swapper.report().planned > 5
    assert swapper.report().late == 0


@pytest.mark.parametrize("gradients", ["auto", "keep"])
def test_with_gradients_kept_state_streams_in_the_step(gradients: str) -> None:
    values, made, swapper = train(60, STATE_BYTES - MIB, gradients)
    assert values == plain(60)
    assert made is not None
    assert swapper is not None
    report = made.report
    assert report is not None
    assert not report.consuming
    assert any("--gradients consume" in text for text in map(str, report.refused)) == (
        gradients == "auto"
    )
    assert made.streaming.plan is None
    assert report.offloaded_bytes >= MIB
    assert swapper.report().planned > 5


@pytest.mark.parametrize("share_of_time", [1.0, 0.05], ids=["here", "on a fast device"])
@pytest.mark.parametrize("gradients", ["keep", "consume"])
def test_state_that_left_for_activations_comes_back_when_they_are_smaller(
    gradients: str, share_of_time: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    elapsed_s = CpuStandIn.elapsed_s
    monkeypatch.setattr(
        Weighed, "elapsed_s", lambda self, *marks: share_of_time * elapsed_s(self, *marks)
    )
    budget_bytes = STATE_BYTES + MIB
    values, made, swapper = train(80, budget_bytes, gradients, smaller_from=40)
    assert values == train(80, smaller_from=40)[0]
    assert made is not None
    assert swapper is not None
    assert made.report is not None
    assert made.report.out_bytes > 0  # it had left
    assert made.report.offloaded_bytes == 0
    assert made.streaming.taken == 0.0
    assert max(swapper.report().peaks_bytes[-2:]) <= budget_bytes


def stepped(
    steps: int, takes: Callable[[int], float], smaller_from: int | None = None
) -> tuple[StateAndWeightPolicy, Weighed]:
    """A training whose step takes so much, within a budget that its passes keep. The numbers are
    those of the plain one."""
    values, made, swapper = train(
        steps, STEP_BUDGET_BYTES, smaller_from=smaller_from, step_takes=takes
    )
    assert values == train(steps, smaller_from=smaller_from)[0]
    assert made is not None
    assert swapper is not None
    assert made.settled
    backend = swapper._store.backend
    assert isinstance(backend, Weighed)
    return made, backend


@pytest.mark.parametrize("smaller_from", [None, 40])
def test_state_leaves_for_what_the_step_itself_takes(smaller_from: int | None) -> None:
    """A step that updates all parameters at once (`foreach`) takes a temporary tensor for each.
    That is so too when activations become smaller."""
    made, backend = stepped(80, lambda state: 1.2 * state, smaller_from)
    assert made.report is not None
    assert made.report.offloaded_bytes > 0
    assert backend.most_bytes <= STEP_BUDGET_BYTES  # since the last pass that was measured
    assert made.refused == ()


@pytest.mark.parametrize("fit", [True, False])
def test_a_step_that_exceeds_the_budget_for_good_is_told(
    fit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes what state that leaves does not give back, or no state can leave."""
    if not fit:
        monkeypatch.setattr(GovernedOptimizer, "unfit", lambda *_: messages.DIFFERENTIABLE)
    made, _ = stepped(60, lambda state: 4 * STATE_BYTES if fit else 1.2 * state)
    assert [reason.code for reason in made.refused] == ["weights_kept", "step_exceeds"]


def test_state_stays_where_the_step_fits() -> None:
    made, _ = stepped(30, lambda state: 0.3 * state)
    assert made.report is None


def test_a_budget_that_does_not_bind_changes_nothing() -> None:
    values, made, _ = train(20, 10 * STATE_BYTES)
    assert values == plain(20)
    assert made is not None
    assert made.settled
    assert made.report is None


@pytest.mark.parametrize("gradients", ["auto", "keep"])
def test_a_crowded_job_makes_its_state_bucket_by_bucket(gradients: str) -> None:
    """Weights, gradients and state do not fit: known from the weights, before the first step."""
    budget_bytes = int(1.6 * STATE_BYTES)
    values, made, _ = train(4, budget_bytes, gradients, crowded=True)
    assert values == plain(4)
    assert made is not None
    report = made.report
    assert report is not None
    assert report.offloaded_bytes > 0
    assert report.state_bytes <= (budget_bytes - STATE_BYTES) // 2


def test_a_guessed_room_is_set_right() -> None:
    """Once it is known what the pass takes, state that has room comes back."""
    budget_bytes = int(1.6 * STATE_BYTES)
    values, made, swapper = train(60, budget_bytes, "keep", crowded=True)
    assert values == plain(60)
    assert made is not None
    assert swapper is not None
    assert made.settled
    assert made.report is not None
    assert made.report.state_bytes > (budget_bytes - STATE_BYTES) // 2
    assert max(swapper.report().peaks_bytes[-2:]) <= budget_bytes


def test_state_leaves_as_soon_as_it_was_made_if_the_second_forward_has_no_room_for_it() -> None:
    """Known from the first pass, in which data had to leave and there was no state."""
    budget_bytes = STATE_BYTES + 2 * MIB
    values, made, swapper = train(60, budget_bytes, begun_bytes=budget_bytes // 5)
    assert values == plain(60)
    assert made is not None
    assert swapper is not None
    assert made.settled
    assert made.report is not None
    assert made.report.out_bytes > 0
    assert swapper.report().planned > 30
    assert max(swapper.report().peaks_bytes[-2:]) <= budget_bytes


@pytest.mark.parametrize("gradients", ["auto", "consume"])
def test_a_crowded_job_settles_within_its_budget(gradients: str) -> None:
    budget_bytes = int(0.9 * STATE_BYTES)
    values, made, swapper = train(60, budget_bytes, gradients, crowded=True)
    assert values == plain(60)
    assert made is not None
    assert swapper is not None
    assert made.settled
    assert made.report is not None
    assert made.report.consuming == (gradients == "consume")
    report = swapper.report()
    assert report.planned > 30
    assert report.late == report.deviations == 0
    assert max(report.peaks_bytes[-2:]) <= budget_bytes


def half_streams(problem: Problem, buckets: Sequence[Bucket], at: Sequence[int]) -> StatePlan:
    """Half of the state, as if nothing else could be evicted."""
    if not problem.intervals:  # state alone has a room
        return stream(problem, buckets, at)
    budget_bytes = problem.peak_bytes - STATE_BYTES // 2
    return stream(replace(problem, intervals=(), budget_bytes=budget_bytes), buckets, at)


@pytest.mark.parametrize("streaming_s", [0.9, 1.2])
def test_streaming_that_makes_iterations_slower_is_taken_back(
    streaming_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kilter.memory.plan.state.stream", half_streams)
    values, made, swapper = train(70, STATE_BYTES + 2 * MIB, "consume", streaming_s=streaming_s)
    assert values == plain(70)
    assert made is not None
    assert swapper is not None
    assert made.settled
    assert made.report is not None
    assert made.report.consuming
    assert (made.report.offloaded_bytes > 0) == (streaming_s < 1)
    assert (made.streaming.taken_back is None) == (streaming_s < 1)
    report = swapper.report()
    assert report.deviations == report.late == 0
    assert report.peaks_bytes[-1] <= STATE_BYTES + 2 * MIB
    assert report.planned > 40


def test_a_backend_that_keeps_account_is_told_what_saved_tensors_hold() -> None:
    backend, told = CpuStandIn(), []
    backend.holds = told.append
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    swapper = Swapper(backend, budget_bytes=MIB, link=H200_PCIE5, min_bytes=256)
    with swapper:
        for _ in range(2):
            net(torch.randn(16, 32)).square().mean().backward()
    assert max(told) == swapper.report().held_peak_bytes > 4 * (16 * 32 * 4)
