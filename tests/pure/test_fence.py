"""The fence: what is caught, what passes, and that it is told once."""

from __future__ import annotations

import pytest

from kilter.act.fence import Fence, describe
from kilter.core.errors import DeviceLost


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
    assert not fence.down
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
