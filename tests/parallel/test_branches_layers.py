"""What is rewritten between the branches stays the loop; what is forked is joined."""

import itertools
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kilter.app.bench.branch_workloads import TOKENS, Encoder, padding_mask
from kilter.parallel import convolutions, kernels
from kilter.parallel.candidates import (
    CandidateBuilder,
    CompileCache,
    ParallelOptions,
    WayRequest,
    trace_request,
)
from kilter.parallel.compilation import (
    beside_each_other,
    compile_units,
    merge_single,
    to_compile,
    warm,
)
from kilter.parallel.convolutions import CONVOLUTION_PROGRAMS, SHORTEST, tile_of, with_convolutions
from kilter.parallel.find_heads import fuse
from kilter.parallel.folding import fold
from kilter.parallel.heads import FusedHeads
from kilter.parallel.linear_layers import blocks, join_layers, splits_of
from kilter.parallel.loop import SerialLoop
from kilter.parallel.plan import Trial
from kilter.parallel.prepare import why_needless
from kilter.parallel.program import BranchProgram, Unit, run_in_order
from kilter.parallel.regions import from_graph
from kilter.parallel.streams import CALLS_AHEAD, ForkJoin
from kilter.parallel.timing import like
from kilter.parallel.trace import WayRefused, trace
from kilter.parallel.watched import WatchedBranches
from kilter.parallel.ways import WAYS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread_without_grad():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def program_of(function, *inputs, products=False):
    graph = trace(function, inputs).graph
    fold(graph, CPU, products=products)
    return from_graph(graph)


def targets(program):
    nodes = [n for unit in program.units() for n in getattr(unit.run, "graph", unit.graph).nodes]
    return [str(n.target) for n in nodes]


class Block(nn.Module):
    """Linear, ReLU, linear, residual, norm; `before`: the norm comes first, the sum goes on."""

    def __init__(self, width=64, *, before=False):
        super().__init__()
        self.before = before
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        if self.before:
            y = x + self.narrow(self.widen(self.norm(x)).relu())
            return y, self.norm(y)
        return self.norm(x + self.narrow(self.widen(x).relu()))


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_layers_are_the_layers(triton, before, dtype):
    block = Block(before=before).eval().to(dtype)
    for parameter in block.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    x = torch.randn(1, 20, 64).to(dtype)
    program = join_layers(program_of(block, x), triton=triton)
    found = program.execute([x], run_in_order)
    expected = block(x) if before else (block(x),)
    limit = 1e-5 if dtype == torch.float32 else 0.05
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=limit, atol=limit)
    assert not any("relu" in t for t in targets(program))
    if triton and not before:  # nothing is left for a compiler
        assert any("finish" in t for t in targets(program))
        assert all(unit.graph is None for unit in program.units())
    if before:  # the sum is read by others too: the norm stays where it is
        assert not any("finish" in t for t in targets(program))


def test_a_layer_of_window_heads_without_its_launches():
    encoder = Encoder(layers=1).eval()
    inputs = torch.randn(TOKENS, 1, 256), padding_mask()
    program = fuse(program_of(encoder, *inputs, products=True))
    assert len(program.ahead) == 1
    program = join_layers(program, triton=True)
    (found,) = program.in_line().execute(inputs, run_in_order)
    torch.testing.assert_close(found, encoder(*inputs), rtol=1e-5, atol=1e-5)
    # The scale of the queries is a number of the heads: q, k and v are one tensor.
    heads = next(u for u in program.units() if isinstance(u.run, FusedHeads))
    assert len(set(heads.reads[:3])) == 1
    assert [h.scale for h in heads.run.heads[:2]] == pytest.approx([32**-0.5, 32**-0.5 / 4])


def test_a_factor_moves_behind_the_product_only_if_nothing_else_reads_it():
    def alone(x, y):
        return (x * 0.5).reshape(4, 2, 8).flip(1).reshape(8, 8) @ y

    def read(x, y):
        scaled = x * 0.5
        return scaled @ y, scaled + 1

    x, y = torch.randn(8, 8), torch.randn(8, 8)
    for function in (alone, read):
        found = program_of(function, x, y, products=True).execute([x, y], run_in_order)
        expected = function(x, y)
        for a, b in zip(found, expected if function is read else (expected,), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_row_is_one_row(dtype):
    layers = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 10)).to(dtype)
    for rows, changed in ((1, True), (2, False)):
        x = torch.randn(rows, 64).to(dtype)
        program = join_layers(program_of(layers, x), triton=True)
        assert any("single" in t for t in targets(program)) == changed
        (found,) = program.execute([x], run_in_order)
        torch.testing.assert_close(found, layers(x))


def test_branches_have_their_layers_joined_too_and_long_sums_of_few_rows_split():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 768), nn.Linear(768, 64)

        def forward(self, x):
            return self.second(self.first(x).relu()).relu()

    branches, x = nn.ModuleList(Branch() for _ in range(2)), torch.randn(20, 64)
    plain = program_of(SerialLoop.of(branches), x)
    assert max(len(step) for step in plain.steps) == 2
    program = join_layers(plain, triton=True)
    found = program.execute([x], run_in_order)
    for a, b in zip(found, [b(x) for b in branches], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert sum("linear" in t for t in targets(program)) == 4
    # Four shares of the long sum: added up, with bias and ReLU, by operations left to the compiler.
    assert sum("sum" in t for t in targets(program)) == 2
    assert sum("relu" in t for t in targets(program)) == 2


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), min_size=1, max_size=6))
def test_pieces_that_occur_once_and_follow_each_other_become_one(steps):
    def model(x, y):
        found = [x, y]
        for kind, other in steps:
            last, back = found[-1], found[other % len(found)]
            if kind == 0:
                found.append((last.sin() * 2 + 1) * (last.cos() - 3))
            else:
                found.append((last @ back).relu() if kind == 1 else last + back)
        return found[-1], found[len(found) // 2] * 1

    x, y = torch.randn(2, 8, 8, dtype=torch.float64)
    program = program_of(model, x, y)
    merged = merge_single(program)
    for a, b in zip(merged.execute([x, y], run_in_order), model(x, y), strict=True):
        torch.testing.assert_close(a, b)
    keys = [unit.key for unit in program.units()]
    repeated = [keys.count(unit.key) > 1 for unit in merged.units()]
    assert sum(repeated) == sum(keys.count(key) > 1 for key in keys)
    assert all(a or b for a, b in itertools.pairwise(repeated))


def test_what_work_ahead_waits_for_stays_apart():
    front = nn.Sequential(nn.Linear(256, 256), nn.Tanh())
    encoder = Encoder(layers=1).eval()

    def model(x, mask):
        return encoder(front(x).sin(), mask.logical_not().logical_not()).cos()

    inputs = torch.randn(TOKENS, 1, 256), padding_mask()
    program = fuse(program_of(model, *inputs, products=True))
    merged = merge_single(program)
    assert len(merged.steps) <= len(program.steps)
    for (start, unit), (before, same) in zip(merged.ahead, program.ahead, strict=True):
        assert unit is same
        done = {s for step in program.steps[:before] for u in step for s in u.writes}
        now = {s for step in merged.steps[:start] for u in step for s in u.writes}
        assert done & set(unit.reads) <= now
        assert merged.needed(unit) >= start
    (found,) = merged.in_line().execute(inputs, run_in_order)
    torch.testing.assert_close(found, model(*inputs), rtol=1e-5, atol=1e-5)


def test_long_sums_of_small_results_are_split():
    assert splits_of(704, 2048, 256) == 1
    assert splits_of(704, 256, 2048) == 4
    for rows, columns, inner in ((1, 1, 64), (704, 256, 256), (37, 50, 4096), (2048, 8192, 8192)):
        count = splits_of(rows, columns, inner)
        assert inner % count == 0
        assert count == 1 or inner // count >= 128
        assert (inner // count) % blocks(rows, columns)[2] == 0 or count == 1


# --- forks and joins, on streams that only remember -----------------------------------------------


class Remembering:
    """A device that keeps the rules: on a stream only what has been waited for may be read."""

    def __init__(self):
        self.now = "main"
        self.known = {"main": set()}

    def current(self):
        return self.now

    def side(self, number):
        self.known.setdefault(number, set())
        return number

    def record(self, stream):
        return frozenset(self.known[stream])

    def wait(self, stream, event):
        self.known[stream] |= event

    @contextmanager
    def use(self, stream):
        before, self.now = self.now, stream
        yield
        self.now = before

    def shared(self, tensor, stream):
        pass


def unit(backend, name, reads, writes):
    """Fails if it reads what its stream has not waited for."""

    def run(*given):
        for slot in reads:
            assert slot in backend.known[backend.now], f"{name} reads {slot} too early"
        backend.known[backend.now] |= set(writes)
        return tuple(torch.tensor(float(slot)) for slot in writes)

    return Unit(run=run, reads=reads, writes=writes, key=name, name=name)


def test_work_ahead_of_time_is_joined_by_the_step_that_reads_it():
    backend = Remembering()
    backend.known["main"] |= {0}
    program = BranchProgram(
        slots=9,
        inputs=(0,),
        constants=(),
        steps=(
            (unit(backend, "first", (0,), (1,)),),
            (unit(backend, "a", (1,), (2,)), unit(backend, "b", (1,), (3,))),
            (unit(backend, "join", (2, 3), (4,)),),
            (unit(backend, "last", (4, 5, 6), (7,)),),
        ),
        outputs=(7,),
        ahead=((1, unit(backend, "early", (1,), (5,))), (1, unit(backend, "next", (1,), (6,)))),
    )
    lanes = [((0,),), ((0,), (1,)), ((0,),), ((0,),)]
    (found,) = program.execute([torch.tensor(0.0)], ForkJoin(backend, lanes))
    assert float(found) == 7
    assert backend.known[CALLS_AHEAD] >= {5, 6}
    assert {2, 3, 4} <= backend.known["main"]
    assert [len(step) for step in program.in_line().steps] == [1, 2, 1, 1, 1, 1]


def test_what_is_read_ahead_of_time_lives_until_it_is_joined():
    """Its memory could otherwise be given to others while the other stream still reads it."""
    backend = Remembering()
    early = unit(backend, "early", (1,), (3,))
    steps = (
        (unit(backend, "first", (0,), (1,)),),
        (unit(backend, "second", (1,), (2,)),),
        (unit(backend, "third", (2, 3), (4,)),),
    )
    program = BranchProgram(5, (0,), (), steps, (4,), ahead=((1, early),))
    assert program.last_uses() == [[], [], [1, 2, 3]]
    assert replace(program, ahead=()).last_uses()[1] == [1]


def test_what_saves_the_most_launches_is_compiled_first(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    long, short = nn.Sequential(*[nn.Tanh() for _ in range(9)]), nn.Sequential(nn.Tanh())

    def function(x):
        return torch.cat([short(x), long(x), long(x * 2)])

    program = program_of(function, torch.randn(4, 4))
    keys = to_compile(program, {})
    compiled = {}
    some = compile_units(program, compiled, 1)
    assert list(compiled) == keys[:1]
    assert to_compile(program, compiled) == keys[1:]
    x = torch.randn(4, 4)
    torch.testing.assert_close(some.execute([x], run_in_order)[0], function(x))
    compile_units(program, compiled)
    assert set(compiled) == set(keys)


# --- convolutions ---------------------------------------------------------------------------------


class Tower(nn.Module):
    """Convolution, norm, ReLU; convolution, norm, residual, ReLU; convolution with a bias."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.second = nn.Conv2d(8, 8, (3, 1), padding=(1, 0), bias=False)
        self.third = nn.Conv2d(8, 5, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8, eps=e) for e in (1e-5, 1e-3))
        for norm in self.norms:
            for tensor in (*norm.parameters(), norm.running_mean, norm.running_var):
                tensor.copy_(torch.rand_like(tensor) + 0.5)

    def forward(self, x):
        x = self.norms[0](self.first(x)).relu()
        x = (x + self.norms[1](self.second(x))).relu()
        return self.third(x), x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_take_along_what_follows(dtype):
    tower = Tower().eval().to(dtype)
    x = torch.randn(2, 3, 11, 9).to(dtype)
    program = with_convolutions(program_of(tower, x), lambda found: True)
    found = program.execute([x], run_in_order)
    limit = 1e-5 if dtype == torch.float32 else 0.05
    for a, b in zip(found, tower(x), strict=True):
        torch.testing.assert_close(a, b, rtol=limit, atol=limit)
    work = [t for t in targets(program) if "aten" in t and "view" not in t]
    assert work == []
    assert all(unit.graph is None for unit in program.units())  # nothing is left for a compiler


def test_convolutions_that_the_library_does_better_stay():
    tower, x = Tower().eval(), torch.randn(1, 3, 8, 8)
    program = with_convolutions(program_of(tower, x), lambda found: found.residual is not None)
    names = targets(program)
    assert sum("kilter.convolve" in t for t in names) == 1
    assert sum("aten.convolution" in t for t in names) == 2
    for a, b in zip(program.execute([x], run_in_order), tower(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ours_s", [1.0, 2.5, 4.0])
def test_the_faster_way_is_timed_with_all_that_follows(monkeypatch, ours_s):
    """Against the library in either layout."""
    timed = []

    def seconds(call, device, *, times):
        timed.append(call())
        return [ours_s, 3.0, 2.0][len(timed) - 1]

    monkeypatch.setattr(convolutions, "graph_seconds", seconds)
    found = []
    program = program_of(Tower().eval(), torch.randn(1, 3, 8, 8))
    with_convolutions(program, lambda c: found.append(c) or False)
    for convolution in found:
        timed.clear()
        assert convolutions.is_faster(convolution, CPU) == (ours_s < 2.0)
        assert {t.shape for t in timed} == {convolution.end.meta["val"].shape}
        assert len(timed) == 3


@pytest.mark.parametrize(
    "other",
    [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 9, padding=4),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.ConvTranspose2d(4, 4, 3),
        nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last),
    ],
)
def test_other_convolutions_are_left_alone(other):
    program = with_convolutions(program_of(other, torch.randn(1, 4, 8, 8)), lambda found: True)
    assert not any("kilter" in t for t in targets(program))


@given(st.integers(1, 2048), st.integers(1, 1024), st.integers(1, 2**13), st.booleans())
def test_tiles_cover_a_product_without_splitting_short_sums(channels, pixels, inner, half):
    tile = tile_of(channels, pixels, inner, half=half)
    assert tile.splits == 1 or inner // tile.splits >= SHORTEST
    programs = -(-channels // tile.rows) * -(-pixels // tile.columns)
    assert tile.splits == 1 or programs * tile.splits < 2 * CONVOLUTION_PROGRAMS


def builder_of(branches, *inputs, on_gpu=False):
    """What ways are built from; on a GPU that is not there, programs are made and not run."""
    loop, options = SerialLoop.of(branches), ParallelOptions("auto")
    state = WatchedBranches(loop.branches)
    request = WayRequest(loop, options, (inputs, {}), state, gradients=False)
    builder = CandidateBuilder(request, CompileCache(), trace_request(request), [])
    if on_gpu:
        request.device = torch.device("cuda")
    return builder


@pytest.mark.parametrize("faster", [True, False])
def test_the_convolved_program_is_the_loop(monkeypatch, faster):
    towers, x = [Tower().eval(), Tower().eval()], torch.randn(1, 3, 8, 8)
    builder = builder_of(towers, x)
    monkeypatch.setattr("kilter.parallel.ways.convolved.is_faster", lambda found, device: faster)
    monkeypatch.setattr(kernels, "has_triton", lambda: True)
    way = WAYS["convolved"]
    if not faster:
        with pytest.raises(WayRefused, match="nothing is faster"):
            way.uncompiled(builder)
        return
    found = way.uncompiled(builder).execute([x], run_in_order)
    right = [Trial(mode="serial", seconds=2.0), Trial(mode="convolved", seconds=1.0)]
    assert "each convolution" in why_needless(WAYS["compiled"], right, builder).text
    assert why_needless(WAYS["graph"], right, builder) is None
    for a, b in zip(found, [t for tower in towers for t in tower(x)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# --- what is tried --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fused_s", "others", "not_tried"),
    [
        (1.0, {"graph": 3.5}, {"graph_streams", "convolved", "compiled"}),
        (1.0, {"graph": 2.5}, {"convolved", "compiled"}),
        (1.0, {"graph": 2.5, "graph_streams": 0.9}, set()),
        (None, {"graph": 2.5}, set()),
    ],
)
def test_what_cannot_win_is_not_tried(fused_s, others, not_tried):
    trials = [Trial(mode="serial", seconds=20.0), Trial(mode="fused", seconds=fused_s)]
    trials += [Trial(mode=mode, seconds=seconds) for mode, seconds in others.items()]
    modes = {"graph", "graph_streams", "convolved", "compiled"} - set(others)
    assert {m for m in modes if why_needless(WAYS[m], trials, None) is not None} == not_tried


# --- compiled beforehand --------------------------------------------------------------------------


def test_everything_is_compiled_once_before_the_first_call():
    tower, x = Tower().eval(), torch.randn(1, 3, 8, 8)
    program = with_convolutions(program_of(tower, x), lambda found: found.residual is None)
    (unit,) = program.units()
    called = []

    def run(*arguments):
        called.append([tuple(a.shape) for a in arguments])
        return unit.graph(*arguments)

    compiled, done = {unit.key: run}, set()
    program = replace(program, steps=((replace(unit, run=run),),))
    for _ in range(2):
        warm(program, compiled, done, CPU)
    assert called == [[tuple(n.meta["val"].shape) for n in unit.graph.graph.nodes
                       if n.op == "placeholder"]]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_numbers_to_compile_with_are_drawn_from_nowhere(dtype):
    for shape, stride in (((3, 4), (1, 3)), ((2, 5), (0, 1)), ((0, 3), (3, 1)), ((), ())):
        before = torch.get_rng_state()
        made = like(torch.empty_strided(shape, stride, dtype=dtype), CPU)
        assert torch.equal(before, torch.get_rng_state())
        assert (made.shape, made.stride(), made.dtype) == (shape, stride, dtype)
        assert bool((made > 0).all()) if dtype.is_floating_point else not made.any()


def test_a_kernel_that_cannot_be_had_says_so():
    def broken():
        raise WayRefused("test", "no such kernel")

    done = []
    with pytest.raises(WayRefused, match="no such kernel"):
        beside_each_other([broken, lambda: done.append(1)], CPU, lambda: done.append(2))
    assert sorted(done) == [1, 2]
