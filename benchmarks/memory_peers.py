"""What others make of the same jobs: offloading of TRL and torchtune, and the compiler's budget.

    python benchmarks/memory_peers.py --out FILE [--workloads gpt] [--trl FILE] [--torchtune FILE]

`--trl` and `--torchtune` name the one file of each that offloads activations (TRL:
`trl/models/activation_offloading.py`, torchtune: `torchtune/training/_activation_offloading.py`),
so that nothing else of them has to be installed: what such a file imports of its own package and
is not there (loggers, questions about versions, a tensor type that no job here has) is stood in
for. `compile` compiles each block, with `activation_memory_budget` as given: 1 keeps all that the
compiler would keep, 0 makes all of a block again.

Rows come from one process per workload, plain first and last; medians of CUDA events around whole
iterations, peak allocated memory over the same iterations.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from memory_h200 import WORKLOADS, Job, Row, checkpointing, timed

from kilter.core.units import GIB

SLOW = 2
"""Timed iterations of a row that takes seconds for each."""


def load(path: Path, absent: dict[str, dict[str, Any]]) -> types.ModuleType:
    """One file of a package, with what is not installed stood in for."""
    packages = {name.partition(".")[0] for name in absent}
    missing = {name for name in packages if importlib.util.find_spec(name) is None}
    for name, values in absent.items():
        if name.partition(".")[0] not in missing:
            continue
        module = types.ModuleType(name)
        module.__dict__.update(values)
        sys.modules[name] = module
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def trl(path: Path, job: Job) -> Any:
    def newer(operation: str, version: str) -> bool:
        return True  # than each version of torch that the file asks about (2.4, 2.5)

    module = load(
        path,
        {
            "accelerate": {},
            "accelerate.logging": {"get_logger": logging.getLogger},
            "accelerate.utils": {},
            "accelerate.utils.versions": {"is_torch_version": newer},
            "transformers": {"is_torch_npu_available": lambda: False},
        },
    )
    # As its own factory does, which also wants a head of a certain name to leave alone.
    context = module.OffloadActivations()
    context.update_model_params(job.model)
    return context


def torchtune(path: Path, job: Job) -> Any:
    nothing = type("Nothing", (), {})
    module = load(
        path,
        {
            "torchao": {"__version__": "1"},
            "torchao.dtypes": {},
            "torchao.dtypes.nf4tensor": {"NF4Tensor": nothing},
            "torchtune": {},
            "torchtune.modules": {"TiedLinear": nothing},
            "torchtune.utils": {"get_logger": logging.getLogger},
        },
    )
    return module.OffloadActivations()


@contextlib.contextmanager
def compiled(job: Job, budget: float) -> Iterator[None]:
    """Each block compiled; blocks are alike, so it is one compilation."""
    import torch._functorch.config

    torch._dynamo.reset()
    blocks = list(job.model.blocks)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        job.model.blocks = torch.nn.ModuleList(torch.compile(block) for block in blocks)
        try:
            yield
        finally:
            job.model.blocks = torch.nn.ModuleList(blocks)


def measure(name: str, options: argparse.Namespace, tell: Callable[[Row], None]) -> None:
    job = WORKLOADS[name]()

    def row(mode: str, context: Any, warm: int = 2, count: int = options.count) -> None:
        with context:
            for _ in range(warm):
                job.step()
            tell(Row(name, mode, **asdict(timed(job, count, waiting=count == SLOW))))

    row("plain", contextlib.nullcontext(), 3)
    row("checkpoint", checkpointing(job))
    if hasattr(job.model, "blocks"):
        for budget in options.budgets:
            row(f"compile, budget {budget:g}", compiled(job, budget), 3)
    if options.trl is not None:
        row("TRL OffloadActivations", trl(options.trl, job), 1, SLOW)
    if options.torchtune is not None:
        row("torchtune OffloadActivations", torchtune(options.torchtune, job), 1, SLOW)
    row("plain again", contextlib.nullcontext())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workloads", default="gpt,long")
    parser.add_argument("--trl", type=Path)
    parser.add_argument("--torchtune", type=Path)
    parser.add_argument("--count", type=int, default=5, help="timed iterations of a row")
    parser.add_argument(
        "--budgets",
        type=lambda text: [float(word) for word in text.split(",")],
        default=[1.0, 0.5, 0.2],
        help="activation_memory_budget of the compiled rows",
    )
    options = parser.parse_args()
    with options.out.open("w") as file:

        def tell(row: Row) -> None:
            print(
                f"{row.workload} {row.mode}: {row.iteration_s * 1e3:.1f} ms, "
                f"{row.peak_bytes / GIB:.2f} GiB",
                flush=True,
            )
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()

        for name in options.workloads.split(","):
            measure(name, options, tell)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
