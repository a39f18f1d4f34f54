"""What a pass holds at its peak, by module, for whoever has run out of memory."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from kilter.core.units import show_bytes, show_count

if TYPE_CHECKING:
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
            module = re.sub(r"(?<![^.])\d+(?![^.])", "*", datum.module)
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
