"""Random optimizers, models and training loops with gradients consumed, state and weights moving.

Whatever the program does from its first iteration on, it gets the plain run's numbers, bit for bit:
losses, parameters, optimizer state, and what it logs on the way.
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.engine.gradients import GradientConsumed
from kilter.memory.engine.state import StateMover
from kilter.memory.engine.weights import WeightMover
from kilter.memory.plan.problem import H200_PCIE5

WIDTH = 32
STEPS = 14
EXAMPLES = int(os.environ.get("KILTER_TEST_PROGRAMS", "15"))
"""Programs; the same ones each time."""


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    """Weights stay in a process that compiles, and other tests do."""
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None:
        compiler.counters.clear()


class Net(nn.Module):
    """Layers with habits of their own: tied, unused, frozen, normalised, looked up."""

    def __init__(self, traits: tuple[str, ...]) -> None:
        super().__init__()
        self.traits = traits
        self.embedding = nn.Embedding(40, WIDTH, sparse="sparse" in traits)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i % 2 == 0) for i in range(5))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        if "tied" in traits:
            self.head.weight = self.embedding.weight
        if "frozen" in traits:
            self.layers[2].requires_grad_(False)
        if "double" in traits:
            self.layers[3].double()
        if "attention" in traits:
            self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        if "recurrent" in traits:
            self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        x = self.embedding(tokens)
        if "attention" in self.traits:
            x = x + self.attention(x, x, x, need_weights=False)[0]
        if "recurrent" in self.traits:
            x = x + self.lstm(x)[0]
        for number, layer in enumerate(self.layers):
            if "skips" in self.traits and (step + number) % 3 == 0:
                continue
            x = x + F.gelu(layer(self.norm(x).to(layer.weight.dtype))).to(x.dtype)
            if "looks at weights" in self.traits:
                x = x * (1 + 0 * layer.weight.abs().mean().to(x.dtype))
        if "penalty" in self.traits:
            x = x + 1e-3 * sum(p.square().sum() for p in self.layers.parameters()).to(x.dtype)
        return self.head(x)


TRAITS = (
    "sparse", "tied", "frozen", "double", "attention", "recurrent", "skips", "looks at weights",
    "penalty",
)  # fmt: skip
HABITS = (
    "clips", "accumulates", "schedules", "logs gradients", "evaluates", "saves", "loads",
    "averages", "decays by hand", "zeroes first", "keeps zeros", "closure", "two backwards",
    "thaws", "new group", "changes a weight", "autocast", "steps seldom", "copies the model",
    "fails", "changes options", "skips bad losses", "swaps its rate",
)  # fmt: skip
MOMENTS = ("before forward", "before backward", "before the step", "after the step")
READS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "{**state}": lambda s: {**s},
    "dict()": dict,
    "copy()": lambda s: s.copy(),
    "|": lambda s: s | {},
    "pop": lambda s: [s.setdefault(key, s.pop(key)) for key in list(s)],
    "items": lambda s: list(dict.items(s)),
    "match": lambda s: list(s.values()) if isinstance(s, dict) else None,
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "deepcopy": copy.deepcopy,
    "get": lambda s: [s.get(key) for key in s],
    "numpy": lambda s: [torch.as_tensor(v).numpy().sum().item() for v in s.values()],
    "dlpack": lambda s: [torch.from_dlpack(v).sum() for v in s.values() if torch.is_tensor(v)],
}


def first(state: dict[str, Any]) -> Tensor:
    """The first tensor of any size."""
    return next((v for v in state.values() if torch.is_tensor(v) and v.dim()), torch.zeros(2))


WRITES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "in place": lambda s: first(s).mul_(0.5),
    ".data": lambda s: first(s).data.mul_(0.5),
    "numpy": lambda s: first(s).numpy().__imul__(0.5),
    "dlpack": lambda s: torch.from_dlpack(first(s)).mul_(0.5),
    "exchanged": lambda s: s.update({k: v * 0.5 for k, v in s.items() if v is first(s)}),
    "cleared": lambda s: s.clear(),
}
HOLDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "itself": first,
    "view": lambda s: first(s).view(-1)[1:],
    "numpy": lambda s: torch.from_numpy(first(s).numpy()),
    "dlpack": lambda s: torch.from_dlpack(first(s)),
    "detached": lambda s: first(s).detach(),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
}


class Roomy(CpuStandIn):
    """Little of its memory is in use."""

    def used_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class Program:
    traits: tuple[str, ...]
    habits: tuple[str, ...]
    since: int
    """The iteration from which on it has its habits."""
    optimizer: str
    groups: int
    movers: tuple[str, ...]
    gradients: str
    room: float
    away: float
    lag: int
    roomy: bool = False
    """In a step there is room for all state."""
    look: tuple[str, str, str] = ("", "", "")
    """What the program does to optimizer state now and then, how, and at which moment."""


looks = st.one_of(
    st.just(("", "", "")),
    st.tuples(st.just("reads"), st.sampled_from(sorted(READS)), st.sampled_from(MOMENTS)),
    st.tuples(st.just("writes"), st.sampled_from(sorted(WRITES)), st.sampled_from(MOMENTS)),
    st.tuples(st.just("holds"), st.sampled_from(sorted(HOLDS)), st.sampled_from(MOMENTS)),
)
programs = st.builds(
    Program,
    traits=st.lists(st.sampled_from(TRAITS), max_size=2, unique=True).map(tuple),
    habits=st.lists(st.sampled_from(HABITS), max_size=3, unique=True).map(tuple),
    since=st.sampled_from((0, 0, 6)),
    optimizer=st.sampled_from(tuple(OPTIMIZERS)),
    groups=st.integers(1, 3),
    movers=st.sampled_from(
        (("state",), ("weights",), ("state", "weights"), ("state", "swapper"),
         ("state", "weights", "swapper"))
    ),
    gradients=st.sampled_from(("consume", "auto", "keep")),
    room=st.sampled_from((0.0, 0.3, 0.7, 2.0)),
    away=st.sampled_from((0.3, 1.0)),
    lag=st.sampled_from((0, 2, 8)),
    roomy=st.booleans(),
    look=looks,
).filter(
    # With gradients consumed, state and parameters are new before the step is called. Nothing
    # tells of a read then; `--gradients consume` is for programs that do not.
    lambda p: not (p.gradients == "consume" and p.look[2] == "before the step")
)  # fmt: skip


def made_optimizers(program: Program, net: Net) -> list[torch.optim.Optimizer]:
    parameters = [p for p in net.parameters() if p.requires_grad]
    kind = "sgd" if "sparse" in program.traits else program.optimizer
    cut = [parameters[i :: program.groups] for i in range(program.groups)]
    if program.groups == 3:  # three optimizers rather than one with three groups
        return [OPTIMIZERS[kind](part) for part in cut if part]
    return [OPTIMIZERS[kind]([{"params": part} for part in cut if part])]


class Training:
    """One run of a program, and everything that the program sees."""

    def __init__(self, program: Program) -> None:
        torch.manual_seed(5)
        self.program = program
        self.step = 0
        self.net = Net(program.traits)
        self.optimizers = made_optimizers(program, self.net)
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 3, 0.5) for o in self.optimizers]
        self.average = copy.deepcopy(self.net) if "averages" in program.habits else None
        self.saved: Any = None
        self.seen: list[Any] = []
        self.held: list[Tensor] = []
        self.refused = False

    def does(self, habit: str) -> bool:
        return habit in self.program.habits and self.step >= self.program.since

    def run(self) -> Training:
        try:
            for self.step in range(STEPS):
                self.iteration()
        except GradientConsumed:
            self.refused = True
        return self

    def end(self) -> None:
        """What is left when everything has come home."""
        self.seen += [p.detach().clone() for p in self.net.parameters()]
        if self.average is not None:
            self.seen += [p.detach().clone() for p in self.average.parameters()]
        for optimizer in self.optimizers:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                state = optimizer.state.get(p, {})
                self.seen += [state[name] for name in sorted(state)]

    def iteration(self) -> None:
        if self.does("zeroes first"):
            self.zero()
        self.before_forward()
        self.look(MOMENTS[0])
        loss = self.loss()
        self.look(MOMENTS[1])
        self.seen.append(loss.detach().clone())
        if self.does("two backwards"):
            loss.backward(retain_graph=True)
        loss.backward()
        if self.does("accumulates"):
            self.loss(0.5).backward()
        self.before_step()
        self.look(MOMENTS[2])
        if self.does("steps seldom") and self.step % 2:
            return
        if self.does("skips bad losses") and self.step % 4 == 3:
            self.zero()
            return
        for optimizer in self.optimizers:
            optimizer.step(*([lambda: loss] if self.does("closure") else []))
        self.after_step()
        self.look(MOMENTS[3])
        if not self.does("zeroes first"):
            self.zero()

    def look(self, moment: str) -> None:
        what, how, when = self.program.look
        if moment != when or self.step < self.program.since or self.step % 3 == 0:
            return
        states = [state for o in self.optimizers for state in o.state.values() if state]
        for state in states[self.step % 2 :: 2]:
            if what == "reads":
                self.seen.append(copy.deepcopy(READS[how](state)))
            elif what == "writes":
                with torch.no_grad():
                    WRITES[how](state)
            elif self.step < 8:
                self.held.append(HOLDS[how](state))
        self.seen += [value.clone() for value in self.held]
        if self.step == 10:
            self.held.clear()

    def loss(self, scale: float = 1.0) -> Tensor:
        tokens = torch.randint(0, 40, (4, 6))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.does("autocast")):
            logits = self.net(tokens[:, :-1], self.step)
        return scale * F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not self.does("keeps zeros"))

    def before_forward(self) -> None:
        net, step = self.net, self.step
        if self.does("evaluates") and step % 3 == 1:
            net.eval()
            with torch.no_grad():
                self.seen.append(self.loss().item())
            net.train()
        if self.does("thaws") and step == 7:
            net.layers[2].requires_grad_(True)
        if self.does("new group") and step == 8:
            fresh = nn.Parameter(torch.rand(WIDTH, WIDTH))
            net.layers[1].register_parameter("extra", fresh)
            self.optimizers[0].add_param_group({"params": [fresh]})
        if self.does("copies the model") and step == 9:
            self.seen += [p.detach().clone() for p in copy.deepcopy(net).parameters()]
        if self.does("fails") and step % 5 == 4:
            with pytest.raises(ZeroDivisionError):
                self.loss() / (1 // 0)

    def before_step(self) -> None:
        net = self.net
        if self.does("clips"):
            kept = [p for p in net.parameters() if p.grad is not None and not p.grad.is_sparse]
            self.seen.append(nn.utils.clip_grad_norm_(kept, 0.1))
        if self.does("logs gradients"):
            gradient = net.layers[0].weight.grad
            self.seen.append(None if gradient is None else gradient.clone())
        if self.does("changes a weight"):
            with torch.no_grad():
                net.layers[4].weight.mul_(0.99)
        if self.does("changes options"):
            self.optimizers[0].param_groups[0]["lr"] *= 0.9
        if self.does("swaps its rate"):
            for optimizer in self.optimizers:
                optimizer.param_groups[0]["lr"] = 1e-2 / (1 + self.step % 3)

    def after_step(self) -> None:
        net, optimizers = self.net, self.optimizers
        if self.does("decays by hand"):
            for p in net.parameters():
                p.data.mul_(0.999)
        if self.does("schedules"):
            for scheduler in self.schedulers:
                scheduler.step()
        if self.average is not None:
            now = dict(net.named_parameters())
            for name, p in self.average.named_parameters():
                p.data.lerp_(now[name].data, 0.1)
        if self.does("saves") and self.step % 4 == 2:
            self.saved = copy.deepcopy((net.state_dict(), [o.state_dict() for o in optimizers]))
        loads = self.does("loads") and "new group" not in self.program.habits
        if loads and self.step == 10 and self.saved is not None:
            net.load_state_dict(self.saved[0])
            for optimizer, state in zip(optimizers, self.saved[1], strict=True):
                optimizer.load_state_dict(state)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        a, b = a.detach(), b.detach()
        return a.dtype == b.dtype and (torch.equal(a, b) or repr(a.tolist()) == repr(b.tolist()))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b)


def differences(program: Program) -> tuple[list[int], list[Any]]:
    weight_bytes = sum(p.nbytes for p in Net(program.traits).parameters())
    reports: list[Any] = []

    def enter(stack: ExitStack) -> None:
        swapper = weights = None
        if "swapper" in program.movers:
            swapper = Swapper(
                CpuStandIn(lag=program.lag), budget_bytes=60_000, link=H200_PCIE5, min_bytes=256
            )
        if "weights" in program.movers:
            weights = WeightMover(
                CpuStandIn(lag=program.lag),
                link=H200_PCIE5,
                offloaded_bytes=int(program.away * weight_bytes),
                min_bytes=256,
                own_hooks=swapper is None,
            )

        def before_update(parameters: Any) -> None:
            found = list(parameters)
            for mover in (swapper, weights):
                if mover is not None:
                    mover.before_update(found)

        def changed() -> None:
            if swapper is not None:
                swapper.weigh_anew()

        if "state" in program.movers:
            mover = StateMover(
                (Roomy if program.roomy else CpuStandIn)(lag=program.lag),
                link=H200_PCIE5,
                gradients=program.gradients,
                room_bytes=int(program.room * weight_bytes),
                bucket_bytes=weight_bytes // 6,
                min_bytes=256,
                before_update=before_update,
                changed=changed,
            )
            mover.keep_within(2**30)
            stack.enter_context(mover)
            stack.callback(lambda: reports.append(mover.report()))
        if swapper is not None:
            stack.enter_context(swapper)
            stack.callback(lambda: reports.append(swapper.report()))
        if weights is not None:
            stack.enter_context(weights)
            stack.callback(lambda: reports.append(weights.report()))
            if swapper is not None:
                assert swapper.hooks.stand_behind(weights.around)
                stack.callback(
                    lambda: swapper.hooks.stand_behind(lambda pack, unpack: (pack, unpack))
                )

    plain, moved = Training(program).run(), Training(program)
    with ExitStack() as stack:
        enter(stack)
        moved.run()
    plain.end()
    if moved.refused:  # a habit that nobody could have known of; until then all is as it was
        assert program.since or "skips bad losses" in program.habits
        assert program.gradients == "consume"
    else:
        moved.end()
        assert len(plain.seen) == len(moved.seen)
    rows = zip(plain.seen, moved.seen, strict=False)
    return [i for i, (a, b) in enumerate(rows) if not same(a, b)], reports


def found(**changed: Any) -> Program:
    """Like one that was wrong once."""
    plain = Program((), (), 0, "momentum", 1, ("state",), "consume", room=0.0, away=0.3, lag=0)
    return replace(plain, **changed)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(programs)
@example(found(traits=("recurrent", "skips"), habits=("saves",)))  # state that came later
@example(found(habits=("two backwards",), since=6))  # through weights that are to be updated
@example(found(traits=("sparse",)))
@example(  # state that some parameters get late: in the order of the plain run
    found(
        traits=("skips",),
        gradients="keep",
        optimizer="fused",
        look=("reads", "get", "before forward"),
    )
)
def test_any_training_gives_the_plain_numbers(program: Program) -> None:
    found, reports = differences(program)
    note(str(reports))
    assert not found
