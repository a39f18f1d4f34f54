"""Observation on a real GPU: whose clock the times are, what a kernel belongs to, and energy.

Reads only; `KILTER_READ_ONLY` is set for every test.
"""

import os
import time

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from kilter.core.errors import DeviceError  # noqa: E402
from kilter.core.trace import Kind  # noqa: E402
from kilter.device.find import find  # noqa: E402
from kilter.observe.iteration_clock import IterationClock  # noqa: E402
from kilter.observe.profiler_window import Window  # noqa: E402
from kilter.observe.sampler import Sampler  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


@pytest.fixture(autouse=True)
def _read_only(monkeypatch):
    monkeypatch.setenv("KILTER_READ_ONLY", "1")


def job(width=2048, batch=4096):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(batch, width, device="cuda")

    def step():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def observed(step, iterations, observe=True):
    """Losses, iterations and the window of a run."""
    marks = IterationClock(lambda index, t_s: window.iteration_ended(index))
    window = Window(marks)
    if observe:
        window.start()
        marks.start()
    losses = [step() for _ in range(iterations)]
    torch.cuda.synchronize()
    marks.stop()
    window.close(60.0)
    return [loss.item() for loss in losses], marks.finished(), window


def test_iteration_times_are_the_gpu_s():
    step = job()
    observed(step, 20, observe=False)
    _, iterations, _ = observed(step, 200)
    late = [i.duration_s for i in iterations if i.index > 100]
    assert {i.timeline for i in iterations} == {"gpu"}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(100):
        step()
    end.record()
    end.synchronize()
    assert sum(late) / len(late) == pytest.approx(begin.elapsed_time(end) * 1e-5, rel=0.05)


def test_kernels_belong_to_modules_and_carry_their_flops():
    _, _, window = observed(job(), 40)
    trace = window.trace()
    assert trace.timeline == "gpu"
    assert trace.iterations == 1
    product = 2.0 * 4096 * 2048 * 2048
    flops = {
        (name, kind): sum(
            o.flops or 0.0 for o in trace.operations if (o.name, o.kind) == (name, kind)
        )
        for name in ("0", "2")
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    assert flops == {
        ("0", Kind.FORWARD): product,
        ("0", Kind.BACKWARD): product,  # the input needs no gradient
        ("2", Kind.FORWARD): product,
        ("2", Kind.BACKWARD): 2 * product,
    }
    assert any(o.kind is Kind.OPTIMIZER and o.name == "AdamW" for o in trace.operations)
    gaps_s = sum(o.duration_s for o in trace.operations if o.kind is Kind.GAP)
    assert trace.busy_s + gaps_s == pytest.approx(trace.iteration_s, rel=0.05)


def test_losses_are_bitwise_the_same_with_and_without():
    torch.backends.cudnn.deterministic = True
    plain, _, _ = observed(job(), 30, observe=False)
    seen, _, window = observed(job(), 30)
    assert window.trace() is not None
    assert plain == seen


def test_a_cuda_graph_can_be_captured_while_marks_are_on():
    step = job(width=256, batch=64)
    marks = IterationClock(lambda index, t_s: None)
    marks.start()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(4, device="cuda"))], lr=0.1)
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    torch.cuda.synchronize()
    optimizer.step()
    marks.stop()
    assert parameter[0].item() == pytest.approx(-0.3)


def test_energy_is_that_of_the_counter():
    try:
        device = find("nvml", environ=os.environ)
        info = device.info()
    except DeviceError as error:
        pytest.skip(f"no real GPU to read: {error}")
    if not info.has_energy_counter:
        pytest.skip("no energy counter")
    sampler = Sampler(device)
    sampler.start()
    step = job()
    begin_s = time.monotonic()
    while time.monotonic() < begin_s + 25.0:
        step()
        torch.cuda.synchronize()
    end_s = time.monotonic()
    time.sleep(0.3)
    assert sampler.record.energy_between(begin_s + 1.0, end_s) is not None
    sampler.stop()
    device.close()
    assert sampler.record.energy_method == "counter"
    assert abs(sampler.record.disagreement) < 0.05
