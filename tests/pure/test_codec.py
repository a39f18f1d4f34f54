"""Files survive a round trip; broken ones give one clear line."""

import pytest

from kilter.core import codec
from kilter.core.errors import FileError
from kilter.core.label import Label
from kilter.core.trace import IterationTrace, Kind, Operation

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
