"""The engine's weak reference to a storage."""

from __future__ import annotations

import sys
from types import FrameType

import torch

from kilter.memory.engine.aliases import StorageReference


def test_it_knows_when_the_storage_is_gone() -> None:
    tensor = torch.zeros(8)
    reference = StorageReference(tensor.untyped_storage())
    view = tensor[2:]
    del tensor
    assert not reference.expired()
    del view
    assert reference.expired()


def test_no_storage_gets_its_number_while_it_lives() -> None:
    tensor = torch.zeros(8)
    reference = StorageReference(tensor.untyped_storage())
    del tensor
    others = [torch.zeros(8) for _ in range(64)]
    assert reference.cdata not in {other.untyped_storage()._cdata for other in others}


def test_its_end_runs_nothing_that_a_signal_handler_could_interrupt() -> None:
    """Python drops what a handler raises within a destructor that is written in Python."""
    called: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    references = [StorageReference(torch.zeros(8).untyped_storage())]
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        references.clear()
    finally:
        sys.setprofile(before)
    assert called == []
