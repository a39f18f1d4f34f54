"""Memory that an operation has made and not set, as `empty` does, until others have set all of it.

What is recomputed must not read it before. Often it is set in parts: halves of each row, as where
embeddings are rotated, or every other element. So what is known of it are the columns that are set
of rows of one length. `recorder.cpp` does the same.
"""

from __future__ import annotations

from collections.abc import Sequence


class UnsetMemory:
    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._row_bytes = 0
        """Rows are so long; 0: nothing is set yet."""
        self._columns: list[tuple[int, int]] = []
        """These bytes of each row are set: from, and up to."""

    def set(
        self, size: Sequence[int], stride: Sequence[int], offset: int, *, each_bytes: int
    ) -> bool:
        """A view is set whose elements have `each_bytes`. Says whether all is set now, as far as
        that can be seen."""
        width, rows, row = each_bytes, 1, self._size_bytes
        steps = (each_bytes * step for step in stride)
        for step, count in sorted(one for one in zip(steps, size, strict=True) if one[1] != 1):
            if rows == 1 and step == width:
                width *= count
            elif rows == 1:
                rows, row = count, step
            elif step == rows * row:
                rows *= count
            else:
                return False
        if rows * row != self._size_bytes or self._row_bytes not in (0, row):
            return False
        self._row_bytes = row
        first = each_bytes * offset
        self._columns.append((first, first + width))
        reached = 0
        for first, last in sorted(self._columns):
            if first > reached:
                return False
            reached = max(reached, last)
        return reached == row
