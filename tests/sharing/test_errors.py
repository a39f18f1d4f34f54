"""An error of ours in the loop of a job: the job trains on, and no number changes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
HERE = Path(__file__).parent
TIMEOUT_S = 1500


def test_an_error_at_any_call_ends_no_job_and_changes_no_number(tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, str(HERE / "errors_worker.py"), str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(out.read_text())
    assert found["wrong"] == []
    assert found["cases"] > 25
    # Whoever has the error tells of it, or, after it has ended the sharing, another rank.
    # How often an idle rank polls is a matter of time, so a run may end before the planted call.
    assert 0.9 * found["cases"] <= found["told"] <= found["cases"]
