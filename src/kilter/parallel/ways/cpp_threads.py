"""`cpp_threads`, the thesis's way: a C++ thread and a stream for each branch, no interpreter lock.

`runner.cpp` is built once for each machine with `torch.utils.cpp_extension`; without a C++ compiler
the way is refused. So are branches that were not traced, because Python has to run them.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from kilter.observe.torch_internals.branches import TorchOperation, arguments_of, names_of
from kilter.parallel.candidates import Built, CandidateBuilder, Site
from kilter.parallel.program import BranchProgram, Unit, laid_like
from kilter.parallel.trace import WayRefused, first_line
from kilter.parallel.ways.way import ThreadedWay


class CppThreads(ThreadedWay):
    name = "cpp_threads"
    about = "C++ threads without interpreter lock, a stream each (the thesis's way)"
    works_on = ("cpu", "cuda")

    def program(self, builder: CandidateBuilder) -> BranchProgram:
        return builder.forked_program()

    def build(self, program: BranchProgram, site: Site) -> Built:
        runner, strides = Runner(program, site.request.device), site.builder.strides
        return Built(lambda tensors: laid_like(runner(tensors), strides), runner.close)


@lru_cache(maxsize=1)
def _library() -> Any:
    from torch.utils import cpp_extension

    if shutil.which("c++") is None and shutil.which("g++") is None:
        raise WayRefused("no_compiler", "no C++ compiler was found (c++ or g++ on the PATH)")
    try:
        return cpp_extension.load(
            name="kilter_branch_runner",
            sources=[str(Path(__file__).with_name("runner.cpp"))],
            extra_cflags=["-O2"],  # torch adds the version of C++ that it needs
        )
    except (RuntimeError, OSError, ImportError) as error:
        text = f"the C++ runner cannot be built ({first_line(error)})"
        raise WayRefused("not_built", text) from error


class Runner:
    def __init__(self, program: BranchProgram, device: torch.device) -> None:
        where = str(device) if device.index is not None or device.type == "cpu" else "cuda:0"
        self._program = program
        self._runner = _library().Runner(program.slots, where)
        for slot, tensor in program.constants:
            self._runner.set_slot(slot, tensor)
        for step, frees in zip(program.steps, program.last_uses(), strict=True):
            self._runner.add_step(frees)
            for unit in step:
                self._add(unit)

    def _add(self, unit: Unit) -> None:
        if unit.graph is None:
            raise WayRefused("needs_python", "a branch that is not traced needs Python", unit.name)
        self._runner.add_unit(list(unit.reads), list(unit.writes))
        register: dict[fx.Node, int] = {}
        for node in unit.graph.graph.nodes:
            if node.op == "placeholder":
                register[node] = len(register)
            elif node.op == "output":
                (results,) = node.args
                self._runner.end_unit([register[n] for n in results])
            elif isinstance(node.target, TorchOperation):
                formal = (a.name for a in arguments_of(node.target))
                named = dict(zip(formal, node.args, strict=False))
                given = {k: _argument(v, register) for k, v in {**named, **node.kwargs}.items()}
                register[node] = self._runner.add_operation(*names_of(node.target), given)
            elif "getitem" in str(node.target):
                of, index = node.args
                register[node] = self._runner.add_element(register[of], index)
            else:
                text = f"the C++ runner cannot call {node.target}"
                raise WayRefused("unknown_operation", text, str(node.target))

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        program = self._program
        found: list[Tensor] = self._runner.run(
            list(program.inputs), list(tensors), list(program.outputs)
        )
        return found

    def close(self) -> None:
        self._runner = None


def _argument(given: Any, register: dict[fx.Node, int]) -> tuple[str, list[int], Any]:
    if isinstance(given, fx.Node):
        return "register", [register[given]], None
    if isinstance(given, (list, tuple)) and any(isinstance(x, fx.Node) for x in given):
        numbers = [-1 if x is None else register[x] for x in given]
        return "optional" if None in given else "list", numbers, None
    return "constant", [], given
