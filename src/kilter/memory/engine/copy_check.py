"""Whether offloaded weights were equal to their copies, by sums over their bits.

Code that knows the address of a weight may write to it unnoticed. So the sum of a weight that is
being offloaded is compared with that of its copy, on the device; the host reads the result later.
"""

from __future__ import annotations

import torch

from kilter.memory.engine.backend import Backend
from kilter.memory.engine.weight_stream import ModuleStream, undisturbed


def bit_sum(flat: torch.Tensor) -> torch.Tensor:
    """The sum over the bits of a flat byte tensor."""
    words = flat.view(torch.int64) if flat.numel() % 8 == 0 else flat
    return words.sum(dtype=torch.int64)


class CopyCheck:
    """Compares the sums of weights with those of their copies."""

    def __init__(self, backend: Backend, stream: ModuleStream) -> None:
        self._backend = backend
        self._stream = stream
        self._sums: list[tuple[torch.Tensor, torch.Tensor]] = []
        """It holds sums over the weights that were offloaded since the last comparison, and over
        their copies."""
        self._falsified = False
        self._flag: torch.Tensor | None = None
        self._flag_host: torch.Tensor | None = None

    def reserve(self) -> None:
        """Have host memory for the result. Raises `HostMemoryError`."""
        if self._flag_host is None:
            self._flag_host = self._backend.reserve(1)
            self._flag_host.fill_(0)

    def add(self, now: torch.Tensor, then: torch.Tensor) -> None:
        """A weight with the sum `now` is offloaded; its copy has the sum `then`."""
        self._sums.append((now, then))

    def compare(self) -> None:
        """Compare the weights that were offloaded since the last call with their copies."""
        if not self._sums:
            return
        with undisturbed(), self._stream.entered():
            now, then = (torch.stack(sums) for sums in zip(*self._sums, strict=True))
            wrong = (now != then).any().view(torch.uint8).view(1)
            if self._flag is None:
                self._flag = torch.zeros_like(wrong)
            self._flag |= wrong
            assert self._flag_host is not None  # since the first copy
            self._backend.copy_out(self._flag_host, self._flag)
        self._sums.clear()

    def falsified(self) -> bool:
        """True once if an offloaded weight differed from its copy. The device finds out later."""
        if self._falsified or self._flag_host is None or torch.jit.is_tracing():
            return False
        with undisturbed():
            self._falsified = bool(self._flag_host[0])
        return self._falsified
