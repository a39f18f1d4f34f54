"""What the summary says of memory, held against what the run's record holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from kilter.core.events import Fitted, Moved, read_events
from kilter.core.units import MIB, show_bytes
from kilter.testing.warm_python import WarmPython

JOB = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
optimizer = torch.optim.AdamW(net.parameters())
for step in range({steps}):
    rows = {rows}
    net(torch.randn(rows, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def ran(
    warm: WarmPython, folder: Path, budget: str, rows: str, steps: int = 36
) -> tuple[str, Moved, list[Fitted]]:
    script = folder / "job.py"
    script.write_text(JOB.format(rows=rows, steps=steps))
    command = ["-m", "kilter", "run", "--memory-budget", budget, "--device", "null"]
    done = warm.run([*command, "--out", "out", script.name], cwd=folder)
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "out").glob("events*.jsonl")
    events = list(read_events(path))
    moved = [event for event in events if isinstance(event, Moved)]
    return done.stderr, moved[-1], [event for event in events if isinstance(event, Fitted)]


def test_data_that_moved_only_in_early_passes_are_told(warm: WarmPython, tmp_path: Path) -> None:
    said, moved, plans = ran(warm, tmp_path, "14MiB", "4096 if step >= 3 else 16000", 20)
    assert moved.out_bytes > 0
    assert all(not plan.swapped and not plan.recomputed for plan in plans)
    assert "the job fits" not in said
    assert "nothing was moved" not in said
    assert f"{show_bytes(moved.out_bytes)} out" in said


@pytest.mark.parametrize("rows", ["4096 * (1 + step % 2)", "4096 * (1 + step % 2 * (step > 20))"])
def test_peak_and_share_are_of_the_largest_kind_of_pass(
    warm: WarmPython, tmp_path: Path, rows: str
) -> None:
    """Passes of two sizes take turns, from the beginning or from later on."""
    said, moved, plans = ran(warm, tmp_path, "60%", rows)
    assert moved.plain_peak_bytes == 18 * MIB
    assert moved.budget_bytes == int(0.6 * 18 * MIB)
    assert moved.peak_bytes is not None
    assert 9 * MIB < moved.peak_bytes <= moved.budget_bytes
    assert len(moved.in_force) == 2
    assert f"peak {show_bytes(18 * MIB)} -> {show_bytes(moved.peak_bytes)}" in said
    for number in moved.in_force:
        assert f"passes of {show_bytes(plans[number].peak_before_bytes)}: " in said


def test_a_job_that_fits_moves_nothing(warm: WarmPython, tmp_path: Path) -> None:
    said, moved, _ = ran(warm, tmp_path, "100MiB", "4096 * (1 + step % 2)")
    assert moved.out_bytes == moved.in_bytes == moved.recomputed == moved.consumed == 0
    assert f"the job fits: peak {show_bytes(18 * MIB)} within 100.0 MiB, nothing was moved" in said


def test_a_kind_of_pass_that_cannot_fit_is_told_beside_one_that_does(
    warm: WarmPython, tmp_path: Path
) -> None:
    said, moved, plans = ran(
        warm, tmp_path, "7MiB", "4096 * (1 + 7 * (step % 2) * (step > 14))", 44
    )
    [small] = [plans[n] for n in moved.in_force]
    assert small.peak_bytes <= 7 * MIB < small.peak_before_bytes
    assert moved.peak_bytes is not None
    assert moved.least_bytes is not None
    assert moved.peak_bytes >= moved.least_bytes > 7 * MIB
    assert f"7.0 MiB cannot be met, {show_bytes(moved.least_bytes)} is the least" in said
    assert "OVER" not in said


def test_a_pass_that_never_came_again_does_not_raise_the_least(
    warm: WarmPython, tmp_path: Path
) -> None:
    said, moved, _ = ran(warm, tmp_path, "7MiB", "40960 if step == 5 else 4096")
    assert moved.least_bytes is not None
    assert moved.least_bytes <= 7 * MIB
    assert "cannot be met" not in said
