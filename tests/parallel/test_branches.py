"""`parallel` on the host: same order, same numbers; right or serial with the reason."""

import copy
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kilter.app.bench.branch_workloads import (
    MAPS,
    TOKENS,
    WINDOWS,
    WORKLOADS,
    Encoder,
    WindowHead,
    bias_size,
    build,
    cyclic_table,
    cyclic_weight,
    padding_mask,
    relative_index,
    shift_of,
    window_table,
)
from kilter.core.errors import UsageError
from kilter.parallel import parallel
from kilter.parallel.calls import Parallel
from kilter.parallel.loop import SerialLoop


@pytest.fixture(autouse=True)
def _one_thread_without_grad():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def linears(*widths: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, w), nn.ReLU(), nn.Linear(w, 4)) for w in widths]


def serial(branches, *inputs):
    inputs = inputs if len(inputs) == len(branches) else inputs * len(branches)
    return tuple(b(x) for b, x in zip(branches, inputs, strict=True))


def same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# --- the encoder that the notes describe, against the golden numbers ------------------------------


def test_tables_are_the_published_ones():
    assert TOKENS == 704
    assert [bias_size(w) for w in (1, 2, 4)] == [1407, 1317, 1302]
    assert cyclic_weight(2).reshape(2, 2).tolist() == [[0.0, -0.5], [-0.5, -0.75]]
    u = [1, 0.875, 0.75, 0.625, 0.5, 0.625, 0.75, 0.875]
    assert (cyclic_weight(8).reshape(8, 8)[0] + 1).tolist() == u
    mask = padding_mask()
    masked = [int(mask[window_table(w, 0)].all(-1).sum()) for w in (1, 2, 4, 8)]
    assert masked == [216, 48, 12, 3]
    assert sum(p.numel() for p in Encoder().parameters()) == 7_894_458


@pytest.mark.parametrize("head", range(8))
def test_window_table_follows_its_formula(head):
    w, s = WINDOWS[head], shift_of(head)
    table, row, base = window_table(w, s), 0, 0
    for number, side in enumerate(MAPS):
        shift = s if number == 2 else 0
        for big in range(side // w):
            for across in range(side // w):
                expected = [
                    base + ((big * w + a + shift) % side) * side + (across * w + b + shift) % side
                    for a in range(w)
                    for b in range(w)
                ]
                assert table[row].tolist() == expected
                row += 1
        base += side * side
    assert row == TOKENS // w**2


@pytest.mark.parametrize("head", range(8))
def test_head_is_the_seven_lines_of_its_definition_bit_for_bit(head):
    w, shift, n = WINDOWS[head], shift_of(head), WINDOWS[head] ** 2
    q, k, v = torch.randn(3, TOKENS, 32)
    mask = padding_mask()
    bias = None
    if w < 8:
        bias = torch.randn(bias_size(w))[relative_index(w)]
    p, c = window_table(w, shift), cyclic_table(w, shift)
    scores = q[p].reshape(-1, 32 * n) @ k[c].reshape(TOKENS, -1).T
    if w > 1:
        scores = (scores + cyclic_weight(w).repeat(TOKENS // n)) / n
    padded = mask[window_table(w, 0)].all(-1).repeat_interleave(n)
    scores = scores.masked_fill(padded[None], float("-inf"))
    if bias is not None:
        scores = scores + bias
    found = (scores.softmax(-1) @ v[c].reshape(TOKENS, -1)).reshape(TOKENS, 32)
    expected = torch.empty_like(found)
    expected[p.reshape(-1)] = found
    head_module = WindowHead(w, shift, host_tables=False)
    assert torch.equal(head_module(q, k, v, mask, bias), expected)


@pytest.mark.parametrize("published", [False, True])
def test_branches_of_a_whole_encoder_are_found_and_equal(published):
    """One layer as published, host tables and all: eight heads are four pairs of equal branches."""
    encoder = Encoder(layers=1, host_tables=published, rebuild=published).eval()
    x = torch.randn(TOKENS, 1, 256)
    with parallel(encoder, mode="folded") as fast:
        first, again = fast(x, padding_mask()), fast(x, padding_mask())
        plan = fast.plan()
    assert plan.chosen == "folded", plan
    assert plan.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    torch.testing.assert_close(first, again, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(first, encoder(x, padding_mask()), rtol=0, atol=0)


def test_the_fused_form_is_found_in_the_loop_and_is_the_loop():
    """Without a GPU the definition runs; the form is found in the trace, whatever the class."""
    encoder = Encoder(layers=1).eval()
    x, mask = torch.randn(TOKENS, 1, 256), padding_mask()
    with parallel(encoder, mode="fused") as fast:
        first, again = fast(x, mask), fast(x, mask)
        assert fast.plan().chosen == "fused", fast.explain()
    torch.testing.assert_close(first, again, rtol=1e-5, atol=1e-5)


# --- calling --------------------------------------------------------------------------------------

MODES = ("auto", "serial", "threads", "folded")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("widths", [(3,), (3, 7), (8, 8, 8), (5, 9, 5, 16)])
def test_same_as_the_loop_in_the_same_order(mode, widths):
    branches = linears(*widths)
    with parallel(branches, mode=mode) as fast:
        for _ in range(3):
            inputs = [torch.randn(2, 8) for _ in widths]
            same(fast(*inputs), serial(branches, *inputs))
        shared = torch.randn(2, 8)
        same(fast(shared), serial(branches, shared))


@pytest.mark.parametrize("mode", MODES)
def test_nested_arguments_and_results_come_back_as_they_are(mode):
    def one(x, scale):
        return {"y": x * scale, "name": "one", "none": None}

    def two(x):
        return [x + 1, (x - 1, 3)]

    with parallel([one, two], mode=mode) as fast:
        for _ in range(2):
            x = torch.randn(3)
            found = fast((x, 2.0), x)
            assert found[0]["name"] == "one"
            assert found[0]["none"] is None
            assert torch.equal(found[0]["y"], x * 2)
            assert torch.equal(found[1][0], x + 1)
            assert found[1][1][1] == 3


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x, *, mask=None, scale=1.0):
        found = self.one(x) * scale + self.two(x) * scale
        return found if mask is None else found * mask


@pytest.mark.parametrize("mode", MODES)
def test_arguments_by_name_are_given_to_every_branch(mode):
    branches, x, mask = [Named(), Named()], torch.randn(2, 8), torch.rand(2, 4)
    with parallel(branches, mode=mode) as fast, parallel(branches[0], mode=mode) as whole:
        for named in ({"mask": mask}, {"scale": 2.0}, {"scale": 3.0}, {"mask": mask, "scale": 2.0}):
            for _ in range(2):
                same(fast(x, **named), [b(x, **named) for b in branches])
                same([whole(x=x, **named)], [branches[0](x, **named)])
        with pytest.raises(TypeError, match="unexpected"):
            fast(x, other=1)


def test_inside_a_model_the_forward_of_a_part_is_made_parallel():
    """Names of weights, saving, copying and moving stay as they were."""
    model = nn.Sequential(Named(), nn.Linear(4, 2)).eval()
    x = torch.randn(2, 8)
    names, expected = list(model.state_dict()), model(x)
    model[0].forward = parallel(model[0].forward, mode="folded")
    for _ in range(2):
        torch.testing.assert_close(model(x), expected)
    assert model[0].forward.plan().chosen == "folded"
    assert list(model.state_dict()) == names
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].one.weight.zero_()
    for _ in range(2):
        torch.testing.assert_close(model(x), expected)
        assert not torch.allclose(other(x), expected)
    model.double()
    torch.testing.assert_close(model(x.double()), expected.double(), rtol=1e-5, atol=1e-5)


def test_a_copy_and_what_was_saved_are_prepared_anew():
    branches, x = linears(5, 5), torch.randn(2, 8)
    with parallel(branches, mode="folded", max_graphs=3) as fast:
        fast(x)
        for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            assert other.plan() is None
            assert other.options == fast.options
            same(other(x), fast(x))
            assert other.loop.branches[0] is not branches[0]


def test_only_what_comes_back_is_prepared_again_and_again():
    """A number that is another one at every call, beside a call that stays the same."""
    branches = [lambda x, k: x * k, lambda x, k: x * k]
    x = torch.randn(4)
    with parallel(branches, mode="folded") as fast:
        for step in range(60):
            fast((x, 0.5), (x, 0.5))
            assert fast.plan().chosen == "folded"
            k = float("nan") if step % 2 else 1.0 + step
            a, b = fast((x, k), (x, k))
            torch.testing.assert_close((a, b), (x * k, x * k), equal_nan=True)
        assert 4 < len(fast._prepared) <= 9
        assert "have served no call" in fast.explain()
        fast((x, 0.5), (x, 0.5))
        assert "have served no call" not in fast.explain()


def test_an_attribute_that_changes_before_every_call_does_not_cost_a_preparation_each():
    scaled = Named()
    scaled.step = 0
    made = []
    with parallel(scaled, mode="folded") as fast:
        for scaled.step in range(40):
            x = torch.randn(2, 8)
            torch.testing.assert_close(fast(x), scaled(x))
            made.append(fast._unserved)
    assert max(made) <= 6


def test_new_shapes_dtypes_and_scalars_are_signatures_of_their_own():
    branches = [lambda x, k: x * k, lambda x, k: x + k]
    with parallel(branches, mode="folded") as fast:
        for x in (torch.ones(2), torch.ones(3), torch.ones(2, dtype=torch.float64)):
            for k in (2, 3, 2.0):
                a, b = fast((x, k), (x, k))
                assert torch.equal(a, x * k)
                assert torch.equal(b, x + k)


def test_branches_raise_what_they_raise_and_go_on():
    def picky(x):
        if x.shape[0] == 3:
            raise KeyError("three")
        return x

    for mode in MODES:
        with parallel([picky, torch.neg], mode=mode) as fast:
            fast(torch.ones(2))
            with pytest.raises(KeyError, match="three"):
                fast(torch.ones(3))
            same(fast(torch.ones(2)), (torch.ones(2), -torch.ones(2)))


def test_branches_that_write_to_what_others_read_do_not_run_at_once():
    """Callables in threads are not traced: what they write to is seen by its version."""
    table, norm = torch.zeros(3), nn.BatchNorm1d(3)

    def writes(x):
        return x.mul_(2)

    def counts(x):
        table.add_(1)
        return x + table

    for branches in ([writes, torch.neg], [counts, lambda x: x * table], [norm, norm]):
        with parallel(branches, mode="threads") as fast:
            for _ in range(2):
                fast(torch.ones(2, 3))
            assert "writes" in fast.plan().reason.text
    own = [nn.BatchNorm1d(3), nn.BatchNorm1d(3)]
    with parallel(own, mode="threads") as fast:
        for _ in range(3):
            fast(torch.randn(4, 3))
        assert fast.plan().chosen == "threads"
        assert int(own[0].num_batches_tracked) == 3


def test_threads_finish_before_an_error_is_passed_on():
    done = threading.Event()
    calls = []

    def fails(x):
        if calls:
            raise ValueError("first")
        calls.append(1)
        return x

    def slow(x):
        done.wait(0.05)
        done.set()
        return x

    with parallel([fails, slow], mode="threads") as fast:
        fast(torch.ones(1))
        done.clear()
        with pytest.raises(ValueError, match="first"):
            fast(torch.ones(1))
        assert done.is_set()


@pytest.mark.parametrize("mode", ["folded", "threads"])
def test_calls_of_several_threads_while_it_is_closed_and_changed(mode):
    branches, wrong = linears(5, 5, 5), []
    fast, done = parallel(branches, mode=mode, max_graphs=2), threading.Event()

    def calls(rows):
        with torch.no_grad():
            while not done.is_set():
                x = torch.randn(rows, 8)
                try:
                    same(fast(x), serial(branches, x))
                except (AssertionError, RuntimeError, LookupError, AttributeError) as error:
                    wrong.append(error)

    threads = [threading.Thread(target=calls, args=(1 + n % 3,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for branches[0].step in range(30):
        fast.close()
        done.wait(0.02)
    done.set()
    for thread in threads:
        thread.join()
    fast.close()
    assert not wrong


def test_a_close_by_another_thread_during_a_preparation_harms_no_call():
    class Closed(Parallel):
        """As if another thread closed it right after each write."""

        _state = property(lambda self: None, lambda self, seen: None)

    branches, x = linears(5, 5, 5), torch.ones(2, 8)
    fast = Closed(SerialLoop.of(branches), parallel(branches, mode="folded").options)
    for _ in range(3):
        same(fast(x), serial(branches, x))
    assert fast.plan().chosen == "folded"


def test_threads_have_the_callers_modes():
    def modes(x):
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            (x @ x).dtype,
        )

    with parallel([modes, modes], mode="threads") as fast:
        x = torch.ones(2, 2)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                fast(x)
                assert {r[0] for r in fast(x)} == {grad}
        with torch.inference_mode():
            fast(x)
            assert {r[1] for r in fast(x)} == {True}
        with torch.autocast("cpu", torch.bfloat16):
            fast(x)
            assert {r[2:] for r in fast(x)} == {(True, torch.bfloat16)}


def test_threads_leave_the_number_of_intra_op_threads_alone():
    torch.set_num_threads(2)
    with parallel(linears(3, 4), mode="threads") as fast:
        fast(torch.randn(2, 8))
        fast(torch.randn(2, 8))
        assert torch.get_num_threads() == 2


def test_wrong_use_is_said():
    with pytest.raises(UsageError, match="not one of"):
        parallel([torch.neg], mode="faster")
    with pytest.raises(UsageError, match="callables"):
        parallel([])
    with pytest.raises(UsageError, match="max_graphs"):
        parallel([torch.neg], max_graphs=0)
    with pytest.raises(UsageError, match="3 branches take 3 inputs"):
        parallel([torch.neg] * 3)(torch.ones(1), torch.ones(1))


# --- right or refused -----------------------------------------------------------------------------


def refused(branches, *inputs, mode="folded"):
    fast = parallel(branches, mode=mode)
    fast(*inputs)
    plan = fast.plan()
    assert plan.chosen == "serial"
    return plan.reason.text


def test_impure_branches_run_serially_with_the_reason():
    x = torch.ones(3)
    held = torch.zeros(3)
    scale = torch.tensor(2.0)
    assert "random" in refused([nn.Dropout(0.5), torch.neg], x)
    assert "writes" in refused([lambda x: x.add_(1), torch.neg], x.clone())
    assert "writes" in refused([lambda x: held.add_(x), torch.neg], x)
    assert "read on the host (item)" in refused([lambda x: x * scale.item(), torch.neg], x)
    assert "test_branches.py" in refused([lambda x: x * scale.item(), torch.neg], x)
    assert "batchnorm.py" in refused([nn.BatchNorm1d(3), torch.neg], torch.randn(2, 3))
    assert "only one" in refused([torch.neg], x, mode="threads")
    assert "read on the host (__bool__)" in refused([lambda x: x if x.sum() > 0 else -x] * 2, x)
    assert "depends on data" in refused([lambda x: x[x > 0], torch.neg], x)
    assert "a SimpleNamespace" in refused([lambda x: SimpleNamespace(y=x), torch.neg], x)


def test_dropout_stays_random_and_batch_norm_counts_once():
    fast = parallel([nn.Dropout(0.5), nn.Identity()], mode="auto")
    x = torch.ones(1000)
    assert not torch.equal(fast(x)[0], fast(x)[0])
    norm = nn.BatchNorm1d(4)
    fast = parallel([norm, nn.Identity()], mode="auto")
    for _ in range(3):
        fast(torch.randn(5, 4))
    assert int(norm.num_batches_tracked) == 3


def test_threads_draw_no_random_numbers_at_once():
    """They would draw them in any order: another result in every run, whatever the seed."""
    branches = [nn.Dropout(0.5), nn.Dropout(0.3), nn.Identity()]
    x = torch.ones(1000)
    with parallel(branches, mode="threads") as fast:
        torch.manual_seed(0)
        ours = [fast(x) for _ in range(3)]
        assert "draws random numbers" in fast.plan().reason.text
    torch.manual_seed(0)
    for results in ours:
        same(results, serial(branches, x))


def test_a_module_with_state_in_python_is_not_run_more_often_than_called():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x + self.calls

    fast = parallel([Counts(), torch.neg])
    x = torch.zeros(1)
    assert [float(fast(x)[0]) for _ in range(5)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert "attribute 'calls' changed" in fast.explain()


def test_lazy_modules_settle_and_are_prepared():
    fast = parallel([nn.LazyLinear(4), nn.LazyLinear(4)], mode="folded")
    x = torch.randn(2, 8)
    first = fast(x)
    same(fast(x), first)
    same(fast(x), first)
    assert fast.plan().chosen == "folded"


def test_changed_weights_are_seen_however_they_change():
    branches = linears(6, 6, 6)
    x = torch.randn(2, 8)
    with parallel(branches, mode="folded") as fast:
        same(fast(x), serial(branches, x))
        assert fast.plan().chosen == "folded"
        changes = [
            lambda: branches[1][0].weight.mul_(2),
            lambda: branches[1][0].weight.data.mul_(0.5),
            lambda: setattr(branches[0][2], "weight", nn.Parameter(torch.randn(4, 6))),
            lambda: branches[2].load_state_dict(linears(6, 6, 6)[0].state_dict()),
            lambda: branches[0].__setitem__(1, nn.Tanh()),
            lambda: branches[1].register_forward_hook(lambda m, i, o: o + 1),
            lambda: branches[1].append(nn.Linear(4, 4)),
            lambda: setattr(branches[2][0].weight, "data", torch.randn(6, 8)),
        ]
        for change in changes:
            change()
            same(fast(x), serial(branches, x))
            same(fast(x), serial(branches, x))
    optimizer_branches = linears(5, 5)
    with parallel(optimizer_branches, mode="folded") as fast:
        fast(x)
        optimizer = torch.optim.SGD([p for b in optimizer_branches for p in b.parameters()], 0.1)
        with torch.enable_grad():
            sum(b(x).sum() for b in optimizer_branches).backward()
        optimizer.step()
        same(fast(x), serial(optimizer_branches, x))


def test_moved_and_switched_modules_are_prepared_anew():
    branches = [nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.9)).eval() for _ in range(2)]
    x = torch.randn(2, 8)
    with parallel(branches, mode="folded") as fast:
        same(fast(x), serial(branches, x))
        branches[0].train()
        fast(x)
        assert "random" in fast.plan().reason.text
        branches[0].eval()
        for b in branches:
            b.double()
        same(fast(x.double()), serial(branches, x.double()))


def test_changed_tables_and_attributes_are_seen():
    class Lookup(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.register_buffer("at", torch.tensor([2, 0, 1]))
            self.scale = scale

        def forward(self, x):
            return x.reshape(3, 8)[self.at].roll(1, 0).clone() * self.scale

    branches = [Lookup(2.0), Lookup(3.0)]
    x = torch.randn(24)
    with parallel(branches, mode="folded") as fast:
        for _ in range(2):
            same(fast(x), serial(branches, x))
        branches[0].at.copy_(torch.tensor([0, 0, 2]))
        same(fast(x), serial(branches, x))
        branches[1].scale = 5.0
        same(fast(x), serial(branches, x))


def test_inference_mode_and_its_tensors_are_welcome():
    with torch.inference_mode():
        branches = linears(5, 5)
        x = torch.randn(2, 8)
        with parallel(branches, mode="folded") as fast:
            same(fast(x), serial(branches, x))
            same(fast(x), serial(branches, x))


def test_results_lie_in_memory_as_the_loops():
    last = torch.channels_last
    branches = [nn.Conv2d(3, 4, 3).to(memory_format=last) for _ in range(2)]
    branches += [lambda x: x[:, :, ::2].transpose(1, 2), lambda x: x[:, :, 1::2].transpose(1, 2)]
    for x in (torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8).to(memory_format=last)):
        for mode in ("folded", "threads"):
            with parallel(branches, mode=mode) as fast:
                fast(x)
                for a, b in zip(fast(x), serial(branches, x), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
                    assert a.stride() == b.stride() or mode == "threads"
                assert fast.plan().chosen == mode


def test_recurrent_branches_are_right_or_refused():
    branches, x = [nn.GRU(8, 4, batch_first=True), nn.LSTM(8, 4)], torch.randn(2, 5, 8)
    for mode in MODES:
        with parallel(branches, mode=mode) as fast:
            for _ in range(2):
                (a, _), (b, _) = fast(x)
                same((a, b), (branches[0](x)[0], branches[1](x)[0]))


def test_inputs_that_overlap_or_are_results_of_the_last_call():
    branches = linears(5, 5)
    base = torch.randn(3, 8)
    with parallel([nn.Identity(), *branches], mode="folded") as fast:
        inputs = (base[:2], base[1:], base[:2])
        for _ in range(2):
            same(fast(*inputs), serial([nn.Identity(), *branches], *inputs))
        first = fast(*inputs)
        kept = [t.clone() for t in first]
        fast(*(x * 2 for x in inputs))
        same(first, kept)


def test_without_a_gpu_its_modes_are_refused_not_wrong():
    x = torch.randn(2, 8)
    branches = linears(4, 6)
    for mode in ("streams", "graph", "graph_streams", "convolved"):
        fast = parallel(branches, mode=mode)
        same(fast(x), serial(branches, x))
        assert "CUDA" in fast.explain()


def test_many_shapes_keep_few_prepared_forms():
    branches = linears(5, 5)
    with parallel(branches, mode="folded", max_graphs=4) as fast:
        for _ in range(3):
            for rows in range(1, 11):
                x = torch.randn(rows, 8)
                same(fast(x), serial(branches, x))
        prepared = [e for e in fast._prepared.values() if e.run is not None]
        assert len(prepared) <= 4
        assert len(fast._prepared) == 10


def test_explain_lists_what_was_tried():
    with parallel(linears(5, 5, 6)) as fast:
        assert "not called yet" in fast.explain()
        fast(torch.randn(2, 8))
        text = fast.explain()
    assert "serial" in text
    assert "threads" in text
    assert "folded" in text
    assert "equal branches of the widest step: {0,1} {2}" in text
    assert "measured" in text
    with parallel(linears(5, 6), mode="serial") as fast:
        fast(torch.randn(2, 8))
        assert fast.explain().startswith("serial on 1 stream: asked for")


@pytest.mark.parametrize("name", ["inception", "experts", "ensemble"])
def test_workloads_run_equal_in_threads(name):
    made, inputs = build(WORKLOADS[name], device="cpu", dtype=torch.float32)
    with parallel(made, mode="threads") as fast:
        first, again = fast(*inputs), fast(*inputs)
        assert fast.plan().chosen == "threads", fast.explain()
    torch.testing.assert_close(first, again, rtol=1e-5, atol=1e-5)
