"""An error of ours, at a call from each place of the engine: the numbers stay those of plain runs.

The invariant behind it: what cannot be restored is not given up, and whatever the engine does in
steps ends with those that cannot fail. So after an error anywhere, the same call does it all.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import kilter.memory.engine
from kilter.memory.engine import CpuStandIn, Swapper
from kilter.memory.plan.problem import Link
from kilter.session.fence import Fence
from kilter.testing.steady_stand_in import SteadyStandIn

WIDTH, ROWS = 16, 64
OURS = str(Path(kilter.memory.engine.__file__).parent)
UNFENCED = frozenset(
    {
        # The hooks themselves, which only decide where an event goes, and the way back.
        "_pack", "_pack_tensor", "_unpack", "_unpack_tensor", "_save_fenced", "_use_fenced",
        "_use_or_modified", "kept", "whole", "of", "refuse", "sole", "owned", "_under_a_mode",
        "takes",
        "_pack_recorded", "_pack_any", "_unpack_any",
        # The same for calls of modules, and operations in them.
        "call", "met", "hears", "unrecorded", "stop",
        # They call what may fail behind the fence.
        "__del__", "_read_saved", "_read_data", "_write_data",
        # Called by the interpreter where no error can go anywhere: names and numbers.
        "let_go", "gone",
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
def planted(number: int | None, event: str) -> Iterator[list[tuple[str, ...]]]:
    """An error at our call of this number: before it has done anything (`call`), or after it has
    done all (`return`). Yields where all calls came from."""
    calls: list[tuple[str, ...]] = []

    def profile(frame: FrameType, happening: str, argument: Any) -> None:
        code = frame.f_code
        if happening != event or not code.co_filename.startswith(OURS) or not inside:
            return
        if code.co_name in UNFENCED:
            return
        calls.append(tuple(_stack(frame)) if number is None else ())
        if len(calls) - 1 == number:
            del frame  # who holds that is taken for a signal handler of the program's
            raise Planted("an error of ours")

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def _stack(frame: FrameType | None) -> Iterator[str]:
    """Our functions on the way to a call, the innermost first, and the lines where they are."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            yield f"{frame.f_code.co_qualname}:{frame.f_lineno}"
        frame = frame.f_back


def chosen(calls: list[tuple[str, ...]]) -> list[int]:
    """The last call from each place, with all places on the way there: under a plan, where there
    is such a call. Or every call, if the environment says so."""
    if os.environ.get("KILTER_TEST_EVERY_CALL"):
        return list(range(len(calls)))
    return sorted({stack: number for number, stack in enumerate(calls)}.values())


def chosen_of_segments(calls: list[tuple[str, ...]]) -> list[int]:
    """The same of what segments add, by the innermost place alone."""
    if os.environ.get("KILTER_TEST_EVERY_CALL"):
        return chosen(calls)
    ours = (
        "ModuleCall.",
        "ModuleCalls.",
        "SegmentTensor.",
        "SegmentPass.",
        "OperationRecorder.",
        "Step.",
        "Ref.",
        "carried_out",
    )
    last = {stack[0]: number for number, stack in enumerate(calls) if stack[0].startswith(ours)}
    return sorted(last.values())


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage of earlier tests goes, and calls our functions, in the middle of a run."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("event", ["call", "return"])
@pytest.mark.parametrize(
    ("bytes_per_s", "segments"),
    [(1e5, False), (1e12, False), (1e5, True)],
    ids=["recomputed", "swapped", "segments"],
)
def test_an_error_at_any_call_changes_no_number(
    event: str, bytes_per_s: float, segments: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "get_objects", list)  # takes longer than all the rest
    make = Deep if segments else Net
    plain = train(make=make)
    for _ in range(2):  # what is looked up once in a process is known in the second
        swapper = governed([], bytes_per_s, segments=segments)
        with planted(None, event) as calls:
            assert same(train(swapper, make=make), plain)
    again = [call for call in calls if call[0].startswith("ModuleCall.run:")]
    assert bool(again) == segments
    report = swapper.report()
    assert report.planned >= 2
    assert report.recomputed > 0 or bytes_per_s > 1e6
    assert report.in_bytes > 0 or bytes_per_s < 1e6
    wrong: list[str] = []
    numbers = chosen_of_segments(calls) if segments else chosen(calls)
    for number in numbers:
        name = calls[number][0]
        told: list[tuple[str, str]] = []
        swapper = governed(told, bytes_per_s, segments=segments)
        try:
            with planted(number, event):
                found = train(swapper, make=make)
        except Planted as error:
            places = traceback.extract_tb(error.__traceback__)
            where = " < ".join(f"{f.name}:{f.lineno}" for f in reversed(places))
            wrong.append(f"{number}: {name} ends the training, by {where}")
            continue
        if not same(found, plain):
            wrong.append(f"{number}: {name} changes numbers")
        if not told:
            wrong.append(f"{number}: {name} is not told of")
    assert not wrong, f"{len(wrong)}: {wrong[:20]}"


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
    gelu: Callable[..., Tensor] = F.gelu
    calls = {"recomputed": 0}

    def short(*args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():  # in a recipe
            calls["recomputed"] += 1
            if calls["recomputed"] % 2 and calls["recomputed"] > 8:
                raise torch.OutOfMemoryError
        return gelu(*args, **kwargs)

    monkeypatch.setattr(F, "gelu", short)
    assert same(train(governed(told, 1e5), steps=12), plain)
    assert calls["recomputed"] > 9
    assert not told
