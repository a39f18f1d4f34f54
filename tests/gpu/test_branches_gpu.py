"""Parallel branches on a real GPU: graphs, forks, compiled groups and kernels, never wrong."""

import copy
import gc
import threading

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from torch import nn  # noqa: E402

from kilter.app.bench.branch_workloads import (  # noqa: E402
    TOKENS,
    WINDOWS,
    WORKLOADS,
    Encoder,
    build,
    cyclic_table,
    padding_mask,
    shift_of,
    window_table,
)
from kilter.parallel import parallel  # noqa: E402
from kilter.parallel.heads import HALF, Blocks, FusedHeads, Head  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    # The framework's own notices (compiler, allocator) are not ours to fix.
    pytest.mark.filterwarnings("default"),
]
CAPTURED = ("graph", "graph_streams")


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def linears(*widths, dtype=torch.float32):
    return [
        nn.Sequential(nn.Linear(64, w), nn.ReLU(), nn.Linear(w, 32)).to("cuda", dtype)
        for w in widths
    ]


def serial(branches, x):
    return tuple(b(x) for b in branches)


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("mode", ["threads", "cpp_threads", "streams", *CAPTURED])
def test_every_mode_is_the_loop_in_its_order(mode):
    branches = linears(32, 64, 64, 128)
    with parallel(branches, mode=mode) as fast:
        for _ in range(4):
            x = rand(8, 64)
            same(fast(x), serial(branches, x))
        assert fast.plan().chosen == mode, fast.explain()


@pytest.mark.parametrize("rows", [1, 20])
def test_compiled_branches_have_their_layers_by_the_kernels(rows):
    def branch(width):
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 32), nn.GELU())

    branches = [branch(width).cuda() for width in (768, 768, 1024)]
    with parallel(branches, mode="compiled") as fast:
        for _ in range(3):
            x = rand(rows, 64)
            same(fast(x), serial(branches, x))
        assert fast.plan().chosen == "compiled", fast.explain()


@pytest.mark.parametrize("mode", CAPTURED)
def test_arguments_by_name_and_a_number_that_never_comes_back(mode):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(64, 32), nn.Linear(64, 32)

        def forward(self, x, *, mask, scale=1.0):
            return self.one(x) * scale + self.two(x) * scale, {"masked": self.two(x) * mask}

    module = Named().cuda()
    with parallel(module, mode=mode) as fast:
        for step in range(40):
            x, mask = rand(8, 64), rand(8, 32)
            found, expected = fast(x, mask=mask), module(x, mask=mask)
            same((found[0], found[1]["masked"]), (expected[0], expected[1]["masked"]))
            fast(x, scale=float(step + 2), mask=mask)
        assert len(fast._prepared) < 12
        same(copy.deepcopy(fast)(x, mask=mask)[:1], fast(x, mask=mask)[:1])


def test_the_newer_switches_of_tf32_are_understood():
    branches, x = linears(48, 64), rand(8, 64)
    before = torch.get_float32_matmul_precision()
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this framework has only the older ones")
    try:
        with parallel(branches, mode="graph") as fast:
            fast(x)
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            for _ in range(2):
                assert torch.equal(fast(x)[0], branches[0](x))
            assert len(fast._prepared) == 2
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision(before)


def test_the_same_kernels_give_the_same_bits():
    branches = linears(32, 64, 96)
    for mode in ("threads", "streams", "graph"):
        with parallel(branches, mode=mode) as fast:
            x = rand(8, 64)
            fast(x)
            y = rand(8, 64)
            assert all(torch.equal(a, b) for a, b in zip(fast(y), serial(branches, y), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_auto_and_the_fused_mode_on_a_layer_of_window_heads(dtype):
    encoder = Encoder(layers=2).eval().to("cuda", dtype)
    wide = copy.deepcopy(encoder).double()
    mask = padding_mask().cuda()
    for mode in ("fused", "auto"):
        with parallel(encoder, mode=mode) as fast:
            for _ in range(3):
                x = rand(TOKENS, 1, 256, dtype=dtype)
                found, expected = fast(x, mask), encoder(x, mask)
                exact = wide(x.double(), mask)
                worst = (found.double() - exact).abs().max()
                assert worst <= 3 * (expected.double() - exact).abs().max(), fast.explain()
            assert fast.plan().chosen != "serial", fast.explain()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_kernels_are_their_reference(dtype):
    heads, biases = [], []
    for i, w in enumerate(WINDOWS):
        rows = TOKENS // w**2
        place = window_table(w, shift_of(i)).reshape(-1)
        columns = cyclic_table(w, shift_of(i)).reshape(-1)
        at = (place * 8 + i, columns * 24 + 8 + i, columns * 24 + 16 + i)
        heads.append(Head(rows, TOKENS, w * w, 1 / w**2, *(t.cuda() for t in at), place.cuda()))
        bias = torch.randn(rows, TOKENS, device="cuda")
        bias[:, 500:600] = float("-inf")
        biases.append(bias.reshape(-1))
    cut = Blocks() if dtype == torch.float32 else HALF
    fused = FusedHeads(heads, 32, torch.device("cuda"), cut)
    q, kv = rand(TOKENS * 8, 32, dtype=dtype), rand(TOKENS * 24, 32, dtype=dtype)
    bias = torch.cat(biases)
    exact = fused.reference(q.double(), kv.double(), kv.double(), bias.double())
    found = fused._launch(q, kv, kv, bias)
    plain = fused.reference(q, kv, kv, bias)
    assert bool(found.isfinite().all())
    limit = 2 * (plain.double() - exact).abs().max()
    assert (found.double() - exact).abs().max() <= limit


@pytest.mark.parametrize("mode", CAPTURED)
def test_changed_weights_are_seen_however_they_change(mode):
    branches = linears(48, 48, 64)
    x = rand(8, 64)
    with parallel(branches, mode=mode) as fast:
        same(fast(x), serial(branches, x))
        assert fast.plan().chosen == mode
        for change in (
            lambda: branches[0][0].weight.mul_(2),
            lambda: branches[1].load_state_dict(linears(48)[0].state_dict()),
            lambda: setattr(branches[2][0], "weight", nn.Parameter(rand(64, 64))),
            lambda: setattr(branches[1][2].weight, "data", rand(32, 48)),
            lambda: branches[0].cpu() and branches[0].cuda(),
        ):
            change()
            torch.cuda.empty_cache()
            same(fast(x), serial(branches, x))
            same(fast(x), serial(branches, x))
            assert fast.plan().chosen == mode, fast.explain()


def test_a_weight_that_is_replaced_is_captured_again_without_a_free_cache():
    """The allocator takes no capture into a pool whose last graph is gone: a new pool begins."""
    branches, x = linears(48, 64), rand(8, 64)
    with parallel(branches, mode="graph") as fast:
        for _ in range(3):
            for _ in range(2):
                same(fast(x), serial(branches, x))
            assert fast.plan().chosen == "graph", fast.explain()
            branches[0][0].weight = nn.Parameter(rand(48, 64))


@pytest.mark.parametrize("gradients", [False, True])
def test_the_winner_is_captured_once_and_later_signatures_share_its_memory(monkeypatch, gradients):
    from kilter.parallel.candidates import CandidateBuilder

    built = []
    plain = CandidateBuilder.build

    def build_and_count(self, way, streams, *, searched, pool):
        found = plain(self, way, streams, searched=searched, pool=pool)
        built.append((way.name, streams, searched))
        return found

    monkeypatch.setattr(CandidateBuilder, "build", build_and_count)
    branches, x = linears(48, 64, 96), rand(8, 64)
    with torch.set_grad_enabled(gradients), parallel(branches, compile=False) as fast:
        same(fast(x), serial(branches, x))
        plan = fast.plan()
        assert plan.chosen != "serial", fast.explain()
        assert len(built) == len(set(built)) > 1
        one = fast.memory_bytes()
        assert plan.trial.memory_bytes == one > 0
        for rows in (16, 32, 64):
            other = rand(rows, 64)
            for _ in range(2):
                same(fast(other), serial(branches, other))
        assert fast.memory_bytes() < 4 * one
        for _ in range(2):
            same(fast(x), serial(branches, x))


def test_tables_and_weights_live_as_long_as_the_graph_that_reads_them():
    encoder = Encoder(layers=1).eval().cuda()
    with parallel(encoder, mode="graph_streams") as fast:
        x, mask = rand(TOKENS, 1, 256), padding_mask().cuda()
        fast(x, mask)
        gc.collect()
        torch.cuda.empty_cache()
        taken = [torch.full((2**20,), -1, device="cuda") for _ in range(64)]
        torch.testing.assert_close(fast(x, mask), encoder(x, mask), rtol=1e-3, atol=1e-4)
        assert len(taken) == 64


def test_results_are_not_overwritten_by_the_next_call():
    branches = linears(48, 64)
    with parallel(branches, mode="graph_streams") as fast:
        x = rand(8, 64)
        fast(x)
        first = fast(x)
        kept = [t.clone() for t in first]
        fast(rand(8, 64))
        assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
        second = fast(first[0].repeat(1, 2))
        same(second, serial(branches, first[0].repeat(1, 2)))


def test_impure_branches_are_refused_and_the_device_stays_usable():
    host_index = torch.tensor([1, 0])
    x = rand(8, 64)
    for branch, reason in (
        (nn.Dropout(0.5), "random"),
        (lambda x: x * x.sum().item(), "host"),
        (lambda x: x if x.sum() > 0 else -x, "host"),
        (lambda x: x[x > 0], "depends on data"),
    ):
        fast = parallel([branch, torch.neg], mode="graph")
        fast(x)
        assert reason in fast.plan().reason.text
    # An index table on the host is a copy and a synchronisation in the loop, a table in ours.
    with parallel([lambda x: x[host_index] * 2, torch.neg], mode="graph_streams") as fast:
        fast(x)
        assert fast.plan().chosen == "graph_streams", fast.explain()
        same(fast(x), (x[host_index] * 2, -x))
    torch.cuda.synchronize()


def test_preparing_draws_no_random_numbers():
    def tower():
        return nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())

    towers = [tower().eval().cuda() for _ in range(3)]
    x = rand(1, 32, 8, 8)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    with parallel(towers, mode="convolved") as fast:
        fast(x)
        same(fast(x), serial(towers, x))
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], torch.cuda.get_rng_state())


def test_a_capture_that_fails_leaves_serial_with_the_reason():
    def synchronises(x):
        torch.cuda.synchronize()
        return x + 1

    x = rand(4, 64)
    fast = parallel([synchronises, torch.neg], mode="graph")
    same(fast(x), (x + 1, -x))
    same(fast(x), (x + 1, -x))
    assert fast.plan().chosen == "serial"
    with parallel(linears(32, 48), mode="graph") as after:
        after(x)
        assert after.plan().chosen == "graph"


def test_calls_from_other_streams_and_threads_take_turns():
    branches = linears(64, 64, 128)
    inputs = [rand(8, 64) for _ in range(4)]
    expected = [serial(branches, x) for x in inputs]
    torch.cuda.synchronize()
    wrong = []
    with parallel(branches, mode="graph_streams") as fast:
        fast(inputs[0])

        def work(number):
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    found = fast(inputs[number])
                    torch.cuda.current_stream().synchronize()
                    for a, b in zip(found, expected[number], strict=True):
                        if not torch.allclose(a, b, rtol=1e-4, atol=1e-4):
                            wrong.append(number)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert wrong == []


def test_inside_a_capture_of_the_users_the_loop_runs_as_written():
    branches = linears(32, 48)
    fast = parallel(branches, mode="graph_streams")
    x = rand(8, 64)
    fast(x)
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        serial(branches, x)
        graph.capture_begin()
        found = fast(x)
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    same(found, serial(branches, x))


def test_autocast_is_part_of_the_signature():
    branches = linears(48, 64)
    x = rand(8, 64)
    with parallel(branches, mode="graph_streams") as fast:
        assert fast(x)[0].dtype == fast(x)[0].dtype == torch.float32
        with torch.autocast("cuda", torch.float16):
            for _ in range(2):
                found = fast(x)
                assert found[0].dtype == torch.float16
                for a, b in zip(found, serial(branches, x), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_ten_thousand_calls_with_twenty_shapes_do_not_grow():
    branches = linears(64, 128)
    inputs = [rand(rows, 64) for rows in range(1, 21)]
    with parallel(branches, mode="graph_streams", max_graphs=8) as fast:

        def calls(count):
            for number in range(count):
                # Mostly a few shapes, now and then all of them: graphs come and go.
                few = number % 400 < 340
                fast(inputs[number % (6 if few else 20)])

        calls(2000)
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved(), fast.memory_bytes()
        calls(10_000)
        torch.cuda.synchronize()
        after = torch.cuda.memory_reserved(), fast.memory_bytes()
        assert after[0] <= before[0] + 2**21
        assert after[1] <= before[1] + 2**21
        for x in inputs:
            same(fast(x), serial(branches, x))
    torch.cuda.empty_cache()
    assert fast.memory_bytes() == 0


@pytest.mark.parametrize("name", ["inception", "experts", "detection"])
def test_workloads_are_right_under_a_forked_graph(name):
    made, inputs = build(WORKLOADS[name], device="cuda", dtype=torch.float32)
    with parallel(made, mode="graph_streams") as fast:
        first = fast(*inputs)
        again = fast(*inputs)
        assert fast.plan().chosen == "graph_streams", fast.explain()
    torch.testing.assert_close(first, again, rtol=1e-3, atol=1e-3)


def test_split_products_are_about_as_exact_as_float32():
    """Tensor cores cut where they add, so a sum is a few times less exact than the library's at
    worst; what it means for a model is judged when the model is prepared."""
    from kilter.parallel.linear_layers import operations, splits_of

    linear, finish = operations().linear, operations().finish
    norm = torch.nn.functional.layer_norm
    for rows, inner, columns in (
        (704, 256, 768), (704, 256, 2048), (704, 2048, 256), (37, 64, 50), (64, 768, 192),
    ):  # fmt: skip
        x, weight, bias = rand(rows, inner), rand(columns, inner), rand(columns)
        exact = x.double() @ weight.double().T + bias.double()
        plain = torch.nn.functional.linear(x, weight, bias)
        limit = 4 * (plain.double() - exact).abs().max()
        splits = splits_of(rows, columns, inner)
        parts = linear(x, weight, bias, False, splits)
        assert ((parts.sum(0) + bias).double() - exact).abs().max() <= limit
        residual, gain, shift = rand(rows, columns), rand(columns), rand(columns)
        normed = finish(parts, bias, residual, gain, shift, 1e-5)
        wide = norm(exact + residual, (columns,), gain.double(), shift.double())
        same_ops = norm(plain + residual, (columns,), gain, shift)
        assert (normed.double() - wide).abs().max() <= 4 * (same_ops.double() - wide).abs().max()
        if inner < 1024:
            whole = linear(x, weight, bias, False, 0)
            assert (whole.double() - exact).abs().max() <= limit
            assert torch.equal(linear(x, weight, bias, True, 0), whole.relu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_single_rows_by_the_kernel_are_as_exact_as_the_librarys(dtype):
    from kilter.parallel.linear_layers import operations

    for inner, columns in ((1024, 512), (100, 33)):
        x, weight = rand(1, inner, dtype=dtype), rand(columns, inner, dtype=dtype)
        bias = rand(columns, dtype=dtype)
        exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        plain = torch.nn.functional.linear(x, weight, bias)
        found = operations().single(x, weight, bias, False)
        limit = 2 * (plain.double() - exact).abs().max()
        assert (found.double() - exact).abs().max() <= limit
        assert torch.equal(operations().single(x, weight, bias, True), found.relu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_convolutions_by_the_kernel_are_their_definition(dtype):
    from kilter.parallel.convolutions import defined, operation, tile_of

    def given(*shape):
        return rand(*shape, dtype=dtype)

    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        for images, into, out, size, window, stride, padding, splits in (
            (1, 480, 192, 14, (1, 1), (1, 1), (0, 0), True),
            (1, 24, 64, 14, (5, 5), (1, 1), (2, 2), True),
            (2, 160, 96, 7, (3, 3), (1, 1), (1, 1), True),
            (1, 64, 33, 17, (3, 1), (2, 2), (1, 0), True),
            (3, 3, 20, 16, (1, 1), (2, 1), (0, 0), False),
            (1, 16, 100, 56, (3, 3), (1, 1), (1, 1), False),
            (1, 80, 128, 64, (1, 1), (1, 1), (0, 0), False),
            (1, 3, 70, 64, (7, 7), (2, 2), (3, 3), True),
            (2, 3, 48, 64, (8, 8), (8, 8), (0, 0), True),
        ):
            x, weight = given(images, into, size, size), given(out, into, *window)
            norm = [given(out), given(out).abs() + 0.5, given(out), given(out)]
            form = list(stride), list(padding), 1e-3
            like = torch.nn.functional.conv2d(x, weight, None, *form[:2])
            tile = tile_of(out, like[:, 0].numel(), weight[0].numel(), half=dtype.itemsize < 4)
            assert (tile.splits > 1) == splits
            for bias, behind, residual, relu in (
                (None, norm, None, True),
                (given(out), [], given(*like.shape), False),
                (None, norm, given(*like.shape), True),
            ):
                wide = [t if t is None else t.double() for t in (x, weight, bias)]
                more = residual if residual is None else residual.double()
                exact = defined(*wide, [t.double() for t in behind], more, *form, relu)
                plain = defined(x, weight, bias, behind, residual, *form, relu)
                limit = 4 * (plain.double() - exact).abs().max()
                tensors = x, weight, bias, behind, residual
                found = operation()(*tensors, *form, relu)
                assert (found.double() - exact).abs().max() <= limit
                assert torch.equal(found, operation()(*tensors, *form, relu))
            x[0, 0, 3, 3] = float("nan")
            found = operation()(x, weight, None, norm, None, *form, False)
            host = [t.cpu().double() for t in (x, weight, *norm)]
            exact = defined(*host[:2], None, host[2:], None, *form, False)
            assert torch.equal(found.isnan().cpu(), exact.isnan())
    finally:
        torch.backends.cudnn.allow_tf32 = before


def gradients(branches, call, x):
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        made = call(x)
        loss = sum((y * y).sum() * (i + 1) for i, y in enumerate(made))
        leaves = [x, *(p for b in branches for p in b.parameters())]
        return [*(y.detach() for y in made), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("mode", ["threads", "streams", *CAPTURED, "auto"])
def test_gradients_are_the_loops(mode):
    branches = linears(32, 64, 64, 128)
    with parallel(branches, mode=mode) as fast:
        for _ in range(4):
            x = rand(8, 64)
            same(
                gradients(branches, fast, x), gradients(branches, lambda x: serial(branches, x), x)
            )
        if mode != "auto":
            assert fast.plan().chosen == mode, fast.explain()


def test_two_forwards_before_two_backwards_keep_their_activations_apart():
    branches = linears(32, 64)
    inputs = [rand(8, 64), rand(8, 64)]
    with parallel(branches, mode="graph_streams") as fast, torch.enable_grad():
        fast(inputs[0])
        losses = [sum((y * y).sum() for y in fast(x)) for x in inputs]
        for x, loss in zip(inputs, losses, strict=True):
            leaves = [p for b in branches for p in b.parameters()]
            expected = torch.autograd.grad(sum((y * y).sum() for y in serial(branches, x)), leaves)
            same(torch.autograd.grad(loss, leaves), expected)


def test_host_tables_cost_no_synchronisation_in_ours():
    """The published code's index meshes on the host become tables on the device."""
    encoder = Encoder(layers=1, host_tables=True, rebuild=True).eval().cuda()
    x, mask = rand(TOKENS, 1, 256), padding_mask().cuda()
    with parallel(encoder, mode="graph_streams") as fast:
        fast(x, mask)
        assert fast.plan().chosen == "graph_streams", fast.explain()
        torch.testing.assert_close(fast(x, mask), encoder(x, mask), rtol=1e-3, atol=1e-4)
