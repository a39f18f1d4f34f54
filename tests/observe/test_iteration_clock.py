"""Borders of iterations in unchanged programs, each run in a process of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODEL = """
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
x = torch.randn(4, 8)
"""
TRAIN = MODEL + "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
STEP = "optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()\n"


ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}


def fresh(program):
    """What was seen of a program in a Python of its own, into which it is the first to import torch
    and the compiler; it must be silent on stderr. Takes seconds: see `observe`."""
    command = [sys.executable, str(HERE / "observed.py")]
    done = subprocess.run(
        command, input=program, capture_output=True, text=True, timeout=300, env=ENVIRON
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout.splitlines()[-1])


def test_every_step_ends_an_iteration_and_torch_is_imported_by_the_program_alone():
    no_trace_of_the_waiting = """
import sys
from importlib.machinery import SourceFileLoader
assert type(torch.__loader__) is SourceFileLoader
assert type(torch.__spec__.loader) is SourceFileLoader
assert "torch" not in [getattr(f, "_name", None) for f in sys.meta_path]
assert not [f for f in sys.meta_path if type(f).__module__.startswith("kilter")]
from torch._dynamo.eval_frame import OptimizedModule
assert OptimizedModule.__init__.__module__ == "torch._dynamo.eval_frame"
"""
    seen = fresh(TRAIN + f"for _ in range(10): {STEP}" + no_trace_of_the_waiting)
    assert not seen["torch_before"]
    assert seen["torch_after"]
    assert seen["source"] == "optimizer"
    assert (seen["iteration_ends"], seen["iterations"]) == (10, 9)
    assert seen["timelines"] == ["host"]


def test_a_program_without_torch_stays_without_torch():
    seen = fresh("import json\nassert sum(range(10)) == 45\n")
    assert not seen["torch_after"]
    assert seen["iteration_ends"] == 0


def test_gradient_accumulation_is_one_iteration_per_step(observe):
    program = """
for i in range(40):
    model(x).sum().backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
"""
    assert observe(TRAIN + program)["iteration_ends"] == 10


def test_steps_skipped_by_the_gradient_scaler_are_not_slow_iterations(observe):
    program = """
now_s = 0.0
import time, types
from kilter.observe import iteration_clock
iteration_clock.time = types.SimpleNamespace(
    monotonic=lambda: now_s, perf_counter=time.perf_counter
)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for i in range(16):
    optimizer.zero_grad()
    loss = model(x).sum() * (float("inf") if i == 9 else 1.0)
    scaler.scale(loss).backward()
    now_s += 0.05
    scaler.step(optimizer)
    scaler.update()
"""
    seen = observe(TRAIN + program)
    assert seen["iteration_ends"] == 15
    assert seen["skipped"] == [9]


def test_a_gan_is_one_iteration_per_step_of_the_generator(observe):
    program = """
critic = nn.Linear(1, 1)
g = optimizer
c = torch.optim.Adam(critic.parameters())
for i in range(10):
    for _ in range(5):
        c.zero_grad(); critic(model(x)).sum().backward(); c.step()
    g.zero_grad(); critic(model(x)).sum().backward(); g.step()
"""
    seen = observe(TRAIN + program)
    # The critic led until the generator's first step.
    assert seen["iteration_ends"] == 5 + 10
    assert seen["iterations"] == 4 + 9


def test_a_closure_is_called_often_but_is_one_iteration(observe):
    program = """
import warnings
warnings.simplefilter("ignore")  # torch 2.8's own
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
def closure():
    optimizer.zero_grad()
    loss = (model(x) ** 2).sum()
    loss.backward()
    return loss
for _ in range(6):
    optimizer.step(closure)
"""
    assert observe(TRAIN + program)["iteration_ends"] == 6


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_training_is_marked_without_a_warning_or_a_recompilation(observe, backend):
    program = f"""
import logging, warnings
warnings.simplefilter("default")
logging.getLogger("torch").setLevel(logging.ERROR)
compiled = torch.compile(model, backend={backend!r})
for _ in range(10):
    optimizer.zero_grad(); compiled(x).sum().backward(); optimizer.step()
from torch._dynamo.utils import counters
assert counters["stats"]["unique_graphs"] == 1, counters
assert not counters["graph_break"], counters
"""
    seen = observe(TRAIN + program)
    assert seen["iteration_ends"] == 10
    assert seen["window"] == "done"
    assert not [o for o in seen["operations"] if o["name"] in ("0", "1", "2")]


@pytest.mark.parametrize("imported", [False, True], ids=["alone", "beside the compiler"])
def test_inference_is_marked_by_its_outermost_module(observe, imported):
    """Tensor parallelism, to name one, imports the compiler, and compiles nothing."""
    program = (
        f"import sys, time\nassert ('torch._dynamo' in sys.modules) is {imported}"
        + """
class Wrapper(nn.Module):
    def __init__(self): super().__init__(); self.inner = model
    def forward(self, x): return self.inner(self.inner[0](x)[:, :8])
wrapped = Wrapper()
from kilter.observe import inference_watch as marks
until = time.monotonic() + marks.INFERENCE_AFTER_S + 0.5
with torch.no_grad():
    while time.monotonic() < until: wrapped(x); time.sleep(0.01)
    before = MARKS.index
    assert before >= 0
    for _ in range(10): wrapped(x)
    assert MARKS.index == before + 10
from torch.nn.modules import module
assert not module._global_forward_hooks
assert not module._global_forward_pre_hooks
from torch._dynamo import callback_handler
assert not callback_handler.start_callbacks
import copy, io, pickle
copies = [copy.deepcopy(wrapped.inner), pickle.loads(pickle.dumps(model))]
"""
    )
    seen = (observe if imported else fresh)(MODEL + program)
    assert seen["source"] == "module"
    assert seen["window"] == "done"


OWN_STEP = """
import time
from kilter.observe import inference_watch
inference_watch.INFERENCE_AFTER_S = 0.5
time.sleep(1.0)

def backward(loss):
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
            p.grad = None

for _ in range(64): backward(model(x).sum())
assert MARKS.index == -1
"""


def test_training_with_an_optimizer_of_its_own_is_marked_by_its_outermost_module(observe):
    program = """
for _ in range(11):
    backward((model(x) + model(x)).sum())  # an iteration, though the module runs twice
    with torch.no_grad():
        for _ in range(3): model(x)
assert MARKS.index == 9 + 1
import copy, pickle
copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
for each in copies: each(x).sum().backward(); each(x)
assert MARKS.index == 9 + 1
"""
    seen = observe(MODEL + OWN_STEP + program)
    assert seen["source"] == "module"
    assert seen["window"] == "done"


def test_an_optimizer_that_steps_late_takes_over_from_the_module(observe):
    program = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5): backward(model(x).sum())
before = MARKS.index
assert before == 3
for _ in range(5): model(x).sum().backward(); model(x).sum().backward(); optimizer.step()
"""
    seen = observe(MODEL + OWN_STEP + program)
    assert seen["source"] == "optimizer"
    assert seen["iteration_ends"] == 4 + 2 + 5  # calls before the first step, and steps


def test_calls_without_backward_are_no_iterations(observe):
    seen = observe(MODEL + OWN_STEP + "for _ in range(9): model(x)\n")
    assert (seen["source"], seen["iteration_ends"]) == (None, 0)
    assert "no backward ran through what the outermost module returned" in seen["why_not"]


def test_a_saved_model_carries_nothing_of_ours(observe, warm, tmp_path):
    program = f"""
import time, torch.nn.functional
from kilter.observe import inference_watch as marks
until = time.monotonic() + marks.INFERENCE_AFTER_S + 0.3
with torch.no_grad():
    while time.monotonic() < until: model(x); time.sleep(0.01)
assert MARKS.source == "module"
torch.save(model, {str(tmp_path / "model.pt")!r})
"""
    assert observe(MODEL + program)["source"] == "module"
    load = (
        "import sys, torch\n"
        "ours = {'kilter', *(name for name in sys.modules if name.startswith('kilter.'))}\n"
        "sys.modules.update(dict.fromkeys(ours))\n"  # whoever imports one of them fails
        f"m = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "print(m(torch.zeros(4, 8)).shape)"
    )
    done = warm.run(["-c", load])
    assert done.stdout == "torch.Size([4, 1])\n", done.stderr


def test_explicit_marks_win(observe):
    program = """
for i in range(12):
    optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
    if i % 3 == 2: MARKS.mark()
"""
    seen = observe(TRAIN + program)
    assert seen["source"] == "explicit"
    assert seen["iteration_ends"] == 3 + 4


def test_data_loader_workers_and_forked_children_are_left_alone(observe):
    program = """
import os, warnings
warnings.simplefilter("ignore")
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(24, 8)), batch_size=4, num_workers=2)
for (x,) in loader:
    optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
pid = os.fork()
if pid == 0:
    optimizer.step()
    from torch.optim import optimizer as o
    os._exit(0 if MARKS.index == 5 and not o._global_optimizer_post_hooks else 1)
assert os.waitpid(pid, 0)[1] == 0
"""
    assert observe(TRAIN + program)["iteration_ends"] == 6


USES_A_PROFILER = """
import os
os.environ["KINETO_LOG_LEVEL"] = "99"
from torch.profiler import ProfilerActivity, profile, schedule
"""


@pytest.mark.parametrize("first", [0, 2, 3, 4, 5, 7])
def test_a_profiler_of_the_program_goes_first(observe, first):
    """It begins at every stage of our window, and sees what it would see without us."""
    program = f"""
for i in range(20):
    if i == {first}:
        p = profile(activities=[ProfilerActivity.CPU])
        p.start()
    {STEP.strip()}
    if i == {first + 2}:
        p.stop()
assert [e.count for e in p.key_averages() if e.key == "Optimizer.step#SGD.step"] == [3]
import torch.autograd.profiler as profiler
assert profiler.profile._prepare_trace.__module__ == "torch.autograd.profiler"
"""
    seen = observe(TRAIN + USES_A_PROFILER + program)
    assert seen["iteration_ends"] == 20
    if seen["window"] == "failed":
        assert "torch.profiler itself" in seen["window_why_not"]
    else:
        assert (seen["window"], first > 4) == ("done", True)


def test_a_profiler_of_the_program_logs_what_it_would_log_without_us(served):
    program = f"""
import torch
from torch import nn
model, x = nn.Linear(2, 1), torch.randn(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10): {STEP}
for _ in range(2):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]): {STEP}
"""
    observed, plain = served(program), served(program, plain=True)
    assert (observed["code"], plain["code"]) == (0, 0)
    assert json.loads(observed["out"].splitlines()[-1])["window"] == "done"
    # A build for CUDA says once that it finds no GPU, by whichever profiler is the first.
    once = r"ERROR:.* gpuGetDeviceCount failed .*\n|\d+"
    logged = [re.sub(once, "", done["err"]) for done in (observed, plain)]
    assert "profiler" in logged[1]  # else there would be nothing to compare
    assert logged[0] == logged[1]


def test_two_threads_that_mark_at_once_are_counted(observe):
    program = """
import sys, threading
sys.setswitchinterval(1e-6)
together = threading.Barrier(4)  # one that has ended may give its number to the next
def mark():
    together.wait()
    for _ in range(2000): MARKS.mark()
    together.wait()
threads = [threading.Thread(target=mark) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    seen = observe("import torch" + program)
    assert (seen["iteration_ends"], seen["threads"], seen["source"]) == (8000, 4, "explicit")


def test_a_scheduled_profiler_of_the_program_keeps_its_warm_up(observe):
    program = f"""
with profile(activities=[ProfilerActivity.CPU],
             schedule=schedule(wait=0, warmup=2, active=2, repeat=1)) as p:
    for _ in range(8):
        {STEP.strip()}
        p.step()
assert [e.count for e in p.key_averages() if e.key == "Optimizer.step#SGD.step"] == [2]
"""
    assert observe(TRAIN + USES_A_PROFILER + program)["window"] == "failed"


def test_a_child_forked_inside_the_window_is_not_recorded(observe):
    program = f"""
import os
os.environ["KINETO_LOG_LEVEL"] = "99"  # the child ends the profiler, which is no business of ours
torch.cuda.is_available = lambda: 1 / 0  # would call the driver
forked = False
for i in range(20):
    {STEP.strip()}
    if WINDOW.state.value == "open" and not forked:
        forked = True
        pid = os.fork()
        if pid == 0:
            {STEP.strip()}
            from torch.autograd import _disable_profiler
            names = [e.name() for e in _disable_profiler().events()]
            os._exit(names.count("Optimizer.step#SGD.step"))
        assert os.waitpid(pid, 0)[1] == 0
assert forked
"""
    assert observe(TRAIN + program)["window"] == "done"


def test_stopping_inside_a_step_does_not_disturb_the_step(observe):
    program = f"""
MARKS._on_iteration_end = lambda index, t_s: MARKS.stop() if index == 3 else None
for _ in range(8): {STEP}
assert MARKS.index == 3
"""
    assert observe(TRAIN + program)["iteration_ends"] == 4


@pytest.mark.parametrize("late", [False, True], ids=["compiled at once", "compiled late"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["compiled", "inside another"])
def test_compiled_inference_is_marked_without_a_recompilation(observe, wrapped, late):
    """The outermost compiled module, if one is inside another; also after a long loading. One of
    the programs is the first to import the compiler."""
    program = f"""
import time, warnings
from kilter.observe import inference_watch as marks
warnings.simplefilter("ignore")  # the compiler's own
if {late}: time.sleep(1.5 * marks.INFERENCE_AFTER_S)
compiled = torch.compile(model, backend="eager")
if {wrapped}:
    inner, compiled = compiled, torch.compile(torch.nn.Sequential(compiled), backend="eager")
with torch.no_grad():
    compiled(x)
    from torch._dynamo.utils import counters
    graphs = counters["stats"]["unique_graphs"]
    until = time.monotonic() + 60 * marks.INFERENCE_AFTER_S
    while MARKS.source is None and time.monotonic() < until: compiled(x)
    before = MARKS.index
    for _ in range(5): compiled(x)
assert MARKS.index == before + 5, (before, MARKS.index)
assert counters["stats"]["unique_graphs"] == graphs, counters
"""
    assert (fresh if wrapped and late else observe)(MODEL + program)["source"] == "module"


@pytest.mark.parametrize("what", ["model", "lambda x: model(x)"], ids=["module", "function"])
def test_a_program_that_prepares_for_long_and_then_compiles_is_not_in_the_way(observe, what):
    program = (
        f"program = {what}"
        + """
import time, warnings, logging
from kilter.observe import inference_watch as marks
time.sleep(marks.INFERENCE_AFTER_S + 0.5)
model(x)
logging.getLogger("torch").setLevel(logging.ERROR)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    compiled = torch.compile(program, backend="eager")
    for _ in range(3): compiled(x)
assert not [each for each in warned if "global hooks" in str(each.message)]
from torch._dynamo.utils import counters
assert counters["stats"]["unique_graphs"] == 1, counters
"""
    )
    seen = observe(MODEL + program)
    assert seen["iteration_ends"] == 0
