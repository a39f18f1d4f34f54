"""What a run did about the clocks of unit operations, in words: `kilter run --operations`."""

from __future__ import annotations

from kilter.app.report import section_run
from kilter.core.events import Operated
from kilter.core.units import show_count, show_time


def headline(told: Operated, *, simulated: bool) -> str:
    """The answer. What the plan would save is simulated."""
    expected = simulated or told.search is None or told.instead is not None
    return f"operations: {answer(told)} [{'simulated' if expected else 'measured'}]"


def answer(told: Operated) -> str:
    """What was taken and why, or what would be, in a few sentences."""
    found = told.search
    if told.instead is not None:
        why = "" if told.instead == told.summary else f": {told.instead}"
        return f"{told.summary} One clock for the whole job instead{why}."
    if found is not None and found.held:
        return section_run.held(found)
    if found is not None:
        return f"{told.summary} The default stands: {found.reason}."
    if told.planned and told.sets:
        blocks = show_count(told.blocks, "block")
        return (
            f"The comparison with plain iterations was not over after {blocks}: the default stood. "
            f"{told.summary}"
        )
    return told.summary


def details(told: Operated, *, simulated: bool) -> list[str]:
    """How the commands went."""
    lines = []
    if told.commands:
        lines.append(f"commands: {section_run.commands(told, simulated=simulated)}")
    if told.reopened:
        lines.append(f"the iteration's time changed {show_count(told.reopened, 'time')}")
    whose = "the device's own switch times" if told.calibrated else "the profile's switch times"
    lines.append(f"break-even: {show_time(told.break_even_s)} by {whose}")
    return lines
