"""The loss curve of a job whose data ratio changes is that of the job without kilter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "share_losses.py"


def test_the_loss_curve_is_that_of_the_solo_run():
    """With clipping, a gradient scaler, learning rates by step and by epoch, and idle ranks."""
    command = [sys.executable, str(BENCHMARK), "--epochs", "3", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stderr[-4000:]
    rows = json.loads(ended.stdout)["rows"]
    assert len(rows) == 4
    for row in rows:
        assert row["repeats_within"] == 0.0, row  # else the difference would say nothing
        assert row["changes"] >= 5, row
        assert row["idle_steps"] > 5, row
        assert row["last_loss"] < 0.3 * row["first_loss"], row
        if row["case"] == "batchnorm":
            assert 1e-4 < row["max_difference"] < 0.3, row
        else:
            assert row["max_difference"] < 1e-4, row
