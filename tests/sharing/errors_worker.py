"""An error of ours, planted at a call from each place while two ranks train: the job ends as it
would without kilter, whichever rank has the error. `errors_worker.py OUT`, with
KILTER_TEST_EVERY_CALL for both ranks and both moments at each place, else one of these four at
every second place; `KILTER_TEST_SEED=1` takes the other places.

Writes a JSON object: how many cases there were, in how many kilter told of the error, and what went
wrong where.
"""

import json
import os
import sys
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import kilter.sharing.elastic
from kilter.session.fence import Fence
from kilter.sharing.elastic.job import ElasticJob
from kilter.testing import forked
from kilter.testing.ratio_plan import RatioPlan

OURS = str(Path(kilter.sharing.elastic.__file__).parent)
EVERY = bool(os.environ.get("KILTER_TEST_EVERY_CALL"))
PLAN = [(7, 3), (10, 0), (4, 6)]
UNFENCED = frozenset(
    {
        # Only decide which step comes next; each step is behind the fence.
        "batches", "_one_stretch", "__iter__", "_next", "_end", "_convert", "_waits", "_watched",
        "sure", "forward", "end_of_pass",
        # What C++ calls in the middle of a backward pass: a product, a collective and the wait for
        # it; and what is behind the fence as a whole.
        "__call__", "_wait", "accumulated", "done", "watched",
        # The fence's own answer to an error, which it guards itself.
        "_failed", "hold",
        # Parts of the function around them.
        "<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>",
    }
)  # fmt: skip


class Planted(Exception):
    """An error of ours."""


class Counts(torch.nn.Module):
    """A running statistic, which no number of the training depends on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x


def train(shared, plan=PLAN, epochs=3):
    """Parameters and samples after a training, with what kilter said."""
    torch.manual_seed(0)
    said = []
    data = TensorDataset(torch.randn(72, 4), torch.randn(72, 1), torch.arange(72))
    net = torch.nn.Sequential(Counts(), torch.nn.Linear(4, 80), torch.nn.Tanh(),
                              torch.nn.Linear(80, 1))  # fmt: skip
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler)
    changes, seen = RatioPlan(plan), []
    job = ElasticJob(
        guard=Fence, may_idle=True, release=True, attached=changes.attached, say=said.append
    )
    if shared:
        job.watch(model)
        job.others.append(torch.optim.lr_scheduler.StepLR(optimizer, 1000))
        optimizer.register_step_post_hook(lambda *_: job.guard.run(job.stepped, optimizer))
    inside.append(True)
    try:
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            batches = job.batches(loader, lambda: iter(loader)) if shared else loader
            for x, y, index in batches:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                changes.keep_pace(job)
                seen += index.tolist()
    finally:
        inside.clear()
        changes.end()
    held = job.share.schedule._changes if job.share is not None else []
    return [p.detach().clone() for p in net.parameters()], sorted(seen), said, held


inside = []


@contextmanager
def planted(place, event):
    """An error at the first call from a place. Yields the places of all calls in order."""
    found = {}

    def profile(frame, happening, argument):
        code = frame.f_code
        if happening != event or not inside or not code.co_filename.startswith(OURS):
            return
        if code.co_name in UNFENCED:
            return
        here = _place(frame)
        if here == place and not found:
            found[here] = True
            del frame  # who holds that is taken for a signal handler of the program's
            raise Planted("an error of ours")
        if place is None:
            found[here] = True

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


def _place(frame):
    """A function of ours, with the one that has called it if every place counts."""
    names = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return " < ".join(names[: 2 if EVERY else 1])


def everyone(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def same(a, b):
    return all(torch.allclose(x, y, atol=1e-5) for x, y in zip(a, b, strict=True))


def cases_of(plain):
    """Place, rank and moment (before a function has done anything, or after it has done all)."""
    found = {}
    for event in ("call", "return"):
        with planted(None, event) as places:
            parameters, _, said, changes = train(True)
        assert same(parameters, plain)
        assert not said, said
        assert [ratios for _, ratios in changes[1:]] == PLAN, changes
        for rank, there in enumerate(everyone(list(places))):
            for place in there:
                found.setdefault(place, []).append((rank, event))
    if EVERY:
        return [(place, *moment) for place, moments in found.items() for moment in moments]
    numbered = list(enumerate(found.items()))[int(os.environ.get("KILTER_TEST_SEED", "0")) % 2 :: 2]
    return [(place, *moments[number // 2 % len(moments)]) for number, (place, moments) in numbered]


def worker(rank, out):
    plain, order, _, _ = train(False)
    samples = sorted(chain.from_iterable(everyone(order)))
    cases, wrong, told_of = cases_of(plain), [], 0
    for number, (place, of, event) in enumerate(cases):
        name = f"{number} of {len(cases)}: rank {of}, {event} of {place}"
        if rank == 0:
            print(name, file=sys.stderr, flush=True)
        with planted(place, event) if rank == of else nullcontext():
            parameters, order, said, _ = train(True)
        result = everyone((same(parameters, plain), order, said))
        if not all(right for right, _, _ in result):
            wrong.append(f"{name}: other parameters")
        if sorted(chain.from_iterable(order for _, order, _ in result)) != samples:
            wrong.append(f"{name}: other samples")
        told_of += any("an error of ours" in line for _, _, said in result for line in said)
    if rank == 0:
        Path(out).write_text(json.dumps({"cases": len(cases), "told": told_of, "wrong": wrong}))


if __name__ == "__main__":
    codes = forked.ForkedRanks(2, worker, sys.argv[1]).wait()
    sys.exit(max(map(abs, codes)))
