"""Files survive a round trip; broken ones give one clear line."""

import gzip
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kilter.core import codec
from kilter.core.errors import FileError
from kilter.core.label import Label
from kilter.core.trace import Datum, IterationTrace, Kind, Operation

TRACE = IterationTrace(
    iteration_s=0.1,
    operations=(
        Operation(name="conv1", kind=Kind.FORWARD, start_s=0.0, duration_s=0.05, flops=1e9),
        Operation(name="conv1", kind=Kind.BACKWARD, start_s=0.05, duration_s=0.04),
    ),
    timeline="gpu",
    device="V100",
    label=Label.MEASURED,
)


def with_datum(**changes):
    datum = Datum(name="x", kind="weight", size_bytes=8, first_use=0, last_use=1)
    return replace(TRACE, data=(replace(datum, **changes),))


def test_round_trip(tmp_path):
    codec.save(tmp_path / "trace.json", TRACE)
    assert codec.load(tmp_path / "trace.json", IterationTrace) == TRACE


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not a complete JSON"),
        (codec.encode(TRACE)[:-7], "not a complete JSON"),
        (b"[1]", "not a kilter file"),
        (b'{"schema":"kilter.plan/1"}', "holds 'kilter.plan'"),
        (b'{"schema":"kilter.trace/99"}', "newer kilter"),
        (b'{"schema":"kilter.trace/1","iteration_s":"soon"}', "malformed"),
        (codec.encode(TRACE).replace(b'"forward"', b'"sideways"'), "malformed"),
        (codec.encode(TRACE).replace(b":0.04,", b":-0.04,"), "operation 1: duration_s is -0.04"),
        (codec.encode(TRACE).replace(b":0.1,", b":-1,"), "iteration_s is -1"),
        (codec.encode(TRACE).replace(b":0.1,", b":NaN,"), "not a complete JSON"),
        (codec.encode(replace(TRACE, memory=with_datum(first_use=3))), "in use from operation 3"),
        (codec.encode(with_datum(last_use=2)), "in use from operation 0 to 2"),
        (codec.encode(with_datum(size_bytes=-1)), "below zero"),
        (gzip.compress(codec.encode(TRACE), mtime=0), "gunzip"),
    ],
)
def test_broken_files_name_the_file_and_the_fault(tmp_path, raw, message):
    path = tmp_path / "trace.json"
    path.write_bytes(raw)
    with pytest.raises(FileError, match=message) as caught:
        codec.load(path, IterationTrace)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(FileError, match="cannot be read"):
        codec.load(tmp_path / "no.json", IterationTrace)


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    codec.write_atomically(pipe, b"page")
    reader.join(600)
    assert read == [b"page"]
    assert pipe.is_fifo()


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full")
def test_a_full_device_is_one_line_and_stays_a_device():
    with pytest.raises(FileError, match="/dev/full: cannot be written"):
        codec.write_atomically("/dev/full", b"page")
    assert Path("/dev/full").is_char_device()


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "place").mkdir()
    (tmp_path / "latest.html").symlink_to(tmp_path / "place" / "report.html")
    codec.write_atomically(tmp_path / "latest.html", b"page")
    assert (tmp_path / "latest.html").is_symlink()
    assert (tmp_path / "place" / "report.html").read_bytes() == b"page"


def test_the_root_of_all_files_is_no_file_to_write():
    with pytest.raises(FileError, match=r"^/: cannot be written \(Is a directory\)$"):
        codec.write_atomically("/", b"")
