"""The engine begins at the first large tensor that is saved, once."""

from __future__ import annotations

import threading
from typing import Any

import torch

from kilter.memory.first_tensor import FirstTensor
from kilter.session.fence import Fence

PATIENCE_S = 20.0


def fail(where: str, error: str) -> None:
    raise AssertionError(f"{where}: {error}")


def test_of_two_threads_that_train_one_begins_the_engine() -> None:
    """To open the device and measure its link takes a while, in which the other thread saves its
    first large tensor as well. Two engines would share a job, and one of them know of no
    iteration."""
    begun: list[int] = []
    begins, other_saved = threading.Event(), threading.Event()

    def begin(tensor: torch.Tensor) -> None:
        begun.append(threading.get_ident())
        begins.set()
        assert other_saved.wait(PATIENCE_S)
        first.leave()

    def trains(*, waits: bool) -> None:
        first.wait_here()
        x = torch.ones(1024, 1024, requires_grad=True) * 1.0
        if waits:
            assert begins.wait(PATIENCE_S)
        y = x.exp()
        if waits:
            other_saved.set()
        y.sum().backward()
        ended.append(waits)

    fence = Fence(fail)
    first = FirstTensor(begin, fence, on_gpu=False)
    no_gpu: Any = torch
    first.torch, first.device_type = no_gpu, "cpu"
    ended: list[bool] = []
    threads = [threading.Thread(target=trains, kwargs={"waits": waits}) for waits in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    assert sorted(ended) == [False, True]
    assert begun == [threads[0].ident]
    assert not fence.down
