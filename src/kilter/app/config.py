"""What the user asked of `kilter run`: flag > environment > file > default, in that order.

One table (`OPTIONS`) names every option. `--max-slowdown` is `KILTER_MAX_SLOWDOWN` in the
environment and `max-slowdown` in `kilter.toml`, or in `[tool.kilter]` of `pyproject.toml`: the file
that `--config` names, or the nearest one from the working directory upward to the project's root.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kilter.app.factors import Factors
from kilter.core.daemon_protocol import SOCKET_VARIABLE
from kilter.core.errors import FileError, UsageError
from kilter.core.files import read_file
from kilter.core.plan import GRADIENTS, RECOMPUTE, WEIGHTS, Goal, MemoryBudget, Objective
from kilter.core.units import MIB, parse_bytes, parse_fraction, parse_seconds
from kilter.device.find import CHOICES
from kilter.lease.baseline import BASELINE_VARIABLE
from kilter.lease.journal import STATE_VARIABLE
from kilter.lease.machine import LOCK_VARIABLE
from kilter.session.options import HISTORY_AUTO, HISTORY_OFF, REHEARSE_S, Options

DEFAULT_MAX_SLOWDOWN = 0.02
"""A run that was given no goal has this contract."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of `kilter run`: its name, how to read it, and its line in the help."""

    name: str
    parse: Callable[[str], Any]
    help: str
    metavar: str | None = None
    """It is None for a switch, which takes no value as a flag, and 0, 1, true or false
    elsewhere."""
    negated: str | None = None
    """It is the help of `--no-NAME`, for a switch that is on where it is not named."""

    @property
    def variable(self) -> str:
        return "KILTER_" + self.name.upper().replace("-", "_")

    def add_to(self, parser: argparse.ArgumentParser, help_text: str | None = None) -> None:
        """As a flag, whose text `resolve` reads with all other sources."""
        text = help_text or self.help
        if self.metavar is None:
            parser.add_argument(f"--{self.name}", action="store_const", const="1", help=text)
            if self.negated is not None:
                parser.add_argument(
                    f"--no-{self.name}",
                    action="store_const",
                    const="0",
                    dest=self.name.replace("-", "_"),
                    help=self.negated,
                )
        else:
            parser.add_argument(f"--{self.name}", metavar=self.metavar, help=text)


def _switch(text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true"):
        raise UsageError(f"{text!r} is not a switch: write true or false")
    return text.lower() in ("1", "true")


def _objective(text: str) -> Objective:
    """`UsageError` for a word that is none."""
    try:
        return Objective(text)
    except ValueError:
        known = ", ".join(one.value for one in Objective)
        raise UsageError(f"{text!r} is not an objective: choose one of {known}") from None


def _price_of_time(text: str) -> float:
    """`UsageError` for what is no number; the goal says which numbers make sense."""
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number") from None


def _one_of(words: Sequence[str]) -> Callable[[str], str]:
    """Reads one of these words; `UsageError` for another one."""

    def read(text: str) -> str:
        if text not in words:
            raise UsageError(f"{text!r} is not one of {', '.join(words)}")
        return text

    return read


def _host_memory(text: str) -> int:
    """`16GiB`; `UsageError` for what is no size, or lacks its unit."""
    size_bytes = parse_bytes(text)
    if size_bytes < MIB:
        raise UsageError(f"{text!r} is less than 1 MiB: write a size with its unit, such as 16GiB")
    return size_bytes


def _device(text: str) -> str:
    if text in CHOICES:
        return text
    kind, _, name = text.partition(":")
    if kind == "replay":
        if not Path(name).exists():
            raise UsageError(f"{text!r}: no such recording (a run's directory, or a CSV file)")
        from kilter.device.sim.replay import load_recording

        load_recording(name)  # a broken one is said before the script begins
        return f"replay:{Path(name).absolute()}"  # the script may change its directory
    # Late: the simulator brings numpy, which must not be imported before the script has had its
    # chance to say how many threads it may start.
    from kilter.device.sim.cards import names

    choices = (*CHOICES, *(f"sim:{name}" for name in names()))
    if text not in choices:
        raise UsageError(
            f"{text!r} is not a device: choose one of {', '.join(choices)}, or replay:PATH"
        )
    return text


def _directory(text: str) -> Path:
    # Absolute now, because the script may change its working directory.
    return Path(text).expanduser().absolute()


def _history(text: str) -> str:
    """A file, made absolute, `auto` or `off`; `UsageError` for a directory."""
    if text in (HISTORY_AUTO, HISTORY_OFF):
        return text
    path = Path(text).expanduser().absolute()  # the script may change its directory
    if not text or path.is_dir():
        raise UsageError(f"{text!r} is not a file for the history: name one, or write off")
    return str(path)


def _predictor(text: str) -> Path:
    path = Path(text).expanduser().absolute()
    if not path.is_file():
        raise UsageError(f"{text!r}: no such file; kilter learn TABLE --out FILE writes one")
    return path


OPTIONS = {
    option.name: option
    for option in (
        Option(
            "max-slowdown",
            parse_fraction,
            "energy under this contract (0 = only free savings); with no goal given: 2%%",
            "2%",
        ),
        Option(
            "memory-budget",
            MemoryBudget.parse,
            "fit into this much GPU memory: 24GiB, 75%% of the peak, or auto (the card); clocks are"
            " then left alone unless --max-slowdown is given",
            "24GiB|75%|auto",
        ),
        Option(
            "gradients",
            _one_of(GRADIENTS),
            "auto or keep (gradients stay until the optimizer's step has used them), or consume"
            " (where the budget asks for it, the optimizer uses and frees each gradient as it"
            " arrives in backward: for a program that never clips or reads gradients and never"
            " skips a step)",
            "NAME",
        ),
        Option(
            "weights",
            _one_of(WEIGHTS),
            "keep (weights stay on the device), or offload (where moving activations, gradients and"
            " optimizer state does not meet the budget, weights are on the host between forward"
            " and backward; experimental: a program that writes to weights by their address"
            " fails)",
            "NAME",
        ),
        Option(
            "recompute",
            _one_of(RECOMPUTE),
            "operations (single ones, from what autograd saved), segments (what calls of modules"
            " saved as well, whole or in part, from a record of what ran), or auto (the fastest of"
            " these and of the checkpointing that a model of transformers, diffusers or timm has"
            " built in: each is measured for a few iterations; the default on a GPU)",
            "NAME",
        ),
        Option(
            "host-memory",
            _host_memory,
            "how much each process may offload to the host's memory (default: half of the free"
            " host memory, divided among the processes)",
            "16GiB",
        ),
        Option(
            "strict",
            _switch,
            "exit code 1 instead of 0 where the budget was not kept, or it is not known whether it"
            " was, once the script has ended",
        ),
        Option(
            "objective",
            _objective,
            "what is minimised under the contract: energy (default), edp or ed2p",
            "NAME",
        ),
        Option(
            "price-of-time",
            _price_of_time,
            "a setting has to save this many times as large a fraction of the energy as it is"
            f" slower (default {Goal().price_of_time:g}: as if the rest of the machine"
            " drew half as much as its GPUs; 0: any saving within --max-slowdown is welcome; 1:"
            " energy times time must not rise)",
            "P",
        ),
        Option(
            "device",
            _device,
            "auto (default), nvml, amdsmi, sim:NAME, replay:PATH of a recorded run, or null",
            "DEVICE",
        ),
        Option(
            "rehearse",
            parse_seconds,
            "on a simulated device: how long to go on with the search after the script (default:"
            f" {REHEARSE_S:g}s)",
            "60s",
        ),
        Option(
            "sections",
            _switch,
            "lower the clock in communication sections that are worth it, inside the iteration, or"
            " one clock for the whole job where that pays more; without the option, jobs of several"
            " ranks are looked at whose GPUs may be set",
            negated="do not look for communication sections",
        ),
        Option(
            "operations",
            _switch,
            "lower the clock in stretches of an iteration's operations that are worth it, or one"
            " clock for the whole job where that pays more (experimental)",
        ),
        Option("dry-run", _switch, "observe, plan and report, but set nothing"),
        Option(
            "trace",
            _switch,
            "record the operations of one iteration also on a real device (a pause of about 0.3 s,"
            " once): trace.json, and the report's table of where the energy goes",
        ),
        Option(
            "history",
            _history,
            "the file of earlier runs, from which a job that comes again takes the setting and the"
            " way to recompute that it begins with: auto (default:"
            " $XDG_STATE_HOME/kilter/history.sqlite), a path, or off",
            "FILE|off",
        ),
        Option(
            "predictor",
            _predictor,
            "order the first settings that are tried by this file of kilter learn, from a trace of"
            " one iteration (a pause as with --trace); what is chosen is decided by measurement"
            " alone",
            "FILE",
        ),
        Option("out", _directory, "where the files of the run go (default: runs/ID)", "DIR"),
        Option("json", _switch, "the summary at the end is one line of JSON, also on stderr"),
    )
}


def resolve(
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    directory: Path,
    command: tuple[str, ...],
    config: Path | None = None,
) -> Options:
    """The options of a run. `UsageError` names the flag, variable or file that is wrong. `config`
    is a file that the user names, whoever owns it; None: the nearest one."""
    file, entries = find_file(directory, config)
    given: dict[str, Any] = {}
    for option in OPTIONS.values():
        for text, where in (
            (flags.get(option.name), f"--{option.name}"),
            (environ.get(option.variable) or None, option.variable),
            (entries.get(option.name), f"{file}: {option.name}"),
        ):
            if text is not None:
                try:
                    given[option.name] = option.parse(text)
                except UsageError as error:
                    raise UsageError(f"{where}: {error}") from None
                break
    factors({}, file, entries)  # wrong ones are said now, and not when the report is written
    max_slowdown = given.get("max-slowdown")
    memory_budget = given.get("memory-budget")
    # A file or the environment may hold these for all runs; asked for here, they were meant.
    for name, does in _OF_MEMORY.items():
        if memory_budget is None and flags.get(name) is not None:
            raise UsageError(f"--{name} {does}: add --memory-budget")
    if flags.get("strict") is not None and given.get("dry-run"):
        raise UsageError("with --dry-run no budget is kept: leave out --strict")
    if memory_budget is None or given.get("dry-run"):
        given.pop("strict", None)
    inside = given.get("sections") or given.get("operations")
    clocks_alone = memory_budget is not None and not inside
    if max_slowdown is None and clocks_alone and any(flags.get(n) is not None for n in _OF_CLOCKS):
        raise UsageError("with --memory-budget alone no clock is set: add --max-slowdown")
    if given.get("operations") and given.get("sections"):
        raise UsageError("--operations and --sections set the same clocks: choose one of them")
    return options_of(given, command, file)


def options_of(given: Mapping[str, Any], command: tuple[str, ...], config: Path | None) -> Options:
    """What was read for some of `OPTIONS`, by name; the others have their defaults. With no goal
    among them, or for sections, it is energy at `DEFAULT_MAX_SLOWDOWN`."""
    named = {_FIELDS.get(name, name.replace("-", "_")): value for name, value in given.items()}
    if "memory_budget" not in named or named.get("sections") or named.get("operations"):
        named.setdefault("max_slowdown", DEFAULT_MAX_SLOWDOWN)
    goal = {field.name: named.pop(field.name) for field in fields(Goal) if field.name in named}
    return Options(goal=Goal(**goal), command=command, config=config, **named)


_FIELDS = {"host-memory": "host_memory_bytes", "rehearse": "rehearse_s", "json": "json_summary"}
"""The fields of `Goal` or `Options` for these options have other names."""

_OF_MEMORY = {
    "gradients": "says what a memory budget may do",
    "weights": "says what a memory budget may move",
    "recompute": "says what a memory budget may do",
    "host-memory": "limits what a memory budget offloads",
    "strict": "says what follows where a memory budget is not kept",
}
"""These options mean nothing without a memory budget; each stands with what it does."""

_OF_CLOCKS = ("objective", "price-of-time")
"""These options mean nothing where clocks are left alone."""

FACTORS = ("grams_co2_per_kwh", "price_per_kwh", "currency")
"""These are keys of the table `report`, and flags of `kilter report`."""


def factors(
    flags: Mapping[str, str | None], file: Path | None, entries: Mapping[str, str]
) -> Factors:
    """What a kilowatt-hour emits and costs: flag > file; there is no default. `UsageError` names
    the flag or the file that is wrong."""
    given: dict[str, Any] = {}
    wheres = []
    for name in FACTORS:
        flag, entry = flags.get(name), entries.get(f"report.{name}")
        text = entry if flag is None else flag
        if text is None:
            continue
        where = f"--{name.replace('_', '-')}" if flag is not None else f"{file}: report.{name}"
        wheres.append(where)
        try:
            given[name] = text if name == "currency" else float(text)
        except ValueError:
            raise UsageError(f"{where}: {text!r} is not a number") from None
    try:
        return Factors(**given)
    except UsageError as error:
        raise UsageError(f"{', '.join(wheres)}: {error}") from None


def factors_of(options: Options) -> Factors:
    """Those of the file that the options of a run were read from."""
    return factors({}, *find_file(here(), options.config))


OTHER_VARIABLES = (
    "KILTER",
    "KILTER_READ_ONLY",
    STATE_VARIABLE,
    LOCK_VARIABLE,
    SOCKET_VARIABLE,
    BASELINE_VARIABLE,
    "KILTER_RUN",
    "KILTER_SHARE",
    "KILTER_BUILD",
    "KILTER_SPOIL_EVICTED",
    "KILTER_TEST_NVML",
    "KILTER_TEST_ALL_LINES",
)
"""They are read from the environment, besides those of the options."""


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each `KILTER_*` variable that nothing reads: most are misspelt."""
    import difflib

    known = [*OTHER_VARIABLES, *(option.variable for option in OPTIONS.values())]
    told = []
    for name in sorted(environ):
        if name.startswith("KILTER_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "kilter run --help lists those it reads"
            told.append(f"{name} is in the environment, and kilter reads no such variable; {hint}")
    return told


def here() -> Path:
    """Where configuration is looked for. Python runs a script in a deleted directory, too."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")


def find_file(directory: Path, named: Path | None = None) -> tuple[Path | None, dict[str, str]]:
    """The configuration file that the user names, or the nearest one at or above a directory, and
    its entries as text.

    The search ends at the project's root (the first directory with a `.git`) and before the first
    directory of another user: what lies in a shared directory above is not this user's wish. Files
    of other users are not obeyed, and what is no regular file is not read.
    """
    if named is not None:
        return _named(named)
    for folder in (directory, *directory.parents):
        if folder != directory and not _own_folder(folder):
            break
        for file, table in ((folder / "kilter.toml", ()), (folder / "pyproject.toml", _TABLE)):
            entries = _entries(file, table, owners={0, os.geteuid()})
            if entries is not None:
                return file, entries
        if (folder / ".git").exists():
            break
    return None, {}


def _named(file: Path) -> tuple[Path, dict[str, str]]:
    table = _TABLE if file.name == "pyproject.toml" else ()
    entries = _entries(file, table, owners=None)
    if entries is None:
        raise UsageError(f"--config {file}: there is no such file, or it has no [tool.kilter]")
    return file.absolute(), entries


def _own_folder(folder: Path) -> bool:
    """Ours or root's, and closed to others: who may write there may put a file there."""
    try:
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o002


_TABLE = ("tool", "kilter")
_MAX_BYTES = 2**20


def _entries(
    file: Path, table: tuple[str, ...], *, owners: Collection[int] | None
) -> dict[str, str] | None:
    try:
        # A group may write: a user's own group can, by the default of many systems.
        raw = read_file(file, max_bytes=_MAX_BYTES, owners=owners, closed_to=0o002)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except FileError as error:
        if table and owners is not None:
            return None  # a pyproject.toml may be there for others
        raise UsageError(
            f"{error}: give it to yourself (chown, chmod go-w), or remove it"
        ) from None
    # A pyproject.toml that does not mention us is not ours to judge, and need not be read.
    return (
        None if b".".join(part.encode() for part in table) not in raw else _read(raw, file, table)
    )


def _read(raw: bytes, file: Path, table: tuple[str, ...]) -> dict[str, str]:
    """The entries of a TOML file as text; `UsageError` for what is not to be there."""
    try:
        found = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{file}: not a TOML file ({error})") from None
    for part in table:
        found = found.get(part, {})
        if not isinstance(found, dict):
            raise UsageError(f"{file}: expected a table [{'.'.join(table)}]")
    factors = found.pop("report", {})
    if not isinstance(factors, dict):
        raise UsageError(f"{file}: expected a table [{'.'.join((*table, 'report'))}]")
    found |= {f"report.{name}": value for name, value in factors.items()}
    known = (*OPTIONS, *(f"report.{name}" for name in FACTORS))
    unknown = [name for name in found if name not in known]
    if unknown:
        raise UsageError(f"{file}: unknown key {unknown[0]!r}; known are {', '.join(known)}")
    for name, value in found.items():
        if not isinstance(value, str | int | float):
            raise UsageError(f"{file}: {name}: expected one value, found {value!r}")
    return {name: str(value) for name, value in found.items()}
