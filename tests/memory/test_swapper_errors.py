"""An error of ours, at a call from each place of the engine: the numbers stay those of plain runs.

The invariant behind it: what cannot be restored is not given up, and whatever the engine does in
steps ends with those that cannot fail. So after an error anywhere, the same call does it all.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.memory.steady_stand_in import SteadyStandIn
from torch import Tensor, nn

import kilter.memory.engine
from kilter.memory.engine import CpuStandIn, Swapper, head_start
from kilter.memory.engine.operation_graph import OperatorCalls
from kilter.memory.plan.problem import Link
from kilter.session.fence import Fence

WIDTH, ROWS = 16, 64
OURS = str(Path(kilter.memory.engine.__file__).parent)
UNFENCED = frozenset(
    {
        # The hooks themselves, which only decide where an event goes, and the way back.
        "_pack", "_pack_tensor", "_unpack", "_unpack_tensor", "_save_fenced", "_use_fenced",
        "_use_or_modified", "kept", "whole", "of", "refuse", "owned", "_under_a_mode",
        "takes",
        "_pack_any", "_unpack_otherwise", "_unpack_any", "_run_backward",
        # The same for calls of modules, and operations in them.
        "call", "met", "hears", "unrecorded", "stop",
        # They call what may fail behind the fence.
        "__del__", "_read_saved", "_read_data", "_write_data", "_note",
        # Called by the interpreter where no error can go anywhere: names and numbers.
        "let_go", "gone", "freed",
        # Parts of the function around them, which an error in the interpreter's own calls ends.
        "<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>",
    }
)  # fmt: skip


inside: list[bool] = []
"""Not empty while the program trains; entering and leaving the block has a fence of its own."""


class Planted(Exception):
    """An error of ours."""


class Layer(nn.Module):
    """Data that are recomputed by calling the module again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.linear(x).tanh(), -1).roll(1, -1).sin()


class Deep(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), *(Layer() for _ in range(3)))


class Net(nn.Module):
    """Data that are swapped, data that are recomputed, and a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(self.norm(x))).cos()
        return x


def train(
    swapper: Swapper | None = None, steps: int = 6, make: Callable[[], nn.Module] = Net
) -> list[Tensor]:
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    found: list[Tensor] = []
    if swapper is not None:
        swapper.__enter__()
    inside.append(True)
    try:
        for _ in range(steps):
            loss = net(torch.randn(ROWS, WIDTH)).square().mean()
            loss.backward()
            found += [loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
            del loss
    finally:
        inside.clear()
        if swapper is not None:
            swapper.__exit__(None, None, None)
    return [*found, *(p.detach() for p in net.parameters())]


def governed(
    told: list[tuple[str, str]],
    bytes_per_s: float,
    backend: CpuStandIn | None = None,
    *,
    segments: bool = False,
) -> Swapper:
    link = Link(
        to_host_bytes_per_s=bytes_per_s,
        to_device_bytes_per_s=bytes_per_s,
        both_bytes_per_s=2 * bytes_per_s,
    )
    return Swapper(
        backend or SteadyStandIn(lag=2),
        budget_bytes=26_000,
        link=link,
        min_bytes=1024,
        fence=Fence(lambda where, error: told.append((where, error))),
        segments=segments,
    )


@contextmanager
def recorded(event: str) -> Iterator[list[tuple[str, ...]]]:
    """Yields where our calls come from: at their begin (`call`), or at their end (`return`)."""
    calls: list[tuple[str, ...]] = []

    def record(frame: FrameType) -> bool:
        calls.append(tuple(_stack(frame)))
        return False

    with _profiled(event, record):
        yield calls


@contextmanager
def planted(numbers: Iterable[int], event: str) -> Iterator[Planting]:
    """An error at each of our calls of these numbers: before it has done anything (`call`), or
    after it has done all (`return`). A fork of this process has the error, and goes on from there;
    this process waits for the fork's end, and then goes on without an error."""
    planting, wanted, count = Planting(), frozenset(numbers), itertools.count()

    def plant(frame: FrameType) -> bool:
        number = next(count)
        return planting.number is None and number in wanted and planting.fork(number)

    try:
        with _profiled(event, plant):
            yield planting
    except BaseException as error:
        if planting.number is None:
            raise
        places = traceback.extract_tb(error.__traceback__)
        where = " < ".join(f"{f.name}:{f.lineno}" for f in reversed(places))
        planting.tell(f"ends the training with {error!r}, by {where}")


class Planting:
    """Forks of this process, one for each planted error."""

    def __init__(self) -> None:
        self.number: int | None = None
        """In a fork: the number of the call with the error."""
        self.told: dict[int, str] = {}
        """Of each fork that has ended, by the same number: what it found to be wrong."""
        self._writes = -1

    def fork(self, number: int) -> bool:
        """Whether this is the fork; if not, the fork has ended."""
        reads, self._writes = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # pytest-xdist's thread is idle
            process = os.fork()
        if process == 0:
            os.close(reads)
            self.number = number
            return True
        os.close(self._writes)
        with open(reads) as pipe:
            self.told[number] = pipe.read()
        _, status = os.waitpid(process, 0)
        if status:
            self.told[number] = f"ends with {os.waitstatus_to_exitcode(status)}"
        return False

    def tell(self, wrong: str) -> NoReturn:
        """End this fork."""
        os.write(self._writes, wrong.encode())
        os._exit(0)


@contextmanager
def _profiled(event: str, raises: Callable[[FrameType], bool]) -> Iterator[None]:
    def profile(frame: FrameType, happening: str, argument: Any) -> None:
        code = frame.f_code
        if happening != event or not code.co_filename.startswith(OURS) or not inside:
            return
        if code.co_name not in UNFENCED and raises(frame):
            del frame  # who holds that is taken for a signal handler of the program's
            raise Planted("an error of ours")

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def _stack(frame: FrameType | None) -> Iterator[str]:
    """Our functions on the way to a call, the innermost first, and the lines where they are."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            yield f"{frame.f_code.co_qualname}:{frame.f_lineno}"
        frame = frame.f_back


def chosen(
    calls: list[tuple[str, ...]], among: tuple[str, ...] = ("",), *, half: bool
) -> list[int]:
    """A call from each place of this half of the engine's places, among those whose names begin so:
    an error comes before the calls of one half, and after those of the other half. Several ways
    lead to most places: one of them is drawn by a seed (`KILTER_TEST_SEED`, 0 if unset), and its
    last call is taken, which is under a plan where there is such a call. The seed also says which
    half comes first. Or every call, if the environment says so."""
    if os.environ.get("KILTER_TEST_EVERY_CALL"):
        return list(range(len(calls)))
    seed = int(os.environ.get("KILTER_TEST_SEED", "0"))
    draw = random.Random(seed)
    last_calls = {way: number for number, way in enumerate(calls) if way[0].startswith(among)}
    ways_to: dict[str, list[int]] = {}
    for way, number in sorted(last_calls.items()):
        ways_to.setdefault(way[0], []).append(number)
    first = (seed + half) % 2
    return sorted(draw.choice(ways_to[place]) for place in sorted(ways_to)[first::2])


OF_SEGMENTS = (
    "ModuleCall.",
    "ModuleCalls.",
    "SegmentPass.",
    "CallRecorder.",
    "OperationRecorder.",
    "DueMoves._evict_call",
    "Store.give_up",
    "Store._leave",
    "Store._arrived",
    "Step.",
    "Ref.",
    "carried_out",
)
"""What the recomputation of whole modules adds."""


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage of earlier tests goes, and calls our functions, in the middle of a run."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A fork has none of the threads that torch's operations may have started."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.usefixtures("uncollected", "one_thread")
@pytest.mark.parametrize("event", ["call", "return"])
@pytest.mark.parametrize(
    ("bytes_per_s", "segments"),
    [(1e5, False), (1e12, False), (1e5, True)],
    ids=["recomputed", "swapped", "segments"],
)
def test_an_error_at_any_call_changes_no_number(
    event: str, bytes_per_s: float, segments: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_start, "PAUSE_S", 0.0)  # as many pauses in each run
    make = Deep if segments else Net
    plain = train(make=make)
    for _ in range(2):  # what is looked up once in a process is known in the second
        swapper = governed([], bytes_per_s, segments=segments)
        with recorded(event) as calls:
            assert same(train(swapper, make=make), plain)
    again = [call for call in calls if call[0].startswith("ModuleCall.run:")]
    assert bool(again) == segments
    report = swapper.report()
    assert report.planned >= 2
    assert report.recomputed > 0 or bytes_per_s > 1e6
    assert report.in_bytes > 0 or bytes_per_s < 1e6
    numbers = chosen(calls, OF_SEGMENTS if segments else ("",), half=event == "return")
    told: list[tuple[str, str]] = []
    swapper = governed(told, bytes_per_s, segments=segments)
    with planted(numbers, event) as planting:
        found = train(swapper, make=make)
        if planting.number is not None:
            wrong = [] if same(found, plain) else ["changes numbers"]
            planting.tell(", ".join(wrong if told else [*wrong, "is not told of"]))
    assert same(found, plain)
    assert not told
    assert sorted(planting.told) == numbers
    bad = [f"{n}: {calls[n][0]} {wrong}" for n, wrong in planting.told.items() if wrong]
    assert not bad, f"{len(bad)}: {bad[:20]}"


def test_copies_that_always_fail_leave_the_numbers() -> None:
    class Broken(CpuStandIn):
        def copy_out(self, host: Tensor, device: Tensor) -> Any:
            raise Planted("an error of ours")

    told: list[tuple[str, str]] = []
    swapper = governed(told, 1e12, Broken(lag=2))
    assert same(train(swapper), train())
    assert len(told) == 1


def test_memory_that_is_out_when_data_are_recomputed_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[str, str]] = []
    plain = train(steps=12)
    carry_out = OperatorCalls.__call__
    calls = {"recomputed": 0}

    def short(self: OperatorCalls, given: Sequence[Tensor]) -> Tensor:
        calls["recomputed"] += 1
        if calls["recomputed"] % 2 and calls["recomputed"] > 8:
            raise torch.OutOfMemoryError
        return carry_out(self, given)

    monkeypatch.setattr(OperatorCalls, "__call__", short)
    assert same(train(governed(told, 1e5), steps=12), plain)
    assert calls["recomputed"] > 9
    assert not told
