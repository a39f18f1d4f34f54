"""Listeners to optimizer steps that come and go while another thread is in the middle of a step."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kilter.memory.engine.backend import CpuStandIn  # noqa: E402
from kilter.memory.engine.engine import Swapper  # noqa: E402
from kilter.memory.engine.state import StateMover  # noqa: E402
from kilter.memory.plan.problem import Link  # noqa: E402
from kilter.observe import optimizer_steps  # noqa: E402
from kilter.observe.iteration_clock import IterationClock  # noqa: E402

LINK = Link(to_host_bytes_per_s=1e12, to_device_bytes_per_s=1e12, both_bytes_per_s=2e12)


def optimizer() -> Any:
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1)


def tables() -> list[set[int]]:
    from torch.optim import optimizer as module

    found = (module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks)
    return [set(table) for table in found]


@contextmanager
def a_thread_in_a_step(place: str) -> Iterator[list[BaseException]]:
    """Another thread waits in a hook of its step, with one of the program's still to come; it ends
    its step when this ends."""
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    inside, go_on = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def wait(*_: Any) -> None:
        inside.set()
        go_on.wait()

    def step() -> None:
        try:
            optimizer().step()
        except RuntimeError as error:
            errors.append(error)
        finally:
            inside.set()

    leave = optimizer_steps.listen(**{place: wait})
    theirs = (
        register_optimizer_step_pre_hook(lambda *_: None),
        register_optimizer_step_post_hook(lambda *_: None),
    )
    thread = threading.Thread(target=step)
    thread.start()
    inside.wait()
    try:
        yield errors
    finally:
        go_on.set()
        thread.join()
        leave()
        for handle in theirs:
            handle.remove()


def a_listener() -> None:
    optimizer_steps.listen(before=print, after=print, first=True)()


def an_engine() -> None:
    with Swapper(CpuStandIn(), budget_bytes=1, link=LINK, min_bytes=1):
        pass


def streamed_state() -> None:
    with StateMover(CpuStandIn(), link=LINK):
        pass


def a_clock() -> None:
    clock = IterationClock(lambda index, t_s: None)
    clock.start()
    clock.stop()


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("come_and_go", [a_listener, an_engine, streamed_state, a_clock])
def test_a_step_of_another_thread_goes_on(come_and_go: Callable[[], None], place: str) -> None:
    with a_thread_in_a_step(place) as errors:
        come_and_go()
    assert errors == []


def test_listeners_are_called_in_the_order_in_which_they_came_but_for_the_first() -> None:
    called: list[str] = []

    def note(text: str) -> Callable[..., None]:
        return lambda *_: called.append(text)

    from torch.optim.optimizer import register_optimizer_step_pre_hook

    theirs = register_optimizer_step_pre_hook(note("the program's"))
    ends = [
        optimizer_steps.listen(before=note("one"), after=note("after one")),
        optimizer_steps.listen(before=note("two"), after=note("after two")),
        optimizer_steps.listen(before=note("first"), first=True),
    ]
    optimizer().step()
    assert called == ["first", "one", "two", "the program's", "after one", "after two"]
    for leave in (*ends, theirs.remove):
        leave()
    called.clear()
    optimizer().step()
    assert called == []


def test_one_that_leaves_inside_of_a_step_harms_no_step() -> None:
    ends: list[Callable[[], None]] = []
    called: list[str] = []

    def once(*_: Any) -> None:
        called.append("once")
        ends[0]()

    ends.append(optimizer_steps.listen(before=once))
    one = optimizer()
    one.step()
    one.step()
    assert called == ["once"]


def test_a_listener_that_comes_inside_of_a_step_begins_with_the_next() -> None:
    called: list[str] = []
    ends: list[Callable[[], None]] = []

    def late(*_: Any) -> None:
        called.append("late")

    def come(*_: Any) -> None:
        if not ends:
            ends.append(optimizer_steps.listen(before=late))

    ends_first = optimizer_steps.listen(before=come)
    one = optimizer()
    one.step()
    assert called == []
    one.step()
    assert called == ["late"]
    for leave in (ends_first, *ends):
        leave()
