"""What random training programs are made of: pieces of source, by the place where they stand.

`{n}` is a small number that is another one at each use; `{k}` is the number of the piece in its
program. Pieces are pure Python as users write it; whatever they do is the same in every run.
"""

from __future__ import annotations

# ruff: noqa: E501

HEADER = '''\
"""Random training program {seed}."""

import builtins
import copy
import gc
import hashlib
import io
import itertools
import pickle
import signal
import threading
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

warnings.simplefilter("ignore")
torch.manual_seed({seed})
W, T, STEPS = {width}, 4, {steps}


def bits(*tensors):
    digest = hashlib.sha256()
    for t in tensors:
        if t is None:
            digest.update(b"none")
            continue
        t = t.detach().contiguous()
        digest.update(str((t.dtype, tuple(t.shape))).encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


class Wrong(Exception):
    pass


def kind(error):
    """Without a class of kilter's own, below the class that plain raises."""
    return next(
        k.__name__ for k in type(error).__mro__ if k is Wrong or hasattr(builtins, k.__name__)
    )


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        x.note = f"shape {{tuple(x.shape)}}"
        ctx.factor, ctx.kept = 0.5, x
        out = x * scale * ctx.factor
        ctx.save_for_backward(x, scale, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, scale, out = ctx.saved_tensors
        SEEN.append((getattr(x, "note", None), x is ctx.kept, x.requires_grad, out._version))
        ctx.kept = None
        return grad * scale * ctx.factor, (grad * x * ctx.factor).sum((0, 1))


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        square = x * x
        ctx.save_for_backward(x, square)
        ctx.mark_non_differentiable(square)
        return x * square, square

    @staticmethod
    def backward(ctx, grad, _):
        x, square = ctx.saved_tensors
        return 3 * grad * square


class Block(nn.Module):
    """All layers that a piece may ask for; each is used once, twice or never."""

    def __init__(self, n):
        super().__init__()
        self.n = n
        self.a, self.b = nn.Linear(W, W), nn.Linear(W, W, bias=False)
        self.scale = nn.Parameter(torch.rand(W))
        self.held = None


SEEN, HANDLES, MAIN = [], [], threading.main_thread()
'''

LAYERS: dict[str, tuple[str, str]] = {
    "linear": ("", "F.gelu(self.a(x))"),
    "tanh": ("", "torch.tanh(self.b(x)) + x"),
    "silu": ("", "F.silu(self.a(x)) * self.scale"),
    "in place": ("", "self.a(x).relu_().add_(0.1)"),
    "norm": ("self.norm = nn.LayerNorm(W)", "F.gelu(self.norm(x)) + self.b(x)"),
    "plain norm": (
        "self.norm = nn.LayerNorm(W, elementwise_affine=False, eps=1e-3)",
        "self.a(F.gelu(self.norm(x)))",
    ),
    "rms": ("self.norm = nn.RMSNorm(W)", "self.b(self.norm(x)) + x"),
    "batch norm": (
        "self.norm = nn.BatchNorm1d(W)",
        "F.relu(self.norm(x.transpose(1, 2))).transpose(1, 2) + self.a(x)",
    ),
    "group norm": (
        "self.norm = nn.GroupNorm(2, W)",
        "self.norm(x.transpose(1, 2)).transpose(1, 2).contiguous() * self.scale",
    ),
    "convolution": (
        "self.conv = nn.Conv1d(W, W, 3, padding=1)",
        "F.gelu(self.conv(x.transpose(1, 2))).transpose(1, 2)",
    ),
    "attention": (
        "self.attention = nn.MultiheadAttention(W, 2, batch_first=True)",
        "x + self.attention(x, x, x, need_weights=False)[0]",
    ),
    "causal": (
        "",
        "F.scaled_dot_product_attention(self.a(x), x, self.b(x), is_causal=True) + x",
    ),
    "lstm": ("self.lstm = nn.LSTM(W, W, batch_first=True)", "self.lstm(x)[0] + x"),
    "gru": ("self.gru = nn.GRU(W, W, batch_first=True)", "self.gru(x)[0]"),
    "embedding": (
        "self.embedding = nn.Embedding(16, W)",
        "x * torch.sigmoid(self.embedding((x.detach().sum(-1).abs() * 7).long() % 16))",
    ),
    "noted": ("", "Noted.apply(self.a(x), self.scale)"),
    "cubed": ("", "Cubed.apply(torch.tanh(self.a(x)))[0]"),
    "dropout": ("", "F.dropout(self.a(x), 0.3) + x"),
    "checkpointed": (
        "self.inner = nn.Sequential(nn.Linear(W, W), nn.GELU(), nn.Linear(W, W))",
        "checkpoint(self.inner, x, use_reentrant=False) + x",
    ),
    "checkpointed anew": (
        "self.inner = nn.Sequential(nn.Linear(W, W), nn.GELU())",
        "checkpoint(self.inner, self.a(x), use_reentrant=True)",
    ),
    "nested": (
        "self.inner = nn.ModuleDict({'x': nn.Sequential(nn.ModuleList([nn.Linear(W, W)])[0],"
        " nn.SiLU()), 'y': nn.Sequential(nn.LayerNorm(W), nn.Linear(W, W))})",
        "self.inner['x'](x) * self.inner['y'](x).sigmoid()",
    ),
    "mixed": ("", "(self.a(x).to(torch.bfloat16) * 2).tanh().to(x.dtype) + x"),
    "double": ("", "F.gelu(self.a(x).double()).float()"),
    "softmax": ("", "torch.softmax(self.a(x), -1) * x"),
    "product": ("", "torch.matmul(torch.tanh(x) @ x.transpose(1, 2).tanh(), x) / W"),
    "chunks": ("", "torch.cat([c.sigmoid() * d for c, d in zip(x.chunk(2, -1), "
               "self.a(x).chunk(2, -1))], -1)"),
    "gathered": ("", "torch.where(x > 0, self.a(x).gather(-1, x.detach().argsort(-1)), x)"),
    "spectrum": ("", "torch.fft.irfft(torch.fft.rfft(self.a(x)), n=W) + x"),
    "other hooks": ("", "on_host(self, x)"),
    "detached": ("", "self.a(x.detach()) * x"),
    "turned": ("", "F.linear(F.gelu(x.flip(1)), self.a.weight.t()).flip(1)"),
    "held": ("", "hold(self, self.a(x), x)"),
    "held norm": ("self.norm = nn.LayerNorm(W)", "F.gelu(hold(self, self.norm(x), x))"),
    "attribute": ("", "tagged(self.b(x)) * self.scale"),
    "autocast": ("", "half(self, x)"),
    "no grad": ("", "x * without(self, x)"),
    "hooked": ("", "scaled(self.a(x).exp().clamp(max=5.0))"),
    "power": ("", "(x.abs() + 1).sqrt() * self.scale ** 2"),
}  # fmt: skip
"""Under each name it has what the block has besides, and what its forward returns."""

HELPERS = '''

def on_host(self, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return F.gelu(self.a(x)) * x


def hold(self, x, _):
    self.held = x
    return F.gelu(x) * 1.5


def tagged(x):
    x.tag = "a tag"
    y = F.silu(x)
    y.tag = x.tag
    SEEN.append(y.tag)
    return y


def half(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = self.a(x)
    return y.float() + x


def without(self, x):
    with torch.no_grad():
        return torch.sigmoid(self.a(x))


def scaled(x):
    if x.requires_grad:
        x.register_hook(lambda grad: grad * 0.5)
    return torch.tanh(x)


def alarm(number, frame):
    raise Wrong("alarm")


def leave_modes():
    """An exception at the entry or exit of a mode of torch leaves that mode on, also in plain torch:
    no_grad, autocast and hooks of saved tensors."""
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting():
        pass
    torch.clear_autocast_cache()
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        whose = top[0].__module__ or type(top[0].__self__).__module__  # the library's have none
        if whose.startswith("kilter"):
            break
        torch._C._autograd._pop_saved_tensors_default_hooks()


def interrupted(model, seconds):
    """An alarm at any moment of a training that nobody looks at afterwards; it arrives."""
    before = torch.get_rng_state()
    scratch = copy.deepcopy(model)
    optimizer = torch.optim.SGD(scratch.parameters(), lr=1e-4)
    try:
        scratch(torch.zeros(4, T, W)).sum().backward()
    except RuntimeError:  # autograd refuses it each time, and PyTorch loses alarms meanwhile
        leave_modes()
        torch.set_rng_state(before)
        SEEN.clear()
        return "never set"
    kept = signal.signal(signal.SIGALRM, alarm)
    arrived = 0
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        for _ in range(2000):
            scratch(torch.zeros(4, T, W)).sum().backward()
            optimizer.step()
    except Wrong:
        arrived = 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, kept)
        leave_modes()
        torch.set_rng_state(before)
        SEEN.clear()
    return arrived


def in_thread(seed, steps, out):
    """A training of its own: own model, own random numbers."""
    own = torch.Generator().manual_seed(seed)
    weights = [torch.randn(W, W, generator=own).requires_grad_() for _ in range(3)]
    optimizer = torch.optim.Adam(weights, lr=1e-3)
    for _ in range(steps):
        x = torch.randn(8, W, generator=own)
        for weight in weights:
            x = F.gelu(x @ weight)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    out.append(bits(*weights))
'''

OPTIMIZER_SOURCES = (
    "torch.optim.SGD(PARAMETERS, lr=1e-2, momentum=0.9)",
    "torch.optim.SGD(PARAMETERS, lr=1e-2)",
    "torch.optim.Adam(PARAMETERS, lr=1e-3, amsgrad=True, foreach=False)",
    "torch.optim.AdamW(PARAMETERS, lr=1e-3, weight_decay=0.1)",
    "torch.optim.AdamW(PARAMETERS, lr=1e-3, fused=True)",
    "torch.optim.RMSprop(PARAMETERS, lr=1e-3, momentum=0.5)",
    "torch.optim.Adagrad(PARAMETERS, lr=1e-2)",
    "torch.optim.NAdam(PARAMETERS, lr=1e-3)",
)

BEFORE_FORWARD = (
    "with torch.no_grad():\n    model.eval()\n    print(bits(model(x)))\n    model.train()",
    "if step % 4 == 1:\n    model(x).sum()  # a graph that nobody uses",
    "if step % 3 == 2:\n    x = x[: len(x) // 2]",
    "x = torch.cat([x, x[: step % 5]])",
    "x.requires_grad_()",
    "if step % 5 == 3:\n    gc.collect()",
    "gc.disable() if step % 4 == 1 else gc.enable()",
    "if step == {n} + 6:\n    model = copy.deepcopy(model)\n    optimizers = make_optimizers(model)",
    "if step == {n} + 5:\n    model = pickle.loads(pickle.dumps(model))\n"
    "    optimizers = make_optimizers(model)",
    "if step == {n} + 7:\n    print('arrived', interrupted(model, 0.002 * {n} + 0.001))",
    "if step % 6 == 4:\n    torch.manual_seed(step)",
    "if step == {n} + 6:\n    for p in model.blocks[0].parameters():\n        p.requires_grad_(False)",
)

AFTER_FORWARD = (
    "if step >= {n} + 5:\n    with torch.no_grad():\n        for p in small:\n"
    "            p.clamp_(-0.2, 0.2)",
    "if step >= {n} + 5:\n    for p in small:\n        p.data.clamp_(-0.2, 0.2)",
    "if step >= {n} + 5:\n    for p in small:\n        p.data.mul_(0.9)",
    "if step >= {n}:\n    for block in model.blocks:\n        if block.held is not None:\n"
    "            block.held.data.mul_(0.5)",
    "if step == {n} + 4:\n    with torch.no_grad():\n        for p in parameters:\n            p.mul_(0.99)",
    "if step >= {n} + 4:\n    x.data.add_(0.01)",
    "if step == {n} + 8:\n    with torch.no_grad():\n        x.add_(1.0)",
    "if step == {n} + 5:\n    model.blocks[-1].a.weight.data = model.blocks[-1].a.weight.data * 1.01",
    "for g in groups():\n    g['lr'] = 1e-3 if step < 8 else 1e-3 / step",
    "copied = copy.deepcopy(model.state_dict())",
    "if step % 3 == 1:\n    print('kilter' in str(pickle.dumps(model.state_dict())))",
    "gc.disable()\nprint(gc.isenabled())",
    "if step == {n} + 5:\n    buffer = io.BytesIO()\n    torch.save(model, buffer)\n"
    "    print(b'kilter' in buffer.getvalue())",
    "loss.grad_fn.register_hook(lambda gi, go: None)",
    "loss.register_hook(lambda grad: grad * 0.5)",
    "torch.autograd.graph.register_multi_grad_hook(parameters, "
    "lambda grads: SEEN.append(sum(g is not None for g in grads)))",
    "found = torch.autograd.grad(loss, parameters[0], retain_graph=True, allow_unused=True)\n"
    "print(bits(*found))",
    "penalty = torch.autograd.grad(loss, parameters[0], create_graph=True, allow_unused=True)[0]\n"
    "loss = loss if penalty is None else loss + penalty.square().sum()",
    "(2 * model(x * 0.5).mean()).backward()",
    "loss.backward(retain_graph=True)",
    "if step % 5 == 2:\n    try:\n        signal.raise_signal(signal.SIGALRM)\n"
    "    except Wrong as error:\n        print(error)",
)

AFTER_BACKWARD = (
    "print(bits(nn.utils.clip_grad_norm_(parameters, 0.5)))",
    "print(bits(*(p.grad for p in parameters)))",
    "if step >= {n} + 6 and step % 4 == 0:\n    zero()\n    continue",
    "if step % 3 == 0:\n    continue  # gradients accumulate",
    "for p in parameters:\n    if p.grad is not None:\n        p.grad.data.mul_(0.5)",
    "if step >= {n} + 6:\n    for g in groups():\n        g['lr'] *= 0.9",
    "with torch.no_grad():\n    for mean, p in zip(means, model.parameters()):\n"
    "        mean.lerp_(p, 0.1)",
    "model(x).mean().backward()",
    "if step == {n} + 9:\n    with torch.no_grad():\n        for p in parameters:\n            p.add_(1e-3)",
    "if step == {n} + 7:\n    parameters[0].data.mul_(0.9)",
)

AFTER_STEP = (
    "for o in optimizers:\n    for p, s in o.state.items():\n"
    "        kept = {**s}\n        print(bits(*(t for t in kept.values() if torch.is_tensor(t))))",
    "for o in optimizers:\n    for p, s in o.state.items():\n        kept = dict(s)\n"
    "        print(bits(*(kept[name] for name in sorted(kept) if torch.is_tensor(kept[name]))))",
    "if step >= {n} + 8:\n    for o in optimizers:\n        for s in o.state.values():\n"
    "            kept = s.copy() | {'more': 1}\n"
    "            print(bits(*(t for t in kept.values() if torch.is_tensor(t))))",
    "if step == {n} + 9:\n    for o in optimizers:\n        for s in list(o.state.values()):\n"
    "            for name in list(s):\n                s[name] = s.pop(name)\n"
    "                s.setdefault(name, None)",
    "if step % 4 == 3:\n    kept = copy.deepcopy([o.state_dict() for o in optimizers])",
    "if step == {n} + 8:\n    for o in optimizers:\n        o.load_state_dict(copy.deepcopy(o.state_dict()))",
    "for p in parameters:\n    p.data.mul_(0.999)",
    "if step == {n} + 8:\n    model.load_state_dict(copy.deepcopy(model.state_dict()))",
    "if step == {n} + 6:\n    kept = pickle.dumps(optimizers[0])\n    print(b'kilter' in kept)",
    "for g in groups():\n    g['lr'] *= 0.97",
    "if step == {n} + 6:\n    extra = nn.Parameter(torch.ones(W))\n"
    "    optimizers[0].add_param_group({'params': [extra]})",
    "print(sorted(vars(parameters[0])), [len(m._forward_hooks) for m in model.modules()][:9])",
)

SETUP = (
    "for block in model.blocks:\n    block.register_forward_hook(lambda m, i, o: o * 1.01)",
    "model.blocks[0].register_forward_pre_hook(lambda m, i: (i[0] * 0.99,))",
    "model.blocks[-1].register_full_backward_hook("
    "lambda m, gi, go: tuple(g if g is None else g * 0.9 for g in gi))",
    "model.blocks[-1].register_full_backward_pre_hook(lambda m, go: tuple(g * 1.1 for g in go))",
    "for p in model.parameters():\n    p.register_hook(lambda grad: grad * 0.9)",
    "for p in model.parameters():\n"
    "    p.register_post_accumulate_grad_hook(lambda p: SEEN.append(tuple(p.shape)))",
    "optimizers[0].register_step_pre_hook(lambda o, a, k: SEEN.append('before'))\n"
    "optimizers[0].register_step_post_hook(lambda o, a, k: SEEN.append('after'))",
    "model.blocks[0].held = None\nmodel.note = 'a note'\nmodel.blocks[0].a.weight.note = 'mine'",
    "HANDLES.append(nn.modules.module.register_module_forward_hook(lambda m, i, o: None))",
    "HANDLES.append(torch.optim.optimizer.register_optimizer_step_post_hook("
    "lambda o, a, k: SEEN.append('stepped') if threading.current_thread() is MAIN else None))",
    "threads.append(threading.Thread(target=in_thread, args=({n}, STEPS, from_threads)))\n"
    "threads[-1].start()",
    "threads.append(threading.Thread(target=in_thread, args=({n} + 10, 2 * STEPS, from_threads)))\n"
    "threads[-1].start()",
    "model.blocks[-1].b.weight = model.blocks[0].b.weight",
)

RAISES = (
    "if step % 5 == 3:\n    raise Wrong('before forward')",
    "if step == {n} + 9:\n    loss.register_hook(lambda grad: 1 / 0)",
    "if step % 4 == 2:\n    model.blocks[0](x) + torch.zeros(3, 5, 7)",
    "if step == {n} + 10:\n    loss.register_hook(lambda grad: signal.raise_signal(signal.SIGALRM))",
)

END = (
    "raise SystemExit({n})",
    "raise Wrong('at the end')",
    "model(torch.randn(4, T, W)).sum().backward()\nprint(bits(*(p.grad for p in parameters)))",
)
