"""The peak of a job as it was measured, and what its largest pass holds there, by module, for
whoever has run out of memory."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from kilter.core.units import show_bytes, show_count
from kilter.memory.layer_paths import without_numbers

if TYPE_CHECKING:
    import torch

    from kilter.memory.engine.engine import Swapper
    from kilter.memory.engine.pass_record import PassRecord

MOST_MODULES = 3
"""At most so many modules are named, the largest first."""


def at_peak(record: PassRecord) -> str:
    """The saved tensors that are there at the peak with everything kept, by the modules that saved
    them; those of layers alike count together. Empty if there are none."""
    peak_at = max(range(len(record.level_bytes)), key=record.level_bytes.__getitem__)
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for datum in record.data:
        used_at = len(record.level_bytes) if datum.needed_at is None else datum.needed_at
        if datum.packed_at <= peak_at <= used_at:
            module = without_numbers(datum.module)
            sizes[module] += datum.size_bytes
            counts[module] += 1
    if not sizes:
        return ""
    largest = sizes.most_common(MOST_MODULES)
    named = [
        f"{show_bytes(size_bytes)} {f'in {module}' if module else 'outside of modules'} "
        f"({show_count(counts[module], 'tensor')})"
        for module, size_bytes in largest
    ]
    left_bytes = sizes.total() - sum(size_bytes for _, size_bytes in largest)
    if left_bytes:
        named.append(f"{show_bytes(left_bytes)} in others")
    return f"{show_bytes(sizes.total())} of saved tensors: {', '.join(named)}"


class JobPeak:
    """Of passes of all kinds."""

    def __init__(self, swapper: Swapper, device: torch.device, cuda: Any) -> None:
        """`cuda` is `torch.cuda` where the device is a GPU, else None."""
        self._swapper = swapper
        self._device = device
        self._cuda = cuda
        self._end_bytes: int | None = None
        """As it was measured when the script ended."""
        self._largest_bytes = 0
        """The largest pass so far had this peak with everything kept."""
        self._words = ""

    @property
    def on_gpu(self) -> bool:
        """It is the allocator's; else what autograd keeps on the CPU."""
        return self._cuda is not None

    def script_ended(self) -> None:
        """What is measured from here on is not the program's."""
        self._end_bytes = self.measured_bytes()

    def measured_bytes(self) -> int | None:
        """As passes run now; where no pass was measured since the newest plan, only the allocator
        shows it."""
        if self._end_bytes:
            return self._end_bytes
        peak_bytes = self._swapper.report().highest_bytes
        if self._cuda is not None and (self._swapper.planned or not peak_bytes):
            allocated_bytes = int(self._cuda.max_memory_allocated(self._device))
            peak_bytes = max(peak_bytes, allocated_bytes)
        return peak_bytes or None

    def words(self) -> str:
        """What was held, by the largest pass that was ever seen: checkpointing makes it a smaller
        one."""
        record = self._swapper.largest_pass()
        if record is not None and record.peak_bytes > self._largest_bytes:
            self._largest_bytes, self._words = record.peak_bytes, at_peak(record)
        return self._words
