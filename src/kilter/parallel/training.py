"""Training: a step's forward and backward captured as two CUDA graphs, behind one autograd node.

The saved activations lie at fixed addresses in the graphs' pool. A second forward before the first
forward's backward overwrites them. That backward then replays its own forward first, on the inputs
that autograd saved for it. Weights that changed in between are an error, as in the serial loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kilter.parallel.capture import (
    WARM_UPS,
    GraphPool,
    Turns,
    capturing,
    copy_all,
    record,
    static_like,
)


class TrainingStep(Protocol):
    """Runs forward and backward on its own memory. `forwards` counts the forward runs."""

    forwards: int

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the outputs; the activations are kept until the next forward."""

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the gradients of the inputs that require one, then of the weights."""

    def asks(self) -> tuple[list[bool], list[bool]]:
        """Which inputs require a gradient, and which outputs have one."""


def differentiable(
    step: TrainingStep, weights: Sequence[Tensor]
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """The step as a call that autograd records."""

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        return list(_Node.apply(step, len(inputs), *inputs, *weights))

    return run


class _Node(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, step: TrainingStep, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)  # autograd then notices weights that change before backward
        outputs = step.forward(tensors[:count])
        ctx.step, ctx.count, ctx.number = step, count, step.forwards
        _, made = step.asks()
        plain = [t for t, yes in zip(outputs, made, strict=True) if not yes]
        ctx.mark_non_differentiable(*plain)
        return tuple(outputs)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        step, inputs = ctx.step, ctx.saved_tensors[: ctx.count]
        if ctx.number != step.forwards:
            step.forward(inputs)
            ctx.number = step.forwards
        wanted, made = step.asks()
        given = [g for g, yes in zip(gradients, made, strict=True) if yes]
        found = iter(step.backward(given))
        of_inputs = [next(found) if yes else None for yes in wanted]
        return None, None, *of_inputs, *found


class CapturedStep:
    """Forward and backward as CUDA graphs of one pool. `weights` share the memory of the user's
    weights and are separate leaves, so that the user's hooks do not run during the capture."""

    def __init__(
        self,
        execute: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        device: torch.device,
        *,
        pool: GraphPool,
        turns: Turns,
    ) -> None:
        self._turns, self._execute = turns, execute
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self.forwards = 0
        self._inputs = static_like([t.detach() for t in inputs])
        for static, given in zip(self._inputs, inputs, strict=True):
            static.requires_grad_(given.requires_grad)
        leaves = [*(t for t in self._inputs if t.requires_grad), *weights]

        def back(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
            roots = [t for t in outputs if t.requires_grad]
            found = torch.autograd.grad(
                roots, leaves, gradients, retain_graph=True, allow_unused=True
            )
            return [
                torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)
            ]

        with capturing(device), torch.enable_grad():
            for _ in range(WARM_UPS):
                outputs = list(execute(self._inputs))
                self._given = [torch.zeros_like(t) for t in outputs if t.requires_grad]
                back(outputs, self._given)
            del outputs
            self._there, made = record(lambda: execute(self._inputs), device, pool)
            # Kept with their autograd graph: the saved activations must keep their memory.
            self._outputs = list(made)
            self._back, self._gradients = record(
                lambda: back(self._outputs, self._given), device, pool
            )
        self._plain = [t.detach() for t in self._outputs]
        self._static = [t.detach() for t in self._inputs]
        pool.graphs.add(self)

    def asks(self) -> tuple[list[bool], list[bool]]:
        return [t.requires_grad for t in self._inputs], [t.requires_grad for t in self._outputs]

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        with self._turns.lock, torch.no_grad():
            self._turns.begin(self._device)
            copy_all(self._static, inputs)
            self._there.replay()
            self.forwards += 1
            outputs = [torch.empty_like(t) for t in self._plain]
            copy_all(outputs, self._plain)
            self._turns.end()
        return outputs

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        with self._turns.lock, torch.no_grad():
            self._turns.begin(self._device)
            copy_all(self._given, gradients)
            self._back.replay()
            found = [torch.empty_like(t) for t in self._gradients]
            copy_all(found, self._gradients)
            self._turns.end()
        return found
