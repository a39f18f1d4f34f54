"""What a trial recomputes is compared byte by byte, and what came of it is read at its end."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from kilter.core.reasons import Reason
from kilter.memory import messages
from kilter.memory.engine import CpuStandIn
from kilter.memory.engine.head_start import HeadStart
from kilter.memory.engine.store import Store
from kilter.memory.engine.trial import RecomputeTrial, Repeated, TrialTerms, same_bytes


@given(st.binary(max_size=40), st.data())
def test_storages_are_the_same_if_no_bit_differs(content: bytes, data: Any) -> None:
    tensor = torch.tensor(list(content), dtype=torch.uint8)
    other = tensor.clone()
    assert same_bytes(tensor, other)
    if content:
        at = data.draw(st.integers(0, len(content) - 1))
        other[at] ^= 1 << data.draw(st.integers(0, 7))
        assert not same_bytes(tensor, other)
    assert not same_bytes(tensor, torch.zeros(len(content) + 1, dtype=torch.uint8))


def test_numbers_that_equal_nothing_have_the_same_bytes() -> None:
    tensor = torch.full((8,), torch.nan)
    assert same_bytes(tensor, tensor.clone())


@given(st.lists(st.lists(st.tuples(st.booleans(), st.booleans())), max_size=6))
def test_each_has_its_own_outcome(rows: list[list[tuple[bool, bool]]]) -> None:
    backend = CpuStandIn()
    refused: dict[Reason, None] = {}
    trial = RecomputeTrial(Store(backend), HeadStart(backend), TrialTerms(), refused)
    taken = []
    for number, row in enumerate(rows):
        equal = [torch.tensor(same) if on_device else same for same, on_device in row]
        reason = messages.recipe_differs(str(number))
        trial.when_over(Repeated(equal, [(0.0, float(number))]), taken.append, reason)
    trial.over()
    good = [number for number, row in enumerate(rows) if all(same for same, _ in row)]
    assert taken == [float(number) for number in good]
    assert len(refused) == len(rows) - len(good)
