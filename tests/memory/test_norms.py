"""The program's norms are found, and no other thread notices."""

from __future__ import annotations

import threading

import torch
from torch import nn

from kilter.memory.engine.norms import ProgramNorms


class Own(nn.LayerNorm):
    """Of the program."""


class Derived(Own):
    """Twice derived."""


def test_all_are_found_while_other_threads_fill_tuples() -> None:
    """A list of all objects holds tuples that are being filled: SystemError in their thread."""
    modules = [
        nn.LayerNorm(4, eps=1e-3),
        Own(4, eps=1e-4),
        Derived(4, eps=1e-6),
        nn.GroupNorm(2, 4, eps=1e-2),
        nn.RMSNorm(4, eps=1e-7),
    ]
    over = threading.Event()
    errors: list[BaseException] = []

    def fill() -> None:
        while not over.is_set():
            try:
                tuple(n for n in range(500))
            except SystemError as error:
                errors.append(error)

    threads = [threading.Thread(target=fill) for _ in range(2)]
    for thread in threads:
        thread.start()
    norms = ProgramNorms(torch.device("cpu"), lambda function, *args: True)
    try:
        for _ in range(20):
            norms.find()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert errors == []
    found = [norms.epsilon(None, module.weight) for module in modules]
    assert found == [1e-3, 1e-4, 1e-6, 1e-2, 1e-7]
    norms.close()
