"""What share of the bytes that other people's models save for backward can be recomputed.

    python benchmarks/memory_recipes.py [--cases llama,gpt2,t5,bert] [--most 6] [--zoo vit,opt|all]

One pass is tried as `kilter run --memory-budget` tries it: every datum with a recipe is recomputed
beside the real one and compared bit for bit. Printed are the share, and the largest kinds of data
without a recipe. Needs transformers; without a GPU the models are tiny. With `--zoo` the small
architectures of `memory_zoo.py` are tried instead, on the CPU.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable

import torch
from memory_models import language, tokens

from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.backend import Backend
from kilter.memory.engine.pass_record import PassRecord
from kilter.memory.plan.problem import H200_PCIE5

CASES = ("llama", "gpt2", "t5", "bert")
ROWS = 8
PASSES = 12
"""In which a trial comes, if there is one."""


def of_zoo(kind: str) -> PassRecord:
    """The same for a small architecture of `memory_zoo.py`."""
    from memory_zoo import FAMILIES, batch, built

    family = next(name for name, (kinds, _) in FAMILIES.items() if kind in kinds.split())
    model = built(kind, family).train()
    what = FAMILIES[family][1]
    return observed(lambda: model(**batch(model, what)).loss, model, CpuStandIn(spoil=True), 2048)


def tried(case: str) -> PassRecord:
    """What a model saved in one pass, after its recipes and its modules' calls were tried."""
    small = not torch.cuda.is_available()
    device = torch.device("cpu" if small else "cuda")
    torch.manual_seed(0)
    model = language(case, small).to(device).train()
    samples = tokens(case, small, ROWS)
    batch = {key: torch.stack([row[key] for row in samples]).to(device) for key in samples[0]}
    if small:
        backend, min_bytes = CpuStandIn(spoil=True), 4096
    else:
        from kilter.memory.engine.cuda import Cuda

        backend, min_bytes = Cuda.open(), 2**20
    return observed(lambda: model(**batch).loss, model, backend, min_bytes)


def observed(
    forward: Callable[[], torch.Tensor], model: torch.nn.Module, backend: Backend, min_bytes: int
) -> PassRecord:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    swapper = Swapper(
        backend, budget_bytes=2**60, link=H200_PCIE5, min_bytes=min_bytes, segments=True
    )
    with swapper:
        for _ in range(PASSES):
            with torch.autocast(backend.device.type, torch.bfloat16):
                loss = forward()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if swapper.tried:
                break
        for reason, count in Counter(swapper.report().refused).most_common(4):
            print(f"  {count} x {reason.subject}: {reason.text}", flush=True)
        return max(swapper.records(), key=lambda found: len(found.data))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--most", type=int, default=6, help="kinds without a recipe to print")
    parser.add_argument("--zoo", default="", help="names of memory_zoo.py, or all")
    args = parser.parse_args()
    cases, look = args.cases.split(","), tried
    if args.zoo:
        from memory_zoo import FAMILIES

        kinds = [kind for names, _ in FAMILIES.values() for kind in names.split()]
        cases, look = kinds if args.zoo == "all" else args.zoo.split(","), of_zoo
    for case in cases:
        record = look(case)
        data = record.data
        called = {number for segment in record.segments for number in record.members(segment)}
        total_bytes = sum(datum.size_bytes for datum in data)
        again_bytes = sum(d.size_bytes for d in data if d.recompute_s is not None)
        either_bytes = sum(
            datum.size_bytes
            for number, datum in enumerate(data)
            if datum.recompute_s is not None or number in called
        )
        differ = sum(d.recipe is not None and d.recompute_s is None for d in data)
        print(
            f"{case}: {again_bytes / total_bytes:.0%} of {total_bytes / 2**20:.0f} MiB can be "
            f"recomputed by operations, {either_bytes / total_bytes:.0%} or segments; "
            f"{differ} data have a recipe that is not equal or was refused",
            flush=True,
        )
        left: Counter[str] = Counter()
        for number, datum in enumerate(data):
            if datum.recipe is None and number not in called:
                left[datum.name.split(": ", 1)[-1]] += datum.size_bytes
        for name, size_bytes in left.most_common(args.most):
            print(f"  {size_bytes / total_bytes:5.1%}  {name}", flush=True)


if __name__ == "__main__":
    main()
