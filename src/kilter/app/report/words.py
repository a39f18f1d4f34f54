"""The line at the start of a run. Needs nothing that the script might want to import itself."""

from __future__ import annotations

from dataclasses import dataclass

from kilter.core.events import Started
from kilter.core.plan import FREE_MARGIN, ClocksMode, Goal
from kilter.core.units import show_bytes, show_fraction

STAND_IN = "a stand-in on the CPU"
"""It stands for the memory of a GPU, where there is none."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence of a report, and how it is known: a label, `predicted, simulated`, or ``."""

    text: str
    label: str = ""

    def __str__(self) -> str:
        return f"{self.text} [{self.label}]" if self.label else self.text


def start_line(started: Started) -> str:
    """The one line at the start of a run."""
    goal = started.goal
    text = f"kilter {started.kilter}: {_doing(started)}"
    if goal.memory_budget is not None:
        text += f", memory {goal.memory_budget}"
        if goal.host_memory_bytes is not None:
            text += f", at most {show_bytes(goal.host_memory_bytes)} of host memory"
    if goal.max_slowdown is not None and started.mode != ClocksMode.OBSERVE:
        text += f", {contract(goal)}"
    if started.mode == ClocksMode.SHADOW:
        text += f"; nothing is set: {started.mode_reason}"
    elif started.mode == ClocksMode.OBSERVE and goal.max_slowdown is not None:
        text += f"; {started.mode_reason}"
    if started.world_size > 1:
        text += f"; {started.world_size} ranks"
    return ascii_line(text)


def _doing(started: Started) -> str:
    """What is done, and on which device. Memory is that of the program's own device: of a GPU, or
    of a stand-in on the CPU, never of a simulated one."""
    device, fits = started.device, started.goal.memory_budget is not None
    name = f"{device.name.removesuffix(' (simulated)')} [{device.label.value}]"
    if started.goal.max_slowdown is None and fits:
        if device.backend == "null":
            return f"fitting {STAND_IN} [simulated]"
        return "fitting the program's own device" if device.backend == "sim" else f"fitting {name}"
    if device.backend == "null":
        doing = "no GPU: iterations are only timed"
    elif started.mode == ClocksMode.OBSERVE:
        doing = f"watching {name}"
    else:
        doing = f"{'governing' if started.mode is ClocksMode.GOVERN else 'planning for'} {name}"
    return f"fitting and {doing}" if fits else doing


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
    told = f"at most {allowed(goal.max_slowdown)} slower"
    if goal.price_of_time == Goal().price_of_time:
        return told
    return f"{told}, each percent of time for at least {goal.price_of_time:g} % of energy"


def allowed(max_slowdown: float) -> str:
    """A bound in words, with what a bound of zero means."""
    if max_slowdown < FREE_MARGIN:
        return f"{show_fraction(max_slowdown)} (tested as {show_fraction(FREE_MARGIN)})"
    return show_fraction(max_slowdown)


def ascii_line(text: str) -> str:
    """One line of printable ASCII; everything else is shown as an escape."""
    return "".join(c if " " <= c <= "~" else c.encode("unicode_escape").decode() for c in text)
