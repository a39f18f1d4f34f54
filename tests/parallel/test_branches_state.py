"""What a prepared form was made from: every change that would make it wrong is noticed."""

import functools
import types

import pytest
import torch
from torch import nn

from kilter.core.errors import UsageError
from kilter.parallel import parallel
from kilter.parallel.checks import tf32_allowed
from kilter.parallel.loop import SerialLoop, assembler, signature, why_serial
from kilter.parallel.watched import WatchedBranches

SCALE = 2.0


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.factors = [1.0, 2.0]
        self.names = {"a": 1}
        self.number = 1000.5
        self.register_buffer("at", torch.tensor([1, 0]))

    def forward(self, x):
        return self.inner(x) * self.number * SCALE


def _delete(module):
    del module.number


CHANGES = {
    "train": lambda m: m.eval(),
    "a number": lambda m: setattr(m, "number", 3.0),
    "its type": lambda m: setattr(m, "number", True),
    "a tensor instead of a number": lambda m: setattr(m, "number", torch.tensor([1.0, 2.0])),
    "removed": _delete,
    "added": lambda m: setattr(m, "forward", lambda x: x),
    "an item of a list": lambda m: m.factors.__setitem__(1, 5.0),
    "one more item": lambda m: m.factors.append(1.0),
    "an item of a dictionary": lambda m: m.names.update(a=2),
    "a weight": lambda m: setattr(m.inner[0], "weight", nn.Parameter(torch.ones(4, 3))),
    "its memory": lambda m: setattr(m.inner[0].weight, "data", torch.ones(4, 3)),
    "no bias": lambda m: m.inner[0].register_parameter("bias", None),
    "a module": lambda m: m.inner.__setitem__(0, nn.Linear(3, 4)),
    "one more module": lambda m: m.inner.append(nn.ReLU()),
    "a hook": lambda m: m.inner[1].register_forward_hook(lambda *_: None),
    "a hook before": lambda m: m.inner[1].register_forward_pre_hook(lambda *_: None),
    "a hook of the backward": lambda m: m.inner[1].register_full_backward_hook(lambda *_: None),
    "an option of a layer": lambda m: setattr(m.inner[1], "eps", 0.5),
    "a watched table": lambda m: m.at.add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("versions", [True, False])
def test_changes_are_noticed(monkeypatch, change, versions):
    if not versions:  # a framework that keeps none
        monkeypatch.setattr("kilter.parallel.watched.dict_version", None)
    module = Scaled()
    state = WatchedBranches([module])
    state.watch_values([module.at])
    assert state.changed() is None
    with torch.no_grad():
        CHANGES[change](module)
    assert state.changed() is not None


def test_what_changes_nothing_is_no_change():
    module = Scaled()
    state = WatchedBranches([module])
    with torch.no_grad():
        module.inner[0].weight.mul_(2)
    module.load_state_dict(Scaled().state_dict())
    module.number = float("1000.5")  # an equal number, another object
    assert state.changed() is None
    assert state.changed() is None
    module.number = 1000.0
    assert "number" in state.changed()


def test_functions_are_watched_through_globals_closures_and_partials(monkeypatch):
    held = [nn.Linear(2, 2)]
    layer = nn.Linear(2, 2)

    def function(x, extra=held):
        return layer(extra[0](x)) * SCALE

    state = WatchedBranches([functools.partial(function, extra=held)])
    assert len(state.modules) == 2
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert "SCALE" in state.changed()
    state = WatchedBranches([function])
    layer = nn.Linear(2, 2)
    assert "captured" in state.changed()


# --- what a class reads beside its own attributes -------------------------------------------------

TABLES = {"flip": torch.tensor([3, 2, 1, 0]), "swap": [torch.tensor([1, 0, 3, 2])]}
WEIGHT = torch.nn.Parameter(torch.ones(4), requires_grad=False)
tables = types.ModuleType("tables_of_a_test")
tables.turn = torch.tensor([1, 2, 3, 0])
tables.unused = torch.tensor([0])


def looked_up(x):
    return x[tables.turn]


class Helper:
    table = torch.tensor([2, 3, 0, 1])

    def scaled(self, x):
        return x * SCALE


def with_closure(table):
    class Tables(Helper, nn.Module):
        """Reads tables in a global dictionary, a closure, a class attribute and a Python module."""

        def forward(self, x):
            (flipped,) = [x[t] for name, t in TABLES.items() if name == "flip"]
            return self.moved(flipped)[TABLES["swap"][0]]

        def moved(self, x):
            return self.scaled(looked_up(x)[table][self.table]) * WEIGHT

    return Tables


CHANGES_BESIDE = {
    "an item of a global dictionary": lambda m: m.setitem(TABLES, "flip", torch.arange(4)),
    "an item of a list in it": lambda m: TABLES["swap"].__setitem__(0, torch.arange(4)),
    "one more item": lambda m: m.setitem(TABLES, "more", torch.arange(4)),
    "the dictionary": lambda m: m.setitem(globals(), "TABLES", {**TABLES, "flip": torch.arange(4)}),
    "a global weight": lambda m: m.setitem(globals(), "WEIGHT", torch.ones(4) * 2),
    "a global number": lambda m: m.setitem(globals(), "SCALE", 3.0),
    "a global function": lambda m: m.setitem(globals(), "looked_up", lambda x: x),
    "a class attribute": lambda m: m.setattr(Helper, "table", torch.arange(4)),
    "an attribute of a Python module": lambda m: m.setattr(tables, "turn", torch.arange(4)),
    "a global table in place": lambda m: TABLES["flip"].copy_(torch.tensor([0, 1, 2, 3])),
    "a captured table in place": lambda m: CAPTURED.copy_(torch.tensor([0, 1, 2, 3])),
}
CAPTURED = torch.tensor([0, 2, 1, 3])


@pytest.mark.parametrize("change", CHANGES_BESIDE)
@pytest.mark.parametrize("versions", [True, False])
def test_tables_outside_modules_are_watched_like_attributes(monkeypatch, change, versions):
    if not versions:
        monkeypatch.setattr("kilter.parallel.watched.dict_version", None)
    before = TABLES["flip"].clone(), CAPTURED.clone(), TABLES["swap"][0]
    module, x = with_closure(CAPTURED)(), torch.randn(4)
    try:
        with torch.no_grad(), parallel([module, torch.neg], mode="folded") as fast:
            for _ in range(2):
                assert torch.equal(fast(x)[0], module(x))
            assert fast.plan().chosen == "folded", fast.explain()
            prepared = fast._last
            CHANGES_BESIDE[change](monkeypatch)
            for _ in range(2):
                assert torch.equal(fast(x)[0], module(x))
            assert fast._last is not prepared
            assert fast.plan().chosen == "folded", fast.explain()
    finally:
        TABLES["flip"].copy_(before[0])
        CAPTURED.copy_(before[1])
        TABLES["swap"][0] = before[2]


def test_names_that_no_branch_reads_may_change(monkeypatch):
    module, x = with_closure(CAPTURED)(), torch.randn(4)
    with torch.no_grad(), parallel([module, torch.neg], mode="folded") as fast:
        fast(x)
        prepared = fast._last
        monkeypatch.setitem(globals(), "UNUSED", 1)
        monkeypatch.setattr(tables, "unused", torch.tensor([1]))
        fast(x)
        assert fast._last is prepared


@functools.lru_cache
def hidden():
    return torch.tensor([1, 0])


def test_a_tensor_that_cannot_be_watched_is_named_with_its_line():
    def branch(x):
        table = hidden()
        return x[table] * 2  # reads it

    with torch.no_grad(), parallel([branch, torch.neg], mode="folded") as fast:
        fast(torch.ones(2))
        reason = fast.plan().reason
    assert reason.code == "unwatched_tensor"
    assert reason.subject == "int64 tensor of shape [2]"
    assert "int64 tensor of shape [2]" in reason.text
    assert "test_branches_state.py" in reason.text
    assert "return x[table] * 2" in reason.text


def test_freezing_counts_only_where_gradients_do():
    module = Scaled()
    plain, training = WatchedBranches([module]), WatchedBranches([module])
    training.watch_gradients()
    module.inner[0].weight.requires_grad_(False)
    assert plain.changed() is None
    assert "frozen" in training.changed()


# --- what a call is told apart by -----------------------------------------------------------------


def test_calls_that_differ_have_different_signatures():
    x = torch.ones(2, 3)
    calls = [
        signature([x], None, None),
        signature([x.t()], None, None),
        signature([x.double()], None, None),
        signature([x, 2], None, None),
        signature([x, 2.0], None, None),
        signature([x, True], None, None),
        signature([x], None, (True,)),
    ]
    with torch.autocast("cpu", torch.bfloat16):
        calls.append(signature([x], None, None))
    assert len(set(calls)) == len(calls)
    assert signature([torch.zeros(2, 3)], None, None) == calls[0]


def test_either_way_of_allowing_tf32_is_another_signature():
    """Since 2.9 there are two, and the older one raises once the newer one was used."""
    x = torch.ones(2)
    matmul = torch.backends.cuda.matmul
    before, plain = torch.get_float32_matmul_precision(), signature([x], None, None)
    try:
        torch.set_float32_matmul_precision("high")
        assert tf32_allowed()[0]
        assert signature([x], None, None) != plain
        torch.set_float32_matmul_precision("highest")
        if hasattr(matmul, "fp32_precision"):
            matmul.fp32_precision = "tf32"
            assert tf32_allowed()[0]
            assert signature([x], None, None) != plain
            matmul.fp32_precision = "ieee"
            assert signature([x], None, None) == plain
    finally:
        torch.set_float32_matmul_precision(before)


def test_what_stands_in_the_way_is_said():
    x = torch.ones(2)

    class Other(torch.Tensor):
        pass

    assert why_serial([x, 1, None], [x]) is None
    assert "subclass" in why_serial([x.as_subclass(Other)], []).text
    assert "object" in why_serial([object()], []).text
    with torch.device("cpu"):
        assert "mode" in why_serial([x], [x]).text


@pytest.mark.parametrize("register", ["forward_pre_hook", "forward_hook", "full_backward_hook"])
def test_hooks_for_all_modules_are_called_by_the_loop(register):
    """A replay calls no modules; so while such a hook is there, the loop runs."""
    module, seen = torch.nn.Linear(3, 3), []
    fast = parallel([module, torch.neg], mode="folded")
    x = torch.ones(2, 3)
    with torch.no_grad():
        fast(x)
        add = getattr(torch.nn.modules.module, f"register_module_{register}")
        handle = add(lambda *_: seen.append(1))
        try:
            fast(x)
            assert "hooks for all modules" in fast.explain()
        finally:
            handle.remove()
        assert bool(seen) == ("forward" in register)
        fast(x)
        assert "hooks for all modules" not in fast.explain()


def test_kilters_own_observers_do_not_stop_a_replay():
    def ours(*_):
        pass

    ours.__module__ = "kilter.observe.profiler_window"
    x = torch.ones(2)
    handle = torch.nn.modules.module.register_module_forward_hook(ours)
    try:
        assert why_serial([x], [x]) is None
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "made",
    [7, (7, 8), [7, (8,)], {"b": 7, "a": (8, "s", None)}, (7,), (1.5, 7)],
)
def test_results_are_assembled_as_the_loop_returns_them(made):
    leaves, spec = torch.utils._pytree.tree_flatten(made)
    const = {i: leaf for i, leaf in enumerate(leaves) if type(leaf) is not int}
    results = [leaf for leaf in leaves if type(leaf) is int]
    found = assembler(spec, const)(results)
    assert found == made
    assert type(found) is type(made)


def test_a_loop_is_a_list_or_one_callable():
    assert SerialLoop.of([abs, abs])(-1) == (1, 1)
    assert SerialLoop.of([abs, max])(-1, (2, 3)) == (1, 3)
    assert SerialLoop.of(abs)(-2) == 2
    assert SerialLoop.of(nn.ModuleList([nn.Identity(), nn.Identity()]))(3) == (3, 3)

    class Summed(nn.ModuleList):
        def forward(self, x):
            return sum(part(x) for part in self)

    assert SerialLoop.of(Summed([nn.Identity(), nn.Identity()]))(3) == 6
    with pytest.raises(UsageError, match="2 branches take 2 inputs"):
        SerialLoop.of([abs, abs])(1, 2, 3)
