"""Descriptors of ours in a program that closes every one that it does not know."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import pytest

from kilter.core import codec
from kilter.core.files import open_file

WEIGHTS = b"weights" * 1000


class Taken:
    """Does to a descriptor what a program does: closes it, and its own file gets the number."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO | None = None

    def __call__(self, number: int) -> None:
        os.close(number)
        self.file = self.path.open("wb", buffering=0)
        assert self.file.fileno() == number
        self.file.write(WEIGHTS)

    def untouched(self) -> bool:
        """Still open, still its own, and nothing of ours in it."""
        assert self.file is not None
        self.file.write(b".")
        self.file.close()
        return self.path.read_bytes() == WEIGHTS + b"."


def test_a_file_that_is_being_read_is_not_mistaken_for_the_programs(tmp_path: Path) -> None:
    ours, taken = tmp_path / "trace.json", Taken(tmp_path / "checkpoint")
    ours.write_bytes(b"{" * 100_000)
    with open_file(ours, max_bytes=1 << 20) as file:
        assert file.read(10) == b"{" * 10
        taken(file.fileno())
        with pytest.raises(OSError, match="the program has closed it"):
            file.read()
    assert taken.untouched()


def test_a_file_that_is_being_written_leaves_the_programs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed while the disk is waited for, which takes longest."""
    taken = Taken(tmp_path / "checkpoint")
    monkeypatch.setattr(os, "fsync", taken)
    codec.write_atomically(tmp_path / "report.json", b"report")
    assert taken.untouched()
    assert (tmp_path / "report.json").read_bytes() == b"report"
