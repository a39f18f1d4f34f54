"""The memory part of a report: from events and files to words, numbers and a page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runs import RunWriter

from kilter.app.report import memory_plots
from kilter.app.report.build import build, to_json
from kilter.app.report.memory import (
    MemoryReport,
    as_json,
    chrome_of,
    details,
    headline,
    how_kept,
    lines,
    memory_report,
    timeline_of,
)
from kilter.core.events import Fitted, Moved, Started
from kilter.core.label import Label
from kilter.core.plan import Effect, Goal, MemoryBudget, MoveData, Plan
from kilter.core.trace import Datum, IterationTrace, Kind, Operation
from kilter.core.units import GIB, MIB, show_bytes, show_fraction, show_time

FITTED = Fitted(
    t_s=2.0,
    planner="mix",
    budget_bytes=30 * GIB,
    feasible=True,
    peak_before_bytes=45 * GIB,
    peak_bytes=29 * GIB,
    compute_s=0.2,
    iteration_s=0.21,
    stall_s=0.004,
    recompute_s=0.006,
    out_bytes=3 * GIB,
    in_bytes=3 * GIB,
    hidden=0.96,
    host_bytes=2 * GIB,
    swapped=40,
    recomputed=200,
    kept=300,
)
MOVED = Moved(
    t_s=9.0,
    backend="cuda",
    budget_bytes=30 * GIB,
    budget="as asked",
    applied=True,
    plain_peak_bytes=45 * GIB,
    plain_peak_seen=False,
    peak_bytes=29 * GIB,
    least_bytes=25 * GIB,
    plain_iteration_s=None,
    iteration_s=0.225,
    passes=100,
    planned=90,
    deviations=1,
    late=2,
    spilled=50,
    recomputed=18000,
    out_bytes=300 * GIB,
    in_bytes=300 * GIB,
    host_bytes=2 * GIB,
    bound_s=0.204,
)
GOAL = MemoryBudget(size_bytes=30 * GIB)


def changed(moved: dict[str, object], plans: tuple[Fitted, ...] = (FITTED,)) -> MemoryReport:
    fields = {name: getattr(MOVED, name) for name in MOVED.__struct_fields__}
    found = memory_report(GOAL, [(0, plans, [Moved(**{**fields, **moved})])])
    assert found is not None
    return found


def text(memory: MemoryReport) -> str:
    return "\n".join([headline(memory), *(f"{name}: {line}" for name, line in details(memory))])


def test_nothing_asked_or_nothing_met_is_no_report() -> None:
    assert memory_report(None, [(0, [FITTED], [MOVED])]) is None
    assert memory_report(GOAL, [(0, [], [])]) is None


def test_a_budget_that_was_met() -> None:
    memory = changed({})
    assert memory.label is Label.MEASURED
    assert memory.within is True
    assert headline(memory) == "memory: peak 45.0 GiB -> 29.0 GiB [measured]"
    assert memory.slowdown is None  # it never ran without us
    assert memory.pass_slowdown == pytest.approx(0.05)
    said = text(memory)
    assert "iteration 225 ms [measured]" in said
    assert "200 ms -> 210 ms (+5.0 %), bound 204 ms [simulated]" in said
    assert "each planned pass: 40 tensors offloaded, 200 recomputed, 300 kept" in said
    assert "all passes: 300.0 GiB out and 300.0 GiB in, 18000 tensors recomputed" in said
    assert "96.0 % of it hidden [simulated]" in said
    assert "2.0 GiB of pinned host memory" in said
    assert "1 deviation, 2 late, 50 on demand" in said
    assert "parts were offloaded on demand from the first iteration on" in said


def test_a_plain_time_makes_a_slowdown_that_was_measured() -> None:
    memory = changed({"plain_iteration_s": 0.2, "plain_peak_seen": True})
    assert memory.slowdown == pytest.approx(0.125)
    assert headline(memory) == "memory: peak 45.0 GiB -> 29.0 GiB, iteration +12.5 % [measured]"
    assert "from the first iteration on" not in text(memory)


def test_where_most_iterations_have_no_plan_their_time_comes_first() -> None:
    counts = {"planned_iterations": 10, "other_iterations": 30, "other_iteration_s": 0.4}
    memory = changed({"plain_iteration_s": 0.2, "plain_peak_seen": True, **counts})
    assert headline(memory) == (
        "memory: peak 45.0 GiB -> 29.0 GiB, iteration +100.0 % without a plan (75.0 % of all), "
        "+12.5 % under one [measured]"
    )


def test_nothing_was_away_where_nothing_was_moved() -> None:
    idle = dict.fromkeys(("planned", "out_bytes", "in_bytes", "recomputed", "spilled"), 0)
    memory = changed({**idle, "budget_bytes": None, "budget": "60 % of the plain peak"}, ())
    assert "no budget (60 % of the plain peak); peak 45.0 GiB, nothing was moved" in text(memory)
    assert "from the first iteration on" not in text(memory)


def test_what_the_plan_does_not_account_for_is_said() -> None:
    late = changed({"plain_iteration_s": 0.2, "iteration_s": 0.26})
    assert "beyond the plan: 50 ms an iteration are not in the plan" in text(late)
    assert "beyond the plan" not in text(changed({"plain_iteration_s": 0.2, "iteration_s": 0.225}))
    streams = {"plain_iteration_s": 0.2, "iteration_s": 0.26, "step_wait_s": 0.04}
    assert "beyond the plan" not in text(changed(streams))  # state is waited for in the step
    several = {"plain_iteration_s": 0.2, "iteration_s": 0.26, "iteration_passes": 8.0}
    assert "beyond the plan" not in text(changed(several))  # 8 times 10 ms are in the plan
    unknown = changed({"plain_iteration_s": None, "iteration_s": 0.9})
    assert "beyond the plan: 690 ms an iteration are no part of forward and backward" in text(
        unknown
    )
    assert "beyond the plan" not in text(changed({"plain_iteration_s": None, "iteration_s": 0.22}))


def test_no_time_of_a_plan_is_told_beside_the_models_own_checkpointing() -> None:
    """A plan's times with everything kept have that checkpointing in them."""
    on: dict[str, object] = {"own_checkpointing": True, "recompute_choice": "it is on: 225 ms"}
    memory = changed({**on, "plain_iteration_s": None})
    assert "iteration 225 ms [measured]" in text(memory)
    assert "recompute: it is on: 225 ms" in text(memory)
    assert "forward and backward" not in text(memory)
    assert "slower" not in memory_plots.claim(memory)
    assert "Forward and backward" not in memory_plots.section(memory, None)
    assert "time:" not in text(changed({**on, "iteration_s": None}))


NOTHING: dict[str, object] = {
    "plain_peak_bytes": 20 * GIB,
    "peak_bytes": 20 * GIB,
    "spilled": 0,
    "recomputed": 0,
    "out_bytes": 0,
    "in_bytes": 0,
}


def planned(**different: object) -> Fitted:
    fields = {name: getattr(FITTED, name) for name in FITTED.__struct_fields__}
    return Fitted(**{**fields, **different})


def test_a_job_that_fits() -> None:
    still = planned(swapped=0, recomputed=0, peak_before_bytes=20 * GIB)
    memory = changed(NOTHING, (still,))
    assert headline(memory) == (
        "memory: the job fits: peak 20.0 GiB within 30.0 GiB, nothing was moved [measured]"
    )


@pytest.mark.parametrize(
    "moved",
    [
        {"out_bytes": MIB},
        {"in_bytes": MIB},
        {"recomputed": 1},
        {"consumed": 1},
        {"plain_peak_bytes": 31 * GIB},
    ],
)
def test_a_job_in_which_anything_moved_in_any_pass_does_not_just_fit(
    moved: dict[str, object],
) -> None:
    still = planned(swapped=0, recomputed=0, peak_before_bytes=20 * GIB)
    memory = changed({**NOTHING, **moved}, (still,))
    assert "the job fits" not in headline(memory)
    assert ("nothing was moved" in text(memory)) is ("plain_peak_bytes" in moved)


def test_a_smaller_kind_of_pass_that_moves_something_is_not_overlooked() -> None:
    still = planned(swapped=0, recomputed=0, peak_before_bytes=20 * GIB, out_bytes=0, in_bytes=0)
    small = planned(swapped=3, recomputed=0, peak_before_bytes=10 * GIB)
    memory = changed({**NOTHING, "out_bytes": MIB, "in_force": (0, 1)}, (still, small))
    said = text(memory)
    assert "the job fits" not in said
    line = "passes of 20.0 GiB: 0 tensors offloaded, 0 recomputed, 300 kept; 0 B out and 0 B in"
    assert f"{line} [simulated]" in said  # no share of nothing is hidden
    assert "passes of 10.0 GiB: 3 tensors offloaded" in said


def test_no_budget_and_yet_data_moved() -> None:
    memory = changed({"budget_bytes": None, "budget": "not known"}, ())
    assert "nothing was moved" not in headline(memory)
    assert "300.0 GiB out and 300.0 GiB in" in headline(memory)


RECORDS = st.fixed_dictionaries(
    {
        "budget_bytes": st.none() | st.integers(1, 60).map(lambda n: n * GIB),
        "plain_peak_bytes": st.none() | st.integers(1, 60).map(lambda n: n * GIB),
        "peak_bytes": st.none() | st.integers(1, 60).map(lambda n: n * GIB),
        "least_bytes": st.none() | st.integers(1, 60).map(lambda n: n * GIB),
        "highest_bytes": st.integers(0, 60).map(lambda n: n * GIB),
        "applied": st.booleans(),
        "recomputed": st.sampled_from((0, 0, 5)),
        "out_bytes": st.sampled_from((0, 0, 3 * GIB)),
        "in_bytes": st.sampled_from((0, 0, 3 * GIB)),
        "consumed": st.sampled_from((0, 0, 2)),
        "spilled": st.sampled_from((0, 4)),
        "in_force": st.sampled_from(((), (0,), (1,), (0, 1))),
        "plain_iteration_s": st.sampled_from((None, 0.2, 0.5)),
        "planned_iterations": st.sampled_from((10, 60)),
        "other_iterations": st.sampled_from((0, 2, 3, 15)),
        "other_iteration_s": st.just(0.7),
    }
)
PLANS = st.lists(
    st.builds(
        planned,
        swapped=st.sampled_from((0, 4)),
        recomputed=st.sampled_from((0, 4)),
        feasible=st.booleans(),
        peak_before_bytes=st.integers(1, 60).map(lambda n: n * GIB),
    ),
    max_size=2,
).map(tuple)


@settings(max_examples=200, deadline=None)
@given(RECORDS, PLANS)
def test_each_sentence_agrees_with_the_record(
    moved: dict[str, object], plans: tuple[Fitted, ...]
) -> None:
    memory = changed(moved, plans)
    said = text(memory)
    anything = any(moved[name] for name in ("recomputed", "out_bytes", "in_bytes", "consumed"))
    if "nothing was moved" in said:
        assert not anything
    if "the job fits" in said:
        assert not anything
        peak_bytes, budget_bytes = memory.record.plain_peak_bytes, memory.record.budget_bytes
        assert peak_bytes is not None
        assert budget_bytes is None or peak_bytes <= budget_bytes
        assert not any(plan.swapped or plan.recomputed for plan in memory.in_force)
    if " -> " in headline(memory):
        over = memory.within is False
        assert ("OVER the budget" in headline(memory)) is over
    if "outside of forward and backward" in said:
        record = memory.record
        assert 0 < record.highest_bytes <= (record.budget_bytes or 0) < (record.peak_bytes or 0)
    if "cannot be met" in said:
        assert memory.feasible is False
    if "the best plan takes" in said:
        record = memory.record
        assert (record.least_bytes or 0) <= (record.peak_bytes or 0) <= record.plain_peak_bytes


SIZE = r"\d[\d.]* (?:B|[KMGT]iB)|unknown"
MOVED_WORDS = r"nothing was moved|.* out and .* in.*|\d+ tensors recomputed.*|\d+ buckets of .*"
Json = dict[str, Any]


def sizes(*keys: str) -> Callable[[re.Match[str], Json], bool]:
    """The groups of a sentence are these sizes of `report.json`; one that is not there is None."""
    return lambda match, found: all(
        said is None or said == show_bytes(found[key])
        for said, key in zip(match.groups(), keys, strict=True)
    )


def no_budget(match: re.Match[str], found: Json) -> bool:
    asked = match[1] == found["budget"] and found["budget_bytes"] is None
    return asked and match[2] == show_bytes(found["peak_before_bytes"])


def unmet(match: re.Match[str], found: Json) -> bool:
    least, best, others = match[2], match[3], match[7] or match[9]
    on_demand = match[6] is None or found["spilled"] > 0
    return (
        found["feasible"] is False
        and on_demand
        and match[1] == show_bytes(found["budget_bytes"])
        and (least or "unknown") == show_bytes(found["least_bytes"])
        and {best, others} <= {None, show_bytes(found["peak_bytes"])}
        and {match[4], match[8]} <= {None, show_bytes(found["peak_before_bytes"])}
    )


def more(match: re.Match[str], found: Json) -> bool:
    stay = found["backend"] == "cuda" and not found["consumed"]
    over_bytes = found["least_bytes"] - found["budget_bytes"]
    return (match[2] is not None) == stay and match[1] == show_bytes(over_bytes)


def met(match: re.Match[str], found: Json) -> bool:
    before, after, over, budget = match.groups()
    if over is not None and over != show_bytes(found["peak_bytes"] - found["budget_bytes"]):
        return False
    return (
        before == show_bytes(found["peak_before_bytes"])
        and after == show_bytes(found["peak_bytes"])
        and budget in (None, show_bytes(found["budget_bytes"]))
        and found["applied"]
        and (over is not None) == (found["within"] is False)
    )


def iteration_times(match: re.Match[str], found: Json) -> bool:
    """Plain iterations are compared with those that do the same; the others are told of if there
    are some."""
    before_s, after_s = found["iteration_before_s"], found["iteration_s"]
    alike = before_s is not None and after_s >= 0.9 * before_s
    others, planned = found["other_iterations"], found["planned_iterations"]
    share = others / (others + planned)
    told = (None, None)
    if others >= 3 and share >= 0.05:
        told = (show_time(found["other_iteration_s"]), show_fraction(share))
    before = show_time(before_s) if alike else None
    return match.groups() == (before, show_time(after_s), *told)


def of_kind(match: re.Match[str], found: Json) -> bool:
    """The words of a kind of pass are those of a plan in force."""
    one = len(found["in_force"]) == 1
    return (match[1] == "each planned pass") == one and any(
        (match[2] is None or match[2] == show_bytes(plan["peak_before_bytes"]))
        and match.group(3, 4, 5) == (str(plan["swapped"]), str(plan["remade"]), str(plan["kept"]))
        and match.group(6, 7) == (show_bytes(plan["out_bytes"]), show_bytes(plan["in_bytes"]))
        for plan in found["in_force"]
    )


def all_moved(match: re.Match[str], found: Json) -> bool:
    names = ("remade", "out_bytes", "in_bytes", "consumed")
    return (match[1] == "nothing was moved") == (not any(found[name] for name in names))


def counts(match: re.Match[str], found: Json) -> bool:
    keys = ("passes", "planned", "deviations", "late", "spilled")
    return match.groups() == tuple(str(found[key]) for key in keys)


LABELLED = r" \[(?:measured|simulated)\]"
PERCENT = r"[+-]?[\d.]+ %"
OVER = rf"(?:, ({SIZE}) OVER the budget of ({SIZE})(?:, outside of forward and backward)?)?"
CHANGE = (
    rf"(?:, iteration {PERCENT}(?: under a plan, {PERCENT} of iterations without one"
    rf"| without a plan \({PERCENT} of all\), {PERCENT} under one)?)?"
)
GRAMMAR: tuple[tuple[str, Callable[[re.Match[str], Json], bool]], ...] = (
    (rf"memory: no budget \((.*)\); peak ({SIZE}), (?:{MOVED_WORDS}){LABELLED}", no_budget),
    (
        rf"memory: the job fits: peak ({SIZE}) within ({SIZE}), nothing was moved{LABELLED}",
        sizes("peak_before_bytes", "budget_bytes"),
    ),
    (
        rf"memory: ({SIZE}) cannot be met(?:, ({SIZE}) is the least that is possible)?"
        rf"(?:; the best plan takes ({SIZE}) of ({SIZE})({CHANGE})"
        rf"|(; tensors were offloaded on demand)?(?:; passes take up to ({SIZE}) of ({SIZE})"
        rf"|; passes of other kinds take up to ({SIZE}))?)"
        rf"{LABELLED}",
        unmet,
    ),
    (
        rf"memory: no plan yet: peak ({SIZE}), budget ({SIZE}){LABELLED}",
        sizes("peak_before_bytes", "budget_bytes"),
    ),
    (
        rf"memory: no plan: peak ({SIZE}) -> ({SIZE}){OVER}, "
        rf"(?:{MOVED_WORDS}){LABELLED}",
        met,
    ),
    (
        rf"memory: peak ({SIZE}) would be (?:{SIZE}); (?:{MOVED_WORDS}){LABELLED}",
        lambda match, found: sizes("peak_before_bytes")(match, found) and not found["applied"],
    ),
    (
        rf"memory: peak ({SIZE}) -> ({SIZE}){OVER}{CHANGE}{LABELLED}",
        met,
    ),
    (rf"budget: ({SIZE}): as asked", sizes("budget_bytes")),
    (
        rf"peak before: ({SIZE}) counted: parts were offloaded on demand from the first iteration"
        r" on",
        sizes("peak_before_bytes"),
    ),
    (
        rf"to fit: ({SIZE}) more are needed: try (--gradients consume, )?kilter\.divided\(2\) or a "
        r"smaller batch \(kilter size says which one fits\)",
        more,
    ),
    (
        rf"time: iteration (?:([\d.]+ \w+) -> )?([\d.]+ \w+){LABELLED}"
        rf"(?:; ([\d.]+ \w+) where a pass has no plan, ([\d.]+ %) of iterations{LABELLED})?"
        rf"(?:; forward and backward .* \(.*\), bound .*{LABELLED})?",
        iteration_times,
    ),
    (
        r"beyond the plan: [\d.]+ \w+ an iteration .*",
        lambda match, found: found["iteration_s"] > 1.1 * found["pass_s"],
    ),
    (
        rf"(each planned pass|passes of ({SIZE})): (\d+) tensors? offloaded, (\d+) recomputed, "
        rf"(\d+) kept; ({SIZE}) out and ({SIZE}) in, [\d.]+ % of it hidden \[simulated\]",
        of_kind,
    ),
    (rf"all passes: ({MOVED_WORDS})", all_moved),
    (rf"host: (?:{SIZE}) of pinned host memory", lambda match, found: found["host_bytes"] > 0),
    (
        r"passes: (\d+) passes, (\d+) under a plan; (\d+) deviations?, (\d+) late, (\d+) on demand",
        counts,
    ),
)


@settings(max_examples=200, deadline=None)
@given(RECORDS, PLANS)
def test_every_sentence_of_the_memory_summary_is_true_of_the_report(
    moved: dict[str, object], plans: tuple[Fitted, ...]
) -> None:
    memory = changed(moved, plans)
    found = json.loads(json.dumps(as_json(memory)))
    found["remade"] = moved["recomputed"]
    for sentence in lines(memory):
        fitting = [
            (match, holds)
            for pattern, holds in GRAMMAR
            if (match := re.fullmatch(pattern, sentence)) is not None
        ]
        assert len(fitting) == 1, f"{len(fitting)} rules for: {sentence}"
        match, holds = fitting[0]
        assert holds(match, found), sentence


def test_a_peak_above_the_budget_is_not_hidden() -> None:
    memory = changed({"peak_bytes": 31 * GIB})
    assert memory.within is False
    assert "-> 31.0 GiB, 1.0 GiB OVER the budget of 30.0 GiB" in headline(memory)
    assert "outside" not in headline(memory)
    beside = changed({"peak_bytes": 31 * GIB, "highest_bytes": 29 * GIB})
    assert "OVER the budget of 30.0 GiB, outside of forward and backward" in headline(beside)


def test_iterations_without_a_plan_are_not_hidden_behind_those_with_one() -> None:
    counts = {"planned_iterations": 70, "other_iterations": 10, "other_iteration_s": 0.4}
    memory = changed({"iteration_s": 0.05, "plain_iteration_s": 0.05, **counts})
    said = ", iteration +0.0 % under a plan, 12.5 % of iterations without one [measured]"
    assert headline(memory).endswith(said)
    assert "400 ms where a pass has no plan, 12.5 % of iterations" in text(memory)
    assert memory_plots.claim(memory).endswith(
        "as fast under a plan, 12.5 % of iterations without one"
    )
    assert "400 ms where a pass has no plan, 12.5 % of iterations." in memory_plots.section(
        memory, None
    )


def test_iterations_that_did_more_are_compared_with_no_others() -> None:
    """Evaluation ran in most of those before the plan."""
    memory = changed({"iteration_s": 0.04, "plain_iteration_s": 0.13})
    assert "iteration -" not in text(memory)
    assert "time: iteration 40 ms" in text(memory)


def test_a_higher_peak_before_the_plans_is_told() -> None:
    assert "highest peak: 31.0 GiB in passes before" in text(changed({"most_bytes": 31 * GIB}))
    assert "highest peak" not in text(changed({"most_bytes": 29 * GIB}))


def test_the_plan_of_the_largest_pass_rules_and_its_last_version() -> None:
    small = planned(peak_before_bytes=GIB, swapped=1)
    again = planned(swapped=44)
    assert changed({}, (FITTED, again, small)).plan == again


def test_what_cannot_be_met_is_said_with_the_least_that_can() -> None:
    memory = changed({"peak_bytes": None, "least_bytes": 33 * GIB, "iteration_s": None}, ())
    assert memory.feasible is False
    assert headline(memory) == (
        "memory: 30.0 GiB cannot be met, 33.0 GiB is the least that is possible; "
        "tensors were offloaded on demand [measured]"
    )


def test_a_killed_run_whose_plan_exceeds_the_budget_names_no_least() -> None:
    unknown = {"peak_bytes": None, "least_bytes": None, "iteration_s": None, "spilled": 0}
    memory = changed(unknown, (planned(peak_bytes=33 * GIB, budget_bytes=33 * GIB),))
    assert headline(memory) == "memory: 30.0 GiB cannot be met [measured]"


@pytest.mark.parametrize("peak", [32, 46])
def test_other_passes_than_those_of_the_plan_are_not_called_its_best(peak: int) -> None:
    """A kind that came to an end, or one without a plan that takes more than was ever seen."""
    least = planned(peak_bytes=33 * GIB, budget_bytes=33 * GIB)
    memory = changed({"peak_bytes": peak * GIB, "least_bytes": 33 * GIB}, (least,))
    assert headline(memory) == (
        "memory: 30.0 GiB cannot be met, 33.0 GiB is the least that is possible; "
        f"passes of other kinds take up to {peak}.0 GiB [measured]"
    )


@pytest.mark.parametrize(("peak", "kinds"), [(32, "passes of other kinds"), (34, "passes")])
def test_without_a_plan_passes_that_take_less_than_the_least_are_of_other_kinds(
    peak: int, kinds: str
) -> None:
    memory = changed({"peak_bytes": peak * GIB, "least_bytes": 33 * GIB, "iteration_s": None}, ())
    said = headline(memory)
    assert f"; tensors were offloaded on demand; {kinds} take up to {peak}.0 GiB" in said


def test_a_plan_within_the_budget_meets_it_whatever_it_was_made_for() -> None:
    """The engine plans for a little less than the budget; where that is less than the least
    possible peak, for a little more than that."""
    least = planned(peak_bytes=30 * GIB, budget_bytes=30 * GIB + MIB)
    memory = changed({"peak_bytes": 30 * GIB, "least_bytes": 30 * GIB}, (least,))
    assert memory.feasible
    assert headline(memory).startswith("memory: peak 45.0 GiB -> 30.0 GiB")


def test_kinds_of_passes_that_look_alike_are_told_once() -> None:
    said = text(changed({"in_force": (0, 1)}, (FITTED, planned(t_s=FITTED.t_s + 1))))
    assert said.count("passes of 45.0 GiB: 40 tensors offloaded") == 1


def test_a_job_that_saves_nothing_to_move_says_so() -> None:
    nothing = {"passes": 0, "planned": 0, "out_bytes": 0, "in_bytes": 0, "applied": True}
    unknown = {"plain_peak_bytes": None, "peak_bytes": None, "least_bytes": None}
    for budget in ({"budget_bytes": None, "budget": "60 % of the plain peak"}, {}):
        memory = changed(
            {**nothing, **unknown, "spilled": 0, "recomputed": 0, "most_bytes": 0, **budget}, ()
        )
        assert headline(memory) == (
            "memory: nothing to move: no activation of 1.0 MiB or more was seen being saved for "
            "backward [measured]"
        )


def test_a_run_killed_before_its_first_pass_may_have_had_much_to_move() -> None:
    first = msgspec.structs.replace(
        MOVED, passes=0, planned=0, spilled=0, recomputed=0, out_bytes=0, in_bytes=0, most_bytes=0
    )
    memory = memory_report(GOAL, [(0, (), [first])], complete=False)
    assert memory is not None
    assert headline(memory) == "memory: no pass is on record [measured]"


def test_a_run_killed_before_a_plan() -> None:
    memory = changed({"peak_bytes": None, "least_bytes": None, "iteration_s": None}, ())
    assert headline(memory) == ("memory: no plan yet: peak 45.0 GiB, budget 30.0 GiB [measured]")


def test_what_was_reached_without_a_plan_is_said() -> None:
    """Shapes keep changing, and tensors are offloaded on demand, or blocks are checkpointed."""
    none = {"least_bytes": None, "iteration_s": None, "recomputed": 0}
    moved = {"out_bytes": 3 * GIB, "in_bytes": 3 * GIB}
    on_demand = "memory: no plan: peak 45.0 GiB -> 29.0 GiB, 3.0 GiB out and 3.0 GiB in [measured]"
    assert headline(changed(none | moved, ())) == on_demand
    over = headline(changed(none | moved | {"peak_bytes": 31 * GIB}, ()))
    assert "-> 31.0 GiB, 1.0 GiB OVER the budget of 30.0 GiB, 3.0 GiB out" in over
    own = headline(changed(none | moved | {"own_checkpointing": True}, ()))
    assert own.endswith("-> 29.0 GiB, the model's own checkpointing is on [measured]")
    assert how_kept(changed(none | moved, ())) == " Tensors were offloaded without a memory plan."
    own_alone = changed(none | {"out_bytes": 0, "own_checkpointing": True}, ())
    assert how_kept(own_alone) == " The model's own checkpointing was on."
    assert how_kept(changed({})) == " The memory plan was in force."
    assert how_kept(changed(none | {"out_bytes": 0}, ())) == ""
    page = memory_plots.section(changed(none | moved, ()), None)
    assert "Offloaded in all passes" in page
    assert "unknown" not in page


def test_each_ranks_peak() -> None:
    memory = memory_report(GOAL, [(0, [FITTED], [MOVED]), (1, [FITTED], [MOVED]), (2, [], [])])
    assert memory is not None
    assert [rank.rank for rank in memory.ranks] == [0, 1]
    assert "peak of each: 0: 45.0 GiB -> 29.0 GiB, 1: 45.0 GiB -> 29.0 GiB" in text(memory)


# The picture

HOSTILE = '"><script>alert(1)</script>'


def run_files() -> tuple[IterationTrace, Plan]:
    """Three data saved in forward; the first swapped, the second recomputed."""
    count, size = 10, 8 * MIB
    reads: dict[int, tuple[int, ...]] = {9: (0,), 8: (1,), 7: (2,)}
    levels = [MIB, 9 * MIB, 17 * MIB, 25 * MIB, 25 * MIB, 25 * MIB, 25 * MIB, 25 * MIB, 17 * MIB]
    operations = tuple(
        Operation(
            name=HOSTILE,
            kind=Kind.BACKWARD if k > 5 else Kind.FORWARD,
            start_s=k * 1e-3,
            duration_s=1e-3,
            reads=reads.get(k, ()),
            writes=(k,) if k < 3 else (),
            level_bytes=[*levels, 9 * MIB][k],
        )
        for k in range(count)
    )
    data = tuple(
        Datum(
            name=HOSTILE,
            kind="feature_map",
            size_bytes=size,
            first_use=k,
            last_use=9 - k,
            recompute_s=1e-4,
            sources=(),
        )
        for k in range(3)
    )
    trace = IterationTrace(
        iteration_s=1e-2,
        operations=operations,
        data=data,
        timeline="gpu",
        device="a card",
        label=Label.MEASURED,
    )
    moved = MoveData(
        budget_bytes=17 * MIB,
        min_bytes=MIB,
        link=(50e9, 50e9, 100e9, 0.0),
        moves=((0, 2, 8),),
        recomputed=(1,),
    )
    plan = Plan(
        planner="mix",
        actions=(),
        effect=Effect(time_ratio=1.0, peak_bytes=17 * MIB),
        reason="",
        label=Label.SIMULATED,
        memory=moved,
    )
    return trace, plan


def test_the_timeline_has_both_levels_and_every_move() -> None:
    trace, plan = run_files()
    found = timeline_of(trace, plan)
    assert found is not None
    assert len(found.starts_s) == len(found.before_bytes) == len(found.after_bytes) == 10
    assert max(found.before_bytes) == 25 * MIB
    assert max(found.after_bytes) <= 17 * MIB
    assert found.backward_from == 6
    assert {span.lane for span in found.spans} >= {"compute", "out", "in", "recompute"}
    inside = timeline_of(replace(trace, data=(), memory=trace), plan)
    assert inside is not None
    assert inside.after_bytes == found.after_bytes
    rows = {
        event["tid"]
        for event in chrome_of(found.problem, found.schedule)["traceEvents"]
        if event["ph"] == "X"
    }
    assert rows == {1, 2, 3}


def test_no_plan_of_memory_is_no_picture() -> None:
    trace, plan = run_files()
    assert timeline_of(trace, replace(plan, memory=None)) is None


def test_the_page_is_well_formed_and_harmless() -> None:
    found = timeline_of(*run_files())
    page = memory_plots.section(changed({"budget": HOSTILE}), found)

    class Closed(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []
            self.seen: set[str] = set()

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.open.append(tag)
            self.seen.add(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    closed = Closed()
    closed.feed(page)
    assert closed.open == []
    assert "script" not in closed.seen
    assert "recomputed" in page
    assert "everything kept, peak 25.0 MiB" in page
    assert "budget 17.0 MiB" in page
    assert memory_plots.section(None, found) == ""


def test_units_keep_their_letters_in_the_names_of_kinds_of_passes() -> None:
    two = changed({"in_force": (0, 1)}, (FITTED, planned(peak_before_bytes=9 * GIB)))
    page = memory_plots.section(two, None)
    assert "<dt>Passes of 45.0 GiB</dt>" in page
    assert "<dt>Passes of 9.0 GiB</dt>" in page


def test_the_claim_names_both_peaks_and_the_cost() -> None:
    assert memory_plots.claim(changed({})) == "29.0 GiB of memory instead of 45.0 GiB, 5.0 % slower"
    unmet = changed({"peak_bytes": None, "least_bytes": 33 * GIB}, ())
    assert memory_plots.claim(unmet).startswith("30.0 GiB cannot be met")


def test_waiting_for_copies_is_told_where_it_was_timed() -> None:
    assert "waits for copies" not in text(changed({}))
    assert "waits for copies: 1.5 ms a pass [measured]" in text(changed({"waited_s": 0.0015}))
    told = text(changed({"waited_s": 0.0, "hastened": 12}))
    assert "12 loads start earlier than planned" in told


OLDER = """{"event":"fitted","t_s":2.0,"planner":"mix","budget_bytes":300,"feasible":true,\
"peak_before_bytes":500,"peak_bytes":290,"compute_s":0.2,"iteration_s":0.21,"stall_s":0.0,\
"recompute_s":0.01,"out_bytes":30,"in_bytes":31,"hidden":0.9,"host_bytes":20,"swapped":4,"remade":2,\
"kept":3}
{"event":"moved","t_s":9.0,"backend":"cuda","budget_bytes":300,"budget":"as asked","applied":true,\
"plain_peak_bytes":500,"plain_peak_seen":true,"peak_bytes":295,"least_bytes":100,\
"plain_iteration_s":0.3,"iteration_s":0.33,"passes":100,"planned":90,"deviations":1,"late":2,\
"spilled":5,"remade":180,"out_bytes":3000,"in_bytes":3100,"host_bytes":20}
{"event":"refused","t_s":9.5,"what":"a part of the memory plan","reason":"it differs"}
"""
"""Lines as an earlier kilter wrote them, before some of the numbers were counted."""


def test_an_older_run_opens_and_its_report_has_the_keys_of_before(tmp_path: Path) -> None:
    writer = RunWriter()
    writer.start()
    writer.stop()
    goal = Goal(memory_budget=MemoryBudget(size_bytes=300 * MIB))
    first, *rest = (
        msgspec.structs.replace(e, goal=goal) if isinstance(e, Started) else e
        for e in writer.events
    )
    lines = [msgspec.json.encode(event).decode() + "\n" for event in (first, *rest)]
    (tmp_path / "events-rank0.jsonl").write_text("".join([lines[0], OLDER, *lines[1:]]))
    found = json.loads(to_json(build(tmp_path)))
    memory = found["memory"]
    assert {key: memory[key] for key in ("peak_before_bytes", "peak_bytes", "remade")} == {
        "peak_before_bytes": 500,
        "peak_bytes": 295,
        "remade": 180,
    }
    assert (memory["pass_before_s"], memory["pass_s"], memory["recomputed"]) == (0.2, 0.21, 2)
    assert (memory["label"], memory["feasible"], memory["within"]) == ("measured", True, True)
    assert memory["goal"] == {"size_bytes": 300 * MIB, "share": None}
    assert memory["in_force"] == memory["plans"]
    assert memory["ranks"][0]["peak_before_bytes"] == 500
    assert set(memory) == {
        *("label", "backend", "goal", "budget_bytes", "budget", "applied", "feasible", "within"),
        *("peak_before_bytes", "peak_before_seen", "peak_bytes", "most_bytes", "least_bytes"),
        *("iteration_before_s", "iteration_s", "pass_before_s", "pass_s", "bound_s", "stall_s"),
        *("recompute_s", "pass_out_bytes", "pass_in_bytes", "hidden", "host_bytes", "swapped"),
        *("recomputed", "kept", "passes", "planned", "deviations", "late", "spilled", "waited_s"),
        *("hastened", "remade", "out_bytes", "in_bytes", "consumed", "state", "plans"),
        *("in_force", "ranks", "compiled", "recompute_choice", "own_checkpointing", "at_peak"),
        *("planned_iterations", "other_iterations", "other_iteration_s", "iteration_passes"),
        *("highest_bytes", "step_wait_s"),
    }
    assert found["refused"][0]["code"] is None
