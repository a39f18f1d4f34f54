"""The recorder: whole lines, from any thread, until the disk refuses."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import runs

from kilter.core.errors import FileError
from kilter.core.events import Failed, Refused, Sampled, read_events
from kilter.session import recorder
from kilter.session.recorder import Recorder


def refused(number: int) -> Refused:
    return Refused(t_s=float(number), what="a test", reason=f"number {number} \N{BULLET}")


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def test_what_was_recorded_is_read_again(tmp_path: Path) -> None:
    made = runs.RunWriter(runs.WrittenJob())
    made.start()
    events = [*made.events, Sampled(t_s=1.0, device_t_s=0.5), Failed(t_s=2.0, where="x", error="y")]
    path = tmp_path / "deep" / "below" / "events-rank0.jsonl"
    record = Recorder(path)
    for event in events:
        record(event)
    assert list(read_events(path)) == events, "also before it is closed"
    record.close()
    record.close()
    record(refused(1))
    assert list(read_events(path)) == events


def test_another_s_record_is_never_touched(tmp_path: Path) -> None:
    path = tmp_path / "events-rank0.jsonl"
    path.write_text("theirs")
    with pytest.raises(FileError, match=r"events-rank0.*another run"):
        Recorder(path)
    assert path.read_text() == "theirs"


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot be written"):
        Recorder(tmp_path / "file" / "events-rank0.jsonl")


def test_lines_of_several_threads_do_not_mix(tmp_path: Path) -> None:
    record = Recorder(tmp_path / "events.jsonl")

    def write(first: int) -> None:
        for number in range(first, first + 200):
            record(refused(number))

    threads = [threading.Thread(target=write, args=(1000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    record.close()
    found = [recorder.msgspec.json.decode(line)["t_s"] for line in lines(record.path)]
    assert sorted(found) == sorted(float(1000 * k + i) for k in range(4) for i in range(200))


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_refuses_ends_the_recording_and_says_so(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Recorder(tmp_path / "events.jsonl")
    record(refused(1))
    write = os.write

    def refuse(file: int, data: bytes) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "write", refuse)
    record(refused(2))
    monkeypatch.setattr(os, "write", write)
    record(refused(3))
    assert record.lost is not None
    assert os.strerror(error) in record.lost
    assert len(lines(record.path)) == 1
    record.close()


def test_half_a_line_is_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = runs.RunWriter(runs.WrittenJob())
    made.start()
    path = tmp_path / "events-rank0.jsonl"
    record = Recorder(path)
    record(made.events[0])
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))
    record(refused(2))
    monkeypatch.setattr(os, "write", write)
    record(refused(3))
    record.close()
    assert record.lost is not None
    assert list(read_events(path)) == made.events[:1]


@pytest.mark.parametrize("arrived", [0, 10, -1])
def test_an_interrupt_leaves_whole_lines(
    arrived: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of a line, or when all of it is on the disk and nobody knows."""
    record = Recorder(tmp_path / "events.jsonl")
    record(refused(1))
    write = os.write

    def interrupted(file: int, data: bytes) -> int:
        write(file, data[: len(data) if arrived < 0 else arrived])
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        record(refused(2))
    monkeypatch.setattr(os, "write", write)
    record(refused(3))
    found = [recorder.msgspec.json.decode(line)["t_s"] for line in lines(record.path)]
    assert found == [1.0, 2.0, 3.0]
    assert record.lost is None
    record.close()


def close_and_reuse(path: Path) -> int:
    """What a daemon does: close what it does not know, open files of its own."""
    os.closerange(3, 4096)
    files = [os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(64)]
    os.write(files[0], b"a checkpoint")
    return files[0]


def test_files_that_are_opened_as_a_line_is_written_get_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread of the program closes ours after we have looked, and opens its own."""
    record, write, files = Recorder(tmp_path / "events.jsonl"), os.write, list[int]()

    def overtaken(number: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", write)
        os.close(number)
        opened = (os.open(tmp_path / f"{n}", os.O_WRONLY | os.O_CREAT) for n in range(24))
        files.extend(opened)
        return write(number, data)

    record(refused(1))
    monkeypatch.setattr(os, "write", overtaken)
    record(refused(2))
    record(refused(3))
    assert record.lost is None
    record.close()
    found = [recorder.msgspec.json.decode(line)["t_s"] for line in lines(record.path)]
    assert found == [1.0, 2.0, 3.0]
    for number, file in enumerate(files):
        os.close(file)
        assert (tmp_path / f"{number}").read_bytes() == b""


def in_a_child(function: Callable[[], None]) -> None:
    """In a process of its own: it closes the descriptors that pytest needs."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_script_that_closes_all_files_gets_none_of_our_lines(tmp_path: Path) -> None:
    path, checkpoint = tmp_path / "events.jsonl", tmp_path / "checkpoint"

    def daemon() -> None:
        record = Recorder(path)
        record(refused(1))
        file = close_and_reuse(checkpoint)
        record(refused(2))
        record.close()
        os.write(file, b", whole")

    in_a_child(daemon)
    assert checkpoint.read_bytes() == b"a checkpoint, whole"
    assert len(lines(path)) == 2


def test_a_script_that_closes_all_files_and_replaces_ours(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def daemon() -> None:
        record = Recorder(path)
        path.rename(tmp_path / "old")
        close_and_reuse(path)
        record(refused(1))
        assert record.lost is not None
        record.close()

    in_a_child(daemon)
    assert path.read_bytes() == b"a checkpoint"


def test_what_was_recorded_survives_the_death_of_the_process(tmp_path: Path) -> None:
    source = """
import os, signal, sys
from pathlib import Path
from kilter.session.recorder import Recorder
from kilter.core.events import Refused

record = Recorder(Path(sys.argv[1]))
for number in range(5):
    record(Refused(t_s=float(number), what="a", reason="b"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "events.jsonl"
    done = subprocess.run([sys.executable, "-c", source, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(lines(path)) == 5
