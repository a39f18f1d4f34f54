"""Reads the trace of a window of ours on a GPU in a process of its own.

    python -P -m kilter.observe.marked_trace PATH RANK < MARKS > TRACE

Reading takes a second or more of an interpreter. In the program's own, every operation of the
program would wait for its turn.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from kilter.core.errors import FileError
from kilter.core.rank_trace import IterationMarks, RankTrace

READ_TIMEOUT_S = 120.0
_NICE = 5


class _Unreadable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    why: str


class _Read(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    trace: RankTrace


_ANSWER = msgspec.json.Decoder(_Unreadable | _Read)


def read_marked(path: Path, marks: IterationMarks, *, rank: int) -> RankTrace:
    """The timeline of a rank on a GPU, its iterations from marker to marker, its clock
    `time.monotonic()`. `FileError` for a trace that holds no such iteration."""
    command = [sys.executable, "-P", "-m", "kilter.observe.marked_trace", str(path), str(rank)]
    try:
        done = subprocess.run(
            command,
            input=msgspec.json.encode(marks),
            capture_output=True,
            timeout=READ_TIMEOUT_S,
            start_new_session=True,
        )
        answer: _Unreadable | _Read = _ANSWER.decode(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FileError(f"{path}: could not be read: {error}") from error
    except msgspec.MsgspecError as error:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise FileError(f"{path}: its reader ended with {done.returncode}: {last}") from error
    if isinstance(answer, _Unreadable):
        raise FileError(answer.why)
    return answer.trace


def main(arguments: list[str]) -> None:
    """Read, and answer on stdout."""
    from kilter.observe.rank_traces import KernelTable, read_rank

    path, rank = arguments
    os.nice(_NICE)
    marks = msgspec.json.decode(sys.stdin.buffer.read(), type=IterationMarks)
    answer: _Unreadable | _Read
    try:
        trace = read_rank(Path(path), table=KernelTable(), otherwise=int(rank), marks=marks)
        answer = _Read(trace=trace)
    except FileError as error:
        answer = _Unreadable(why=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
