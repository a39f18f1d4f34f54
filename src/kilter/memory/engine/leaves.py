"""Parameters that operations read without saving them.

A recipe may read such a parameter only where the pass has not written to it: which version the
operation has read is not known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilter.memory.engine.aliases import Known, version_counter
from kilter.memory.engine.operation_graph import HeldSource

if TYPE_CHECKING:
    import torch


class Leaves:
    """Those that recipes have read, in the present pass or before."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Known, torch.Tensor, int]] = {}
        """It holds them by identity, with their counters of versions and their versions when the
        pass began. The compiled library looks here first."""
        self._count = 0
        """There were so many when the pass began."""

    def begin(self) -> None:
        """A pass begins."""
        known = self.known
        if len(known) != self._count:  # others have come, perhaps in the place of some
            known = {key: leaf for key, leaf in known.items() if not leaf[0].gone()}
        self._count = len(known)
        self.known = {key: (leaf, count, count._version) for key, (leaf, count, _) in known.items()}

    def unwritten(self, parameter: torch.Tensor) -> HeldSource | None:
        """To read this parameter; None if the program has written to it in this pass."""
        version = parameter._version
        found = self.known.get(id(parameter))
        if found is None or not found[0](parameter):
            self.known[id(parameter)] = Known(parameter), version_counter(parameter), version
        elif found[2] != version:
            return None
        return HeldSource(parameter, version)
