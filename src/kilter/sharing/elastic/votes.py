"""The ranks of a job become elastic together or not at all: what each says before that, through the
store of torch.distributed, where no rank waits for one that has failed."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from kilter.observe import torch_internals

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL_S = 0.002
_TIMEOUT_S = 120.0
_jobs = itertools.count()


QUESTIONS = ("model", "store", "share")
"""They stand in the order in which they are asked."""


class Votes:
    """What a rank has said it does not take back: it declines at the next question. Jobs of one
    process are made in the same order on all ranks, so that their numbers tell them apart."""

    def __init__(self) -> None:
        self._prefix = f"kilter-share/{next(_jobs)}"
        self._said: set[str] = set()

    def say(self, question: str, answer: str) -> None:
        """This rank's answer, unless it has declined."""
        import torch.distributed as dist

        if question not in self._said:
            store: Store = torch_internals.default_store()
            store.set(f"{self._prefix}/{question}/{dist.get_rank()}", answer)
            self._said.add(question)

    def decline(self) -> None:
        """This rank takes no part, whatever is asked from here on."""
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            for question in QUESTIONS:
                self.say(question, "")

    def hear(self, question: str, world: int) -> list[str] | None:
        """The answers of all ranks; None if one of them has declined, or says nothing for two
        minutes."""
        store: Store = torch_internals.default_store()
        keys = [f"{self._prefix}/{question}/{rank}" for rank in range(world)]
        deadline = time.monotonic() + _TIMEOUT_S
        while not store.check(keys):
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)
        answers = [store.get(key).decode() for key in keys]
        return answers if all(answers) else None
