"""The line at the start of a run. Needs nothing that the script might want to import itself."""

from __future__ import annotations

from kilter.core.events import Started
from kilter.core.plan import FREE_MARGIN, Goal
from kilter.core.units import show_fraction

STAND_IN = "a stand-in on the CPU"
"""For the memory of a GPU, where there is none."""


def start_line(started: Started) -> str:
    """The one line at the start of a run."""
    device = started.device
    doing = {"govern": "governing", "shadow": "shadowing (nothing is set)"}.get(
        started.mode, "watching only"
    )
    fitting = started.goal.memory_budget is not None
    if fitting:
        doing = "fitting" if started.mode == "observe" else f"fitting and {doing}"
    name = f"{device.name} [{device.label.value}]"
    if fitting and device.backend == "null":
        name = f"{STAND_IN} [simulated]"
    elif device.backend == "null":
        doing, name = "no GPU:", "iterations are timed, no more"
    text = f"kilter {started.kilter}: {doing} {name}"
    if fitting:
        text += f", memory {started.goal.memory_budget}"
    if started.goal.max_slowdown is not None and started.mode != "observe":
        text += f", {contract(started.goal)}"
    if started.mode != "govern" and not (fitting and started.goal.max_slowdown is None):
        text += f"; {started.mode_reason}"
    if started.world_size > 1:
        text += f"; {started.world_size} ranks"
    return ascii_line(text)


def wish(goal: Goal) -> str:
    """The whole goal in words."""
    if goal.memory_budget is None:
        return contract(goal)
    memory = f"memory {goal.memory_budget}"
    return memory if goal.max_slowdown is None else f"{memory}; {contract(goal)}"


def contract(goal: Goal) -> str:
    """What was asked of the clocks, in words."""
    if goal.max_slowdown is None:
        return "no clock goal"
    return f"at most {allowed(goal.max_slowdown)} slower"


def allowed(max_slowdown: float) -> str:
    """A bound in words, with what a bound of zero means."""
    if max_slowdown < FREE_MARGIN:
        return f"{show_fraction(max_slowdown)} (tested as {show_fraction(FREE_MARGIN)})"
    return show_fraction(max_slowdown)


def ascii_line(text: str) -> str:
    """One line of printable ASCII; everything else is shown as an escape."""
    return "".join(c if " " <= c <= "~" else c.encode("unicode_escape").decode() for c in text)
