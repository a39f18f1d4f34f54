"""What share of the bytes that other people's models save for backward can be recomputed.

    python benchmarks/memory_recipes.py [--cases llama,gpt2,t5,bert] [--most 6]

One pass is tried as `kilter run --memory-budget` tries it: every datum with a recipe is recomputed
beside the real one and compared bit for bit. Printed are the share, and the largest kinds of data
without a recipe. Needs transformers; without a GPU the models are tiny.
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from memory_models import language, tokens

from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.pass_record import SavedDatum
from kilter.memory.plan.problem import H200_PCIE5

CASES = ("llama", "gpt2", "t5", "bert")
ROWS = 8


def tried(case: str) -> list[SavedDatum]:
    """What a model saved in one pass, after its recipes were tried."""
    small = not torch.cuda.is_available()
    device = torch.device("cpu" if small else "cuda")
    torch.manual_seed(0)
    model = language(case, small).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    samples = tokens(case, small, ROWS)
    batch = {key: torch.stack([row[key] for row in samples]).to(device) for key in samples[0]}
    if small:
        backend, min_bytes = CpuStandIn(spoil=True), 4096
    else:
        from kilter.memory.engine.cuda import Cuda

        backend, min_bytes = Cuda.open(), 2**20
    unlimited = 2**60
    with Swapper(backend, budget_bytes=unlimited, link=H200_PCIE5, min_bytes=min_bytes) as swapper:
        while not swapper.tried:
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        record = max(swapper.records(), key=lambda found: len(found.data))
    return record.data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--most", type=int, default=6, help="kinds without a recipe to print")
    args = parser.parse_args()
    for case in args.cases.split(","):
        data = tried(case)
        total_bytes = sum(datum.size_bytes for datum in data)
        again_bytes = sum(d.size_bytes for d in data if d.recompute_s is not None)
        differ = sum(d.recipe is not None and d.recompute_s is None for d in data)
        print(
            f"{case}: {again_bytes / total_bytes:.0%} of {total_bytes / 2**20:.0f} MiB can be "
            f"recomputed; {differ} data have a recipe that is not equal or was refused",
            flush=True,
        )
        left: Counter[str] = Counter()
        for datum in data:
            if datum.recipe is None:
                left[datum.name.split(": ", 1)[-1]] += datum.size_bytes
        for name, size_bytes in left.most_common(args.most):
            print(f"  {size_bytes / total_bytes:5.1%}  {name}", flush=True)


if __name__ == "__main__":
    main()
