"""The report says what the record says: no more when a run was killed, and never by luck."""

import json
import math
import re
from dataclasses import replace
from html import escape

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import runs

from kilter.app.cli import main
from kilter.app.report import build as report
from kilter.app.report import html, operations, summary, svg
from kilter.core import codec
from kilter.core.errors import FileError
from kilter.core.events import Block, Sampled, Stopped
from kilter.core.label import Label
from kilter.core.setting import Setting
from kilter.core.trace import IterationTrace, Kind
from kilter.core.units import MHZ

CHOSEN = Setting(sm_clock_hz=1245 * MHZ)
QUIET = runs.WrittenJob(noise=0.0, drift=0.0, throttled_share=0.0)


def report_of(*recorders, trace=None, plan=None):
    ranks = [report.sort_events(recorder.events) for recorder in recorders]
    return report.summarise(ranks, run="test", trace=trace, plan=plan)


def ended(recorder):
    recorder.stop()
    return recorder


def changed(recorder, change, *, phase):
    """The run with every block of a phase changed."""
    recorder.events = [
        msgspec.structs.replace(e, **change(e)) if isinstance(e, Block) and e.phase == phase else e
        for e in recorder.events
    ]
    return recorder


def test_headline_is_the_truth_without_noise():
    found = report_of(ended(runs.governed(QUIET)))
    assert found.saving == pytest.approx(1 - QUIET.energy_ratio(CHOSEN), abs=1e-12)
    assert found.slowdown == pytest.approx(QUIET.time_ratio(CHOSEN) - 1, abs=1e-12)
    assert found.kept
    assert found.restored
    assert found.within_contract
    assert found.choice.setting == CHOSEN
    assert found.evidence.pairs == 20
    assert found.rehearsed_share == 0.0


def test_arms_have_the_ratio_of_the_headline():
    found = report_of(ended(runs.governed()))
    assert found.governed.energy_j / found.baseline.energy_j == pytest.approx(1 - found.saving)
    assert found.governed.iteration_s / found.baseline.iteration_s == pytest.approx(
        1 + found.slowdown
    )


def test_intervals_cover_the_truth_as_often_as_they_say():
    job = runs.WrittenJob(drift=0.0, throttled_share=0.0)
    seeds, hits = 200, [0, 0]
    for seed in range(seeds):
        run = runs.governed(job, seed=seed, confirm_pairs=6, hold_pairs=2)
        found = report_of(ended(run))
        low, high = found.slowdown_ci95
        hits[0] += low <= job.time_ratio(CHOSEN) - 1 <= high
        low, high = found.saving_ci95
        hits[1] += low <= 1 - job.energy_ratio(CHOSEN) <= high
    # 95 % of 200 is 190; below 180 has a probability of 0.1 % for intervals that are right
    assert min(hits) >= 180


def test_pairs_that_chose_the_setting_do_not_count():
    honest = report_of(ended(runs.governed(seed=3)))
    lucky = report_of(
        changed(
            ended(runs.governed(seed=3)),
            lambda b: {"energy_j": b.energy_j * (0.5 if b.arm == "candidate" else 2.0)},
            phase="probe",
        )
    )
    assert lucky.saving == honest.saving
    assert lucky.saving_ci95 == honest.saving_ci95
    assert lucky.baseline == honest.baseline
    assert lucky.probes != honest.probes


def test_default_stands_is_no_saving_and_no_interval():
    run = runs.RunWriter(runs.WrittenJob())
    run.start()
    run.pairs("probe", CHOSEN, 2)
    run.decide("decided", Setting(), "the default stands: none of 1 settings saves enough")
    run.block("hold", Setting(), arm="baseline")
    found = report_of(ended(run))
    assert (found.saving, found.slowdown) == (0.0, 0.0)
    assert (found.saving_ci95, found.slowdown_ci95) == (None, None)
    assert not found.kept
    assert found.governed == found.baseline
    line = summary.headline(found)
    assert line == "the default stands: none of 1 settings saves enough [simulated]"


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize(
    ("phase", "doing"),
    [
        ("warm", "before any setting was tried"),
        (
            "probe",
            "while SM 1245 MHz was being tried, to see what it saves and what it costs; the search "
            "for a better setting had no result yet",
        ),
        (
            "confirm",
            "while SM 1245 MHz was being tested against the default; that it saves energy within "
            "the bound was not certain yet",
        ),
        ("hold", "while the default was held; no setting had been chosen in its place"),
    ],
)
def test_no_conclusion_is_unknown_not_zero(phase, doing, killed):
    run = runs.RunWriter(runs.WrittenJob())
    run.start()
    run.block("warm", Setting(), arm="baseline")
    if phase in ("probe", "confirm"):
        run.decide(phase, CHOSEN, phase)
        run.pairs(phase, CHOSEN, 3)
    if phase == "hold":
        run.block("hold", Setting(), arm="baseline")
    found = report_of(run if killed else ended(run))
    assert (found.saving, found.slowdown, found.governed.energy_j) == (None, None, None)
    assert found.choice.setting == found.found
    ends = "the record ends" if killed else "the run ended"
    assert summary.headline(found) == f"no result: {ends} {doing} [simulated]"


def test_observed_run_has_a_baseline_and_no_saving():
    run = runs.RunWriter(runs.WrittenJob(), mode="observe")
    run.start("no goal was given")
    for _ in range(3):
        run.block("warm", Setting(), arm="baseline")
    found = report_of(ended(run))
    assert found.saving is None
    assert found.baseline.iteration_s == pytest.approx(0.084, rel=0.05)
    assert summary.headline(found) == "only watched: 36 timed iterations of 83.8 ms [simulated]"
    assert "no goal was given" in summary.full(found)


def test_shadow_run_shows_the_plan_and_keeps_nothing(tmp_path):
    run = runs.RunWriter(runs.WrittenJob(), mode="shadow", label=Label.MEASURED)
    run.start("no permission: run as root")
    run.block("warm", Setting(), arm="baseline")
    run.decide("predicted", CHOSEN, "safe on the simulated device")
    runs.write(tmp_path, ended(run))
    runs.write_plan(tmp_path, CHOSEN, runs.WrittenJob())
    found = report.build(tmp_path)
    assert (found.saving, found.kept) == (None, False)
    assert "nothing was set; plan: SM 1245 MHz" in summary.headline(found)
    assert "predicted, simulated" in summary.headline(found)
    assert summary.ending(found) == "nothing was set"


def test_a_setting_that_no_block_came_to_its_end_under_was_set_all_the_same():
    run = runs.RunWriter(runs.WrittenJob(), mode="govern", label=Label.MEASURED)
    run.start()
    run.block("warm", Setting(), arm="baseline")
    assert summary.ending(report_of(ended(run))) == "nothing was set"
    run = runs.RunWriter(runs.WrittenJob(), mode="govern", label=Label.MEASURED)
    run.start()
    run.block("warm", Setting(), arm="baseline")
    run.decide("probe", CHOSEN, "predicted to save")
    assert summary.ending(report_of(ended(run))) == "held the default; default restored"


def test_one_pair_has_no_interval():
    run = runs.RunWriter(runs.WrittenJob())
    run.start()
    run.pairs("confirm", CHOSEN, 1)
    run.decide("hold", CHOSEN, "safe")
    found = report_of(ended(run))
    assert found.saving is not None
    assert (found.saving_ci95, found.within_contract) == (None, None)


def test_block_that_does_not_count_takes_its_pair_with_it_unless_done_again():
    run = runs.RunWriter(QUIET)
    run.start()
    run.pair = 1
    run.block("confirm", Setting(), pair=1, arm="baseline")
    run.block("confirm", CHOSEN, pair=1)
    run.block("confirm", CHOSEN, pair=1)
    run.block("confirm", Setting(), pair=2, arm="baseline")
    run.block("confirm", CHOSEN, pair=2)
    # a second search counts its pairs anew: these two are no pair
    run.block("confirm", CHOSEN, pair=3)
    run.block("confirm", Setting(), pair=1, arm="baseline")
    run.block("hold", CHOSEN, pair=1)
    run.decide("hold", CHOSEN, "safe")
    for i, why in ((1, "stalled"), (4, "throttled")):
        number = [k for k, e in enumerate(run.events) if isinstance(e, Block)][i]
        run.events[number] = msgspec.structs.replace(
            run.events[number], clean=False, why_not=why, iteration_s=9.0
        )
    found = report_of(ended(run))
    assert found.evidence.pairs == 1
    assert found.evidence.left_out == {"stalled": 1, "throttled": 1}
    assert found.slowdown == pytest.approx(QUIET.time_ratio(CHOSEN) - 1)


def test_unknown_energy_leaves_the_slowdown_alone():
    run = changed(ended(runs.governed()), lambda b: {"energy_j": None}, phase="confirm")
    some = report_of(run)
    assert 0 < some.evidence.energy_pairs < some.evidence.pairs
    assert (some.baseline.energy_j, some.governed.energy_j) == (None, None)
    none = report_of(changed(run, lambda b: {"energy_j": None}, phase="hold"))
    assert (none.saving, none.saving_ci95) == (None, None)
    assert none.slowdown == some.slowdown
    assert "energy unknown" in summary.headline(none)


def test_broken_contract_is_said():
    slow = runs.WrittenJob(clock_share=0.5, noise=0.002)
    found = report_of(ended(runs.governed(slow)))
    assert found.within_contract is False
    assert "all of it beyond the contract of 2.0 %" in summary.headline(found)


def test_ranks_are_added_and_named():
    recorders = []
    for rank in range(4):
        uuid = f"GPU-{rank}"
        run = runs.RunWriter(rank=rank, world_size=4, uuid=uuid, label=Label.MEASURED)
        if rank == 0:
            run = runs.governed(world_size=4, uuid=uuid, label=Label.MEASURED)
        else:
            run.start()
        run.refuse("memory clock", "not supported")
        run.stop(restored=rank != 2)
        recorders.append(run)
    found = report_of(*recorders)
    assert found.ranks == "time of the slowest of 4 ranks, energy summed over 4 ranks"
    assert found.device == "4 x Tesla V100-SXM2-16GB"
    assert found.restored is False
    assert [r.what for r in found.refused].count("memory clock") == 2  # two reasons, each once
    shared = report_of(*(shared_device(r) for r in recorders))
    assert "4 ranks share 1 device" in shared.ranks


def shared_device(recorder):
    start = recorder.events[0]
    recorder.events[0] = msgspec.structs.replace(start, device=replace(start.device, uuid="one"))
    return recorder


def test_ranks_on_a_simulated_device_are_not_counted_as_if_they_were():
    assert "the others are not counted" in report_of(ended(runs.governed(world_size=2))).ranks


def test_rank_killed_before_its_first_line_is_missed_not_fatal(tmp_path):
    runs.write(tmp_path, ended(runs.governed(world_size=2, label=Label.MEASURED)))
    (tmp_path / "events-rank1.jsonl").write_bytes(b"")
    assert "1 of them left no record" in report.build(tmp_path).ranks


def test_rehearsed_pairs_are_never_labelled_measured():
    run = ended(runs.governed(label=Label.MEASURED, rehearse_hold=True))
    found = report_of(run)
    assert found.label is Label.SIMULATED
    assert 0 < found.rehearsed_share < 1
    assert "rehearsed" in summary.evidence(found)
    assert report_of(ended(runs.governed(label=Label.MEASURED))).label is Label.MEASURED


def test_error_of_ours_leaves_the_default_with_its_reason():
    run = runs.governed()
    run.fail("the sampler", "the disk is full")
    found = report_of(ended(run))
    assert (found.saving, found.kept) == (0.0, False)
    assert "stepped aside after an error" in summary.headline(found)
    assert "the sampler: the disk is full" in summary.summary(found, "runs/x")


def trace_of(directory):
    runs.write_trace(directory)
    return codec.load(directory / "trace.json", IterationTrace)


@pytest.mark.parametrize(
    ("label", "rule"), [(Label.MEASURED, "share of time"), (Label.SIMULATED, "in sim:v100")]
)
@given(energy_j=st.floats(1e-6, 1e6), iteration_s=st.floats(0.01, 0.5))
def test_attributed_energies_add_up(label, rule, energy_j, iteration_s, tmp_path_factory):
    trace = replace(trace_of(tmp_path_factory.mktemp("run")), iteration_s=iteration_s)
    device = runs.governed(label=label, hold_pairs=0, confirm_pairs=0).events[0].device
    found, method = operations.attribute(trace, energy_j, device)
    energies = [op.energy_j for op in found]
    assert math.fsum(energies) == pytest.approx(energy_j)
    assert math.fsum(op.share for op in found) == pytest.approx(1.0)
    assert min(energies) >= 0
    assert energies == sorted(energies, reverse=True)
    assert rule in method


def test_layers_are_told_as_one(tmp_path):
    names = (
        *("blocks.0.mlp.0", "blocks.1.mlp.0", "blocks.0.mlp.2", "blocks.0", "blocks.1"),
        *("features.0", "features.1", "head", "aten::add", "0"),
    )
    trace = trace_of(tmp_path)
    one = trace.operations[0]
    named = tuple(replace(one, name=name) for name in names)
    trace = replace(trace, operations=named)
    device = runs.governed().events[0].device
    told, _ = operations.attribute(trace, 1.0, device)
    assert {op.name: op.names for op in told} == {
        "blocks.*.mlp.0": 2,
        "blocks.0.mlp.2": 1,
        "blocks.*": 2,
        "features.0": 1,
        "features.1": 1,
        "head": 1,
        "aten::add": 1,
        "0": 1,
    }


def test_readings_that_all_have_one_time_are_drawn():
    """A simulated device whose virtual time stands still."""
    run = ended(runs.governed())
    still = {"device_t_s": 0.0, "device_begin_s": 0.0, "device_end_s": 0.0}
    run.events = [
        msgspec.structs.replace(e, **{k: v for k, v in still.items() if hasattr(e, k)})
        for e in run.events
    ]
    assert sum(isinstance(e, Sampled) for e in run.events) > 2
    assert "Power and clock over the run" in html.page(report_of(run))


def test_a_run_without_a_trace_says_how_to_get_one(tmp_path):
    why = "nothing needed one; --trace records one"
    run, trace = ended(runs.governed()), trace_of(tmp_path)
    found = report_of(run, trace=trace)
    assert (found.no_trace, bool(found.operations)) == (None, True)
    told = "one iteration: 298 kernels per second; the GPU idles 4.2 % of the time"
    assert told in summary.full(found)
    assert told.partition(": ")[2] in html.page(found)
    assert "Where the energy of an iteration goes" in html.page(found)
    # The trace of a memory plan may be there; it is no table of energy.
    run.events[-1] = msgspec.structs.replace(run.events[-1], no_trace=why)
    found = report_of(run, trace=trace)
    assert (found.no_trace, found.operations) == (why, ())
    assert f"were not recorded: {why}." in html.page(found)


def test_no_energy_means_no_attribution(tmp_path):
    device = runs.governed().events[0].device
    assert operations.attribute(trace_of(tmp_path), None, device) == ((), None)
    assert operations.attribute(None, 1.0, device) == ((), None)


RECORD = b"".join(runs.lines(ended(runs.governed(hold_pairs=2, confirm_pairs=4)).events))


@settings(deadline=None, max_examples=60)
@given(cut=st.integers(0, len(RECORD)))
def test_run_killed_at_any_byte_has_a_report_or_one_clear_line(cut, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    (directory / "events-rank0.jsonl").write_bytes(RECORD[:cut])
    if b"\n" not in RECORD[:cut]:
        with pytest.raises(FileError, match="first whole record"):
            report.build(directory)
        return
    found = report.build(directory)
    assert found.restored is None or cut >= len(RECORD) - 1
    assert found.kept == (found.choice.setting == CHOSEN)
    if found.saving is None:
        assert found.saving_ci95 is None
    json.loads(report.to_json(found), parse_constant=pytest.fail)
    assert html.page(found).endswith("</html>\n")
    assert "kilter:" in summary.summary(found, directory)


def test_killed_run_says_who_restores(tmp_path):
    runs.write(tmp_path, runs.governed())
    found = report.build(tmp_path)
    assert (found.restored, found.outcome, found.energy_method) == (None, None, None)
    assert found.kept
    assert found.iterations > 0
    assert "the watcher puts the GPU back" in summary.summary(found, tmp_path)


def test_a_killed_run_that_set_nothing_needs_no_restore(tmp_path):
    job = runs.RunWriter(runs.WrittenJob(), mode="shadow")
    job.start()
    job.block("hold", Setting(), arm="baseline")
    runs.write(tmp_path, job)
    assert "kilter restore" not in summary.summary(report.build(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no events-rank"),
        ({"events-rank0.jsonl": b""}, "jsonl: the run ended before its first whole record"),
        ({"events-rank0.jsonl": RECORD[:40]}, "jsonl: the run ended before its first whole record"),
        ({"events-rank0.jsonl": RECORD[3:]}, "not an event"),
        ({"events-rank0.jsonl": RECORD.split(b"\n", 1)[1]}, "does not begin with the start"),
    ],
)
def test_broken_runs_give_one_clear_line(tmp_path, files, message):
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(FileError, match=message) as caught:
        report.build(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "raw", "why", "without"),
    [
        ("trace.json", b"{", "not a complete JSON", "operations of an iteration"),
        ("trace.json", b"[]", "not a kilter file", "operations of an iteration"),
        ("plan.json", b'{"schema":"kilter.plan/9"}', "newer kilter", "what the plan expects"),
    ],
)
def test_a_file_that_cannot_be_read_costs_its_part_of_the_report(
    tmp_path, capsys, name, raw, why, without
):
    (tmp_path / "events-rank0.jsonl").write_bytes(RECORD)
    whole = report.build(tmp_path)
    (tmp_path / name).write_bytes(raw)
    found = report.build(tmp_path)
    (told,) = found.unread
    assert told.startswith(f"{tmp_path / name}: ")
    assert why in told
    assert without in told
    assert (found.saving, found.operations) == (whole.saving, ())
    assert summary.full(found).count(told) == 1
    assert f"warning: {told}" in summary.summary(found, tmp_path)
    assert main.main(["report", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    assert f"Warning: {escape(told)}.</p>" in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    assert main.main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unread"] == [told]


def test_long_runs_are_thinned_where_they_are_shown():
    run = runs.governed(hold_pairs=400)
    found = report_of(ended(run))
    assert all(len(s.device_t_s) <= report.MOST_POINTS for s in found.series)
    assert len(html.page(found)) < 700_000


@pytest.mark.parametrize(
    ("outcome", "step"),
    [
        ("raised ValueError", "mend the script, then run it again"),
        ("raised KeyboardInterrupt", None),
    ],
)
def test_what_to_do_after_a_script_that_did_not_finish(outcome, step):
    run = runs.RunWriter(runs.WrittenJob())
    run.start()
    run.stop(outcome)
    assert summary.next_step(report_of(run)) == step


def test_end_of_the_run_is_told_apart_from_its_outcome():
    run = runs.governed()
    run.stop("raised ValueError")
    found = report_of(run)
    assert found.outcome == "raised ValueError"
    assert isinstance(run.events[-1], Stopped)
    assert found.kept


@pytest.mark.parametrize("prefix", ["encoder.layers.encoder_layer_", "vit_block_", "h."])
def test_layers_with_a_number_in_their_own_name_are_told_as_one(tmp_path, prefix):
    trace = trace_of(tmp_path)
    one = trace.operations[0]
    named = tuple(replace(one, name=f"{prefix}{i}.mlp.0") for i in range(24))
    others = (replace(one, name="fc_1"), replace(one, name="fc_2"))
    trace = replace(trace, operations=(*named, *others))
    told, _ = operations.attribute(trace, 1.0, runs.governed().events[0].device)
    assert {op.name: op.names for op in told} == {f"{prefix}*.mlp.0": 24, "fc_1": 1, "fc_2": 1}


def test_operations_without_a_line_of_their_own_are_added_up_by_kind(tmp_path):
    trace = trace_of(tmp_path)
    one = trace.operations[0]
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    many = tuple(replace(one, name=f"f{i}x", kind=kind) for i in range(40) for kind in kinds)
    run = ended(runs.governed())
    page = html.page(report_of(run, trace=replace(trace, operations=many)))
    rest = 80 - html.MOST_OPERATIONS
    counts = [int(n) for n in re.findall(r">(\d+) more<", page)]
    assert sum(counts) == rest
    assert len(counts) == 2


def test_the_page_draws_less_energy_to_the_left_of_zero():
    page = html.page(report_of(ended(runs.governed())))
    strip = page[page.index("strip-energy-t") :]
    strip = strip[: strip.index("</svg>")]
    value = float(re.search(r'<circle cx="([\d.]+)"', strip)[1])
    zero = float(re.search(r'<text x="([\d.]+)"[^>]*>0</text>', strip)[1])
    assert value < zero


def test_iterations_that_were_rehearsed_are_not_counted_as_the_scripts():
    run = runs.governed(rehearse_hold=True)
    run.events = [
        msgspec.structs.replace(e, rehearsed=True) if isinstance(e, Block) else e
        for e in run.events
    ]
    run.iterations, run.rehearsed = 40, run.iterations + run.rehearsed
    found = report_of(ended(run))
    page = html.page(found)
    assert f"{found.evidence.iterations} rehearsed iterations; 40 of the script timed" in page
    assert f"of {found.iterations + found.rehearsed_iterations} iterations" not in page


def test_a_predicted_decision_is_labelled_simulated_in_a_measured_run():
    run = runs.RunWriter(mode="shadow", label=Label.MEASURED)
    run.start("setting clocks needs root")
    run.decide("predicted", CHOSEN, "safe after 7 pairs, and it saves")
    page = html.page(report_of(ended(run)))
    decisions = page[page.index("<h2>Decisions</h2>") :]
    decisions = decisions[: decisions.index("</section>")]
    assert "tag simulated" in decisions
    assert "tag measured" not in decisions
    assert page.lower().count("nothing was set") <= 1


def test_two_blocks_of_the_default_are_no_picture():
    run = runs.RunWriter(mode="observe", label=Label.MEASURED)
    run.start("no goal")
    for _ in range(2):
        run.block("warm", Setting(), arm="baseline")
    assert "block by block" not in html.page(report_of(ended(run)))


def test_small_numbers_have_a_micro_sign_on_the_page():
    tiny = runs.WrittenJob(iteration_s=2e-5, power_w=10.0)
    page = html.page(report_of(ended(runs.governed(tiny))))
    assert "\u00b5J" in page
    assert not re.search(r"\d u[sJ]\b", page)


@pytest.mark.parametrize("clock_share", [0.002, 0.05, 0.3])
def test_no_word_of_the_trade_off_is_clipped_and_each_label_is_nearest_to_its_mark(clock_share):
    page = html.page(report_of(ended(runs.governed(runs.WrittenJob(clock_share=clock_share)))))
    figure = page[page.index("<h2>Energy against time</h2>") : page.index("block by block")]
    for drawing in figure.split("<svg")[1:]:
        width = float(re.search(r'viewBox="0 0 (\d+)', drawing)[1])
        words = re.findall(
            r'<text x="([\d.-]+)" y="([\d.-]+)"[^>]*anchor="(\w+)">([^<]*)<', drawing
        )
        for x, _, anchor, text in words:
            long = svg.width(text)
            left = float(x) - {"start": 0.0, "middle": long / 2, "end": long}[anchor]
            assert left >= -1.0, text
            assert left + long <= width + 12.0, text
