"""`kilter.divided`: forward and backward in pieces of the batch, one alive at a time.

A piece's activations are freed before the next one begins, so memory does not limit the batch.
Gradients add up to those of the whole batch, with sums taken in another order and other dropout
masks. How many pieces there have to be is learned in the first call, which runs pieces of 1, 1, 2,
4, ... samples and measures what a sample takes: nothing is tried that is not expected to fit. The
idea is [0068] of US 2025/0259058 A1 (256 into 4 times 64).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any

from kilter.core.errors import UsageError
from kilter.core.plan import MemoryBudget
from kilter.core.units import show_bytes
from kilter.memory.usable_bytes import usable_device_bytes
from kilter.observe import torch_internals

if TYPE_CHECKING:
    import torch

MARGIN = 0.03
"""This share of a piece's room is left free: other sizes differ a little from the one measured."""


class divided:  # noqa: N801
    """Called with a batch, it stands for `loss = loss_of(*batch); loss.backward()`.

    in_pieces = kilter.divided(lambda x, y: criterion(model(x), y), memory_budget="24GiB")
    for x, y in batches:
        loss = in_pieces(x, y)
        optimizer.step()
        optimizer.zero_grad()
    """

    def __init__(
        self,
        loss_of: Callable[..., torch.Tensor],
        *,
        pieces: int | None = None,
        memory_budget: str | int = "auto",
        reduction: str = "mean",
        backward: Callable[[torch.Tensor], None] | None = None,
        allow_batch_norm: bool = False,
    ) -> None:
        """`loss_of(*batch)` is the loss of a batch whose tensors have the samples in their first
        dimension; other arguments are handed on to every piece.

        `pieces` fixes their number; without it, as few as keep the device's memory within
        `memory_budget` (`"24GiB"`, `"75%"` of what the whole batch would take, `"auto"`: the card).
        `reduction` says whether the loss is the `mean` over samples or their `sum`; what does not
        depend on samples (a penalty of weights) belongs to a mean only. A mean over tokens or by
        class weights is no mean over samples: give their sum over the batch's own count.
        `backward` is what is done with the loss of a piece (default: `loss.backward()`); a scaler
        goes here. Batch norm in training would take its statistics of a piece and is refused,
        unless allowed.
        """
        if pieces is not None and (not isinstance(pieces, Integral) or pieces < 1):
            raise UsageError(f"pieces={pieces!r}: write a whole number of pieces, at least 1")
        if reduction not in ("mean", "sum"):
            raise UsageError(f"reduction {reduction!r} is not one of mean, sum")
        self._loss_of = loss_of
        self._fixed = pieces
        self._budget = MemoryBudget.parse(str(memory_budget))
        self._mean = reduction == "mean"
        self._backward = backward
        self._allow_batch_norm = allow_batch_norm
        self._surges: dict[int, int] = {}
        """It holds, by size of a piece, the most that the piece had on the device on top of what
        was there."""
        self._grows_bytes = 0
        """What a call leaves behind that was not there before: gradients."""
        self._sizes: tuple[int, ...] = ()
        self._effects: dict[str, None] = {}

    def __call__(self, *batch: Any, **named: Any) -> torch.Tensor:
        """The loss of the whole batch, detached; its gradients are where backward leaves them."""
        samples, device = self._first(batch, named)
        if samples == 0:
            raise UsageError("the batch is empty")
        if self._fixed is not None:
            sizes: Iterator[int] = iter(_even(samples, self._fixed))
        elif device is None:
            raise UsageError("pieces are found by the allocator of a GPU: on a CPU, give pieces=N")
        elif len(self._surges) < 2:
            sizes = self._growing(samples, device)
        else:
            sizes = iter(_even(samples, self._fewest(samples, device)))
        return self._run(sizes, samples, device, batch, named)

    def explain(self) -> str:
        """How the last batch was divided, why, and how that differs from the whole."""
        if not self._sizes:
            return "no batch so far"
        lines = [f"{len(self._sizes)} pieces of {', '.join(map(str, _distinct(self._sizes)))}"]
        if len(self._surges) > 1:
            base_bytes, sample_bytes = self._line()
            lines.append(
                f"a piece takes {show_bytes(base_bytes)} and {show_bytes(sample_bytes)} a sample "
                "[measured]"
            )
        if len(self._sizes) > 1:
            lines.append(f"other than in one piece: {', '.join(self._effects)}")
        return "\n".join(lines)

    @property
    def pieces(self) -> int:
        """Of the last batch; 0 if there was none."""
        return len(self._sizes)

    # How many

    def _growing(self, samples: int, device: torch.device) -> Iterator[int]:
        """Sizes of the first call's pieces: each is the last one doubled, if that is to fit."""
        left, size = samples, 1
        while left:
            yield min(size, left)
            left -= min(size, left)
            if len(self._surges) > 1:
                size = max(1, min(2 * size, self._largest(samples, device)))
            elif self._surges:
                size = 2

    def _fewest(self, samples: int, device: torch.device) -> int:
        return -(-samples // min(samples, self._largest(samples, device)))

    def _largest(self, samples: int, device: torch.device) -> int:
        """Samples of a piece that fit, at least one."""
        import torch

        base_bytes, sample_bytes = self._line()
        there_bytes = torch.cuda.memory_allocated(device) + self._grows_bytes
        room_bytes = self._budget_bytes(samples, device) - there_bytes - base_bytes
        return max(1, int((1 - MARGIN) * room_bytes / max(1, sample_bytes)))

    def _budget_bytes(self, samples: int, device: torch.device) -> int:
        import torch

        if self._budget.size_bytes is not None:
            return self._budget.size_bytes
        if self._budget.share is not None:
            base_bytes, sample_bytes = self._line()
            there_bytes = torch.cuda.memory_allocated(device) + self._grows_bytes
            return int(self._budget.share * (there_bytes + base_bytes + sample_bytes * samples))
        return usable_device_bytes(torch.cuda, device)[0]

    def _line(self) -> tuple[int, int]:
        """Bytes of a piece without samples, and of each sample: through the two largest sizes."""
        (few, less_bytes), (many, more_bytes) = sorted(self._surges.items())[-2:]
        sample_bytes = max(0, more_bytes - less_bytes) // (many - few)
        return max(0, more_bytes - sample_bytes * many), sample_bytes

    # Running

    def _run(
        self,
        sizes: Iterator[int],
        samples: int,
        device: torch.device | None,
        batch: tuple[Any, ...],
        named: dict[str, Any],
    ) -> torch.Tensor:
        import torch

        self._effects.clear()
        total: torch.Tensor | None = None
        done: list[int] = []
        first = 0
        for size in sizes:
            last = first + size == samples
            with self._watched(whole=size == samples, last=last), self._measured(size, device):
                part, part_named = torch_internals.pytree.tree_map_only(
                    torch.Tensor, partial(_part, first=first, size=size), (batch, named)
                )
                loss = self._loss_of(*part, **part_named)
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                    raise UsageError("loss_of must return the loss, a tensor of one element")
                if self._mean:
                    loss = loss * (size / samples)
                loss.backward() if self._backward is None else self._backward(loss)
                total = loss.detach() if total is None else total + loss.detach()
                del loss, part, part_named
            done.append(size)
            first += size
        self._sizes = tuple(done)
        assert total is not None
        return total

    @contextmanager
    def _measured(self, size: int, device: torch.device | None) -> Iterator[None]:
        """What a piece takes, unless gradients came into being in it."""
        import torch

        if device is None or self._fixed is not None:
            yield
            return
        before_bytes = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield
        after_bytes = torch.cuda.memory_allocated(device)
        if after_bytes > before_bytes + (before_bytes >> 10):
            self._grows_bytes = after_bytes - before_bytes
        else:
            surge_bytes = torch.cuda.max_memory_allocated(device) - before_bytes
            self._surges[size] = max(self._surges.get(size, 0), surge_bytes)

    @contextmanager
    def _watched(self, *, whole: bool, last: bool) -> Iterator[None]:
        """While a piece runs: what makes it differ from the whole, and gradients that processes
        exchange are exchanged once."""
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.nn.parallel import DistributedDataParallel

        self._effects["order of summation"] = None
        waiting: list[Any] = []

        def before(module: Any, inputs: Any) -> None:
            if isinstance(module, torch_internals.Dropout) and module.training:
                self._effects["dropout masks"] = None
            elif isinstance(module, torch_internals.BatchNorm) and module.training and not whole:
                if not self._allow_batch_norm:
                    raise UsageError(
                        f"{type(module).__name__} in training takes its statistics of a piece: "
                        "the results would be others in kind (allow_batch_norm=True does it)"
                    )
                self._effects["batch norm statistics of a piece"] = None
            elif (
                isinstance(module, DistributedDataParallel)
                and module.require_backward_grad_sync
                and not last
            ):
                module.require_backward_grad_sync = False
                waiting.append(module)

        handle = register_module_forward_pre_hook(before)
        try:
            yield
        finally:
            handle.remove()
            for module in waiting:
                module.require_backward_grad_sync = True

    def _first(
        self, batch: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[int, torch.device | None]:
        """How many samples, and the GPU that they are on."""
        import torch

        tensors = [
            t
            for t in torch_internals.pytree.tree_leaves((batch, named))
            if isinstance(t, torch.Tensor) and t.dim()
        ]
        counts = {int(t.size(0)) for t in tensors}
        if len(counts) != 1:
            raise UsageError(
                "the tensors of a batch must have the samples in their first dimension, all as "
                f"many; here: {sorted(counts) or 'no tensors'}"
            )
        gpus = [t.device for t in tensors if t.is_cuda]
        return counts.pop(), gpus[0] if gpus else None


def _part(tensor: torch.Tensor, *, first: int, size: int) -> torch.Tensor:
    """Some samples; what has no samples is whole in every piece."""
    return tensor.narrow(0, first, size) if tensor.dim() else tensor


def _even(samples: int, pieces: int) -> list[int]:
    """As even as it goes, the larger first."""
    pieces = min(samples, pieces)
    cuts = [samples * i // pieces for i in range(pieces + 1)]
    return sorted((b - a for a, b in pairwise(cuts)), reverse=True)


def _distinct(sizes: tuple[int, ...]) -> list[int]:
    return sorted(set(sizes), reverse=True)
