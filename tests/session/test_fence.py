"""The fence: what is caught, what passes, and that it is told once."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from kilter.core.errors import DeviceLost
from kilter.memory.engine.gone import when_gone
from kilter.session.destructors import Destructors
from kilter.session.fence import PACKAGE, Fence, describe


class Ears:
    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def __call__(self, where: str, error: str) -> None:
        self.heard.append((where, error))


def fails(*_: object) -> None:
    raise ValueError("mine")


def test_an_error_is_told_once_and_nothing_runs_any_more() -> None:
    ears = Ears()
    fence = Fence(ears)
    calls: list[int] = []
    count = fence(calls.append)
    count(1)
    fence(fails)("an argument")
    fence(fails)()
    count(2)
    assert calls == [1]
    assert fence.down
    assert [where for where, _ in ears.heard] == ["fails"]


def test_what_is_run_now_is_run_also_after_an_error() -> None:
    ears = Ears()
    fence = Fence(ears)
    calls: list[int] = []
    assert not fence.run(fails)
    assert fence.run(calls.append, 1)
    assert not fence.run(fails)
    assert calls == [1]
    assert len(ears.heard) == 1


def test_results_are_dropped_and_names_kept() -> None:
    fence = Fence(Ears())
    fenced = fence(lambda: 3)
    assert fenced() is None
    assert fence(fails).__name__ == "fails"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_program_passes(error: type[BaseException]) -> None:
    ears = Ears()
    fence = Fence(ears)

    def interrupted() -> None:
        raise error

    with pytest.raises(error):
        fence(interrupted)()
    assert fence.down, "what it has interrupted is half done"
    assert ears.heard == []


def test_an_error_while_stepping_aside_stays_inside_too() -> None:
    def aside(where: str, error: str) -> None:
        raise OSError("stderr is closed")

    fence = Fence(aside)
    assert not fence.run(fails)
    assert fence.down


def test_an_error_that_cannot_even_be_shown_stays_inside() -> None:
    class Rude(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    def rude() -> None:
        raise Rude

    ears = Ears()
    assert not Fence(ears).run(rude)
    assert ears.heard == []


def test_a_step_aside_that_uses_the_fence_itself_is_told_once() -> None:
    heard: list[str] = []

    def aside(where: str, error: str) -> None:
        heard.append(error)
        assert not fence.run(fails)

    fence = Fence(aside)
    fence(fails)()
    assert len(heard) == 1


def test_ours_say_what_to_do_and_others_where_they_are_from() -> None:
    assert describe(DeviceLost("gone; see dmesg")) == "gone; see dmesg"
    try:
        fails()
    except ValueError as error:
        text = describe(error)
    assert text.startswith("ValueError: mine at ")
    assert "test_fence.py:" in text


class TimeIsUp(Exception):
    pass


def handler(number: int, frame: FrameType | None) -> None:
    raise TimeIsUp("now")


class Handler:
    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise TimeIsUp("now")

    def method(self, *what: object) -> None:
        self(*what)  # type: ignore[arg-type]


def once(number: int, frame: FrameType | None) -> None:
    """What `getsignal` tells afterwards is another handler."""
    signal.signal(number, signal.SIG_DFL)
    deeper(1)


def deeper(number: int) -> None:
    raise TimeIsUp("now")


HANDLERS: dict[str, Callable[..., None]] = {
    "function": handler,
    "partial": functools.partial(lambda text, *_: deeper(1), "text"),
    "object": Handler(),
    "method": Handler().method,
    "lambda": lambda number, frame: deeper(number),
    "once": once,
}


@pytest.fixture
def alarm() -> Iterator[Callable[[Callable[..., None]], None]]:
    before = signal.getsignal(signal.SIGALRM)

    def install(function: Callable[..., None]) -> None:
        signal.signal(signal.SIGALRM, function)

    yield install
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


Alarm = Callable[[Callable[..., None]], None]


@pytest.mark.parametrize("name", HANDLERS)
def test_what_a_signal_handler_of_the_program_raises_passes(name: str, alarm: Alarm) -> None:
    ears = Ears()
    fence = Fence(ears)
    alarm(HANDLERS[name])
    with pytest.raises(TimeIsUp):
        fence(lambda: os.kill(os.getpid(), signal.SIGALRM))()
    assert fence.down
    assert fence.broken_into is not None
    assert "TimeIsUp" in fence.broken_into
    assert ears.heard == []


def test_it_passes_also_where_our_code_took_it_for_an_error_of_the_system(alarm: Alarm) -> None:
    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("now")

    def write() -> None:
        try:
            os.kill(os.getpid(), signal.SIGALRM)
        except OSError as error:
            raise DeviceLost("cannot be written") from error

    alarm(late)
    with pytest.raises(TimeoutError, match="now"):
        Fence(Ears())(write)()


def test_what_another_thread_of_the_program_raises_passes() -> None:
    fence = Fence(Ears())
    begun = threading.Event()
    target = threading.get_ident()

    def raise_there() -> None:
        begun.wait()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(target), ctypes.py_object(TimeIsUp)
        )

    def work() -> None:
        begun.set()
        end = time.monotonic() + 600.0
        while time.monotonic() < end:
            pass

    thread = threading.Thread(target=raise_there)
    thread.start()
    with pytest.raises(TimeIsUp):
        fence(work)()
    thread.join()


def bare() -> None:
    raise NotImplementedError


def asserted() -> None:
    assert not time


@pytest.mark.parametrize(
    "ours", [fails, bare, asserted, lambda: next(iter(())), lambda: os.stat("")]
)
def test_an_error_of_ours_is_never_taken_for_the_programs(ours: Callable[[], None]) -> None:
    ears = Ears()
    assert not Fence(ears).run(ours)
    assert len(ears.heard) == 1


def test_after_an_interruption_only_what_stepping_aside_needs_goes_on(alarm: Alarm) -> None:
    fence = Fence(Ears())
    calls: list[str] = []
    work, iteration_ended = fence(calls.append), fence.until_aside(calls.append)
    alarm(handler)
    with pytest.raises(TimeIsUp):
        fence(lambda: os.kill(os.getpid(), signal.SIGALRM))()
    work("work")
    iteration_ended("iteration_ended")
    fence.close()
    iteration_ended("end after")
    assert calls == ["iteration_ended"]


# --- destructors -----------------------------------------------------------------------------

DESTRUCTOR = """
import signal

class Datum:
    def __del__(self):
        signal.raise_signal(signal.SIGALRM)

class Other:
    def __del__(self):
        self.gone = True

class Broken:
    def __del__(self):
        raise ValueError("mine")
"""


def ours() -> dict[str, type]:
    """Classes whose code is in our package."""
    made: dict[str, type] = {}
    exec(compile(DESTRUCTOR, os.path.join(PACKAGE, "datum.py"), "exec"), made)
    return made


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    found: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: found.append(what.exc_type))
    return found


@pytest.mark.parametrize("kind", [TimeIsUp, TimeoutError, KeyboardInterrupt])
def test_what_a_handler_raises_in_a_destructor_of_ours_arrives(
    kind: type[BaseException], alarm: Alarm, dropped: list[object]
) -> None:
    def ring(number: int, frame: FrameType | None) -> None:
        raise kind("now", 7)

    classes, fence, arrived = ours(), Fence(Ears()), 0
    destructors = Destructors(fence)
    destructors.start()
    alarm(ring)
    for _ in range(50):
        data = [classes["Datum"](), classes["Other"](), classes["Other"]()]
        try:
            data.clear()
            for _ in range(3):
                pass
        except kind as error:
            arrived += error.args == ("now", 7)
    destructors.stop()
    assert arrived == 50
    assert dropped == []
    assert fence.down


def alarms_behind(error: BaseException | None) -> int:
    return 0 if error is None else isinstance(error, TimeIsUp) + alarms_behind(error.__context__)


@pytest.mark.parametrize("moment", range(1, 100))
def test_a_second_alarm_does_not_replace_the_first(
    moment: int, alarm: Alarm, dropped: list[object]
) -> None:
    """The second comes at one of the moments after the first has left a destructor, at which python
    calls a signal handler: at the entry of a function, and after a call of one written in C."""
    raised, left = 0, moment

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        raised += 1
        raise TimeIsUp(raised)

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if raised == 1 and event in ("call", "c_return"):
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGALRM)

    classes, fence, arrived = ours(), Fence(Ears()), 0
    destructors = Destructors(fence)
    destructors.start()
    alarm(ring)
    data = [classes["Other"](), classes["Datum"]()]
    sys.setprofile(profile)
    try:
        try:
            fence.ask(data.clear)
            list(map(abs, range(3)))
        except TimeIsUp as error:
            arrived += alarms_behind(error)
            list(map(abs, range(3)))
    except TimeIsUp as error:  # the second, while the program was handling the first
        arrived = alarms_behind(error)
    finally:
        sys.setprofile(None)
        destructors.stop()
    assert raised in (1, 2)
    assert arrived == raised
    assert dropped == []


def test_what_a_destructor_raises_itself_goes_where_it_went(dropped: list[object]) -> None:
    before = sys.unraisablehook
    destructors = Destructors(Fence(Ears()))
    destructors.start()
    datum = ours()["Broken"]()
    del datum
    destructors.stop()
    assert dropped == [ValueError]
    assert sys.unraisablehook is before


def test_what_a_handler_raises_at_the_end_of_an_object_arrives(dropped: list[object]) -> None:
    """`weakref.finalize` would run Python code that is not ours, where nobody could tell."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeIsUp("now", 7)

    before = signal.signal(signal.SIGALRM, ring)
    destructors = Destructors(Fence(Ears()))
    destructors.start()
    thing = Ears()
    when_gone(thing, signal.raise_signal, signal.SIGALRM)
    arrived = 0
    try:
        del thing
        for _ in range(3):
            pass
    except TimeIsUp as error:
        arrived += error.args == ("now", 7)
    finally:
        destructors.stop()
        signal.signal(signal.SIGALRM, before)
    assert arrived == 1
    assert dropped == []


CALLBACK = """
import signal, weakref

class Thing:
    pass

def import_something():
    thing = Thing()
    kept = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGALRM))
    del thing
    for _ in range(3):
        pass
"""


@pytest.mark.parametrize("at_work", [True, False])
def test_what_a_handler_raises_in_a_callback_of_the_library_arrives_from_our_calls(
    at_work: bool, alarm: Alarm, dropped: list[object]
) -> None:
    """The locks of imports have such callbacks. What the program calls is not ours."""
    library: dict[str, Callable[[], None]] = {}
    exec(compile(CALLBACK, "<frozen importlib._bootstrap>", "exec"), library)
    fence, arrived = Fence(Ears()), 0
    destructors = Destructors(fence)
    destructors.start()
    alarm(handler)
    call = library["import_something"]
    try:
        if at_work:
            fence.ask(call)
        else:
            call()
    except TimeIsUp as error:
        arrived += error.args == ("now",)
    finally:
        destructors.stop()
    assert (arrived, dropped) == ((1, []) if at_work else (0, [TimeIsUp]))


def test_the_end_of_an_object_is_told_once() -> None:
    ended: list[str] = []
    thing = Ears()
    when_gone(thing, ended.append, "gone")
    assert ended == []
    del thing
    gc.collect()
    assert ended == ["gone"]
