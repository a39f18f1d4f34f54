"""Whoever reads or writes optimizer state, by whatever way and at whatever moment, does what he
does in the plain run, also while the state is in host memory.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import json
import operator
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kilter.memory.engine import CpuStandIn
from kilter.memory.engine.gradients import GradientConsumed
from kilter.memory.engine.state import StateMover
from kilter.memory.plan.problem import Link

LINK = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
STEPS = 8
WIDTH = 24
LAYERS = 5
MOMENTS = ("before forward", "before backward", "before the step", "after the step")

Optimizer = torch.optim.Optimizer
State = dict[str, Any]


def network() -> nn.Module:
    torch.manual_seed(3)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers)


def mover(gradients: str = "keep", lag: int = 8) -> StateMover:
    """All state is on the host between steps."""
    return StateMover(
        CpuStandIn(lag=lag),
        link=LINK,
        gradients=gradients,
        room_bytes=0,
        bucket_bytes=2000,
        min_bytes=512,
    )


def moments(net: nn.Module, optimizer: Optimizer, steps: int = STEPS) -> Iterator[tuple[int, str]]:
    """A training that stops at each moment."""
    for number in range(steps):
        torch.manual_seed(number)
        yield number, MOMENTS[0]
        loss = net(torch.randn(6, WIDTH)).square().mean()
        yield number, MOMENTS[1]
        loss.backward()
        yield number, MOMENTS[2]
        optimizer.step()
        optimizer.zero_grad()
        yield number, MOMENTS[3]


def end(net: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    found = [p.detach().clone() for p in net.parameters()]
    for p in net.parameters():
        found += [optimizer.state[p][key].clone() for key in sorted(optimizer.state.get(p, {}))]
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return type(one) is type(other) and one.device == other.device and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def call(**state: Any) -> Any:
    return state


def matched(state: State) -> Any:
    match state:
        case {"exp_avg": first, "exp_avg_sq": second, **rest}:
            return [first, second, rest]
    return None


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def doubled(x: Tensor) -> Tensor:
    return x * 2


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted = torch.jit.script(doubled)


def bytes_of(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def storage_of(tensor: Tensor) -> Any:
    storage = tensor.untyped_storage()
    return [storage.nbytes(), tensor.storage_offset(), bytes(storage.tolist())]


READS: dict[str, Callable[[State], Any]] = {
    "item": lambda s: s["exp_avg"],
    "get": lambda s: s.get("exp_avg"),
    "{**state}": lambda s: {**s},
    "dict()": dict,
    "copy()": lambda s: s.copy(),
    "|": lambda s: s | {},
    "call": lambda s: call(**s),
    "update": lambda s: (d := {}, d.update(s))[0],
    "items": lambda s: list(s.items()),
    "values": lambda s: list(s.values()),
    "dict.items": lambda s: list(dict.items(s)),
    "dict.__getitem__": lambda s: dict.__getitem__(s, "exp_avg"),
    "itemgetter": operator.itemgetter("exp_avg", "exp_avg_sq"),
    "match": matched,
    "repr": repr,
    "class": lambda s: [type(s), *(type(value) for value in s.values())],
    "len": len,
    "==": lambda s: [s == s.copy(), list(s) == [*s]],
    "setdefault": lambda s: s.setdefault("exp_avg", None),
    "pop and back": lambda s: (s.update(exp_avg=(value := s.pop("exp_avg"))), value)[1],
    "popitem and back": lambda s: s.update([s.popitem()]),
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "torch.save": through_file,
    "json": lambda s: json.dumps(s, default=lambda value: value.tolist()),
    "numpy": lambda s: s["exp_avg"].numpy().tolist(),
    "dlpack": lambda s: torch.from_dlpack(s["exp_avg"]).clone(),
    "capsule": lambda s: torch.utils.dlpack.from_dlpack(
        torch.utils.dlpack.to_dlpack(s["exp_avg"])
    ).clone(),
    "TorchScript": lambda s: scripted(s["exp_avg"]),
    "address": lambda s: bytes_of(s["exp_avg"]),
    "storage": lambda s: storage_of(s["exp_avg"]),
    "foreach": lambda s: torch._foreach_add([s["exp_avg"], s["exp_avg_sq"]], 1.0),
    "data": lambda s: s["exp_avg"].data.clone(),
    "metadata": lambda s: [s["exp_avg"].device, s["exp_avg"].stride(), s["exp_avg"]._version],
}  # fmt: skip


@pytest.mark.parametrize("read", READS)
def test_reading(read: str) -> None:
    """At each moment of an iteration, in an iteration of its own."""
    found = []
    for governed in (None, mover()):
        net = network()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        seen: list[Any] = []
        with governed or nullcontext():
            for number, now in moments(net, optimizer):
                if number >= 4 and now == MOMENTS[number - 4]:
                    away = governed is None or governed.report().offloaded_bytes > 0
                    assert away, "nothing is on the host"
                    states = optimizer.state.values()
                    seen += [copy.deepcopy(READS[read](state)) for state in states]
        found.append([seen, end(net, optimizer)])
    assert same(*found)


def through_the_optimizer(optimizer: Optimizer) -> Iterator[Any]:
    yield optimizer.state_dict()["state"]
    yield through_file(optimizer.state_dict())["state"]
    yield list(through_file(optimizer).state.values())
    yield list(copy.deepcopy(optimizer).state.values())
    yield list(pickle.loads(pickle.dumps(optimizer)).state.values())
    yield list(vars(optimizer)["state"].values())
    yield list(dict(optimizer.state).values())
    yield list(copy.copy(optimizer.state).values())
    twin = torch.optim.AdamW([p.detach().clone() for p in optimizer.param_groups[0]["params"]])
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    yield list(twin.state.values())


@pytest.mark.parametrize("moment", MOMENTS)
def test_reading_through_the_optimizer(moment: str) -> None:
    found = []
    for governed in (None, mover()):
        net = network()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        seen: list[Any] = []
        with governed or nullcontext():
            for number, now in moments(net, optimizer):
                if now == moment and number in (4, 7):
                    seen += copy.deepcopy(list(through_the_optimizer(optimizer)))
        found.append([seen, end(net, optimizer)])
    assert same(*found)


def exchange(state: State) -> None:
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def shrink(state: State) -> None:
    state["exp_avg"].data.mul_(0.5)


def exchange_data(state: State) -> None:
    state["exp_avg"].data = torch.ones_like(state["exp_avg"])


def write_by_address(state: State) -> None:
    ctypes.memset(state["exp_avg"].data_ptr(), 0, state["exp_avg"].nbytes)


WRITES: dict[str, Callable[[State], Any]] = {
    "in place": lambda s: s["exp_avg"].mul_(0.5),
    ".data in place": shrink,
    ".data": exchange_data,
    "set_": lambda s: s["exp_avg"].set_(torch.zeros_like(s["exp_avg"])),
    "copy_": lambda s: s["exp_avg"].copy_(torch.ones(())),
    "numpy": lambda s: s["exp_avg"].numpy().fill(0.25),
    "dlpack": lambda s: torch.from_dlpack(s["exp_avg"]).zero_(),
    "address": write_by_address,
    "exchanged": exchange,
    "|=": lambda s: s.__ior__({"exp_avg": torch.ones_like(s["exp_avg"])}),
    "swapped": lambda s: s.update(exp_avg=s["exp_avg_sq"], exp_avg_sq=s["exp_avg"].abs_()),
    "cleared": lambda s: s.clear(),
    "more": lambda s: s.update(mine=torch.ones(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("write", WRITES)
def test_writing(write: str) -> None:
    """At each moment of an iteration, in an iteration of its own."""
    found = []
    for governed in (None, mover()):
        net = network()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        with governed or nullcontext():
            for number, now in moments(net, optimizer, 12):
                if number in range(4, 12, 2) and now == MOMENTS[number // 2 - 2]:
                    for state in list(optimizer.state.values())[::2]:
                        WRITES[write](state)
            if governed is not None:
                assert governed.report().offloaded_bytes > 0
        found.append(end(net, optimizer))
    assert same(*found)


ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda t: t,
    "detached": lambda t: t.detach(),
    "view": lambda t: t.view(-1)[3:],
    "data": lambda t: t.data,
    "numpy": lambda t: t.numpy(),
    "dlpack": torch.from_dlpack,
    "storage": lambda t: t.untyped_storage(),
}


@pytest.mark.parametrize("since", [0, 5])
@pytest.mark.parametrize("kind", ALIASES)
def test_an_alias_follows_the_updates_and_they_follow_it(kind: str, since: int) -> None:
    """Taken before state streams, or while it is on the host; given up again later."""
    found = []
    for governed in (None, mover()):
        net = network()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        held: list[Any] = []
        seen: list[Any] = []
        with governed or nullcontext():
            for number, now in moments(net, optimizer, 12):
                if now != MOMENTS[3]:
                    continue
                if number == since:
                    held += [ALIASES[kind](s["exp_avg"]) for s in optimizer.state.values()]
                if number == 7:
                    for alias in held[::3]:
                        alias.fill_(1) if hasattr(alias, "fill_") else alias.fill(1)
                seen += [torch.tensor(alias.tolist()) for alias in held]
                if number == 9:
                    held.clear()
            if governed is not None:
                assert governed.report().offloaded_bytes > 0
        found.append([seen, end(net, optimizer)])
    assert same(*found)


def test_what_is_popped_outlives_everything() -> None:
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    kept = []
    with mover():
        for number, now in moments(net, optimizer):
            if (number, now) == (5, MOMENTS[3]):
                kept = [state["exp_avg"] for state in optimizer.state.values()]
                expected = [value.clone() for value in kept]
                optimizer.state.clear()
        del optimizer, net
        gc.collect()
    gc.collect()
    filler = [torch.full((WIDTH, WIDTH), -1.0) for _ in range(64)]
    assert same(kept, expected), filler


def test_one_tensor_in_two_optimizers() -> None:
    """`load_state_dict` takes over the tensors of a `state_dict` that was not copied."""
    found = []
    for governed in (None, mover()):
        nets = [network(), network()]
        optimizers = [torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9) for net in nets]
        with governed or nullcontext():
            for number in range(STEPS + 2):
                for net, optimizer in zip(nets, optimizers, strict=True):
                    for _ in moments(net, optimizer, 1):
                        pass
                if number == 5:
                    optimizers[1].load_state_dict(optimizers[0].state_dict())
        found.append([end(*pair) for pair in zip(nets, optimizers, strict=True)])
    assert same(*found)


def test_state_written_between_a_consumed_backward_and_the_step_is_refused() -> None:
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def train() -> None:
        for number, now in moments(net, optimizer):
            if (number, now) == (6, MOMENTS[2]):
                next(iter(optimizer.state.values()))["exp_avg"].zero_()

    with mover("consume"), pytest.raises(GradientConsumed, match="state was changed"):
        train()


PLAIN = """
import io, pickle, sys, torch
sys.modules["kilter"] = None  # whoever imports it is told that there is none
for data in pickle.load(open(sys.argv[1], "rb")):
    torch.load(io.BytesIO(data), weights_only=False)
"""


def test_files_are_read_without_kilter(tmp_path: Path) -> None:
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    files = []
    with mover():
        for number, _ in moments(net, optimizer):
            if number != 5:
                continue
            parameters = list(net.parameters())
            for value in (net, optimizer, optimizer.state, dict(optimizer.state), parameters):
                file = io.BytesIO()
                torch.save(value, file)
                files.append(file.getvalue())
    path = tmp_path / "all.pickle"
    path.write_bytes(pickle.dumps(files))
    subprocess.run([sys.executable, "-I", "-c", PLAIN, str(path)], check=True, timeout=900)
