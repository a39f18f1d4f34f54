"""`kilter bench harm`: every unusual program, and random ones, come out as they do plainly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kilter.app.bench import harm, harm_random
from kilter.core.errors import UsageError
from kilter.core.units import MIB
from kilter.testing.warm_python import WarmPython

PLAIN = harm.ProgramOutcome(
    exit="0",
    stdout="trained\n",
    stderr=("a warning",),
    facts={"parameters": "0123"},
    files={"model.pt": "4567"},
    settings=0,
    errors=(),
    work="",
    peak_bytes=300 * MIB,
)


def bench(*words: str) -> Any:
    """What `kilter bench harm --json` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "kilter", "bench", "harm", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["schema"] == "kilter.bench-harm/1"
    assert done.returncode == int(bool([row for row in found["rows"] if not row.get("equal")]))
    return found


@pytest.fixture(scope="module")
def programs() -> Iterator[Path]:
    with harm.copied_programs() as place:
        yield place


@pytest.mark.parametrize("case", harm.cases(), ids=lambda case: case.path.stem)
def test_a_program_is_the_same_under_kilter(
    case: harm.Case, warm: WarmPython, programs: Path
) -> None:
    """Under one set of options of each row; `kilter bench harm` tries them all."""
    case = replace(case, path=programs / case.path.name)
    [row] = harm.rows_of(case, case.run[-1:], warm)
    assert row.differences == ()


def test_the_table_of_one_row() -> None:
    found = bench("--only", "2b", "--options", "recompute")
    [row] = found["rows"]
    assert (row["row"], row["options"], row["differences"]) == ("2b", "recompute", [])
    assert "passes planned" in row["work"]
    assert found["summary"] == {"n": 1, "equal": 1}


def test_a_program_that_does_not_end_is_killed(warm: WarmPython, tmp_path: Path) -> None:
    program = tmp_path / "r99_sleeps.py"
    program.write_text("import time\ntime.sleep(600)\n")
    case = harm.Case("99", program, "sleeps", within_s=0.5)
    assert harm.run_one(case, None).exit == "did not end within 0.5 s"
    assert harm.run_one(case, None, warm).exit == "did not end within 0.5 s"


def test_random_programs_are_the_same_under_kilter() -> None:
    found = bench("--programs", "100", "--seed", "0")
    assert found["rows"] == []
    assert found["summary"]["n"] == 100
    assert found["summary"]["planned"] >= 50  # else the engine was not put to the test
    assert found["summary"]["recomputed"] >= 25


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"exit": "-11 (SIGSEGV)"}, "exit code: 0 became -11 (SIGSEGV)"),
        ({"stdout": "trained\nkilter"}, "standard output: trained became trained / kilter"),
        ({"stderr": ("a warning", "another")}, "standard error: "),
        ({"facts": {"parameters": "9"}}, "parameters: 0123 became 9"),
        ({"facts": {}}, "parameters: 0123 became nothing"),
        ({"files": {"model.pt": "4567", "more": "8"}}, "file more: nothing became 8"),
        ({"settings": 2}, "settings made: 0 became 2"),
        ({"errors": ("its record: broken",)}, "an error of kilter: its record: broken"),
        ({"peak_bytes": 3000 * MIB}, "peak host memory: 300.0 MiB became 2.9 GiB"),
    ],
)
def test_whatever_differs_is_told(changed: dict[str, Any], told: str) -> None:
    case = harm.cases(["2a"])[0]
    assert harm.differences(case, PLAIN, PLAIN) == ()
    (text,) = harm.differences(case, PLAIN, replace(PLAIN, **changed))[:1]
    assert text.startswith(told)


def test_a_plain_program_that_fails_proves_nothing() -> None:
    case = harm.cases(["2a"])[0]
    failed = replace(PLAIN, exit="1")
    assert harm.differences(case, failed, failed) == (
        "the plain program ended with 1 instead of 0",
    )


def test_a_program_that_runs_jobs_itself_is_held_against_what_it_expects() -> None:
    case = harm.cases(["7b"])[0]
    assert case.expect is not None
    assert harm.expectations(case, replace(PLAIN, facts=case.expect)) == ()
    assert harm.expectations(case, PLAIN) != ()


def test_every_row_says_what_it_does_and_how_it_is_run() -> None:
    for case in harm.cases():
        assert case.program, case.path
        assert case.expect is not None or set(case.run) <= set(harm.OPTION_SETS)


def test_an_unknown_row_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="there is no row '99'"):
        harm.cases(["99"])


def test_a_random_program_follows_from_its_seed_alone() -> None:
    sources = [harm_random.source_of(seed) for seed in range(60)]
    assert sources == [harm_random.source_of(seed) for seed in range(60)]
    assert len(set(sources)) == 60
    for seed, source in enumerate(sources):
        compile(source, f"{seed}.py", "exec")


def test_a_worker_that_dies_costs_one_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warm: WarmPython
) -> None:
    def dies_of_7(how: str, place: Path, seeds: list[int], warm: WarmPython) -> str:
        done = seeds[: seeds.index(7)] if 7 in seeds else seeds
        lines = (json.dumps([seed, "printed", [], 1, 1]) + "\n" for seed in done)
        (place / "results").write_text("".join(lines))
        return "exit code -11" if 7 in seeds else ""

    monkeypatch.setattr(harm_random, "_run_worker", dies_of_7)
    found = harm_random.run_batch("governed", [5, 6, 7, 8], warm)
    assert [found[seed].printed is None for seed in (5, 6, 7, 8)] == [False, False, True, False]
    assert found[7].death == "exit code -11"
