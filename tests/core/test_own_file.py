"""Descriptors of ours in a program that closes every one that it does not know."""

from __future__ import annotations

import fcntl
import os
import resource
from io import FileIO
from pathlib import Path

import pytest

from kilter.core import codec
from kilter.core.files import open_file
from kilter.core.own_file import OwnFile

WEIGHTS = b"weights" * 1000


class Taken:
    """Does to a descriptor what a program does: closes it, and its own file gets the number."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: FileIO | None = None

    def __call__(self, number: int) -> None:
        with self.path.open("wb", buffering=0) as file:
            os.dup2(file.fileno(), number)
        self.file = FileIO(number, "wb")
        self.file.write(WEIGHTS)

    def untouched(self) -> bool:
        """Still open, still its own, and nothing of ours in it."""
        assert self.file is not None
        self.file.write(b".")
        self.file.close()
        return self.path.read_bytes() == WEIGHTS + b"."


def test_the_files_that_a_program_opens_do_not_get_our_numbers(tmp_path: Path) -> None:
    ours = OwnFile.open(tmp_path / "ours", os.O_WRONLY | os.O_CREAT)
    number = ours.number
    assert number is not None
    os.close(number)
    files = [(tmp_path / f"checkpoint-{n}").open("wb") for n in range(24)]
    assert number not in [file.fileno() for file in files]
    for file in files:
        file.close()
    assert ours.number is None
    ours.reopen(tmp_path / "ours", os.O_WRONLY)
    assert ours.number == number
    ours.close()


@pytest.mark.parametrize("moment", ["before it is moved", "after it is moved"])
def test_a_number_that_the_program_takes_meanwhile_stays_its_own(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another thread, between two calls of ours."""
    taken = Taken(tmp_path / "checkpoint")
    move = fcntl.fcntl

    def moves(number: int, *how: int) -> int:
        monkeypatch.undo()
        if moment == "before it is moved":
            taken(number)
        moved = move(number, *how)
        if moment == "after it is moved":
            taken(number)
        return moved

    monkeypatch.setattr(fcntl, "fcntl", moves)
    ours = OwnFile.open(tmp_path / "ours", os.O_WRONLY | os.O_CREAT)
    assert (ours.number is None) == (moment == "before it is moved")
    if ours.number is not None:
        os.write(ours.number, b"ours")
    ours.close()
    assert taken.untouched()


def test_another_file_at_the_same_path_is_not_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "ours"
    ours = OwnFile.open(path, os.O_WRONLY | os.O_CREAT)
    assert ours.number is not None
    os.close(ours.number)
    (tmp_path / "other").write_text("of somebody else")
    (tmp_path / "other").replace(path)
    before = len(os.listdir("/proc/self/fd"))
    ours.reopen(path, os.O_WRONLY)
    assert ours.number is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_where_numbers_are_few_a_file_stays_where_it_is(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, before[1]))
    try:
        ours = OwnFile.open(tmp_path / "ours", os.O_WRONLY | os.O_CREAT)
        assert ours.number == lowest
        ours.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


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
