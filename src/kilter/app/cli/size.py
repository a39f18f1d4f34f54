"""`kilter size`: will it fit, and at what cost? From shapes, before anything is allocated."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import kilter
from kilter.app.cli.output import print_json
from kilter.app.plan_memory import add_link_arguments, link_of
from kilter.core.errors import KilterError, UsageError, UserCodeError
from kilter.core.label import Label
from kilter.core.plan import MemoryBudget
from kilter.device.sim.cards import names
from kilter.memory.size import (
    AUTOCAST,
    OPTIMIZERS,
    Fit,
    Size,
    largest_batch,
    on_meta,
    size,
    told,
)

HELP = "What memory a training iteration takes, found from shapes: no GPU, nothing allocated."

EPILOG = """\
FUNCTION returns the model and its inputs, and a third thing if the loss is not the model's own:

  def make(batch=8):
      model = Gpt(layers=48, width=1600)
      tokens = torch.randint(50304, (batch, 1024))
      loss = lambda logits: F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
      return model, (tokens,), loss

It is called on the meta device, where tensors have shapes and no bytes. With --batch it is called
once for each size, with the argument batch; where it takes that argument, a budget in bytes is
answered with the largest batch that fits. Everything that is printed is simulated.
Exit code 0: fits; 1: does not; 2: wrong usage; 3: an error in FUNCTION, its file or its model.

examples:
  kilter size train.py:make
  kilter size package.models:make --memory-budget 24GiB --optimizer adamw-fused
  kilter size train.py:make --batch 4,8,16 --memory-budget 40GiB --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="FILE.py:FUNCTION", help="or MODULE:FUNCTION")
    parser.add_argument(
        "--batch", metavar="N,N", help="batch sizes; FUNCTION is called once with each"
    )
    parser.add_argument("--memory-budget", metavar="B", help="24GiB, or 75%% of the peak")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="(adamw)")
    parser.add_argument(
        "--autocast", choices=list(AUTOCAST), default="bf16", help="data type of autocast (bf16)"
    )
    parser.add_argument(
        "--card", choices=names(), default="h200", help="the card whose times are simulated (h200)"
    )
    add_link_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    function = _found(args.what)
    budget = None if args.memory_budget is None else MemoryBudget.parse(args.memory_budget)
    if budget is not None and budget.size_bytes is None and budget.share is None:
        raise UsageError("--memory-budget auto: there is no card here; give a size or a share")
    rows = []
    _check_call(function, args)
    for batch in _batches(args.batch):
        found = _sized(function, batch, args)
        fit = None
        if budget is not None:
            fit = found.fit(budget.size_bytes or int((budget.share or 0) * found.peak_bytes))
        rows.append((batch, found, fit))
        if not args.json:
            _tell(batch, found, fit)
    largest = None
    if budget is not None and budget.size_bytes is not None and _takes(function, batch=1):
        largest = largest_batch(lambda n: _sized(function, n, args), budget.size_bytes)
        if not args.json:
            unknown = "unknown: what FUNCTION returns has one size whatever batch it is given"
            print(f"{'largest batch':<18} {largest or unknown} [simulated]")
    if args.json:
        objects = [{"batch": batch, **found.as_json(fit)} for batch, found, fit in rows]
        document = {
            "rows": objects,
            "largest_batch": None if largest is None else asdict(largest),
        }
        print_json("kilter.size/1", Label.SIMULATED, document)
    return 0 if all(fit is None or fit.fits for _, _, fit in rows) else 1


def _tell(batch: int | None, found: Size, fit: Fit | None) -> None:
    if batch is not None:
        print(f"batch {batch}")
    print(found)
    lines = [] if fit is None else told(fit, found.card)
    for name, line in zip(["budget"] + [""] * len(lines), [*lines, "[simulated]"], strict=False):
        print(f"{name if lines else '':<18} {line}")


def _check_call(function: Callable[..., Any], args: argparse.Namespace) -> None:
    """FUNCTION is called with nothing, or with the batch alone: said before it is called."""
    named = {} if args.batch is None else {"batch": 1}
    try:
        inspect.signature(function).bind(**named)
    except ValueError:  # some that are written in C do not tell
        return
    except TypeError as error:
        call = "with batch=N alone" if named else "without arguments"
        raise UsageError(f"{args.what} is called {call}: {error}") from None


def _takes(function: Callable[..., Any], *values: object, **named: object) -> bool:
    try:
        inspect.signature(function).bind(*values, **named)
    except TypeError:
        return False
    except ValueError:  # some that are written in C do not tell
        return not named
    return True


def _sized(function: Any, batch: int | None, args: argparse.Namespace) -> Size:
    call = f"{args.what} on the meta device"
    with _UserCode(call if batch is None else f"{call} with batch={batch}"):
        made = on_meta(function, **({} if batch is None else {"batch": batch}))
    wrong = f"{args.what} must return a model, its inputs, and perhaps a loss"
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise UsageError(f"{wrong}; it returned {type(made).__name__}")
    model, inputs, *loss = made
    if not hasattr(model, "named_parameters"):
        raise UsageError(f"{wrong}; the first is a {type(model).__name__}")
    if not all(map(callable, loss)):
        raise UsageError(f"{wrong}; the loss is a {type(loss[0]).__name__}")
    if not all(_takes(own, None) for own in loss):
        raise UsageError(f"{wrong}; the loss has to take the model's output alone")
    named = inputs if isinstance(inputs, dict) else {}
    with _UserCode(f"an iteration of the model of {args.what}"):
        return size(
            model,
            *(() if named else inputs if isinstance(inputs, tuple | list) else (inputs,)),
            loss=loss[0] if loss else None,
            optimizer=args.optimizer,
            autocast=args.autocast,
            card=args.card,
            link=link_of(args),
            **named,
        )


class _UserCode(AbstractContextManager[None]):
    """Whatever the user's code raises in here becomes one sentence, with the line of the user's
    that it came from. An error that a line of ours raises stays ours. What it prints goes to
    standard error: standard output has the answer alone."""

    def __init__(self, what: str) -> None:
        """`what` is called, in words."""
        self._what = what
        self._prints = redirect_stdout(sys.stderr)

    def __enter__(self) -> None:
        self._prints.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._prints.__exit__(None, None, None)
        if not isinstance(error, Exception | SystemExit) or isinstance(error, KilterError):
            return
        home = Path(kilter.__file__).parent
        frames = traceback.extract_tb(error.__traceback__)
        if Path(frames[-1].filename).is_relative_to(home):
            return
        lines = [
            f" in {Path(frame.filename).name}, line {frame.lineno}"
            for frame in frames
            if not frame.filename.startswith("<")
            and not Path(frame.filename).is_relative_to(home)
            and "site-packages" not in frame.filename
        ]
        told = " ".join("".join(traceback.format_exception_only(error)[-1:]).split())
        raise UserCodeError(f"{self._what} failed{''.join(lines[-1:])}: {told}") from error


def _batches(text: str | None) -> list[int | None]:
    if text is None:
        return [None]
    try:
        found: list[int | None] = [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"--batch {text!r}: write sizes like 4,8,16") from None
    if any(n is None or n < 1 for n in found):
        raise UsageError(f"--batch {text!r}: a batch has at least one sample")
    return found


def _found(what: str) -> Callable[..., Any]:
    """The function that `FILE.py:NAME` or `MODULE:NAME` names. Its file runs, as on import."""
    place, colon, name = what.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"{what!r}: write FILE.py:FUNCTION or MODULE:FUNCTION")
    with _UserCode(f"the import of {place}"):
        module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{place} has no function {name}")
    return function  # type: ignore[no-any-return]


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"can't open file {str(path)!r}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _from_name(name: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there; what it imports is not
        raise UsageError(f"there is no module {name!r}") from error
