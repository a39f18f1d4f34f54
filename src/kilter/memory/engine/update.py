"""The optimizer's own step on some of its parameters.

In a round of visits it is called some forty times an iteration, with a dozen parameters each, so
the host time of `step` beside its kernels counts. For the fused kinds of Adam, whose step ends in
two calls of the framework, only these two calls are made; all others go through `step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kilter.observe import torch_internals

FUSED = frozenset({"Adam", "AdamW"})


def update(
    optimizer: Any,
    groups: Mapping[int, int],
    parameters: Sequence[Any],
    gradients: Sequence[Any],
) -> None:
    """Without the optimizer's hooks; `groups` tells the group of each parameter, by identity. Both
    ways compute the same numbers, bit for bit."""
    chosen: dict[int, tuple[list[Any], list[Any]]] = {}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        members = chosen.setdefault(groups[id(parameter)], ([], []))
        members[0].append(parameter)
        members[1].append(gradient)
    left = [i for i in sorted(chosen) if not _fused(optimizer, i, *chosen[i])]
    if not left:
        return
    before = optimizer.param_groups
    optimizer.param_groups = [{**before[i], "params": chosen[i][0]} for i in left]
    try:
        type(optimizer).step.__wrapped__(optimizer)
    finally:
        optimizer.param_groups = before


def _fused(optimizer: Any, number: int, parameters: list[Any], gradients: list[Any]) -> bool:
    """Do what `step` of a fused Adam or AdamW does; `False` if there is more to it, and nothing was
    done."""

    from kilter.memory.engine.quiet import ungraded

    group = optimizer.param_groups[number]
    if (
        type(optimizer).__name__ not in FUSED
        or not group["fused"]
        or group["amsgrad"]
        or getattr(optimizer, "grad_scale", None) is not None
        or getattr(optimizer, "found_inf", None) is not None
        or not all(isinstance(v, float) for v in (group["lr"], *group["betas"]))
    ):
        return False
    states = [optimizer.state.get(parameter) for parameter in parameters]
    if not all(states):
        return False  # made by the first step
    moments, squares, steps = (
        [state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")
    )
    decoupled = group["decoupled_weight_decay"]
    apply = torch_internals.fused_adamw if decoupled else torch_internals.fused_adam
    beta1, beta2 = group["betas"]
    fused = partial(
        apply,
        parameters,
        gradients,
        moments,
        squares,
        [],
        steps,
        amsgrad=False,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        grad_scale=None,
        found_inf=None,
    )
    ungraded(lambda: (torch_internals.foreach_add(steps, 1), fused()))
    return True
