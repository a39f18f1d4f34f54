"""`kilter bench harm`: the same programs plain and under kilter, and everything that differs.

A row is one file of `harm_programs/`: its docstring says what the program does, its constants how
the program is run and what is compared. Plain is `python FILE`; governed is `kilter run`, or
`with kilter.govern(...)`, under one of the sets of options below.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kilter.app.cli.options import positive
from kilter.app.cli.output import print_json
from kilter.app.fields import taken
from kilter.core.errors import FileError, UsageError
from kilter.core.events import Failed, Moved, read_events
from kilter.core.label import Label
from kilter.core.units import KIB, MIB, show_bytes
from kilter.lease.journal import STATE_VARIABLE
from kilter.testing.fake_card import Card
from kilter.testing.fake_nvml import FakeNvml
from kilter.testing.warm_python import ProcessEnd, WarmPython

PROGRAM_FILES = Path(__file__).with_name("harm_programs")
HARM_SCHEMA = "kilter.bench-harm/1"
WITHIN_S = 240.0
"""A run that takes longer hangs; the programs need seconds."""
MORE_MIB = 256
"""By so much the peak host memory of a governed run may exceed plain's: our own modules, and, on
the CPU, the host's copies of what would be on a GPU."""
MMAP_FROM_BYTES = 128 * KIB
"""From this size on glibc's `malloc` asks the system for memory and gives it back at once, by its
first value. Unless it is set, `malloc` raises it to 32 MiB as the program frees larger blocks.
Tensors on the CPU then lie in a heap whose gaps depend on chance: of the same plain program, three
runs had peaks of 698, 2510 and 2573 MiB, and 341 MiB with the value set. What kilter holds cannot
be told from that, so that programs with a growing heap are run with the value set, both times."""
ON_GPU = Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""

HELP = "The same programs plain and under kilter: exit codes, output, bits, memory, files."
EPILOG = """\
Each row is a program that trains in an unusual way, run by python and then under kilter with some
sets of options. Compared are exit code, standard output, the program's lines on standard error,
parameters, gradients and losses bit by bit, files, settings of the GPU, and peak host memory.
Without a GPU, the CPU stands in for one.

exit code: 0 if nothing differs, 1 otherwise

examples:
  kilter bench harm
  kilter bench harm --only 2b,4a --jobs 2
  kilter bench harm --programs 2000 --seed 0     random training programs
  kilter bench harm --programs 1 --seed 1234     one of them again
"""


# What is run ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OptionSet:
    """One way to run a program under kilter."""

    how: str
    """It is `run` or `govern`."""
    options: tuple[str, ...]
    stand_in: tuple[str, ...] = ()
    """These are options of `kilter.testing.stand_in` itself; they are meaningless on a GPU."""
    fake_nvml: bool = False

    def command(self, program: Path, out: Path) -> list[str]:
        """The arguments of python."""
        stand_in = () if ON_GPU else self.stand_in
        options = list(self.options)
        if ON_GPU and not self.fake_nvml:
            options = ["auto" if option.startswith("sim:") else option for option in options]
        plain = self.how == "run" and not stand_in
        launcher = ["kilter"] if plain else ["kilter.testing.stand_in", *stand_in]
        arguments = [self.how, *options, "--out", str(out), str(program)]
        return ["-m", *launcher, *arguments]


SIM = ("--device", "sim:v100", "--max-slowdown", "2%", "--rehearse", "0.5s")
"""The rehearsal begins when the program's last line has run."""
SLOW = ("--bytes-per-s", "1e4")
OPTION_SETS: dict[str, OptionSet] = {
    "energy": OptionSet("run", SIM),
    "dry-run": OptionSet("run", (*SIM, "--memory-budget", "60%", "--dry-run")),
    "memory": OptionSet("run", ("--memory-budget", "60%")),
    "recompute": OptionSet("run", ("--memory-budget", "40%"), SLOW),
    "state": OptionSet("run", ("--memory-budget", "10%", "--weights", "offload"), ("--card",)),
    "all": OptionSet("run", (*SIM, "--memory-budget", "30%"), ("--card", *SLOW)),
    "govern": OptionSet("govern", (*SIM, "--memory-budget", "60%")),
    "nvml": OptionSet("run", ("--max-slowdown", "2%"), fake_nvml=True),
}
"""`recompute`: the link is so slow that tensors are recomputed. `state`: the CPU's memory counts as
a GPU's, so that gradients, optimizer state and weights make room too. `nvml`: a fake card."""
RECOMPUTE_VARIABLE = "KILTER_RECOMPUTE"
"""This environment variable says what the governed runs recompute."""
USUAL = ("energy", "dry-run", "memory", "recompute", "all", "govern")


@dataclass(frozen=True, slots=True)
class Case:
    """One file of `harm_programs/`, with what its constants say."""

    name: str
    path: Path
    program: str
    """What it does, in words."""
    run: tuple[str, ...] = USUAL
    """The program is run with the option sets of these names."""
    expect: dict[str, Any] | None = None
    """A program that itself runs jobs under kilter must find these facts."""
    not_compared: tuple[str, ...] = ()
    ends: tuple[str, ...] = ("0",)
    """How the plain program may end; else the row proves nothing."""
    within_s: float = WITHIN_S
    more_mib: int = MORE_MIB
    close: tuple[int, ...] = ()
    """These descriptors are closed when the program starts."""
    cold: bool = False
    """Whether it sees how its interpreter was started."""
    mmap: bool = False
    """Whether `malloc` keeps to `MMAP_FROM_BYTES`: slower, but the peak is the same each time."""


CONSTANTS = {
    "RUN": "run",
    "EXPECT": "expect",
    "NOT_COMPARED": "not_compared",
    "ENDS": "ends",
    "WITHIN_S": "within_s",
    "MORE_MIB": "more_mib",
    "CLOSE": "close",
    "COLD": "cold",
    "MMAP": "mmap",
}
"""It maps a constant of a program to a field of `Case`."""


def read_case(path: Path) -> Case:
    """The constants are read from the source: the programs import torch, and the bench does not."""
    tree = ast.parse(path.read_text())
    given = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            field = CONSTANTS.get(statement.targets[0].id)
            if field is not None:
                given[field] = ast.literal_eval(statement.value)
    words = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ").rstrip(".")
    name = path.name.partition("_")[0].removeprefix("r").lstrip("0")
    return Case(name=name, path=path, program=words, **given)


def cases(only: Iterable[str] = (), place: Path = PROGRAM_FILES) -> list[Case]:
    """All rows in order, or those named: `2b`, or `2` for all of its letters."""
    found = [read_case(path) for path in sorted(place.glob("r[0-9]*.py"))]
    wanted = list(only)
    unknown = [w for w in wanted if not any(_is_named(case, w) for case in found)]
    if unknown:
        names = ", ".join(case.name for case in found)
        raise UsageError(f"there is no row {unknown[0]!r}; known are {names}")
    return [case for case in found if not wanted or any(_is_named(case, w) for w in wanted)]


def _is_named(case: Case, wanted: str) -> bool:
    return wanted in (case.name, case.name.rstrip("abcdefghijklmnopqrstuvwxyz"))


# Running it -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """Everything that is compared of one run."""

    exit: str
    stdout: str
    stderr: tuple[str, ...]
    """It lacks the lines that begin with `kilter`, which are ours."""
    facts: dict[str, Any]
    files: dict[str, str]
    """It maps a path below the working directory to its hash."""
    settings: int
    """So many calls would have changed a setting of the (fake) GPU."""
    errors: tuple[str, ...]
    """The run's own record tells these errors of kilter."""
    work: str
    """What kilter did, so that an equal row is known to have been put to the test."""
    peak_bytes: int


@contextmanager
def copied_programs() -> Iterator[Path]:
    """The programs in a directory that is not kilter's, as a user's are."""
    with tempfile.TemporaryDirectory(prefix="harm-programs-") as place:
        for path in PROGRAM_FILES.glob("*.py"):
            shutil.copy(path, place)
        yield Path(place)


def run_one(
    case: Case, options: OptionSet | None, warm: WarmPython | None = None
) -> ProgramOutcome:
    """One process, in an empty directory of its own; forked from `warm` where that is the same."""
    with tempfile.TemporaryDirectory(prefix="harm-") as place:
        root = Path(place)
        work, out, seen = root / "work", root / "out", root / "seen"
        work.mkdir()
        (root / "state").mkdir(mode=0o700)
        fake = FakeNvml.create(root / "cards.json", Card(load=1.0))
        given = {k: v for k, v in os.environ.items() if not k.startswith("KILTER")}
        environ = given | {k: v for k, v in os.environ.items() if k == RECOMPUTE_VARIABLE}
        environ |= {
            STATE_VARIABLE: str(root / "state"),
            "HARM_SEEN": str(seen),
            "KILTER_HISTORY": "off",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }
        if options is not None and options.fake_nvml:
            environ = fake.environ(environ)
        command = [str(case.path)] if options is None else options.command(case.path, out)
        if case.mmap:
            environ["MALLOC_MMAP_THRESHOLD_"] = str(MMAP_FROM_BYTES)
        if case.cold or case.close:
            warm = None
        ending, peak_bytes = _run(command, case, root, environ, warm)
        errors, moved = record_of(out)
        lines = (root / "stderr").read_text(errors="replace").splitlines()
        return ProgramOutcome(
            exit=ending,
            stdout=(root / "stdout").read_text(errors="replace"),
            stderr=tuple(line for line in lines if not line.startswith("kilter")),
            facts=_facts(seen),
            files={
                str(path.relative_to(work)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
                for path in sorted(work.rglob("*"))
                if path.is_file()
            },
            settings=len(fake.setters()),
            errors=tuple(errors),
            work=_work(moved),
            peak_bytes=peak_bytes,
        )


def _run(
    command: Sequence[str],
    case: Case,
    root: Path,
    environ: dict[str, str],
    warm: WarmPython | None,
) -> tuple[str, int]:
    """How `python COMMAND` ended, and its peak memory."""
    with (
        open(os.devnull, "rb") as nothing,
        (root / "stdout").open("wb") as stdout,
        (root / "stderr").open("wb") as stderr,
    ):
        streams = (nothing, stdout, stderr)
        try:
            if warm is None:
                ended = _run_cold(command, case, root / "work", environ, streams)
            else:
                ended = warm.start(
                    command, cwd=root / "work", environ=environ, streams=streams
                ).wait(case.within_s)
        except subprocess.TimeoutExpired:
            return f"did not end within {case.within_s:g} s", 0
    code = ended.returncode
    name = f" ({signal.Signals(-code).name})" if code < 0 else ""
    return f"{code}{name}", ended.peak_bytes


def _run_cold(
    command: Sequence[str],
    case: Case,
    work: Path,
    environ: dict[str, str],
    streams: tuple[IO[bytes], ...],
) -> ProcessEnd:
    """By an interpreter of its own; `subprocess.TimeoutExpired` after the case's time."""
    closing = " ".join(f"{number}>&-" for number in case.close)
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, *command],
        cwd=work,
        env=environ,
        stdin=streams[0],
        stdout=streams[1],
        stderr=streams[2],
        start_new_session=True,
    )
    late = threading.Event()

    def end() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(case.within_s, end)
    timer.start()
    _, status, usage = os.wait4(process.pid, 0)
    timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    if late.is_set():
        raise subprocess.TimeoutExpired(command, case.within_s)
    return ProcessEnd(process.returncode, usage.ru_maxrss * KIB)


def _facts(seen: Path) -> dict[str, Any]:
    if not seen.exists():
        return {}
    found: dict[str, Any] = {}
    for line in seen.read_text().splitlines():
        name, value = json.loads(line)
        found[name] = value
    return found


def record_of(out: Path) -> tuple[list[str], Moved | None]:
    """Errors of ours, and the last line about memory, of a run's record."""
    errors: list[str] = []
    moved: Moved | None = None
    try:
        for path in sorted(out.glob("events-*.jsonl")):
            for event in read_events(path):
                if isinstance(event, Failed):
                    errors.append(f"{event.where}: {event.error}")
                elif isinstance(event, Moved):
                    moved = event
    except FileError as error:
        errors.append(f"its record: {error}")
    return errors, moved


def _work(moved: Moved | None) -> str:
    if moved is None:
        return ""
    parts = [f"{moved.planned} of {moved.passes} passes planned", f"{moved.recomputed} recomputed"]
    return ", ".join([*parts, moved.state] if moved.state else parts)


# Comparing --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HarmRow:
    """One line of the table: a program under one set of options."""

    row: str
    program: str
    options: str
    differences: tuple[str, ...]
    work: str
    peak_bytes: tuple[int, int]
    """It is host memory, of the plain run and of the governed one."""


def differences(case: Case, plain: ProgramOutcome, governed: ProgramOutcome) -> tuple[str, ...]:
    """What differs, in words. Of a run that ended otherwise, only how."""
    if plain.exit not in case.ends:
        expected = " or ".join(case.ends)
        return (f"the plain program ended with {plain.exit} instead of {expected}",)
    ended = _change("exit code", plain.exit, governed.exit)
    if ended:
        return (*ended, *(_short(line) for line in governed.stderr[-1:]))
    found = {
        "stdout": _change("standard output", plain.stdout, governed.stdout),
        "stderr": _change("standard error", "\n".join(plain.stderr), "\n".join(governed.stderr)),
        "facts": _changes("", plain.facts, governed.facts),
        "files": _changes("file ", plain.files, governed.files),
        "settings": _change("settings made", plain.settings, governed.settings),
        "errors": [f"an error of kilter: {error}" for error in governed.errors],
        "memory": _more_memory(case, plain.peak_bytes, governed.peak_bytes),
    }
    compared = (texts for name, texts in found.items() if name not in case.not_compared)
    return tuple(text for texts in compared for text in texts)


def _change(what: str, plain: object, governed: object) -> list[str]:
    return [] if plain == governed else [f"{what}: {_short(plain)} became {_short(governed)}"]


def _changes(what: str, plain: dict[str, Any], governed: dict[str, Any]) -> list[str]:
    names = [*plain, *(name for name in governed if name not in plain)]
    texts = []
    for name in names:
        texts += _change(f"{what}{name}", plain.get(name, "nothing"), governed.get(name, "nothing"))
    return texts


def _more_memory(case: Case, plain_bytes: int, governed_bytes: int) -> list[str]:
    if governed_bytes <= plain_bytes + case.more_mib * MIB:
        return []
    sizes = f"{show_bytes(plain_bytes)} became {show_bytes(governed_bytes)}"
    return [f"peak host memory: {sizes} (allowed: {case.more_mib} MiB more)"]


def _short(value: object, most: int = 300) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = text.strip().replace("\n", " / ")
    return (text if len(text) <= most else f"... {text[-most:]}") or "nothing"


def expectations(case: Case, outcome: ProgramOutcome) -> tuple[str, ...]:
    """What a program that runs jobs under kilter has found otherwise than it should."""
    assert case.expect is not None
    found = _change("exit code", "0", outcome.exit)
    for name, value in case.expect.items():
        given = outcome.facts.get(name, "nothing")
        if given != value:
            found.append(f"{name}: {_short(given)} instead of {_short(value)}")
    if outcome.exit != "0":
        found += outcome.stderr[-1:]
    return tuple(found)


def rows_of(
    case: Case, sets: Sequence[str] = (), warm: WarmPython | None = None
) -> Iterable[HarmRow]:
    """Run a program in all its ways, or in those of them that are named."""
    plain = run_one(case, None, warm)
    if case.expect is not None:
        sizes = (plain.peak_bytes, plain.peak_bytes)
        yield HarmRow(case.name, case.program, "", expectations(case, plain), "", sizes)
        return
    for name in (name for name in case.run if name in (sets or case.run)):
        governed = run_one(case, OPTION_SETS[name], warm)
        sizes = (plain.peak_bytes, governed.peak_bytes)
        found = differences(case, plain, governed)
        yield HarmRow(case.name, case.program, name, found, governed.work, sizes)


# The verb ---------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="ROWS", default="", help="for example 2b,4a or 2")
    parser.add_argument(
        "--options", metavar="SETS", default="", help=f"of {', '.join(OPTION_SETS)}; all if empty"
    )
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="programs at a time")
    parser.add_argument(
        "--programs", type=positive, metavar="N", help="random programs instead of rows"
    )
    parser.add_argument(
        "--recompute",
        default="operations",
        choices=("operations", "segments", "auto"),
        help="what is recomputed under a memory budget",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first one")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    os.environ[RECOMPUTE_VARIABLE] = args.recompute
    sets = tuple(filter(None, args.options.split(",")))
    for name in sets:
        if name not in OPTION_SETS:
            raise UsageError(f"--options: {name!r} is not one of {', '.join(OPTION_SETS)}")
    if args.programs is not None:
        from kilter.app.bench import harm_random

        return harm_random.run(args.programs, args.seed, jobs=args.jobs, as_json=args.json)
    with copied_programs() as place:
        chosen = cases(filter(None, args.only.split(",")), place)
        found = _run_all(chosen, args.jobs, sets)
    rows = [row for case in chosen for row in found[case.name]]
    if args.json:
        _print_json(rows)
    else:
        print(as_text(rows))
    return int(any(row.differences for row in rows))


def _run_all(chosen: Sequence[Case], jobs: int, sets: Sequence[str]) -> dict[str, list[HarmRow]]:
    """By name of the row."""
    found: dict[str, list[HarmRow]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        running = {
            pool.submit(lambda case: list(rows_of(case, sets)), case): case for case in chosen
        }
        for number, done in enumerate(as_completed(running), start=1):
            case = running[done]
            found[case.name] = done.result()
            count = sum(bool(row.differences) for row in found[case.name])
            verdict = f"{count} of {len(found[case.name])} differ" if count else "equal"
            print(f"{number} of {len(chosen)}: {case.name}: {verdict}", file=sys.stderr, flush=True)
    return found


def _print_json(rows: Sequence[HarmRow]) -> None:
    table = [
        {
            **taken(row, ("row", "program", "options", "differences", "work")),
            "equal": not row.differences,
            "plain_peak_bytes": row.peak_bytes[0],
            "governed_peak_bytes": row.peak_bytes[1],
        }
        for row in rows
    ]
    summary = {"n": len(rows), "equal": sum(not row.differences for row in rows)}
    label = Label.MEASURED if ON_GPU else Label.SIMULATED
    print_json(HARM_SCHEMA, label, {"rows": table, "summary": summary})


def as_text(rows: Sequence[HarmRow]) -> str:
    """A table in Markdown."""
    lines = ["| row | the program | options | what kilter did | compared with plain |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        verdict = re.sub(r"\s+", " ", "; ".join(row.differences)).replace("|", "\\|") or "equal"
        lines.append(f"| {row.row} | {row.program} | {row.options} | {row.work} | {verdict} |")
    equal = sum(not row.differences for row in rows)
    where = "on a GPU" if ON_GPU else "on the CPU, which stands in for a GPU"
    lines += ["", f"{equal} of {len(rows)} equal ({where})."]
    return "\n".join(lines)
