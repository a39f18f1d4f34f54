"""How a script ended, as a value and as the text that records hold."""

from __future__ import annotations

import pytest

from kilter.core.script_end import end_of


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


@pytest.mark.parametrize(
    ("error", "text", "finished", "out_of_memory"),
    [
        (None, "finished", True, False),
        (SystemExit(), "finished", True, False),
        (SystemExit(0), "finished", True, False),
        (SystemExit(3), "exit 3", False, False),
        (SystemExit("no such file: OutOfMemoryError"), "exit 1", False, False),
        (ValueError("OutOfMemoryError"), "raised ValueError", False, False),
        (KeyboardInterrupt(), "raised KeyboardInterrupt", False, False),
        (OutOfMemoryError(), "raised OutOfMemoryError", False, True),
    ],
)
def test_end_of_a_script(
    error: BaseException | None, text: str, *, finished: bool, out_of_memory: bool
) -> None:
    end = end_of(error)
    assert (str(end), end.finished, end.out_of_memory) == (text, finished, out_of_memory)
