"""Every sentence of a summary says what the report says, whatever came of the run.

A grammar of all sentences, each with what has to be true of `report.json` for it to be said. Memory
has sentences of its own, which are held elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import runs

from kilter.app.report import build as report
from kilter.app.report import html, summary
from kilter.app.report.glossary import WORDS
from kilter.clocks.plan.job_class import IDLE_TOLD
from kilter.core.events import Started, Stopped
from kilter.core.label import Label
from kilter.core.reasons import CLOCKS_REFUSED, REHEARSAL_CUT
from kilter.core.setting import Setting
from kilter.core.trace import IterationTrace, Kind, Operation
from kilter.core.units import MHZ

CHOSEN = Setting(sm_clock_hz=1245 * MHZ)
Json = dict[str, Any]

NUMBER = r"-?\d+\.\d"
INTERVAL = rf"\((?:no interval|95 %: ({NUMBER}) to ({NUMBER}) %)\)"
LABEL = r"\[(measured|replayed|simulated)\]"
NEXT = (
    "run: kilter restore",
    "the watcher puts the GPU back; to be sure: kilter restore",
    "mend the script, then run it again",
    "give the rehearsal more time: --rehearse 60s",
    "kilter doctor says how to allow it",
    "run it so on a real GPU: nothing is saved on a simulated one",
    "feed the GPU: larger batches, torch.compile or CUDA graphs, data loaded ahead",
    "feed the GPU: the program waits for its data (more loader workers, prefetching)",
)


def same(shown: str | None, fraction: float | None) -> bool:
    """A number in percent with one decimal is this fraction."""
    if shown is None or fraction is None:
        return shown is None and fraction is None
    return shown == f"{round(100 * fraction, 1) + 0.0:.1f}"


def same_interval(low: str | None, high: str | None, ends: list[float] | None) -> bool:
    if ends is None or None in ends:
        return low is None
    return same(low, ends[0]) and same(high, ends[1])


def is_simulated(found: Json) -> bool:
    return any(device["backend"] == "sim" for device in found["devices"])


def idles(m: re.Match[str], found: Json) -> bool:
    idle = found["idle"]
    waits = idle["waits_for_data"]
    return (
        m[1] == found["job"]["name"]
        and (m[2] == "would idle") == (idle["label"] == "simulated")
        and m[3] == f"{100 * idle['share']:.0f}"
        and idle["share"] >= IDLE_TOLD
        and (m[1] == "input-bound") == (waits is not None and waits > 0.5)
        and (m[4] is None) == (m[1] == "idle")
        and (m[4] is None or m[4] == f"{100 * waits:.0f}")
        and m[5] == idle["label"]
    )


def verdict_holds(text: str, found: Json) -> bool:
    says = {"all of it within": True, "all of it beyond": False, "the interval reaches": None}
    said = next((value for words, value in says.items() if text.startswith(words)), "nothing")
    if said == "nothing":
        return found["slowdown_ci95"] is None and text.startswith(("the contract", "no contract"))
    return found["within_contract"] is said and found["contract"] is not None


def saves(m: re.Match[str], found: Json) -> bool:
    happened = found["kept"] and found["label"] == "measured" and not is_simulated(found)
    return (
        (m[1] == "saved") == happened
        and not (m[1] == "saved" and found["rehearsed_share"] > 0.0)
        and same(m[2], found["saving"])
        and same_interval(m[3], m[4], found["saving_ci95"])
        and same(m[5], found["slowdown"])
        and same_interval(m[6], m[7], found["slowdown_ci95"])
        and verdict_holds(m[8], found)
        and m[9] == found["label"]
    )


def slows(m: re.Match[str], found: Json) -> bool:
    return (
        found["saving"] is None
        and same(m[1], found["slowdown"])
        and same_interval(m[2], m[3], found["slowdown_ci95"])
        and verdict_holds(m[4], found)
        and m[5] == found["label"]
    )


def default_stands(m: re.Match[str], found: Json) -> bool:
    stays = found["choice"]["setting"] == found["found"] and not found["kept"]
    return stays and found["saving"] == 0.0 and m[1] in found["choice"]["reason"]


def is_planned(m: re.Match[str], found: Json) -> bool:
    expected = found["prediction"]
    return (
        not found["kept"]
        and found["saving"] is None
        and m[1] == "; ".join(expected["actions"])
        and same(m[2].removeprefix("+"), expected["energy_ratio"] - 1)
        and same(m[3].removeprefix("+"), expected["time_ratio"] - 1)
        and m[4] == expected["label"]
    )


def only_watched(m: re.Match[str], found: Json) -> bool:
    timed = found["baseline"]["iteration_s"] is not None
    return found["mode"] == "observe" and int(m[1]) == found["iterations"] and bool(m[2]) == timed


def no_result(m: re.Match[str], found: Json) -> bool:
    return found["saving"] is None and m[1] == found["choice"]["reason"]


def evidence(m: re.Match[str], found: Json) -> bool:
    told = found["evidence"]
    share = found["rehearsed_share"]
    counts = (m[1] == "no" and not told["pairs"] and int(m[2]) == len(found["blocks"])) or (
        m[1] == str(told["pairs"]) and int(m[3]) == told["iterations"]
    )
    left_out = ", ".join(f"{count} {why}" for why, count in told["left_out"].items())
    return (
        counts
        and (m[4] or "") == (f"{100 * share:.0f}" if share else "")
        and (m[5] or "") == left_out
    )


def nothing_set(m: re.Match[str], found: Json) -> bool:
    default = all(block["setting"] == found["found"] for block in found["blocks"])
    return found["restored"] is True and (default or found["mode"] != "govern")


def held(m: re.Match[str], found: Json) -> bool:
    setting = "the default" if not found["kept"] else str(msgspec.convert(_chosen(found), Setting))
    end = {
        True: "default restored",
        False: "default NOT restored",
        None: "no end on record: its process still runs, or was killed or terminated",
    }
    return (
        (m[1] is not None) == is_simulated(found)
        and m[2] == setting
        and m[3] == (found["choice"]["reason"] if found["kept"] else None)
        and m[4] == end[found["restored"]]
    )


def _chosen(found: Json) -> Json:
    chosen: Json = found["choice"]["setting"]
    return chosen


def is_refused(m: re.Match[str], found: Json) -> bool:
    return any((m[1], m[2]) == (r["what"], r["reason"]) for r in found["refused"])


def is_error(m: re.Match[str], found: Json) -> bool:
    return any((m[1], m[2]) == (e["where"], e["error"]) for e in found["errors"])


def next_step(m: re.Match[str], found: Json) -> bool:
    if m[1] == "run: kilter restore":
        return found["restored"] is False
    if m[1].startswith("the watcher"):
        return found["restored"] is None and found["mode"] == "govern"
    return m[1] in NEXT


def is_doubt(m: re.Match[str], found: Json) -> bool:
    return f"{found['energy_disagreement']:+.1%}" == m[1]


GRAMMAR: tuple[tuple[str, Callable[[re.Match[str], Json], bool]], ...] = (
    (
        r"(idle|input-bound): the GPU (would idle|idles) (\d+) % of the time"
        rf"(?:, and the program waits for its data in (\d+) % of that)?: feed it {LABEL}",
        idles,
    ),
    (
        rf"(saved|would save) ({NUMBER}) % energy {INTERVAL}, slowdown ({NUMBER}) % {INTERVAL}, "
        rf"([^\[]*) {LABEL}",
        saves,
    ),
    (rf"energy unknown, slowdown ({NUMBER}) % {INTERVAL}, ([^\[]*) {LABEL}", slows),
    (rf"the default stands: (.*) {LABEL}", default_stands),
    (
        r"nothing was set; plan: (.*), ([+-]?[\d.]+) % energy, ([+-]?[\d.]+) % time "
        r"\[predicted, (\w+)\]",
        is_planned,
    ),
    (rf"only watched: (\d+) timed iterations?( of \S+ \S+)? {LABEL}", only_watched),
    (rf"no result: (.*) {LABEL}", no_result),
    (r"(no iteration seen.*)", lambda m, found: m[1] == found["unseen"]),
    (
        r"evidence: (no|\d+) (?:pairs, (\d+) blocks?|pairs? of blocks, (\d+) iterations)"
        r"(?: \((\d+) % rehearsed after the script had ended\))?(?:; blocks left out: (.*))?",
        evidence,
    ),
    (r"nothing was set", nothing_set),
    (r"(on the simulated device: )?held (the default|SM \d+ MHz)(?: \((.*)\))?; (.*)", held),
    (r"refused: ([^:]*): (.*)", is_refused),
    (r"an error of ours, ([^:]*): (.*)", is_error),
    (r"warning: the integral of power is (\S+) off the energy counter: .*", is_doubt),
    (r"next: (.*)", next_step),
    (r"words: the end of the page explains (.*)", lambda m, found: {*m[1].split(", ")} <= {*WORDS}),
    (r"report: (.*)", lambda m, found: found["run"] in m[1]),
)


@st.composite
def records(draw: st.DrawFn) -> tuple[list[Any], bool, float]:
    """Events of a run, whether there is a plan beside them, and how much its GPU idles."""
    label = draw(st.sampled_from([Label.SIMULATED, Label.MEASURED]))
    mode = draw(st.sampled_from(["govern", "govern", "shadow", "observe"]))
    job = runs.WrittenJob(
        clock_share=draw(st.sampled_from([0.0, 0.05, 0.5])),
        noise=draw(st.sampled_from([0.0, 0.004, 0.05])),
        throttled_share=draw(st.sampled_from([0.0, 0.2])),
    )
    run = runs.RunWriter(job, seed=draw(st.integers(0, 9)), mode=mode, label=label)
    run.start("because")
    for _ in range(draw(st.integers(0, 2))):
        run.block("warm", Setting(), arm="baseline")
    run.rehearsing = draw(st.booleans())
    sets = mode == "govern" or (mode == "shadow" and label is Label.SIMULATED)
    ending = draw(st.sampled_from(["hold", "stands", "searching", "predicted", "nothing"]))
    if sets and ending in ("hold", "stands", "searching"):
        run.decide("probe", CHOSEN, "probe")
        run.pairs("probe", CHOSEN, draw(st.integers(0, 2)))
        run.pairs("confirm", CHOSEN, draw(st.integers(0, 5)))
        run.rehearsing = run.rehearsing or draw(st.booleans())
    if sets and ending == "hold":
        run.decide("hold", CHOSEN, "safe")
        run.pairs("hold", CHOSEN, draw(st.integers(0, 2)))
    elif sets and ending == "stands":
        run.decide("decided", Setting(), "the default stands: nothing saves enough")
    elif mode == "shadow" and ending == "predicted":
        run.decide("predicted", CHOSEN, "safe on the simulated device")
    codes = {"setting clocks": CLOCKS_REFUSED, "a complete rehearsal": REHEARSAL_CUT}
    for what in draw(st.lists(st.sampled_from(list(codes)))):
        run.refuse(what, "a reason: with a colon", codes[what])
    if draw(st.integers(0, 5)) == 0:
        run.fail("the sampler", "the disk is full")
    if draw(st.integers(0, 4)) > 0:
        run.stop(
            draw(st.sampled_from(["finished", "raised ValueError"])),
            restored=draw(st.integers(0, 4)) > 0,
            energy_disagreement=draw(st.sampled_from([None, 0.01, -0.12])),
        )
        if run.iterations == 0 and draw(st.booleans()):
            stop = run.events[-1]
            assert isinstance(stop, Stopped)
            unseen = "no iteration seen: the script did not import torch"
            run.events[-1] = msgspec.structs.replace(stop, unseen=unseen)
    return run.events, draw(st.booleans()), draw(st.sampled_from([0.0, 0.29, 0.5, 0.97]))


def idle_trace(share: float) -> IterationTrace:
    busy_s = 0.1 * (1.0 - share)
    work = Operation(
        name="layer", kind=Kind.FORWARD, start_s=0.0, duration_s=busy_s, flops=1e9, bytes_moved=1e8
    )
    gap = Operation(name="gap", kind=Kind.GAP, start_s=busy_s, duration_s=0.1 - busy_s)
    return IterationTrace(
        iteration_s=0.1,
        operations=(work, gap),
        timeline="gpu",
        device="test",
        label=Label.MEASURED,
    )


def report_of(events: list[Any], planned: bool, idle: float) -> report.Report:
    rank = report.sort_events(events)
    assert rank is not None
    plan = runs.plan_of(CHOSEN, runs.WrittenJob()) if planned else None
    return report.summarise([rank], run="the-run", trace=idle_trace(idle), plan=plan)


@settings(deadline=None, max_examples=120)
@given(record=records())
def test_every_sentence_of_the_summary_is_true_of_the_report(
    record: tuple[list[Any], bool, float],
) -> None:
    built = report_of(*record)
    found = json.loads(report.to_json(built))
    for line in summary.summary(built, Path("runs/the-run")).splitlines():
        assert line.startswith("kilter: ")
        assert line == line.rstrip()
        sentence = line.removeprefix("kilter: ")
        fitting = [
            (match, holds)
            for pattern, holds in GRAMMAR
            if (match := re.fullmatch(pattern, sentence)) is not None
        ]
        assert len(fitting) == 1, f"{len(fitting)} rules for: {sentence}"
        match, holds = fitting[0]
        assert holds(match, found), sentence


@settings(deadline=None, max_examples=40)
@given(record=records())
def test_the_text_and_the_page_claim_no_saving_that_was_not_had(
    record: tuple[list[Any], bool, float],
) -> None:
    built = report_of(*record)
    text, page = summary.full(built), html.page(built)
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "unknown per iteration" not in text
    assert "by none" not in text
    heading = page[page.index("<h1>") : page.index("</header>")]
    if " less energy per iteration" in heading or " more energy per iteration" in heading:
        assert ("Would take" in heading) != summary.happened(built)
    if built.idle is not None and built.idle.share >= IDLE_TOLD:
        first = heading[: heading.index("</h1>")]
        assert ": feed it" in first, "before any clock"
    if is_simulated(json.loads(report.to_json(built))):
        assert "the device's own sensors" not in page.lower()
        assert "tried on the job" not in page


def test_an_energy_that_nobody_measured_is_not_measured_by_none() -> None:
    run = runs.RunWriter(mode="observe", label=Label.MEASURED)
    run.start("there is no GPU")
    run.block("warm", Setting(), arm="baseline")
    run.stop()
    run.events = [
        msgspec.structs.replace(e, energy_method="none") if isinstance(e, Stopped) else e
        for e in run.events
    ]
    built = report_of(run.events, False, 0.0)
    text = summary.full(replace(built, baseline=replace(built.baseline, energy_j=None)))
    assert "energy   not measured" in text
    assert "governed" not in text
    job_class, _, rest = text.partition("\n")
    assert "memory-bound: 100 % of the busy time is in operations below 14 FLOP" in job_class
    assert "unknown" not in rest


def test_idle_time_is_known_from_utilisation_where_there_is_no_trace() -> None:
    run = runs.RunWriter(label=Label.MEASURED)
    run.start()
    for _ in range(3):
        run.block("warm", Setting(), arm="baseline")
    run.stop()
    run.events = [
        msgspec.structs.replace(e, sm_utilisation=0.24) if hasattr(e, "sm_utilisation") else e
        for e in run.events
    ]
    rank = report.sort_events(run.events)
    assert rank is not None
    built = report.summarise([rank], run="r", trace=None, plan=None)
    assert built.idle is not None
    assert (built.idle.source, built.idle.share) == ("utilisation", pytest.approx(0.76))
    first = summary.summary(built, None).splitlines()[0]
    assert first == "kilter: idle: the GPU idles 76 % of the time: feed it [measured]"


def test_facts_of_the_run_are_in_the_text_and_on_the_page() -> None:
    run = runs.governed(label=Label.MEASURED)
    run.stop()
    start, stop = run.events[0], run.events[-1]
    assert isinstance(start, Started)
    assert isinstance(stop, Stopped)
    device = replace(start.device, driver="560.35")
    run.events[0] = msgspec.structs.replace(start, host="node7", torch="2.9.1", device=device)
    run.events[-1] = msgspec.structs.replace(stop, energy_j=7.2e6)
    built = report_of(run.events, False, 0.0)
    for told in (summary.full(built), html.page(built)):
        for fact in ("node7", "torch 2.9.1", "driver 560.35", "7.2 MJ (2 kWh)", "1.43 min"):
            assert fact in told
    assert built.energy_j == 7.2e6
