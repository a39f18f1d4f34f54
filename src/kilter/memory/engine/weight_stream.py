"""On which stream, and past which modes of the program, work on weights is issued."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from kilter.observe import torch_internals


class ModuleStream:
    """The stream on which the program's modules issue their work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream: Any = None

    def note(self) -> bool:
        """A module has run or a gradient has arrived. Whether on the same stream as before."""
        if self.stream is None and self._device.type == "cuda":
            self.stream = torch.cuda.current_stream(self._device)
        return not self.left()

    def left(self) -> bool:
        """The program issues work on another stream than that of its modules."""
        if self._device.type != "cuda" or self.stream is None:
            return False
        return bool(torch.cuda.current_stream(self._device) != self.stream)

    def foreign(self, stream: Any) -> bool:
        """Modules have run on another stream than this."""
        return self.stream is not None and stream is not None and stream != self.stream

    def entered(self) -> Any:
        """A context in which work is issued on the modules' stream."""
        return torch.cuda.stream(self.stream if self.left() else None)

    def synchronize(self) -> None:
        """Wait until any stream may read what was issued on this one."""
        if self.stream is not None:
            self.stream.synchronize()


def undisturbed() -> Any:
    """A context in which the program's modes do not see our operations."""
    quiet = torch_internals.DisableFunction()
    modes = torch_internals.dispatch_mode_depth() or torch_internals.functorch_level() is not None
    if not modes and not torch.is_inference_mode_enabled():
        return quiet
    stack = ExitStack()
    stack.enter_context(quiet)
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch_internals.DisableFunctorch())
    stack.enter_context(torch_internals.disable_current_modes())
    return stack
