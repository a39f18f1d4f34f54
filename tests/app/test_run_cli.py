"""The surface of `kilter run`: its options, where their values come from, and what is refused."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

import kilter
from kilter.app.cli import main as cli
from kilter.app.cli import run as verb
from kilter.app.config import OPTIONS, find_file, resolve
from kilter.app.report import build as report
from kilter.app.worker import received, worker_command, worker_environment
from kilter.core.errors import UsageError
from kilter.core.plan import Goal, MemoryBudget, Objective
from kilter.core.ranks import Ranks
from kilter.session.options import Options
from kilter.session.run_directory import run_directory


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for option in OPTIONS.values():
        monkeypatch.delenv(option.variable, raising=False)
    monkeypatch.delenv("KILTER", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise AssertionError('a test of options runs no script')")


def flags(*arguments: str) -> argparse.Namespace:
    parser = cli._Parser(prog="kilter run")
    verb.add_arguments(parser)
    return verb.parse(parser, arguments)


# --- the options are a contract ------------------------------------------------------------------


def test_options_are_frozen() -> None:
    assert {name: option.variable for name, option in OPTIONS.items()} == {
        "max-slowdown": "KILTER_MAX_SLOWDOWN",
        "memory-budget": "KILTER_MEMORY_BUDGET",
        "gradients": "KILTER_GRADIENTS",
        "weights": "KILTER_WEIGHTS",
        "recompute": "KILTER_RECOMPUTE",
        "host-memory": "KILTER_HOST_MEMORY",
        "strict": "KILTER_STRICT",
        "objective": "KILTER_OBJECTIVE",
        "price-of-time": "KILTER_PRICE_OF_TIME",
        "device": "KILTER_DEVICE",
        "rehearse": "KILTER_REHEARSE",
        "sections": "KILTER_SECTIONS",
        "operations": "KILTER_OPERATIONS",
        "dry-run": "KILTER_DRY_RUN",
        "trace": "KILTER_TRACE",
        "history": "KILTER_HISTORY",
        "predictor": "KILTER_PREDICTOR",
        "out": "KILTER_OUT",
        "json": "KILTER_JSON",
    }


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    head, _, rest = printed.partition("Everything after SCRIPT belongs to the script.")
    assert head.startswith("usage: kilter run [options] SCRIPT|-m MODULE [ARGS...]\n\n")
    for words in ("less energy under a proven slowdown contract", "with no goal given: 2%"):
        assert words in " ".join(head.split())
    options = re.findall(r"^  (--?[a-z-]+)", head, re.MULTILINE)
    assert options == [
        *("-h", "--max-slowdown", "--memory-budget", "--gradients", "--weights", "--recompute"),
        *(
            "--host-memory",
            "--strict",
            "--objective",
            "--price-of-time",
            "--device",
            "--rehearse",
            "--sections",
            "--no-sections",
            "--operations",
            "--dry-run",
        ),
        *("--trace", "--history", "--predictor", "--out", "--json", "--config", "-m"),
    ]
    for word in ("torchrun", "KILTER=0", "KILTER_READ_ONLY=1", "kilter.toml", "[tool.kilter]"):
        assert word in rest


# --- everything after SCRIPT belongs to the script -----------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["train.py", "--help", "--json"], ["train.py", "--help", "--json"]),
        (["--json", "train.py", "--", "--device", "x"], ["train.py", "--", "--device", "x"]),
        (["train.py", "-m", "x"], ["train.py", "-m", "x"]),
        (["train.py", "--dev", "--max"], ["train.py", "--dev", "--max"]),
        (["train.py", "--nproc-per-node", "2"], ["train.py", "--nproc-per-node", "2"]),
        (["-m", "pack.mod", "--dry-run"], ["pack.mod", "--dry-run"]),
        (["-", "a"], ["-", "a"]),
    ],
)
def test_arguments_of_the_script_are_left_alone(arguments: list[str], command: list[str]) -> None:
    found = flags(*arguments)
    assert found.command == command
    assert not found.torchrun
    assert not found.dry_run


def test_torchruns_own_parser_reads_its_options() -> None:
    found = flags("--nproc_per_node=2", "--json", "--standalone", "train.py", "--standalone")
    assert found.torchrun
    assert (found.nproc_per_node, found.standalone, found.json) == ("2", True, "1")
    assert found.command == ["train.py", "--standalone"]


# --- flag > environment > file > default ---------------------------------------------------------


def options(tmp_path: Path, *arguments: str, **environ: str) -> Options:
    given = vars(flags(*arguments, "train.py"))
    named = {name: given[name.replace("-", "_")] for name in OPTIONS}
    return resolve(named, environ, tmp_path, ("train.py",))


def test_with_no_goal_given_the_contract_is_two_percent(tmp_path: Path) -> None:
    assert options(tmp_path) == Options(
        goal=Goal(max_slowdown=0.02),
        device="auto",
        dry_run=False,
        out=None,
        command=("train.py",),
        json_summary=False,
    )


def test_a_memory_budget_alone_leaves_the_clocks_alone(tmp_path: Path) -> None:
    goal = options(tmp_path, "--memory-budget", "1GiB").goal
    assert goal == Goal(max_slowdown=None, memory_budget=MemoryBudget(size_bytes=2**30))


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("24GiB", MemoryBudget(size_bytes=24 * 2**30)),
        ("800MB", MemoryBudget(size_bytes=800 * 10**6)),
        (" 1.5 gib", MemoryBudget(size_bytes=3 * 2**29)),
        ("75%", MemoryBudget(share=0.75)),
        ("62.5 %", MemoryBudget(share=0.625)),
        ("auto", MemoryBudget()),
        ("Auto", MemoryBudget()),
    ],
)
def test_a_memory_budget_is_a_size_a_share_or_the_card(text: str, budget: MemoryBudget) -> None:
    assert MemoryBudget.parse(text) == budget


def test_flags_are_read(tmp_path: Path) -> None:
    found = options(
        tmp_path,
        *(
            "--max-slowdown",
            "0",
            "--objective",
            "ed2p",
            "--price-of-time",
            "0",
            "--device",
            "sim:v100",
        ),
        *("--dry-run", "--out", "here", "--json"),
    )
    assert found.goal == Goal(max_slowdown=0.0, objective=Objective.ED2P, price_of_time=0.0)
    assert (found.device, found.dry_run, found.json_summary) == ("sim:v100", True, True)
    assert found.out == tmp_path / "here"


@pytest.mark.parametrize(
    ("others", "strict"),
    [
        ({"KILTER_MEMORY_BUDGET": "1GiB"}, True),
        ({}, False),
        ({"KILTER_MEMORY_BUDGET": "1GiB", "KILTER_DRY_RUN": "1"}, False),
    ],
)
def test_strict_for_all_runs_means_those_with_a_budget_to_keep(
    others: dict[str, str], strict: bool, tmp_path: Path
) -> None:
    assert resolve({}, {"KILTER_STRICT": "1", **others}, tmp_path, ()).strict is strict


def test_flag_then_environment_then_file(tmp_path: Path) -> None:
    (tmp_path / "kilter.toml").write_text('max-slowdown = 0.03\ndevice = "null"\ndry-run = true\n')
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    found = resolve(
        {"max-slowdown": "1%"},
        {"KILTER_MAX_SLOWDOWN": "2%", "KILTER_DEVICE": "nvml", "KILTER_OUT": ""},
        below,
        ("train.py",),
    )
    assert (found.goal.max_slowdown, found.device, found.dry_run, found.out) == (
        0.01,
        "nvml",
        True,
        None,
    )


def test_the_nearest_file_is_used(tmp_path: Path) -> None:
    (tmp_path / "kilter.toml").write_text("json = true")
    near = tmp_path / "near"
    near.mkdir()
    # Without a table of ours, a pyproject.toml is passed by, even a broken one.
    (near / "pyproject.toml").write_text("[project\n")
    assert resolve({}, {}, near, ()).json_summary
    (near / "pyproject.toml").write_text("[tool.kilter]\ndry-run = true\n")
    found = resolve({}, {}, near, ())
    assert (found.dry_run, found.json_summary) == (True, False)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("kilter.toml", 'max_slowdown = "2%"', "unknown key 'max_slowdown'"),
        ("kilter.toml", "max-slowdown = 2", "max-slowdown: '2' is 100 % or more"),
        ("kilter.toml", "dry-run = 3", "dry-run: '3' is not a switch"),
        ("kilter.toml", "[run]\njson = true", "unknown key 'run'"),
        ("kilter.toml", 'device = ["null"]', "device: expected one value"),
        ("kilter.toml", "json = ", "not a TOML file"),
        ("pyproject.toml", "[tool.kilter]\nspeed = 1", "unknown key 'speed'"),
        ("pyproject.toml", "[tool]\nkilter = 3 # tool.kilter", "expected a table"),
    ],
)
def test_a_wrong_file_is_named(file: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(UsageError) as error:
        resolve({}, {}, tmp_path, ())
    assert str(error.value).startswith(str(tmp_path / file))
    assert message in str(error.value)


# --- what the workers of our torchrun are told ----------------------------------------------------


def test_a_worker_has_the_options_of_its_launcher(tmp_path: Path) -> None:
    told = Options(
        goal=Goal(
            max_slowdown=0.01, objective=Objective.EDP, memory_budget=MemoryBudget(share=0.75)
        ),
        device="null",
        dry_run=True,
        out=tmp_path / "out",
        command=("train.py", "--lr", "1"),
        json_summary=True,
    )
    environment = {"OTHER": "kept", **worker_environment(told)}
    launched = worker_command(told.command)
    assert launched == ("-mkilter.app.worker", "train.py", "--lr", "1")
    program, options = received(launched[1:], environment)
    assert options == told
    assert program.argv == told.command
    assert environment == {"OTHER": "kept"}


def test_a_worker_started_by_somebody_else_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"torchrun \.\.\. -m kilter run SCRIPT"):
        received(("train.py",), {})


# --- wrong usage: exit code 2, one line that says what to do --------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: SCRIPT"),
        (["--json"], "required: SCRIPT"),
        (["-m"], "required: SCRIPT"),
        (["--max-slowdown", "5", "train.py"], "--max-slowdown: '5' is 100 % or more"),
        (["--max-slowdown", "-5%", "train.py"], "--max-slowdown: '-5%' is below zero"),
        (["--nproc-per-node", "two", "train.py"], "--nproc-per-node two: "),
        (["--nnodes", "x", "train.py"], "--nnodes x: "),
        (["--memory-budget", "train.py"], "did you mean: --memory-budget 24GiB train.py?"),
        (["--max-slowdown", "train.py", "--lr", "1"], "did you mean: --max-slowdown 2% train.py?"),
        (["--memory-budgt", "1GiB", "train.py"], "did you mean --memory-budget?"),
        (["--rehearse", "soon", "train.py"], "--rehearse: 'soon' is not a time: write 60s"),
        (["--objective", "speed", "train.py"], "choose one of energy, edp, ed2p"),
        (["--price-of-time", "much", "train.py"], "--price-of-time: 'much' is not a number"),
        (["--price-of-time", "-1", "train.py"], "price_of_time=-1.0 must be 0 or more"),
        (["--gradients", "keep", "train.py"], "add --memory-budget"),
        (["--weights", "offload", "train.py"], "add --memory-budget"),
        (
            ["--memory-budget", "1GiB", "--weights", "away", "train.py"],
            "--weights: 'away' is not one of keep, offload",
        ),
        (["--host-memory", "1GiB", "train.py"], "add --memory-budget"),
        (["--strict", "train.py"], "is not kept: add --memory-budget"),
        (["--memory-budget", "1GiB", "--strict", "--dry-run", "train.py"], "leave out --strict"),
        (
            ["--host-memory", "16", "train.py"],
            "'16' is less than 1 MiB: write a size with its unit, such as 16GiB",
        ),
        (["--host-memory", "half", "train.py"], "--host-memory: 'half' is not a size"),
        (["--memory-budget", "1GiB", "--objective", "edp", "train.py"], "add --max-slowdown"),
        (["--device", "gpu", "train.py"], "choose one of auto, nvml, amdsmi, null, sim:"),
        (["--device", "sim:nothing", "train.py"], "choose one of auto, nvml, amdsmi, null, sim:"),
        (["--device", "replay:nowhere", "train.py"], "no such recording"),
        (
            ["--gradients", "eat", "train.py"],
            "--gradients: 'eat' is not one of auto, consume, keep",
        ),
        (["--memory-budget", "much", "train.py"], "--memory-budget: 'much' is not a memory budget"),
        (
            ["--memory-budget", "24", "train.py"],
            "'24' is less than 1 MiB: write a size with its unit, such as 24GiB",
        ),
        (
            ["--memory-budget", "9KiB", "train.py"],
            "'9KiB' is less than 1 MiB: write a size with its unit, such as 24GiB",
        ),
        (["--memory-budget", "-1GiB", "train.py"], "--memory-budget"),
        (["--memory-budget", "0GiB", "train.py"], "is not a memory budget"),
        (["--memory-budget", "120%", "train.py"], "'120%' leaves nothing to do"),
        (["--memory-budget", "x%", "train.py"], "'x%' is not a share"),
        (["--max-slow", "1%", "train.py"], "unrecognized arguments: --max-slow"),
        (["--no-python", "train.py"], "not Python"),
        (["missing.py"], "can't open file"),
        (["--standalone", "missing.py"], "can't open file"),
        (["--standalone", "-"], "standard input"),
    ],
)
def test_wrong_usage_exits_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        sys.exit(cli.main(["run", *arguments]))
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert len(printed.err.splitlines()) <= 2


def test_a_place_that_cannot_be_written_is_said_before_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "train.py"
    job.write_text("print('ran')\n")
    assert cli.main(["run", "--device", "null", "--out", str(job), str(job)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "train.py: cannot be made (File exists)" in printed.err
    assert cli.main(["run", "--out", str(tmp_path / "new"), str(tmp_path / "missing.py")]) == 2
    assert not (tmp_path / "new").exists(), "a wrong command leaves nothing behind"


def test_a_name_that_the_locale_cannot_decode_is_recorded(tmp_path: Path) -> None:
    job = tmp_path / "tr\u00e4in.py"
    job.write_text("print('ran')\n")
    done = subprocess.run(
        [sys.executable, "-m", "kilter", "run", "--device", "null", "--out", "out", job.name],
        cwd=tmp_path,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "stepped aside" not in done.stderr
    assert report.build(tmp_path / "out").command == (job.name,)


def test_in_a_deleted_directory_the_script_runs_as_python_would(tmp_path: Path) -> None:
    job, gone = tmp_path / "train.py", tmp_path / "gone"
    job.write_text("print('ran')\n")
    gone.mkdir()
    command = f"cd {gone} && rmdir {gone} && exec '{sys.executable}' -m kilter run {job}"
    done = subprocess.run(
        ["sh", "-c", command],
        env=os.environ | {"KILTER_DEVICE": "null", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "runs/ cannot be made in the working directory" in done.stderr
    assert f"{tmp_path}/kilter-" in done.stderr, "the files have a place all the same"
    assert "Traceback" not in done.stderr


def test_a_broken_recording_exits_1_before_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.csv").write_text("a,b\n")
    (tmp_path / "train.py").write_text("print('ran')\n")
    arguments = ["--device", f"replay:{tmp_path}/bad.csv", str(tmp_path / "train.py")]
    assert cli.main(["run", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "missing columns" in printed.err
    assert len(printed.err.splitlines()) == 1


def test_without_torch_an_unknown_option_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.run", None)
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "--standalone", "train.py"])
    assert end.value.code == 2
    assert "--standalone" in (printed := capsys.readouterr().err)
    assert "pip install torch" in printed


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_slowdown": 2},
        {"max_slowdown": "2%"},
        {"memory_budget": "much"},
        {"objective": "speed"},
        {"gradients": "eat"},
        {"memory_budget": "1GiB", "host_memory": "half"},
        {"device": "gpu"},
    ],
)
def test_in_python_too_a_wrong_argument_is_a_usage_error(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError), kilter.govern(**wrong):
        raise AssertionError("the program must not begin")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnu", "train.py"], "'rnu' is not a verb; did you mean run?"),
        (["train.py"], "'train.py' is not a verb; did you mean: kilter run train.py?"),
        (["xyzzy"], "'xyzzy' is not a verb\n"),
    ],
)
def test_a_wrong_verb_says_what_was_meant(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_overview_names_every_capability(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    told = capsys.readouterr().out
    for word in ("energy", "memory budget", "parallel", *cli.VERBS):
        assert word in told


def test_a_variable_that_nothing_reads_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KILTER_MAX_SLOWDWON", "1%")
    monkeypatch.setenv("KILTER_DEVICE", "null")
    assert cli.main(["run", "missing.py"]) == 2
    told = capsys.readouterr().err
    assert "KILTER_MAX_SLOWDWON is in the environment" in told
    assert "did you mean KILTER_MAX_SLOWDOWN?" in told
    assert told.count("\n") == 2
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    cli.main(["run", "missing.py"])
    assert "KILTER_MAX_SLOWDWON" not in capsys.readouterr().err, "rank 0 speaks for all"


# --- where the files of a run go ------------------------------------------------------------------

ALONE = Ranks()


def test_runs_has_a_gitignore_of_its_own_only_where_it_is_ours(tmp_path: Path) -> None:
    first, elsewhere = run_directory(None, ALONE)
    assert elsewhere is None
    assert first.parent == tmp_path / "runs"
    assert (tmp_path / "runs" / ".gitignore").read_text() == "*\n"
    (tmp_path / "runs" / ".gitignore").unlink()
    run_directory(None, Ranks(rank=0, world_size=2))  # TensorBoard's runs/, perhaps
    assert not (tmp_path / "runs" / ".gitignore").exists()


def test_a_place_that_takes_no_directory_gets_one_among_the_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").write_text("a file is in the way")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    first, elsewhere = run_directory(None, ALONE)
    assert first.parent.parent.parent == tmp_path / "tmp"
    assert first.parent.parent.stat().st_mode & 0o777 == 0o700
    assert elsewhere is not None
    assert "runs/ cannot be made in the working directory" in elsewhere


def test_the_folders_of_torchruns_jobs_sort_by_date(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(6))

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime(2026, 11, 20, 10, 0, next(clock))

    monkeypatch.setattr("kilter.session.run_directory.datetime", Later)
    names = []
    for job in ("zzz", "aaa", "aaa"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        ranks = [Ranks(rank=rank, world_size=2) for rank in (0, 1)]
        first, second = (run_directory(None, rank)[0] for rank in ranks)
        assert first == second, "the ranks of a job agree, whatever their clocks say"
        for rank in ranks:
            (first / f"events-rank{rank.rank}.jsonl").touch()
        names.append(first.name)
    assert names == sorted(names)
    assert len(set(names)) == 3, "a later job of the same name has a folder of its own"


def test_a_fifo_or_anothers_file_is_no_configuration(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    fifo.mkdir()
    os.mkfifo(fifo / "kilter.toml")
    with pytest.raises(UsageError, match="not a regular file"):
        find_file(fifo)
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "kilter.toml").write_text("json = true")
    (shared / "kilter.toml").chmod(0o666)
    with pytest.raises(UsageError, match="writable by others"):
        find_file(shared)


def test_a_named_file_is_read_instead_and_the_report_says_so(tmp_path: Path) -> None:
    (tmp_path / "kilter.toml").write_text("nonsense = 1")
    (tmp_path / "mine.toml").write_text("dry-run = true\nmax-slowdown = '7%'\n")
    (tmp_path / "job.py").write_text("print('hello')")
    command = ["--config", "mine.toml", "--device", "null", "--out", "run", "job.py"]
    done = subprocess.run(
        [sys.executable, "-m", "kilter", "run", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    found = report.build(tmp_path / "run")
    assert found.config == str(tmp_path / "mine.toml")
    assert found.contract == 0.07
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"options of {tmp_path / 'mine.toml'}" in page
    with pytest.raises(UsageError, match="no such file"):
        resolve({}, {}, tmp_path, (), tmp_path / "missing.toml")
    os.mkfifo(tmp_path / "fifo.toml")
    with pytest.raises(UsageError, match="not a regular file"):
        resolve({}, {}, tmp_path, (), tmp_path / "fifo.toml")


def test_the_search_ends_at_the_project_and_before_a_shared_directory(tmp_path: Path) -> None:
    (tmp_path / "kilter.toml").write_text("json = true")
    inside = tmp_path / "project" / "deep"
    inside.mkdir(parents=True)
    assert find_file(inside)[0] == tmp_path / "kilter.toml"
    (tmp_path / "project" / ".git").mkdir()
    assert find_file(inside)[0] is None
    (tmp_path / "project" / ".git").rmdir()
    tmp_path.chmod(0o777)
    assert find_file(inside)[0] is None
    tmp_path.chmod(0o700)


def test_clocks_of_operations_and_of_sections_exclude_each_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["run", "--operations", "--sections", "train.py"]) == 2
    assert "choose one of them" in capsys.readouterr().err
