"""The observation window on real training: what it sees, and that it changes nothing."""

import gc
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from kilter.core.trace import Kind  # noqa: E402
from kilter.observe.iteration_clock import IterationClock  # noqa: E402
from kilter.observe.profiler_window import Window, WindowState  # noqa: E402


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch):
    """Other tests compile in this process; then modules would not be named."""
    monkeypatch.setattr("kilter.observe.torch_internals.anything_compiled", lambda: False)


class Block(nn.Module):
    """A residual block: its own addition belongs to it, the rest to its children."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.norm(self.conv(x)))


class Convnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.block = Block(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.block(self.stem(x)).mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 50)

    def forward(self, tokens):
        b, t = tokens.shape
        q, k, v = self.qkv(self.embed(tokens)).reshape(b, t, 3, 4, 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(b, t, 32))


def train(model, x, y, *, observe, iterations=12):
    """Losses, and the trace if observed."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    marks = IterationClock(lambda index, t_s: window.iteration_ended(index))
    window = Window(marks, after=3)
    if observe:
        marks.start()
    losses = []
    for _ in range(iterations):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    marks.stop()
    window.close()
    return losses, window


def fresh(kind):
    torch.manual_seed(0)
    if kind is Convnet:
        return Convnet(), torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))
    return Transformer(), torch.randint(0, 50, (2, 6)), torch.randint(0, 50, (2, 6))


def flops(trace, name, kind):
    return sum(o.flops or 0.0 for o in trace.operations if (o.name, o.kind) == (name, kind))


@pytest.mark.parametrize("kind", [Convnet, Transformer])
def test_losses_are_bitwise_the_same_with_and_without(kind):
    plain, _ = train(*fresh(kind), observe=False)
    observed, window = train(*fresh(kind), observe=True)
    assert window.trace() is not None
    assert plain == observed


def test_flops_of_a_convnet_are_those_of_the_textbook():
    _, window = train(*fresh(Convnet), observe=True)
    trace = window.trace()
    stem = 2 * 4 * 8 * (8 * 8) * (3 * 3 * 3)
    conv = 2 * 4 * 8 * (8 * 8) * (8 * 3 * 3)
    head = 2 * 4 * 8 * 10
    assert flops(trace, "stem", Kind.FORWARD) == stem
    assert flops(trace, "block.conv", Kind.FORWARD) == conv
    assert flops(trace, "head", Kind.FORWARD) == head
    assert flops(trace, "stem", Kind.BACKWARD) == stem  # the images need no gradient
    assert flops(trace, "block.conv", Kind.BACKWARD) == 2 * conv
    assert flops(trace, "head", Kind.BACKWARD) == 2 * head
    assert trace.flops == 2 * stem + 3 * conv + 3 * head


def test_flops_of_a_transformer_are_those_of_the_textbook():
    _, window = train(*fresh(Transformer), observe=True)
    trace = window.trace()
    qkv, out = 2 * 12 * 32 * 96, 2 * 12 * 32 * 50
    attention = 2 * (2 * 4) * 6 * 6 * 8 * 2  # scores and mixing, 2 sequences of 4 heads
    assert flops(trace, "qkv", Kind.FORWARD) == qkv
    assert flops(trace, "out", Kind.FORWARD) == out
    forward = sum(o.flops or 0.0 for o in trace.operations if o.kind is Kind.FORWARD)
    assert forward == qkv + out + attention
    assert flops(trace, "qkv", Kind.BACKWARD) == 2 * qkv


def test_the_iteration_is_told_in_the_words_of_the_model():
    _, window = train(*fresh(Convnet), observe=True)
    trace = window.trace()
    assert trace.timeline == "host"
    forward = [o.name for o in trace.operations if o.kind is Kind.FORWARD]
    order = ["stem", "block.conv", "block.norm", "block", "head"]
    assert [name for name in forward if name in order] == order
    backward = [o.name for o in trace.operations if o.kind is Kind.BACKWARD]
    assert [name for name in dict.fromkeys(backward) if name in order] == order[::-1]
    assert [o.name for o in trace.operations if o.kind is Kind.OPTIMIZER] == ["AdamW"]
    total = sum(o.duration_s for o in trace.operations)
    assert total == pytest.approx(trace.iteration_s, rel=1e-3)


def test_nothing_is_left_afterwards():
    from torch.nn.modules import module
    from torch.optim import optimizer

    tables = (
        module._global_forward_hooks,
        module._global_forward_pre_hooks,
        module._global_forward_hooks_always_called,
        optimizer._global_optimizer_post_hooks,
    )
    before = [set(table) for table in tables]  # other tests leave theirs in threads that ended
    _, window = train(*fresh(Convnet), observe=True)
    window.trace()
    assert [set(table) for table in tables] == before
    assert not torch.autograd._profiler_enabled()
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name == "kilter-window"]
    assert "kilter" not in {type(f).__module__.partition(".")[0] for f in sys.meta_path}


def test_a_program_that_ends_inside_the_window_keeps_its_whole_iterations():
    _, window = train(*fresh(Convnet), observe=True, iterations=5)
    assert window.trace().iterations == 1


def test_a_program_that_is_too_short_says_so():
    _, window = train(*fresh(Convnet), observe=True, iterations=2)
    assert window.trace() is None
    assert "ended before" in window.why_not


def test_an_error_in_a_forward_pass_is_the_program_s_and_leaves_nothing_open():
    model, x, y = fresh(Convnet)
    window = None

    def iteration_ended(index, t_s):
        window.iteration_ended(index)

    marks = IterationClock(iteration_ended)
    window = Window(marks, after=1, iterations=2)
    marks.start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        if window.state == WindowState.OPEN:
            with pytest.raises(RuntimeError, match="size"):
                model(torch.randn(4, 5, 16, 16))
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    marks.stop()
    window.close()
    trace = window.trace()
    assert flops(trace, "head", Kind.FORWARD) == 2 * 4 * 8 * 10


def test_a_patient_window_writes_nothing_before_the_program_is_over():
    marks = IterationClock(lambda index, t_s: window.iteration_ended(index))
    window = Window(marks, after=1, patient=True)
    marks.start()
    model, x, y = fresh(Convnet)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while window.state != WindowState.HELD:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert window.trace() is None
    marks.stop()
    window.close()
    assert flops(window.trace(), "head", Kind.FORWARD) == 2 * 4 * 8 * 10
    assert window.state == WindowState.DONE
    assert not window._file.exists()


@pytest.mark.parametrize("window", ["patient", "at-once"])
def test_an_exception_of_the_program_at_any_line_leaves_no_profiler_behind(window):
    """To stop a profiler that is off, or to start one that was not prepared, crashes."""
    program = Path(__file__).with_name("interrupted_window.py")
    done = subprocess.run(
        [sys.executable, str(program), window], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    lines = {str(line).partition(":")[0] for line, _ in found}
    assert {"Window._prepare", "Window._open", "Window._shut", "profile.__exit__"} <= lines
    assert [(line, wrong) for line, wrong in found if wrong] == []


def test_nobody_else_may_enter_where_the_profiler_writes(tmp_path, monkeypatch):
    """The profiler opens its files by name and for everybody; others could plant a link there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    marks = IterationClock(lambda index, t_s: window.iteration_ended(index))
    window = Window(marks, after=1, patient=True)
    marks.start()
    model, x, y = fresh(Convnet)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while window.state != WindowState.HELD:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    marks.stop()
    before = os.umask(0)
    try:
        window._save()
    finally:
        os.umask(before)
    (own,) = tmp_path.glob("*ki*")  # torch's compiler may have a directory of its own
    assert (own.is_dir(), stat.S_IMODE(own.stat().st_mode)) == (True, 0o700)
    assert window._file.parent == own
    window.close()
    assert flops(window.trace(), "head", Kind.FORWARD) == 2 * 4 * 8 * 10
    assert not own.exists()
    assert not list(Path("/tmp").glob(f"libkineto*{os.getpid()}*"))


def test_flops_of_a_depthwise_convolution_do_not_grow_with_its_channels():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten())
    _, window = train(model, torch.randn(4, 3, 12, 12), torch.randint(0, 10, (4,)), observe=True)
    once = 2 * 4 * 8 * (8 * 8) * (1 * 3 * 3)
    assert flops(window.trace(), "1", Kind.FORWARD) == once
    assert flops(window.trace(), "1", Kind.BACKWARD) == 2 * once


@pytest.mark.parametrize(
    ("cuda", "chosen", "seen"),
    [("13.0", None, "1"), ("13.0", "0", "0"), ("12.4", None, None), (None, None, None)],
)
def test_cupti_goes_where_that_is_safe_and_the_program_did_not_choose(
    cuda, chosen, seen, monkeypatch
):
    profile = torch.autograd.profiler.profile
    stop, stops = profile.__exit__, []

    def note(*arguments):
        stops.append(os.environ.get("TEARDOWN_CUPTI"))
        return stop(*arguments)

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(profile, "__exit__", note)
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    if chosen is not None:
        monkeypatch.setenv("TEARDOWN_CUPTI", chosen)
    train(*fresh(Convnet), observe=True)
    assert stops == [seen]
    assert os.environ.get("TEARDOWN_CUPTI") == chosen
