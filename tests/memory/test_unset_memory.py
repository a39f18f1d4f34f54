"""When memory that was made without being set has been set as a whole."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kilter.memory.engine.unset_memory import UnsetMemory

SIZE = (2, 3, 4)


@st.composite
def views(draw: st.DrawFn) -> list[tuple[torch.Tensor, bool]]:
    """Views of one tensor by slices, selections, permutations, or as bytes."""
    flags = torch.zeros(SIZE, dtype=torch.int16)
    found = []
    for _ in range(draw(st.integers(1, 6))):
        view = flags
        for dim in range(len(SIZE)):
            begin = draw(st.sampled_from([0, 0, 0, 1, 2]))
            step = draw(st.sampled_from([1, 1, 2, 3]))
            end = draw(st.sampled_from([SIZE[dim], SIZE[dim], SIZE[dim] // 2]))
            index = [slice(None)] * dim + [slice(begin, max(begin, end), step)]
            view = view[tuple(index)]
        view = view.permute(draw(st.permutations(range(len(SIZE)))))
        as_bytes = view.is_contiguous() and view.stride(-1) == 1 and draw(st.booleans())
        found.append((view, as_bytes))
    return found


@given(views())
def test_all_is_said_to_be_set_only_where_each_element_is(
    several: list[tuple[torch.Tensor, bool]],
) -> None:
    memory = UnsetMemory(torch.zeros(SIZE, dtype=torch.int16).nbytes)
    for view, as_bytes in several:
        view.fill_(1)
        seen = view.view(torch.uint8) if as_bytes else view
        if memory.set(seen.size(), seen.stride(), seen.storage_offset(), each_bytes=seen.itemsize):
            base = view.as_strided(SIZE, (12, 4, 1), 0)
            assert bool(base.all())


def all_set(size: tuple[int, ...], *parts: tuple[object, ...]) -> bool:
    tensor = torch.empty(size)
    memory = UnsetMemory(tensor.nbytes)
    said = [
        memory.set(view.size(), view.stride(), view.storage_offset(), each_bytes=4)
        for view in (tensor[part] for part in parts)
    ]
    assert not any(said[:-1])
    return said[-1]


def test_parts_that_programs_set_are_seen_to_be_all() -> None:
    size = (2, 3, 4)
    assert all_set(size, (...,))
    assert all_set(size, (..., slice(0, None, 2)), (..., slice(1, None, 2)))
    assert all_set(size, (..., slice(None, 2)), (..., slice(2, None)))
    assert all_set(size, (slice(1, None),), (slice(None, 1),))
    assert all_set(size, *((slice(None), row) for row in (2, 0, 1)))
    assert not all_set(size, (..., slice(None, 2)), (..., slice(3, None)))
    assert not all_set(size, (..., slice(0, None, 2)), (..., slice(0, None, 2)))
    assert not all_set(size, (..., slice(None, 2)), (0, ..., slice(2, None)))
