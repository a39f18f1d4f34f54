"""Runs a program under kilter on a machine without a GPU, with everything that a GPU would see.

    python -m kilter.testing.stand_in [own options] run [options of kilter run] SCRIPT ...
    python -m kilter.testing.stand_in [own options] govern [options of kilter run] SCRIPT ...

`run` is `kilter run`; `govern` runs the script inside `with kilter.govern(...)`.

Without own options, the engine on the CPU copies over a link that is too fast for recomputation to
pay, and gradients, optimizer state and weights are left alone: only saved tensors are counted.
`--bytes-per-s` makes the link slow, so that tensors are recomputed. `--card` declares the CPU's
memory to be a GPU's, so that gradients, optimizer state and weights are moved as well.
`--min-bytes` lets tensors count that a real job would ignore as too small.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any


def slow_link(bytes_per_s: float) -> None:
    """Let the engine plan for a link of this speed in both directions."""
    from kilter.memory.plan import problem

    problem.H200_PCIE5 = problem.Link(
        to_host_bytes_per_s=bytes_per_s,
        to_device_bytes_per_s=bytes_per_s,
        both_bytes_per_s=1.5 * bytes_per_s,
    )


def small_tensors(min_bytes: int) -> Callable[[], None]:
    """Let tensors of `min_bytes` count where the default is a MiB. Returns what undoes it."""
    from kilter.memory import budget, controller, first_tensor, job_record, schedule
    from kilter.memory import state_and_weights as floor
    from kilter.memory.engine import engine, state, weights

    undo = ExitStack()
    for module in (budget, controller, first_tensor, job_record, schedule):
        undo.callback(vars(module).__setitem__, "MIB", vars(module)["MIB"])
        vars(module)["MIB"] = min_bytes
    for kind in (floor.StateAndWeightPolicy, engine.Swapper, state.StateMover, weights.WeightMover):
        _set_default(kind.__init__, "min_bytes", min_bytes, undo)
    _set_default(state.StateMover.__init__, "bucket_bytes", 16 * min_bytes, undo)
    return undo.close


def _set_default(function: Any, name: str, value: object, undo: ExitStack) -> None:
    parameters = inspect.signature(function).parameters
    undo.callback(setattr, function, "__defaults__", function.__defaults__)
    undo.callback(setattr, function, "__kwdefaults__", function.__kwdefaults__)
    if parameters[name].kind is inspect.Parameter.KEYWORD_ONLY:
        function.__kwdefaults__ = {**function.__kwdefaults__, name: value}
        return
    named = [p.name for p in parameters.values() if p.default is not inspect.Parameter.empty]
    named = [n for n in named if parameters[n].kind is not inspect.Parameter.KEYWORD_ONLY]
    defaults = list(function.__defaults__)
    defaults[named.index(name)] = value
    function.__defaults__ = tuple(defaults)


def card() -> None:
    """Treat the memory of the CPU as a GPU's: the whole engine runs, on the stand-in."""
    import torch

    from kilter.memory import controller
    from kilter.memory.engine.backend import CpuStandIn
    from kilter.memory.first_tensor import FirstTensor
    from kilter.memory.plan import problem

    governs = FirstTensor._governs

    def governs_on_card(first: Any, tensor: Any) -> bool:
        first.device_type = "cpu"
        found = governs(first, tensor)
        first.device_type = "cuda"
        return found

    replaced: Any = FirstTensor
    replaced._governs = governs_on_card
    vars(controller)["card_memory"] = lambda cuda, device, info: (None, "")
    fake: Any = types.ModuleType("kilter.memory.engine.cuda")
    fake.Cuda = types.SimpleNamespace(open=lambda index, host=None: CpuStandIn(host=host))
    fake.measure_link = lambda backend, size_bytes: problem.H200_PCIE5
    sys.modules[fake.__name__] = fake
    torch.cuda.max_memory_allocated = lambda device=None: 0
    torch.cuda.reset_peak_memory_stats = lambda device=None: None


def prepare(*, bytes_per_s: float | None, min_bytes: int | None, as_card: bool) -> None:
    """Change this process for good."""
    if bytes_per_s is not None:
        slow_link(bytes_per_s)
    if min_bytes is not None:
        small_tensors(min_bytes)
    if as_card:
        card()


def govern(arguments: Sequence[str]) -> None:
    """Run a script inside `with kilter.govern(...)`, given the options of `kilter run`."""
    import kilter
    from kilter.app.cli import run as verb
    from kilter.app.config import OPTIONS, here, resolve
    from kilter.connect.script import find_program, run_program

    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    given = parser.parse_args(arguments)
    flags = {name: getattr(given, name.replace("-", "_")) for name in OPTIONS}
    options = resolve(flags, os.environ, here(), tuple(given.command))
    program = find_program(given.command)
    with kilter.govern(
        max_slowdown=options.goal.max_slowdown,
        memory_budget=given.memory_budget,
        gradients=options.gradients,
        weights=options.weights,
        device=options.device,
        dry_run=options.dry_run,
        out=options.out,
    ):
        run_program(program)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kilter.testing.stand_in")
    parser.add_argument("--bytes-per-s", type=float)
    parser.add_argument("--min-bytes", type=int)
    parser.add_argument("--card", action="store_true")
    parser.add_argument("how", choices=("run", "govern"))
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    prepare(bytes_per_s=given.bytes_per_s, min_bytes=given.min_bytes, as_card=given.card)
    if given.how == "govern":
        govern(given.rest)
        return 0
    from kilter.app.cli.main import main as kilter_main

    return kilter_main(["run", *given.rest])


if __name__ == "__main__":
    sys.exit(main())
