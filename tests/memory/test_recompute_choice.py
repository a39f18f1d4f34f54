"""`--recompute auto`: what is measured to be faster stays, and is said."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replace_fields
from tests.memory.steady_stand_in import SteadyStandIn
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import kilter
from kilter.core.messages import LocalMessages
from kilter.core.ranks import Ranks
from kilter.memory.engine import Swapper
from kilter.memory.host_time import HOST_EACH_S
from kilter.memory.iteration_times import FEW, MEASURED, MIXED, PATIENCE, IterationTimes
from kilter.memory.kept_calls import KeptCall, KeptCalls
from kilter.memory.kept_recompute import KeptRecompute, RecomputeWay
from kilter.memory.own_checkpointing import OwnCheckpointing
from kilter.memory.plan import problem
from kilter.memory.plan.problem import Link
from kilter.memory.rank_agreement import RankAgreement
from kilter.memory.recompute_choice import MOST_TENSORS, RecomputeChoice
from kilter.testing.stand_in import small_tensors


@dataclass
class Engine:
    """Notes what it is asked for."""

    recomputes_calls: bool = False
    planned: bool = True
    recomputed: int = 1
    asked: list[bool] = field(default_factory=list)
    each_s: list[float] = field(default_factory=list)
    worth: bool = True
    tensors: int = 1
    exchanged: list[Any] = field(default_factory=list)

    stall_s: float = 0.0
    plan_s: float = 0.1
    passes: int = 0
    """None is counted: an iteration has one."""
    spilled: int = 0

    def report(self) -> Any:
        plan = SimpleNamespace(compute_s=0.08, peak_before_bytes=9, recomputed=200, swapped=0)
        plan.iteration_s, plan.stall_s = self.plan_s, self.stall_s
        counts = SimpleNamespace(
            recomputed=self.recomputed, passes=self.passes, spilled=self.spilled
        )
        counts.plans = (plan,)
        return counts

    budget_bytes: int = 47
    fingerprint: str = "as ever"

    def largest_pass(self) -> Any:
        data = [SimpleNamespace(size_bytes=60)] * self.tensors
        return SimpleNamespace(peak_bytes=77, data=data, fingerprint=self.fingerprint)

    def exchange(self, others: Any) -> str:
        self.exchanged.append(others)
        return f"kinds {len(self.exchanged)}"

    kept: list[Any] = field(default_factory=list)

    def recompute(self, *, calls: bool, each_s: float, kept: tuple[KeptCalls, ...] = ()) -> None:
        self.asked.append(calls)
        self.kept.append(kept)
        self.each_s.append(each_s)
        self.recomputes_calls = calls and self.worth


def _at_once() -> bool:
    return True


def choice_of(
    engine: Engine,
    times: IterationTimes,
    own: OwnCheckpointing | None = None,
    can_record: Callable[[], bool] = _at_once,
    kept: KeptRecompute | None = None,
) -> RecomputeChoice:
    alone = RankAgreement(LocalMessages, Ranks(), times)
    history: Any = SimpleNamespace(known=True, last=kept)
    return RecomputeChoice(engine, times, own, can_record, alone, history)  # type: ignore[arg-type]


def chosen(engine: Engine, *durations_s: float) -> RecomputeChoice:
    """After enough iterations of each duration in turn."""
    times = IterationTimes()
    choice = choice_of(engine, times)
    for duration_s in durations_s:
        for _ in range(FEW):
            choice.iteration_ended(met=True, settled=True)
            times.planned_s.append(duration_s)
    choice.iteration_ended(met=True, settled=True)
    return choice


@pytest.mark.parametrize(
    ("calls_s", "asked", "words"),
    [
        (0.092, [True], "calls of modules are recomputed where they pay: 92 ms an iteration"),
        (0.150, [True, False], "single operations are recomputed: 150 ms an iteration"),
    ],
    ids=["faster", "slower"],
)
def test_the_faster_way_stays(calls_s: float, asked: list[bool], words: str) -> None:
    engine = Engine()
    choice = chosen(engine, 0.131, calls_s)
    assert engine.asked == asked
    assert choice.decided
    assert choice.words.startswith(words)
    assert choice.words.endswith("131 ms with single operations [measured]")


def host_late(*durations_s: float) -> tuple[Engine, RecomputeChoice]:
    """Plain iterations take 91 ms, and the plan adds 20 ms: after iterations of each duration."""
    engine, times = Engine(), IterationTimes()
    times.plain_s.append(0.091)
    choice = choice_of(engine, times)
    for duration_s in durations_s:
        times.planned_s.extend([duration_s] * MEASURED)
        choice.iteration_ended(met=True, settled=True)
    return engine, choice


def test_what_the_host_took_beyond_the_plan_counts_for_each_tensor() -> None:
    times = IterationTimes()
    times.planned_s.extend([0.131] * MEASURED)
    unknown = Engine()
    choice_of(unknown, times).iteration_ended(met=True, settled=True)
    assert (unknown.asked, unknown.each_s) == ([True], [HOST_EACH_S])
    known, _ = host_late(0.131, 0.120)
    each_s = (0.131 - 0.091 - 0.02) / 200
    assert known.asked == [False, True]
    assert known.each_s == [pytest.approx(each_s)] * 2


def test_what_the_step_waits_for_state_is_not_taken_for_the_hosts_time() -> None:
    engine, times = Engine(), IterationTimes()
    times.plain_s.append(0.091)
    choice = choice_of(engine, times)
    for _ in range(2):
        times.planned_s.extend([0.131] * MEASURED)
        choice.iteration_ended(met=True, settled=True, step_wait_s=0.01)
    assert engine.each_s[0] == pytest.approx((0.131 - 0.091 - 0.02 - 0.01) / 200)


def test_plans_count_the_host_where_iterations_are_shorter_by_that() -> None:
    engine, choice = host_late(0.131, 0.120, 0.140)
    assert engine.asked == [False, True, False]
    assert engine.each_s == [pytest.approx(1e-4)] * 3
    assert choice.words == (
        "single operations are recomputed, each counted with 100 us of the host's time: "
        "140 ms an iteration with calls of modules, 120 ms with single operations [measured]"
    )
    assert choice.kept is not None
    assert choice.kept.each_s == pytest.approx(1e-4)


def test_plans_do_not_count_the_host_where_iterations_are_not_shorter_by_that() -> None:
    engine, choice = host_late(0.131, 0.130, 0.140)
    assert engine.asked == [False, False, True, False]
    assert engine.each_s == [pytest.approx(1e-4), 0.0, pytest.approx(1e-4), 0.0]
    assert choice.words.startswith("single operations are recomputed: 140 ms")
    assert choice.words.endswith("131 ms with single operations [measured]")
    assert choice.kept is not None
    assert choice.kept.each_s == 0.0


def test_without_a_plan_that_counts_the_host_the_one_before_comes_back() -> None:
    engine, choice = host_late(0.131)
    for _ in range(PATIENCE):
        assert engine.asked == [False]
        choice.iteration_ended(met=True, settled=True)
    assert engine.asked == [False, False, True]
    assert engine.each_s[1] == 0.0


def test_at_once_is_tried_where_at_once_is_recomputed_or_the_budget_does_not_stand() -> None:
    engine = Engine(recomputed=0)
    assert not chosen(engine, 0.1, 0.1).decided
    times = IterationTimes()
    times.planned_s.extend([0.1] * MEASURED)
    choice_of(engine, times).iteration_ended(met=True, settled=False)
    assert engine.asked == []


def test_without_a_call_that_is_worth_it_operations_stay() -> None:
    engine = Engine(worth=False)
    choice = chosen(engine, 0.1)
    choice.iteration_ended(met=True, settled=True)
    assert engine.asked == [True, False]
    assert choice.words.endswith("no call of a module is worth recomputing")


def test_so_many_tensors_that_a_plan_with_calls_would_take_minutes() -> None:
    engine = Engine(tensors=MOST_TENSORS + 1)
    choice = chosen(engine, 0.1)
    assert engine.asked == []
    assert choice.words.endswith("calls of modules are not tried with so many tensors")


def test_where_no_plan_comes_operations_come_back() -> None:
    engine = Engine(planned=False)
    choice = chosen(engine, 0.1)
    for _ in range(PATIENCE):
        assert choice.words == ""
        choice.iteration_ended(met=True, settled=True)
    assert engine.asked == [True, False]
    assert choice.words.endswith("got no plan in time")


def test_a_run_that_ends_while_ways_are_compared_says_so() -> None:
    choice = chosen(Engine(), 0.1)
    choice.close()
    assert choice.words == (
        "calls of modules are recomputed where they pay: "
        "the run ended before ways to recompute were compared"
    )
    assert choice.kept is None
    early = chosen(Engine())
    early.close()
    assert early.words == ""


def test_durations_of_the_way_before_do_not_count() -> None:
    """They become known later than the iteration ends."""
    times = IterationTimes()
    before = times.planned_s
    times.begin_plan()
    before.append(1.0)
    assert list(times.planned_s) == []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x.sin()).cos()


def trained(net: nn.Module, iterations: int, seed: int) -> list[Tensor]:
    """The losses."""
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    found = []
    for _ in range(iterations):
        loss = net(torch.randn(512, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def losses(iterations: int) -> list[Tensor]:
    torch.manual_seed(0)
    return trained(nn.Sequential(*(Block() for _ in range(6))), iterations, 0)


@pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"),
    reason="this PyTorch does not show what its nodes saved, so that nothing is recomputed here",
)
def test_a_run_chooses_and_says_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = replace(
        problem.H200_PCIE5,
        to_host_bytes_per_s=1e7,
        to_device_bytes_per_s=1e7,
        both_bytes_per_s=1e7,
    )
    monkeypatch.setattr(problem, "H200_PCIE5", slow)
    iterations = 3 * MEASURED + 2 * PATIENCE  # a busy host has its time counted for a turn, too
    plain = losses(iterations)
    out = tmp_path / "run"
    undo = small_tensors(512 * 64 * 4)
    with kilter.govern(memory_budget="60%", recompute="auto", device="null", out=out):
        governed = losses(iterations)
    undo()
    assert all(torch.equal(a, b) for a, b in zip(plain, governed, strict=True))
    memory = json.loads((out / "report.json").read_text())["memory"]
    words = memory["recompute_choice"]
    assert " are recomputed" in words
    assert words in capsys.readouterr().err
    assert memory["peak_bytes"] <= memory["budget_bytes"]


def test_a_way_that_gets_no_plan_is_named() -> None:
    model, engine, times = _Model(), Engine(), IterationTimes()
    choice = choice_of(engine, times, OwnCheckpointing(FENCE))
    choice.iteration_ended(met=True, settled=True)
    model(torch.randn(4, 64))
    times.planned_s.extend([0.131] * MEASURED)
    for _ in range(PATIENCE + 2):
        choice.iteration_ended(met=True, settled=True)
    assert choice.words == (
        "single operations are recomputed: the model's own checkpointing got no plan in time"
    )
    assert not model.layers[0].gradient_checkpointing


# The model's own checkpointing


class _Layer(nn.Module):
    """As layers of libraries are written."""

    gradient_checkpointing = False

    def __init__(self, statistics: bool = False) -> None:
        super().__init__()
        self.inner = Block()
        self.norm = nn.BatchNorm1d(64) if statistics else nn.Identity()

    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:
        if self.gradient_checkpointing and self.training:
            checkpointed: Tensor = self._gradient_checkpointing_func(self.inner, x)
            return checkpointed
        y: Tensor = self.norm(self.inner(x))
        return y


class _Model(nn.Module):
    supports_gradient_checkpointing = True
    use_cache = False

    def __init__(self, statistics: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_Layer(statistics) for _ in range(3)))
        self.rest = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, use_cache=self.use_cache)
        y: Tensor = self.rest(x)
        return y


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (_Layer, _EncoderLayer, _Model, Block):
        monkeypatch.setattr(kind, "__module__", "transformers.models.here")
        monkeypatch.setattr(kind.forward, "__module__", "transformers.models.here")


FENCE: Any = lambda hook: hook  # noqa: E731


def flags(model: nn.Module) -> list[dict[str, Any]]:
    """What stands in the modules themselves that torch has not put there."""
    plain = vars(nn.Module())
    return [{k: v for k, v in vars(m).items() if k not in plain} for m in model.modules()]


def seen(model: nn.Module) -> tuple[OwnCheckpointing, str]:
    own = OwnCheckpointing(FENCE)
    assert own.look()
    assert not own.look()
    model(torch.randn(4, 64))
    return own, own.found()


def test_checkpointing_of_the_model_is_switched_on_and_off_again() -> None:
    model = _Model()
    found = flags(model)
    own, names = seen(model)
    assert names == "_Model"
    own.switch_on()
    assert [layer.gradient_checkpointing for layer in model.layers] == [True] * 3
    function = model.layers[0]._gradient_checkpointing_func
    copied = copy.deepcopy(model).layers[0]._gradient_checkpointing_func
    assert type(pickle.loads(pickle.dumps(function))) is type(copied) is partial  # not kilter's
    own.switch_off()
    own.switch_off()
    assert flags(model) == found
    own.switch_on(0.4)
    assert [layer.gradient_checkpointing for layer in model.layers] == [True, True, False]


def test_what_is_checkpointed_can_be_transformed() -> None:
    """PyTorch's own checkpointing is an error there."""
    model = _Model().train()
    own, _ = seen(model)
    x = torch.randn(4, 64)

    def gradient() -> Tensor:
        torch.manual_seed(0)
        return torch.func.grad(lambda x: model(x).sum())(x)

    plain = gradient()
    own.switch_on()
    assert torch.equal(gradient(), plain)


def test_what_the_program_sets_meanwhile_stays() -> None:
    model = _Model()
    own, _ = seen(model)
    own.switch_on()
    model.layers[0].gradient_checkpointing = False
    own.switch_off()
    assert vars(model.layers[0])["gradient_checkpointing"] is False
    assert "gradient_checkpointing" not in vars(model.layers[1])


@pytest.mark.parametrize(
    "why",
    [
        "statistics",
        "set already",
        "not supported",
        "no library",
        "own part",
        "hook",
        "own forward",
        "own forward of a class",
    ],
)
def test_a_model_is_left_alone(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something would happen twice that has to happen once, where the program uses the
    switch, where the model says that it cannot, and where the flag is not that of a library."""
    model = _Model(statistics=why == "statistics")
    if why == "set already":
        model.layers[1].gradient_checkpointing = True
        model.layers[1]._gradient_checkpointing_func = lambda block, x: block(x)
    elif why == "not supported":
        monkeypatch.setattr(_Model, "supports_gradient_checkpointing", False)
    elif why == "own part":
        monkeypatch.setattr(Block, "__module__", "__main__")
    elif why == "hook":
        model.layers[0].inner.register_forward_hook(lambda module, args, output: None)
    elif why == "own forward":
        model.layers[0].inner.forward = lambda x: x.sin()
    elif why == "own forward of a class":
        monkeypatch.setattr(Block, "forward", lambda self, x: x.sin())
    elif why == "no library":
        monkeypatch.setattr(_Layer, "__module__", "train")
        monkeypatch.setattr(_Model, "__module__", "train")
    found = flags(model)
    own, names = seen(model)
    assert names == ""
    own.switch_on()
    assert flags(model) == found


def test_a_model_that_keeps_a_cache_in_training_is_left_alone_and_that_is_said() -> None:
    """Its library does without the cache where blocks are checkpointed. The program may read the
    cache, and attention may round otherwise where it reads keys and values elsewhere."""
    model, engine, times = _Model(), Engine(), IterationTimes()
    model.use_cache = True
    choice = choice_of(engine, times, OwnCheckpointing(FENCE))
    choice.iteration_ended(met=True, settled=True)
    model(torch.randn(4, 64))
    for _ in range(2):
        times.planned_s.extend([0.131] * MEASURED)
        choice.iteration_ended(met=True, settled=True)
    assert engine.asked[0] is True  # calls are tried in its place
    assert choice.words.endswith("config.use_cache = False allows it")
    assert not model.layers[0].gradient_checkpointing


@pytest.mark.parametrize("cache", [torch.zeros(2), (), object()], ids=["tensor", "empty", "any"])
def test_whatever_is_given_as_a_cache_counts(cache: Any) -> None:
    model = _Model()
    model.use_cache = cache
    own, names = seen(model)
    assert (names, bool(own.why_not)) == ("", True)


class _EncoderLayer(_Layer):
    """It is told of caches, and has none."""

    def forward(self, x: Tensor, **_others: Any) -> Tensor:
        return super().forward(x)


def test_the_blocks_that_keep_no_cache_are_checkpointed_of_a_model_that_keeps_one() -> None:
    """As in models that translate or transcribe."""
    model = _Model()
    model.use_cache = True
    model.layers[0], model.layers[2] = _EncoderLayer(), _EncoderLayer()
    found = flags(model)
    own, names = seen(model)
    assert (names, own.why_not) == ("_Model", "")
    own.switch_on()
    assert [layer.gradient_checkpointing for layer in model.layers] == [True, False, True]
    own.switch_off()
    assert flags(model) == found


@pytest.mark.parametrize(
    ("own_s", "words"),
    [
        (0.2, "the model's own checkpointing is on (_Model): 200 ms an iteration with"),
        (
            0.4,
            "tensors are recomputed by plans or offloaded on demand, as shapes keep changing: 400",
        ),
    ],
    ids=["faster", "slower"],
)
def test_where_shapes_keep_changing_own_checkpointing_is_compared_with_no_plan(
    own_s: float, words: str
) -> None:
    model, engine, times = _Model(), Engine(spilled=3), IterationTimes()
    choice = choice_of(engine, times, OwnCheckpointing(FENCE))
    choice.iteration_ended(met=True, settled=False, changing=True)
    model(torch.randn(4, 64))
    for duration_s in (0.3, own_s, 0.3):
        times.mixed_s.extend([duration_s] * (MIXED - 1))
        choice.iteration_ended(met=True, settled=False, changing=True)
        assert not choice.decided
        times.mixed_s.append(duration_s)
        choice.iteration_ended(met=True, settled=False, changing=True)
    assert choice.words.startswith(words)
    assert choice.words.endswith(
        "300 ms with tensors recomputed by plans or offloaded on demand [measured]"
    )
    assert model.layers[0].gradient_checkpointing == (own_s < 0.3)
    assert engine.asked == []  # calls are not tried
    assert choice.kept is None


def test_where_shapes_change_and_all_fits_nothing_is_compared() -> None:
    model, engine, times = _Model(), Engine(spilled=0), IterationTimes()
    choice = choice_of(engine, times, OwnCheckpointing(FENCE))
    choice.iteration_ended(met=True, settled=False, changing=True)
    model(torch.randn(4, 64))
    times.mixed_s.extend([0.1] * MIXED)
    choice.iteration_ended(met=True, settled=False, changing=True)
    assert not choice.decided
    assert not model.layers[0].gradient_checkpointing


def of_any_length(iterations: int) -> tuple[list[Tensor], nn.Module]:
    """The losses, where no two passes save tensors of the same sizes."""
    torch.manual_seed(0)
    net = _Model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    found = []
    for number in range(iterations):
        loss = net(torch.randn(300 + number * 37 % 211, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found, net


def test_a_run_whose_shapes_keep_changing_compares_and_says_so(tmp_path: Path) -> None:
    plain, _ = of_any_length(450)
    out = tmp_path / "run"
    undo = small_tensors(64 * 64 * 4)
    with kilter.govern(memory_budget="60%", recompute="auto", device="null", out=out):
        governed, net = of_any_length(450)
    undo()
    assert all(torch.equal(a, b) for a, b in zip(plain, governed, strict=True))
    memory = json.loads((out / "report.json").read_text())["memory"]
    assert "with the model's own checkpointing, " in memory["recompute_choice"]
    assert memory["recompute_choice"].endswith(
        "with tensors recomputed by plans or offloaded on demand [measured]"
    )
    assert not any(layer.gradient_checkpointing for layer in net.layers)
    assert memory["peak_bytes"] <= memory["budget_bytes"]
    assert memory["planned"] > 50  # by plans of passes that are a little larger


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("own_part", [False, True], ids=["of a library", "with an own part"])
def test_sharding_is_looked_through(
    own_part: bool, mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hooks into modules and gives them a class of its own."""
    if own_part:
        monkeypatch.setattr(Block, "__module__", "__main__")
    model = _Model()
    for layer in model.layers:
        for part in (layer.inner, layer, model)[: 3 if layer is model.layers[-1] else 2]:
            fully_shard(part, mesh=mesh)
    _, names = seen(model)
    assert names == ("" if own_part else "_Model")


@pytest.mark.parametrize("part", ["inner", "inner.layers.0"])
def test_what_is_sharded_runs_again_as_it_ran_before(part: str, mesh: Any) -> None:
    """PyTorch 2.8 and 2.11 cast nothing then, and 2.8 does not gather parameters that the backward
    of a second call has freed."""
    model = _Model()
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    for layer in model.layers:
        sharded = layer.get_submodule(part)
        fully_shard(sharded, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)

    def hooks() -> list[int]:
        return [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]

    def gradients() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        one, other = model(torch.randn(4, 64)), model(torch.randn(4, 64))
        (one.square().sum() + other.sin().sum()).backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    own, names = seen(model)
    assert names == "_Model"
    plain, found = gradients(), hooks()
    own.switch_on()
    assert all(map(torch.equal, gradients(), plain))
    own.switch_off()
    assert hooks() == found


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["unknown", "newer", "older"])
def test_timm_in_pytorchs_older_way_of_checkpointing_is_left_alone(
    reentrant: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _Model()
    model.layers[0].grad_checkpointing = False
    layers = {} if reentrant is None else {"use_reentrant_ckpt": lambda: reentrant}
    monkeypatch.setitem(sys.modules, "timm.layers", SimpleNamespace(**layers))  # type: ignore[arg-type]
    assert seen(model)[1] == ("_Model" if reentrant is False else "")


@pytest.mark.parametrize(
    ("turns_s", "own_stays"),
    [
        ((0.131, 0.08, 0.131), True),
        ((0.27, 0.24, 0.37, 0.32, 0.36), True),  # other programs make the machine slower
        ((0.27, 0.29, 0.30, 0.29, 0.28, 0.28, 0.27), False),
    ],
    ids=["own", "own after two turns", "never clear"],
)
@pytest.mark.parametrize("calls_s", [0.05, 0.5], ids=["calls", "no calls"])
def test_ways_take_turns_until_one_is_faster(
    turns_s: tuple[float, ...], own_stays: bool, calls_s: float
) -> None:
    model, times, engine = _Model(), IterationTimes(), Engine()
    choice = choice_of(engine, times, OwnCheckpointing(FENCE))
    choice.iteration_ended(met=True, settled=True)
    model(torch.randn(4, 64))

    def turn(duration_s: float) -> list[bool]:
        assert choice.words == ""
        times.planned_s.extend([duration_s] * MEASURED)
        choice.iteration_ended(met=True, settled=True)
        return [layer.gradient_checkpointing for layer in model.layers]

    covered = [True, True, False]  # 30 of 60 bytes have to go, and some more
    for number, duration_s in enumerate(turns_s[:-1]):
        assert turn(duration_s) == (covered if number % 2 == 0 else [False] * 3)
        # What is known of passes comes back with the way that it belongs to.
        assert engine.exchanged[1:] == [f"kinds {turn}" for turn in range(1, len(engine.exchanged))]
    assert engine.asked == []
    assert turn(turns_s[-1]) == [False] * 3  # calls, beside the faster of the two
    assert engine.asked == [True]
    layers = turn(calls_s)
    if own_stays:
        assert layers == covered
        layers = turn(turns_s[-2])
    calls = calls_s < min(turns_s)
    assert layers == (covered if own_stays and not calls else [False] * 3)
    assert engine.recomputes_calls is calls
    stays = "the model's own" if own_stays else "single operations are"
    assert choice.words.startswith("calls of modules are" if calls else stays)
    assert "ms with calls of modules" in choice.words
    assert choice.plain.peak_bytes == 77
    choice.close()
    assert model.layers[0].gradient_checkpointing is False


def test_calls_wait_for_what_records_them() -> None:
    """Single operations are measured before its compiler runs beside the program."""
    engine, times = Engine(), IterationTimes()
    asked = []
    built = iter([False] * 3 + [True])

    def can_record() -> bool:
        asked.append(len(times.planned_s))
        return next(built)

    choice = choice_of(engine, times, None, can_record)
    choice.iteration_ended(met=True, settled=True)
    assert asked == []
    for duration_s in (0.131, 9.0, 9.0, 9.0):
        assert engine.asked == []
        times.planned_s.extend([duration_s] * MEASURED)
        choice.iteration_ended(met=True, settled=True)
    assert engine.asked == [True]
    times.planned_s.extend([0.1] * MEASURED)
    choice.iteration_ended(met=True, settled=True)
    assert choice.words.endswith(
        "100 ms an iteration with calls of modules, 131 ms with single operations [measured]"
    )


@pytest.mark.parametrize("stall_s", [0.0, 0.01], ids=["nothing waits", "the plan waits for copies"])
def test_where_the_host_keeps_up_calls_are_not_tried(stall_s: float) -> None:
    """A plan expects 20 ms more than the plain iteration, and no more was measured."""
    engine, times = Engine(stall_s=stall_s), IterationTimes()
    times.plain_s.append(0.110)
    times.planned_s.extend([0.131] * MEASURED)
    built: list[bool] = []

    def can_record() -> bool:
        built.append(True)
        return True

    choice = choice_of(engine, times, None, can_record)
    choice.iteration_ended(met=True, settled=True)
    assert engine.asked == built == [True] * (stall_s > 0.0)
    assert choice.words.endswith("no pass waits for the host or for copies") is (stall_s == 0.0)


@pytest.mark.parametrize("stall_s", [0.0, 0.01], ids=["nothing waits", "the plan waits for copies"])
def test_where_the_host_keeps_up_the_models_own_checkpointing_is_tried_alone(
    stall_s: float,
) -> None:
    model, engine, times = _Model(), Engine(stall_s=stall_s), IterationTimes()
    times.plain_s.append(0.110)
    choice = choice_of(engine, times, OwnCheckpointing(FENCE))
    choice.iteration_ended(met=True, settled=True)
    model(torch.randn(4, 64))
    for duration_s in (0.131, 0.150, 0.131):
        times.planned_s.extend([duration_s] * MEASURED)
        choice.iteration_ended(met=True, settled=True)
    assert engine.asked == [True] * (stall_s > 0.0)
    assert choice.decided is (stall_s == 0.0)
    if choice.decided:
        assert choice.words == (
            "single operations are recomputed: 150 ms an iteration with the model's own "
            "checkpointing, 131 ms with single operations [measured]; "
            "with them no pass waits for the host or for copies"
        )


@pytest.mark.parametrize("plan_s", [0.081, 0.1], ids=["hidden", "the plan waits for copies"])
def test_checkpointing_is_tried_where_a_plan_that_only_offloads_waits(plan_s: float) -> None:
    model, engine, times = _Model(), Engine(recomputed=0, plan_s=plan_s), IterationTimes()
    choice = choice_of(engine, times, OwnCheckpointing(FENCE))
    choice.iteration_ended(met=True, settled=True)
    model(torch.randn(4, 64))
    times.planned_s.extend([0.131] * MEASURED)
    choice.iteration_ended(met=True, settled=True)
    assert model.layers[0].gradient_checkpointing is (plan_s == 0.1)


def kept(way: RecomputeWay, **changes: Any) -> KeptRecompute:
    found = KeptRecompute(
        day="2026-11-26", way=way, models="_Model", events="as ever", share=0.3, each_s=2e-4
    )
    return replace_fields(found, **changes)


def beginning_with(
    found: KeptRecompute, engine: Engine, own: OwnCheckpointing | None
) -> tuple[RecomputeChoice, IterationTimes, _Model]:
    """A job after the iteration that is looked at for models."""
    model, times = _Model(), IterationTimes()
    choice = choice_of(engine, times, own, kept=found)
    choice.iteration_ended(met=True, settled=True)
    if own is not None:
        model(torch.randn(4, 64))
        choice.iteration_ended(met=True, settled=True)
    return choice, times, model


def on(model: _Model) -> list[bool]:
    return [layer.gradient_checkpointing for layer in model.layers]


CHOSE = "an earlier run of this job chose that (2026-11-26) [measured]"


def test_the_checkpointing_that_an_earlier_run_chose_is_on_at_once() -> None:
    engine, found = Engine(), kept(RecomputeWay.OWN, each_s=0.0)
    choice, times, model = beginning_with(found, engine, OwnCheckpointing(FENCE))
    assert on(model) == [True, False, False]
    times.planned_s.extend([9.9] * MEASURED)  # nothing is compared with it
    choice.iteration_ended(met=True, settled=True)
    assert choice.words == f"the model's own checkpointing is on (_Model): {CHOSE}"
    assert (choice.kept, engine.asked, on(model)) == (found, [], [True, False, False])


def test_calls_that_an_earlier_run_chose_are_recomputed_at_once() -> None:
    engine, calls = Engine(), (KeptCalls("as ever", (KeptCall("Block", 1, 2, (3,)),), 9, 0.1, 0.1),)
    found = kept(RecomputeWay.CALLS, models="", calls=calls)
    choice, times, _ = beginning_with(found, engine, None)
    assert (engine.asked, engine.each_s, engine.kept) == ([True], [2e-4], [calls])
    times.planned_s.extend([9.9] * MEASURED)
    choice.iteration_ended(met=True, settled=True)
    assert choice.words == f"calls of modules are recomputed where they pay: {CHOSE}"


def test_single_operations_that_an_earlier_run_chose_stay() -> None:
    engine, found = Engine(), kept(RecomputeWay.OPERATIONS, models="", each_s=0.0)
    choice, _, _ = beginning_with(found, engine, None)
    assert choice.words == f"single operations are recomputed: {CHOSE}"
    assert engine.asked == []


@pytest.mark.parametrize("way", [RecomputeWay.OPERATIONS, RecomputeWay.OWN])
def test_plans_count_the_host_at_once_as_in_an_earlier_run(way: RecomputeWay) -> None:
    engine = Engine()
    choice, times, _ = beginning_with(kept(way), engine, OwnCheckpointing(FENCE))
    times.planned_s.extend([0.131] * MEASURED)
    choice.iteration_ended(met=True, settled=True)
    assert choice.decided
    assert (engine.asked, engine.each_s) == ([False], [2e-4])


def test_an_earlier_choice_does_not_wait_for_a_plan() -> None:
    """It is taken once a pass is known to be as it was then."""
    engine, calls = Engine(), (KeptCalls("as ever", (KeptCall("Block", 1, 2, (3,)),), 9, 0.1, 0.1),)
    choice = choice_of(
        engine, IterationTimes(), kept=kept(RecomputeWay.CALLS, models="", calls=calls)
    )
    choice.iteration_ended(met=False, settled=False)
    engine.fingerprint = "a first pass, unlike the others"
    choice.iteration_ended(met=True, settled=False)
    assert engine.asked == []
    engine.fingerprint = "as ever"
    choice.iteration_ended(met=True, settled=False)
    assert (engine.asked, engine.kept) == ([True], [calls])


@pytest.mark.parametrize("changes", [{"models": "Other"}, {"events": "others"}])
def test_another_model_or_pass_is_compared_as_ever(changes: dict[str, str]) -> None:
    engine, found = Engine(), kept(RecomputeWay.OWN, **changes)
    choice, times, model = beginning_with(found, engine, OwnCheckpointing(FENCE))
    assert on(model) == [False] * 3
    times.planned_s.extend([0.131] * MEASURED)
    choice.iteration_ended(met=True, settled=True)
    assert on(model) == [True, True, False]  # by what this run has seen


def test_where_no_call_is_worth_it_any_more_the_ways_are_compared() -> None:
    engine, found = Engine(worth=False), kept(RecomputeWay.CALLS)
    choice, times, model = beginning_with(found, engine, OwnCheckpointing(FENCE))
    choice.iteration_ended(met=True, settled=True)
    assert (engine.asked, choice.words) == ([True, False], "")
    for duration_s in (0.131, 0.08, 0.131):
        times.planned_s.extend([duration_s] * MEASURED)
        choice.iteration_ended(met=True, settled=True)
    choice.iteration_ended(met=True, settled=True)
    words = "the model's own checkpointing is on (_Model): 80 ms an iteration with"
    assert choice.words.startswith(words)
    assert choice.words.endswith("no call of a module is worth recomputing")
    assert on(model) == [True, True, False]
    assert choice.kept == kept(
        RecomputeWay.OWN, day=date.today().isoformat(), share=0.6, each_s=0.0
    )


def test_where_the_checkpointing_gets_no_plan_any_more_the_ways_are_compared() -> None:
    engine = Engine(planned=False)
    choice, times, model = beginning_with(kept(RecomputeWay.OWN), engine, OwnCheckpointing(FENCE))
    for _ in range(PATIENCE):
        assert on(model) == [True, False, False]
        choice.iteration_ended(met=True, settled=True)
    assert (choice.words, on(model)) == ("", [False] * 3)
    times.planned_s.extend([0.131] * MEASURED)
    choice.iteration_ended(met=True, settled=True)
    assert on(model) == [True, True, False]


def test_what_was_not_measured_is_not_kept() -> None:
    choice = chosen(Engine(tensors=MOST_TENSORS + 1), 0.1)
    assert choice.decided
    assert choice.kept is None
    measured = chosen(Engine(), 0.131, 0.092).kept
    assert measured is not None
    assert (measured.way, measured.models) == (RecomputeWay.CALLS, "")


def test_passes_that_were_set_aside_are_planned_when_they_come_back() -> None:
    """Without being watched again, and for the budget that is in force by then."""
    torch.manual_seed(0)
    plain_model = _Model()
    model = copy.deepcopy(plain_model)
    plain = [loss for seed in range(4) for loss in trained(plain_model, 8, seed)]
    own, names = seen(model)
    assert names == "_Model"
    size_bytes = 512 * 64 * 4
    link = Link(to_host_bytes_per_s=1e8, to_device_bytes_per_s=1e8, both_bytes_per_s=1e8)
    with Swapper(
        SteadyStandIn(), budget_bytes=14 * size_bytes, link=link, min_bytes=size_bytes
    ) as swapper:
        governed = trained(model, 8, 0)
        assert swapper.planned
        own.switch_on()
        operations = swapper.exchange(None)
        governed += trained(model, 8, 1)
        assert swapper.planned
        watched = swapper.report().watched
        own.switch_off()
        checkpointed = swapper.exchange(operations)
        governed += trained(model, 8, 2)
        assert (swapper.report().planned, swapper.report().watched) == (
            swapper.report().passes - watched,
            watched,
        )
        own.switch_on()
        swapper.exchange(checkpointed)
        swapper.limit(13 * size_bytes)
        own.switch_off()
        swapper.exchange(operations)
        governed += trained(model, 8, 3)
        assert swapper.report().watched == watched
        assert swapper.report().plans[0].budget_bytes <= 13 * size_bytes
    assert all(torch.equal(a, b) for a, b in zip(plain, governed, strict=True))
