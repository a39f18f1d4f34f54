"""Waits for the first large tensor that the program saves for backward.

Nothing is opened before the program itself has used the device: it may still choose another one,
or fork. Hooks on saved tensors belong to a thread, so the waiting one is set where torch is
imported, and in any thread that turns out to step an optimizer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kilter.core.units import MIB
from kilter.observe import torch_internals
from kilter.observe.imports import after_import
from kilter.observe.iteration_clock import in_backward

if TYPE_CHECKING:
    import torch

    from kilter.session.fence import Fence


class FirstTensor:
    """Calls `met(tensor)` behind the fence, until `leave` says that the wait is over.

    `on_gpu` says that the job's device is a GPU; otherwise torch is asked.
    """

    def __init__(self, met: Callable[[torch.Tensor], None], fence: Fence, *, on_gpu: bool) -> None:
        self._met = met
        self._fence = fence
        self._on_gpu = on_gpu
        self._import = after_import("torch", fence(self._arrived))
        self._hooks: dict[int, Any] = {}
        """Each thread has a waiting hook of its own."""
        self._ended = False
        self._begun = threading.Lock()
        """Taken for good by the thread that calls `met`, which takes a while: two may train."""
        self._end_around: Callable[[], None] = lambda: None
        self.torch: Any = None
        """It is None as long as the program has not imported it."""
        self.device_type: str | None = None
        """Tensors of a device of this type are governed: `cuda` or `cpu`; None: not known yet."""

    def begin(self) -> None:
        """Begin as soon as the program has imported torch."""
        self._import.install()

    def stop(self) -> None:
        """Do not begin any more, and call `met` no more."""
        self._ended = True
        self._import.cancel()

    def remove_hooks(self) -> None:
        """Take out what has been put into torch, in this thread."""
        self._end_around()
        self._end_around = lambda: None
        waiting = self._hooks.pop(threading.get_ident(), None)
        if waiting is not None:
            waiting.__exit__()

    def leave(self) -> None:
        """From `met`: remove the waiting hook of this thread. It is on top, since autograd has just
        called it."""
        self._hooks.pop(threading.get_ident()).__exit__()
        self._ended = True

    def _arrived(self) -> None:
        import torch

        from kilter.memory.engine.saved_hooks import around_disabling, stepped_aside

        self.torch = torch
        self._end_around = around_disabling(stepped_aside)
        self.wait_here()

    def wait_here(self) -> None:
        """Wait for a tensor of this thread too."""
        here = threading.get_ident()
        if self.torch is None or self._ended or here in self._hooks:
            return
        from kilter.memory.engine.quiet import unseen
        from kilter.memory.engine.store import kept, read_kept

        def pack(tensor: Any) -> Any:
            waiting = not self._ended and threading.get_ident() in self._hooks
            # Backward undoes in its end what happens to the hooks of a thread within it.
            first = waiting and not in_backward() and self._governs(tensor)
            if first and self._begun.acquire(blocking=False):
                unseen(lambda: self._fence(self._met)(tensor))
            return kept(tensor)

        disable = torch_internals.uncompiled  # Dynamo would compile our own frames
        hooks = self.torch.autograd.graph.saved_tensors_hooks(disable(pack), disable(read_kept))
        hooks.__enter__()
        self._hooks[here] = hooks

    def _governs(self, tensor: torch.Tensor) -> bool:
        """Whether the engine governs tensors like this one."""
        if tensor.numel() * tensor.element_size() < MIB or (
            tensor.is_leaf and tensor.requires_grad
        ):
            return False
        if type(tensor) is not self.torch.Tensor or tensor.device.type not in ("cuda", "cpu"):
            return False
        if self.device_type is None:
            # Asking whether there is CUDA begins to use it: only where the answer matters.
            cuda = self.torch.cuda
            seen = self._on_gpu or tensor.is_cuda
            built = self.torch.version.cuda is not None
            self.device_type = "cuda" if seen or (built and cuda.is_available()) else "cpu"
        if tensor.device.type != self.device_type:
            return False
        return self.device_type == "cpu" or not self.torch.cuda.is_current_stream_capturing()
