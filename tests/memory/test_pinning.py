"""Host memory that cannot be pinned: nothing of that error reaches the program."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from kilter.memory.engine import cuda
from kilter.memory.engine.cuda import Cuda
from kilter.memory.host_memory import HostLimit, HostMemoryError

CPU = torch.device("cpu", 0)
NO_MEMORY = 2


class Runtime:
    """CUDA's runtime as far as it pins memory. A call that fails is told of once more at the next
    kernel."""

    def __init__(self, failing: str) -> None:
        self._failing = failing
        self.untold = False

    def _answer(self, name: str) -> int:
        self.untold = self.untold or name == self._failing
        return NO_MEMORY if name == self._failing else 0

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        return self._answer("register")

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return self._answer("unregister")

    def kernel(self, *args: Any, **kwargs: Any) -> None:
        untold, self.untold = self.untold, False
        if untold:
            raise RuntimeError("CUDA error: invalid argument")


@pytest.fixture
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime(request.param)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(cuda.torch, "ones", made.kernel)
    return made


def backend() -> Cuda:
    lane: Any = None
    return Cuda(CPU, lane, lane, HostLimit(2**20))


@pytest.mark.parametrize("runtime", ["register"], indirect=True)
def test_memory_that_cannot_be_pinned_is_given_back_and_the_program_hears_nothing(
    runtime: Runtime,
) -> None:
    card = backend()
    with pytest.raises(HostMemoryError, match="cannot be pinned"):
        card.reserve(4096)
    assert card.host.taken_bytes == 0
    assert not runtime.untold


@pytest.mark.parametrize("runtime", ["unregister"], indirect=True)
def test_memory_that_cannot_be_unpinned_is_no_error_of_the_program(runtime: Runtime) -> None:
    card = backend()
    card.give_back(card.reserve(4096))
    assert card.host.taken_bytes == 0
    assert not runtime.untold
