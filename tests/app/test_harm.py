"""`kilter bench harm`: unusual programs, and random ones, come out as they do plainly.

Rows whose subject another test asserts at a fraction of the cost are left to that test and to
`kilter bench harm`. `KILTER_TEST_PROGRAMS` says how many random programs are run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kilter.app.bench import harm, harm_random
from kilter.app.cli.main import main
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

WRITES = "memory/test_swapper_harm.py::test_writes_that_nobody_announces_change_nothing"
READS = "memory/test_state_reading.py::test_reading"
USES = "memory/test_nothing_left.py::test_used_in_the_middle_of_a_run"
LATE = "memory/test_state.py::test_only_who_asks_for_it_has_gradients_consumed"
ASSERTED_BY = {
    "1a": WRITES,
    "2a": WRITES,
    "2b": "app/test_harm.py::test_the_table_of_one_row",
    "2c": WRITES,
    "2d": WRITES,
    "4b": READS,
    "4c": READS,
    "4d": READS,
    "4e": READS,
    "4f": READS,
    "4g": READS,
    "4h": READS,
    "6": "memory/test_host_limit.py::test_host_memory_is_bounded_where_lengths_vary",
    "7a": "memory/test_changing_shapes.py::test_attention_wanes_and_comes_back",
    "7b": "app/test_memory_cli.py::test_a_share_where_shapes_keep_changing_is_of_the_largest_pass",
    "8a": "session/test_edge.py::test_every_alarm_of_the_program_arrives",
    "8b": "session/test_edge.py::"
    "test_after_an_alarm_in_the_middle_of_our_work_the_numbers_are_plains",
    "9": "session/test_edge.py::test_the_end_does_not_wait_for_a_store_that_does_not_answer",
    "10": "session/test_edge.py::test_a_script_that_closes_all_descriptors_has_its_files_to_itself",
    "11": "session/test_session_nvml.py::test_a_program_that_computes_on_no_card_leaves_all_alone",
    "12a": "lease/test_restore_verb.py::"
    "test_a_dead_run_whose_watcher_is_frozen_is_an_error_until_it_is_forced",
    "12b": "lease/test_restore_verb.py::"
    "test_a_dead_run_whose_child_keeps_the_lock_is_an_error_until_it_is_forced",
    "12c": "lease/test_restore_verb.py::"
    "test_a_run_that_is_frozen_with_its_watcher_is_forced_after_its_deadline",
    "13b": "memory/test_swapper_harm.py::test_a_custom_function_gets_its_own_objects_back",
    "14a": "memory/test_nothing_left.py::test_files_load_without_kilter",
    "14b": USES,
    "14d": USES,
    "14e": USES,
    "15a": "memory/test_swapper_harm.py::test_what_the_program_does_to_the_collector_stands",
    "15b": "memory/test_swapper_harm.py::test_the_programs_counters_do_not_count_our_operations",
    "15d": "memory/test_swapper_harm.py::"
    "test_a_strided_nested_tensor_is_left_alone_and_the_rest_is_not",
    "15e": "memory/test_swapper_harm.py::test_a_batched_backward_gives_the_same_numbers",
    "15f": "memory/test_swapper_harm.py::test_under_forward_mode_tangents_stay_and_are_told",
    "15g": "memory/test_swapper_harm.py::test_a_batched_backward_gives_the_same_numbers",
    "16a": LATE,
    "16b": LATE,
    "17a": "memory/test_memory_sentences.py::test_data_that_moved_only_in_early_passes_are_told",
    "17b": "memory/test_memory_frameworks.py::test_a_training_in_another_thread",
    "17c": "session/test_edge.py::test_with_stderr_closed_we_say_nothing_anywhere",
    "17d": "session/test_edge.py::test_with_stderr_closed_we_say_nothing_anywhere",
    "17e": "session/test_edge.py::test_ctrl_c_in_the_middle_of_our_work_shows_no_frame_of_ours",
}
"""Row -> the test that asserts what the row does."""
PROGRAMS = int(os.environ.get("KILTER_TEST_PROGRAMS", "16"))


@pytest.fixture
def bench(
    warm: WarmPython, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """What `kilter bench harm --json` prints; its programs are forked from the tests' Python."""

    def run(*words: str) -> Any:
        monkeypatch.setattr(harm, "rows_of", partial(harm.rows_of, warm=warm))
        monkeypatch.setattr(harm_random, "WarmPython", lambda environ: nullcontext(warm))
        monkeypatch.setenv(harm.RECOMPUTE_VARIABLE, "")  # the verb sets it
        code = main(["bench", "harm", *words, "--json"])
        found = json.loads(capsys.readouterr().out)
        assert found["schema"] == "kilter.bench-harm/1"
        assert code == int(bool([row for row in found["rows"] if not row.get("equal")]))
        return found

    return run


@pytest.fixture(scope="module")
def programs() -> Iterator[Path]:
    with harm.copied_programs() as place:
        yield place


@pytest.mark.parametrize(
    "case",
    [case for case in harm.cases() if case.name not in ASSERTED_BY],
    ids=lambda case: case.path.stem,
)
def test_a_program_is_the_same_under_kilter(
    case: harm.Case, warm: WarmPython, programs: Path
) -> None:
    """Under one set of options of each row; `kilter bench harm` tries them all."""
    case = replace(case, path=programs / case.path.name)
    [row] = harm.rows_of(case, case.run[-1:], warm)
    assert row.differences == ()


def test_the_rows_that_are_left_out_exist_and_so_do_the_tests_of_them() -> None:
    harm.cases(ASSERTED_BY)
    for named in set(ASSERTED_BY.values()):
        file, _, name = named.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text()


def test_the_table_of_one_row(bench: Callable[..., Any]) -> None:
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


def test_random_programs_are_the_same_under_kilter(bench: Callable[..., Any]) -> None:
    found = bench("--programs", str(PROGRAMS), "--seed", "0")
    assert found["rows"] == []
    assert found["summary"]["n"] == PROGRAMS
    assert found["summary"]["planned"] >= PROGRAMS // 2  # else the engine was not put to the test
    assert found["summary"]["recomputed"] >= PROGRAMS // 4


def test_random_programs_are_the_same_while_ways_to_recompute_are_compared(
    bench: Callable[..., Any],
) -> None:
    found = bench("--programs", "2", "--seed", "0", "--recompute", "auto")
    assert found["rows"] == []
    assert found["summary"]["recomputed"] >= 1


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


def test_unknown_options_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "harm", "--only", "1a", "--options", "memry"]) == 2
    assert "'memry' is not one of energy" in capsys.readouterr().err


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
