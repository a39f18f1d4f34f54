"""Stepping aside for `torch.func`, which allows no hooks on saved tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from kilter.memory.engine.saved_hooks import (
    around_disabling,
    innermost_are_ours,
    stepped_aside,
)
from kilter.memory.engine.store import kept, whole
from kilter.observe import torch_internals


def test_one_replacement_serves_all_and_goes_with_the_last() -> None:
    graph = torch.autograd.graph
    seen = []

    def noting(name: str):  # type: ignore[no-untyped-def]
        @contextmanager
        def around() -> Iterator[None]:
            seen.append(name)
            yield

        return around

    ends = [around_disabling(noting(name)) for name in ("first", "second")]
    replaced = graph.disable_saved_tensors_hooks
    assert replaced is not disable_saved_tensors_hooks
    with replaced("no hooks here"):
        pass
    assert seen == ["second", "first"]
    ends[0]()
    assert graph.disable_saved_tensors_hooks is replaced
    ends[1]()
    assert graph.disable_saved_tensors_hooks is disable_saved_tensors_hooks


def test_a_replacement_below_anothers_stays_and_serves_again() -> None:
    graph = torch.autograd.graph
    end = around_disabling(stepped_aside)
    below = graph.disable_saved_tensors_hooks
    theirs = lambda message: below(message)  # noqa: E731
    graph.disable_saved_tensors_hooks = theirs
    try:
        end()
        assert graph.disable_saved_tensors_hooks is theirs
        again = around_disabling(stepped_aside)
        assert graph.disable_saved_tensors_hooks is theirs
    finally:
        graph.disable_saved_tensors_hooks = below
    again()
    assert graph.disable_saved_tensors_hooks is disable_saved_tensors_hooks


def test_our_hooks_step_aside_below_none_of_the_programs() -> None:
    end = around_disabling(stepped_aside)
    try:
        with saved_tensors_hooks(kept, whole):
            assert innermost_are_ours()
            square = torch.func.grad(lambda x: (x * x).sum())
            assert torch.equal(square(torch.ones(3)), torch.full((3,), 2.0))
            assert innermost_are_ours()
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                assert not innermost_are_ours()
                with stepped_aside():
                    assert torch_internals.top_saved_hooks(True) is not None
    finally:
        end()
