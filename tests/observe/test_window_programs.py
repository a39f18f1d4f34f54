"""Programs whose iterations end wherever they may: inside backward, in hooks, in several threads.

Each is run plain and observed, in processes of their own, and must print the same numbers, be as
silent, and end with the same exit code. `KILTER_TEST_PROGRAMS` says how many random ones.
"""

import json
import os
import random
import re

import pytest

pytest.importorskip("torch")

PROGRAMS = int(os.environ.get("KILTER_TEST_PROGRAMS", "16"))
HEAD = """
import os
os.environ["KINETO_LOG_LEVEL"] = "99"
import threading
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)
OUT = {}

def mark():
    if "MARKS" in globals():
        MARKS.mark()

class Net(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.reentrant = reentrant
    def body(self, x):
        return torch.relu(self.b(torch.relu(self.a(x))))
    def forward(self, x):
        if self.reentrant is None:
            return self.c(self.body(x))
        x = x.clone().requires_grad_()
        return self.c(checkpoint(self.body, x, use_reentrant=self.reentrant))

class Job:
    def __init__(self, number, reentrant, steps, profiled):
        self.random = torch.Generator().manual_seed(number)
        self.net = Net(reentrant)
        with torch.no_grad():
            for p in self.net.parameters():
                p.copy_(torch.randn(p.shape, generator=self.random))
        self.steps, self.profiled = steps, profiled
        self.out = OUT[number] = []
        if profiled:
            self.profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU])
    def data(self):
        if self.profiled and len(self.out) == self.profiled[0]:
            self.profiler.start()
        return torch.randn(4, 6, generator=self.random)
    def note(self, number):
        self.out.append(number.item())
        if self.profiled and len(self.out) == self.profiled[1]:
            self.profiler.stop()
            averages = self.profiler.key_averages()
            OUT["seen"] = sum(e.count for e in averages if e.key == "aten::addmm")

def train(job, *, step=True, output=lambda y: None):
    optimizer = torch.optim.SGD(job.net.parameters(), lr=1e-2)
    for i in range(job.steps):
        y = job.net(job.data())
        output(y)
        loss = y.square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step:
            optimizer.step()
        job.note(loss)
"""

WAYS = {
    "plain": "train(job)",
    "an optimizer for each parameter, in backward": """
optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in job.net.parameters()}
def hook(p):
    optimizers[p].step()
    optimizers[p].zero_grad()
for p in optimizers:
    p.register_post_accumulate_grad_hook(hook)
for i in range(job.steps):
    loss = job.net(job.data()).square().mean()
    loss.backward()
    job.note(loss)
""",
    "some in backward, the rest every second time": """
parameters = list(job.net.parameters())
optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in parameters[:3]}
rest = torch.optim.SGD(parameters[3:], lr=1e-2)
def hook(p):
    optimizers[p].step()
    optimizers[p].zero_grad()
for p in optimizers:
    p.register_post_accumulate_grad_hook(hook)
for i in range(job.steps):
    loss = job.net(job.data()).square().mean()
    rest.zero_grad()
    loss.backward()
    if i % 2:
        rest.step()
    job.note(loss)
""",
    "in backward for some iterations": """
optimizer = torch.optim.SGD(job.net.parameters(), lr=1e-2)
inside = False
def hook(p):
    if inside:
        optimizer.step()
list(job.net.parameters())[-1].register_post_accumulate_grad_hook(hook)
for i in range(job.steps):
    inside = SWITCH <= i < SWITCH + 7
    loss = job.net(job.data()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if not inside:
        optimizer.step()
    job.note(loss)
""",
    "marked in a tensor's hook": "train(job, output=lambda y: y.register_hook(lambda g: mark()))",
    "marked in a forward hook": "job.net.b.register_forward_hook(lambda *a: mark()); train(job)",
    "marked in a backward hook": """
job.net.b.register_full_backward_hook(lambda *a: mark())
train(job)
""",
    "marked where a saved tensor is unpacked": """
calls = 0
def unpack(tensor):
    global calls
    calls += 1
    if calls % 5 == 0:
        mark()
    return tensor
with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
    train(job)
""",
    "marked in a function of its own": """
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if PERIOD % 2:
            mark()
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        mark()
        return grad
head = job.net.c
job.net.c = nn.Sequential(head)
head.register_forward_hook(lambda module, args, y: Function.apply(y))
train(job)
""",
    "marked when backward is over, by autograd": """
queue = torch.autograd.Variable._execution_engine.queue_callback
train(job, output=lambda y: y.register_hook(lambda g: queue(mark)))
""",
    "marked in a backward inside backward": """
def inner(grad):
    with torch.enable_grad():
        v = torch.ones(3, requires_grad=True)
        (v * v).sum().backward()
    mark()
train(job, output=lambda y: y.register_hook(inner))
""",
    "marked under torch.func": """
w = torch.randn(6, generator=job.random)
for i in range(job.steps):
    def loss(w, row):
        if i % PERIOD == 0:
            mark()
        return (row @ w).square()
    w = w - 1e-3 * torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, job.data()).mean(0)
    if i % PERIOD:
        mark()
    job.note(w.sum())
""",
    "marked in a generator without gradients": """
def rows():
    with torch.no_grad():
        for i in range(job.steps):
            job.note(job.net(job.data()).sum())
            mark()
            yield i
for _ in rows():
    pass
""",
}

THREADS = {
    "one after the other": "for job in jobs: job()",
    "in a thread, the main one waits": """
def all_jobs():
    for job in jobs: job()
thread = threading.Thread(target=all_jobs)
thread.start()
thread.join()
""",
    "each in a thread": """
threads = [threading.Thread(target=job) for job in jobs]
for thread in threads: thread.start()
for thread in threads: thread.join()
""",
    "the first in the main thread, beside the others": """
threads = [threading.Thread(target=job) for job in jobs[1:]]
for thread in threads: thread.start()
jobs[0]()
for thread in threads: thread.join()
""",
}


def program(ways, where, *, seed=0):
    """Each way is a job; `where` is one of `THREADS`. One job at most has a profiler: two at a
    time in two threads end a plain program."""
    random_ = random.Random(seed)
    profiled = random_.randrange(4) if seed else None
    parts = [HEAD]
    for number, way in enumerate(ways):
        steps = random_.choice([6, 12, 30])
        reentrant = (
            None
            if "torch.func" in way or "inside" in way
            else random_.choice([None, None, True, False])
        )
        begin = random_.randrange(steps - 1)
        own = (begin, random_.randint(begin + 1, steps)) if number == profiled else None
        body = WAYS[way].replace("SWITCH", str(random_.randint(1, 6)))
        body = body.replace("PERIOD", str(random_.choice([2, 3, 100])))
        lines = "\n    ".join(body.replace("global calls", "nonlocal calls").strip().splitlines())
        job = f"job = Job({number}, {reentrant}, {steps}, {own})"
        parts.append(f"def job_{number}():\n    {job}\n    {lines}")
    names = ", ".join(f"job_{number}" for number in range(len(ways)))
    parts.append(f"jobs = [{names}]\n{THREADS[where].strip()}")
    parts.append("print(sorted(OUT.items(), key=str))")
    return "\n".join(parts) + "\n"


def compare(served, text):
    """What was seen of a program that does the same as without us; what only Kineto itself tells
    of a thread in which the program's own profiler is the first one aside."""
    plain, seen = served(text, plain=True), served(text)
    assert plain["code"] == 0, plain["err"]
    kineto = re.compile(r"ERROR: External init callback must run .*\n")
    assert (seen["code"], kineto.sub("", seen["err"])) == (0, kineto.sub("", plain["err"]))
    printed, seen_printed = plain["out"].splitlines()[0], seen["out"].splitlines()[0]
    assert seen_printed == printed
    return json.loads(seen["out"].splitlines()[-1])


@pytest.mark.parametrize("way", WAYS)
def test_one_job_in_the_main_thread(served, way):
    text = program([way], "one after the other").replace(", 6, None)", ", 30, None)")
    seen = compare(served, text.replace(", 12, None)", ", 30, None)"))
    assert seen["threads"] <= 1
    if "in backward" in way and "some" not in way:
        # Iterations that end inside backward are recorded from forward to forward.
        assert seen["window"] == "done"
        assert {("c", "forward"), ("c", "backward")} <= {
            (o["name"], o["kind"]) for o in seen["operations"]
        }
    elif seen["window"] != "done":
        assert "inside backward" in seen["window_why_not"]


TURNS = """
barrier, data = threading.Barrier(2), Job.data
def together(job):
    try:
        barrier.wait(60)
    except threading.BrokenBarrierError:
        pass
    return data(job)
Job.data = together
def first_beside():
    thread = threading.Thread(target=lambda: (jobs[1](), barrier.abort()))
    thread.start()
    jobs[0]()
    barrier.abort()
    thread.join()
first_beside()
"""
"""The first job in the main thread, each of its iterations beside one of the other's."""


@pytest.mark.parametrize("where", [name for name in THREADS if "thread" in name])
@pytest.mark.parametrize("way", ["plain", "an optimizer for each parameter, in backward"])
def test_jobs_in_threads(served, way, where):
    text = program([way, "plain"], where)
    if "beside" in where:
        text = text.replace(THREADS[where].strip(), TURNS.strip())
    seen = compare(served, text)
    assert seen["window"] == "failed"
    assert "another thread" in seen["window_why_not"]


@pytest.mark.parametrize("seed", range(1, PROGRAMS + 1))
def test_random_programs(served, seed):
    """`compare` asserts that numbers, words and end are those of the plain program."""
    random_ = random.Random(seed)
    ways = random_.choices(list(WAYS), k=random_.randint(1, 3))
    compare(served, program(ways, random_.choice(list(THREADS)), seed=seed))


@pytest.mark.parametrize("meanwhile", ["train(job)", "thread.join()"])
def test_a_profiler_in_another_thread_works(served, meanwhile):
    """Ours is on in the main thread, which goes on training, or waits for the other thread."""
    text = f"""
{HEAD}
import sys
def other():
    job = Job(1, None, 6, (1, 4))
    train(job)
job = Job(0, None, 4, None)
train(job)
if "WINDOW" in globals():
    assert WINDOW.state.value == "open"
    sys.modules["kilter.observe.profiler_window"]._WAIT_S = 0.5
thread = threading.Thread(target=other)
thread.start()
{meanwhile}
thread.join()
train(job)
print(sorted(OUT.items(), key=str))
"""
    plain, seen = served(text, plain=True), served(text)
    assert (plain["code"], seen["code"]) == (0, 0)
    assert seen["out"].splitlines()[0] == plain["out"].splitlines()[0]
