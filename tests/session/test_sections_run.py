"""`kilter run --sections` on real DDP jobs over gloo."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from kilter.testing.warm_python import WarmPython

PROGRAM = [str(Path(__file__).with_name("gloo_program.py"))]
TORCHRUN = ["--standalone", "--nproc-per-node", "2"]
TIMEOUT_S = 300
ATTEMPTS = 4
"""On a machine with other load a rank may wait so irregularly that no clock is worth its switches,
or a short script be over before the search: then that is the right answer."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith("KILTER"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def losses(output: str) -> list[str]:
    """Of every rank; their lines may run into each other."""
    return sorted(re.findall(r"rank \d: [0-9a-f]{64}", output))


def read_report(where: Path) -> dict[str, Any]:
    sections: dict[str, Any] = json.loads((where / "out" / "report.json").read_text())["sections"]
    return sections


def governed(
    warm: WarmPython, where: Path, *options: str, job: list[str]
) -> tuple[dict[str, Any], str]:
    """The report, and what was said, of two ranks that are started as torchrun starts them."""
    shutil.rmtree(where / "out", ignore_errors=True)
    kilter = ["-m", "kilter", "run", "--sections", "--out", "out", *options]
    ranks = warm.run_ranks(2, [*kilter, *PROGRAM, *job], cwd=where, timeout_s=TIMEOUT_S)
    said = "".join(rank.stderr for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return read_report(where), said


def test_a_waiting_rank_gets_a_plan_and_another_one_when_the_collectives_change(
    tmp_path: Path, warm: WarmPython
) -> None:
    job = [*PROGRAM, "--iterations", "60", "--more-from", "32", "--late-s"]
    ranks = warm.run_ranks(2, [*job, "0"], cwd=tmp_path)
    options = ["--sections", "--dry-run", "--device", "sim:h200", "--out", "out", *TORCHRUN]
    done = warm.run(
        ["-m", "kilter", "run", *options, *job, "0.25"], cwd=tmp_path, timeout_s=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    hashes, found, said = losses(done.stdout), read_report(tmp_path), done.stderr
    assert hashes == losses("".join(rank.stdout for rank in ranks))
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


def test_nothing_to_gain_is_an_answer(tmp_path: Path, warm: WarmPython) -> None:
    job = ["--iterations", "40", "--late-s", "0"]
    found, said = governed(warm, tmp_path, "--dry-run", "--device", "sim:h200", job=job)
    assert not found["planned"]
    assert found["commands"] == 0
    assert "sections: rank" in said
    assert "Nothing to gain: " in said
    assert "below the break-even of " in said


def test_a_script_that_is_too_short_is_searched_on_by_rank_0_and_the_result_kept(
    tmp_path: Path, warm: WarmPython
) -> None:
    """Rank 0 waits for rank 1, which computes. With two idle cores (`KILTER_TEST_QUIET=1`) the next
    run sees the same sections: it confirms what was kept, and holds it."""
    job = ["--late-s", "0.22", "--busy", "--iterations"]
    device = ["--device", "sim:h200", "--max-slowdown", "1%", "--rehearse", "120s"]
    for _ in range(ATTEMPTS):
        first, said = governed(warm, tmp_path, *device, job=[*job, "26"])
        if "Would hold" in said:
            break
    assert "Would hold" in said, said
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
    second, said = governed(warm, tmp_path, *device, job=[*job, "115"])
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


def test_without_a_device_the_run_says_what_to_name(tmp_path: Path, warm: WarmPython) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(2000):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    options = ["--sections", "--device", "null", "--out", "out"]
    done = warm.run(["-m", "kilter", "run", *options, "train.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "refused: looking for sections:" in done.stderr
    assert "--device sim:" in done.stderr
