"""`kilter run --sections` on real DDP jobs over gloo."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

JOB = ["--standalone", "--nproc-per-node", "2", "-m", "kilter.testing.gloo_program"]
TIMEOUT_S = 300


def start(command: list[str], where: Path) -> subprocess.CompletedProcess[str]:
    environ = {n: v for n, v in os.environ.items() if not n.startswith("KILTER")}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=where,
        env=environ | {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(where / "state")},
        timeout=TIMEOUT_S,
    )


def losses(output: str) -> list[str]:
    """Of every rank; their lines may run into each other."""
    return sorted(re.findall(r"rank \d: [0-9a-f]{64}", output))


def governed(where: Path, *options: str, job: list[str]) -> tuple[list[str], dict[str, Any], str]:
    """Hashes of the losses, the report, and what was said."""
    shutil.rmtree(where / "out", ignore_errors=True)
    kilter = [sys.executable, "-m", "kilter", "run", "--sections", "--out", str(where / "out")]
    done = start([*kilter, *options, *JOB, *job], where)
    assert done.returncode == 0, done.stderr
    report = json.loads((where / "out" / "report.json").read_text())
    return losses(done.stdout), report["sections"], done.stderr


def test_a_waiting_rank_gets_a_plan_and_another_one_when_the_collectives_change(
    tmp_path: Path,
) -> None:
    job = ["--iterations", "60", "--late-s", "0.25", "--more-from", "32"]
    plain = start([sys.executable, "-m", "torch.distributed.run", *JOB, *job], tmp_path)
    hashes, found, said = governed(tmp_path, "--dry-run", "--device", "sim:h200", job=job)
    assert hashes == losses(plain.stdout)
    assert len(hashes) == 2
    first, second = (each["sections"] for each in found["ranks"])
    assert first["planned"]
    assert not second["planned"]
    assert first["collectives"] == second["collectives"] == 2  # none is added
    assert (first["reopened"], first["windows"]) == (1, 2)
    assert found["dry_run"]
    assert found["restored"]
    assert found["commands"] > 0
    assert "clock calls written down, none sent" in said
    log = (tmp_path / "out" / "commands-rank0.jsonl").read_text().splitlines()
    states = {json.loads(line)["state"] for line in log}
    assert "set" not in states
    assert "would set" in states


def test_nothing_to_gain_is_an_answer(tmp_path: Path) -> None:
    job = ["--iterations", "40", "--late-s", "0"]
    _, found, said = governed(tmp_path, "--dry-run", "--device", "sim:h200", job=job)
    assert not found["planned"]
    assert found["commands"] == 0
    assert "sections: rank" in said
    assert "Nothing to gain: " in said
    assert "below the break-even of " in said


def test_a_script_that_is_too_short_is_searched_on_by_rank_0_and_the_result_kept(
    tmp_path: Path,
) -> None:
    """Rank 0 waits for rank 1, which computes. With two idle cores (`KILTER_TEST_QUIET=1`) the next
    run sees the same sections: it confirms what was kept, and holds it."""
    job = ["--late-s", "0.22", "--busy", "--iterations"]
    device = ["--device", "sim:h200", "--max-slowdown", "1%"]
    _, first, said = governed(tmp_path, *device, job=[*job, "26"])
    assert "Would hold" in said
    assert "less energy" in said
    assert "One clock for the whole job was expected to save" in said
    search = first["search"]
    assert search["taken"] == "sections"
    assert search["rehearsed"]
    assert search["whole_job_saving"] < search["sections_saving"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.index("Would hold") < page.index("Clocks held") < page.index("One iteration")
    for part in ("rank 0", "rank 1", "exposed communication", "all_reduce/stream host/1"):
        assert part in page
    (kept,) = (tmp_path / "state" / "kilter" / "sections").iterdir()
    assert json.loads(kept.read_text())["depths"] == search["depths"]

    if not os.environ.get("KILTER_TEST_QUIET"):
        return
    _, second, said = governed(tmp_path, *device, job=[*job, "115"])
    search = second["search"]
    assert search["known"]
    assert not search["rehearsed"]
    assert {rank["sections"]["search"] == search for rank in second["ranks"]} == {True}
    assert "kilter: sections: Held" in said
    assert "of an earlier run, confirmed in" in said
    assert "to the simulated device; the found clock is back" in said
    log = (tmp_path / "out" / "commands-rank0.jsonl").read_text().splitlines()
    sent = [json.loads(line) for line in log if '"state":"set"' in line]
    last = max(each["iteration"] for each in sent)
    assert last >= 110  # until the end


def test_without_a_device_the_run_says_what_to_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(2000):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    out = ["--out", str(tmp_path / "out"), "train.py"]
    command = [sys.executable, "-m", "kilter", "run", "--sections", "--device", "null", *out]
    done = start(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "refused: looking for sections:" in done.stderr
    assert "--device sim:" in done.stderr
