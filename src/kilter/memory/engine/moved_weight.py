"""A weight that may be offloaded: where its bytes are, the host's copy, and when passes need it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kilter.memory.engine.backend import CopyEvent
from kilter.memory.engine.stream import Where

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class HostCopy:
    """The host's copy of a weight's value."""

    host: torch.Tensor
    on_host: torch.Tensor
    """It is the host memory as a tensor of the device, in the parameter's shape."""
    storage: int = -1
    version: int = -1
    """The parameter had this storage and this version when it was copied."""
    lent: bool = False
    """The program has read `.data` since the copy, or holds the bytes by another tensor."""
    departure: CopyEvent = None
    sum: Any = None
    """It is the sum over the bits of the copy."""
    published: bool = False
    """The weight was copied since it was updated in backward."""

    def valid(self, parameter: torch.Tensor) -> bool:
        """No write to the parameter shows since it was copied."""
        same_storage = parameter.untyped_storage()._cdata == self.storage
        return same_storage and parameter._version == self.version and not self.lent


@dataclass(slots=True)
class WeightUse:
    """When passes need a weight, as far as that was seen."""

    marker: int
    """The gradient of the parameter with this identity shows when backward needs the weight."""
    updated_at: int | None = None
    needed_at: int | None = None
    """The weight was needed at this tick, where that was before its gradient."""
    asked_in: int = -2
    """This is the last pass in which forward needed the weight after it was offloaded."""


class MovedWeight:
    """One weight that may be offloaded, and where its bytes are."""

    def __init__(self, parameter: torch.nn.Parameter, forget: Callable[[int], None]) -> None:
        key = id(parameter)
        self.parameter = weakref.ref(parameter, lambda _: forget(key))
        self.size_bytes = parameter.untyped_storage().nbytes()
        self.use = WeightUse(marker=key)
        self.where = Where.RESIDENT
        self.copy: HostCopy | None = None
        self.incoming: torch.Tensor | None = None
        """The weight is copied back to this device memory."""
        self.arrival: CopyEvent = None
        self.stays = False
