"""Carbon and cost: nothing without a factor, and never more than the record of energy says."""

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import runs

from kilter.app.cli.main import main
from kilter.app.config import resolve
from kilter.app.factors import Factors
from kilter.app.report import build as report
from kilter.app.report import html
from kilter.core.errors import UsageError
from kilter.core.events import Block
from kilter.core.label import Label
from kilter.core.setting import Setting
from kilter.core.units import MHZ

QUIET = runs.WrittenJob(noise=0.0, drift=0.0, throttled_share=0.0)
FACTORS = Factors(grams_co2_per_kwh=360.0, price_per_kwh=0.36, currency="EUR")


def written(directory, *, label=Label.MEASURED, energy_j=None, **options):
    run = runs.governed(QUIET, label=label, uuid="GPU-0", **options)
    run.stop()
    run.events[-1] = msgspec.structs.replace(run.events[-1], energy_j=energy_j)
    return runs.write(directory, run), run


def test_used_is_the_energy_of_the_whole_run(tmp_path):
    directory, _ = written(tmp_path, energy_j=3.6e7)
    used = report.build(directory, FACTORS).footprint.used
    assert (used.energy_j, used.label) == (3.6e7, Label.MEASURED)
    assert used.grams_co2 == pytest.approx(3600.0)
    assert used.cost == pytest.approx(3.6)


def test_saved_counts_what_ran_with_the_search(tmp_path):
    """Against the job's formula: each iteration under another setting, at its energy."""
    directory, run = written(tmp_path, energy_j=3.6e7)
    default_j = QUIET.iteration_s * QUIET.power_w
    expected_j = sum(
        event.iterations * default_j * (1.0 - QUIET.energy_ratio(event.setting))
        for event in run.events
        if isinstance(event, Block) and event.setting != Setting()
    )
    found = report.build(directory, FACTORS).footprint
    assert found.happened
    assert found.saved.energy_j == pytest.approx(expected_j)
    assert found.saved.grams_co2 == pytest.approx(expected_j / 3.6e6 * 360.0)
    assert found.saved.label is Label.MEASURED


def test_search_that_cost_more_than_it_saved_is_said(tmp_path, capsys):
    run = runs.RunWriter(QUIET, label=Label.MEASURED, uuid="GPU-0")
    run.start()
    run.block("warm", Setting(), arm="baseline")
    run.pairs("probe", Setting(sm_clock_hz=1600 * MHZ), 2)  # above the default: more energy
    run.decide("decided", Setting(), "the default stands: none saves enough")
    run.stop()
    directory = runs.write(tmp_path, run)
    assert report.build(directory, FACTORS).footprint.saved.energy_j < 0.0
    assert main(["report", str(directory), "--grams-co2-per-kwh", "360"]) == 0
    assert "took more than the default by" in capsys.readouterr().out


def test_rehearsal_would_save_and_nothing_was_used(tmp_path):
    directory, _ = written(tmp_path, label=Label.SIMULATED)
    built = report.build(directory, FACTORS)
    found = built.footprint
    assert not found.happened
    per_iteration_j = built.baseline.energy_j - built.governed.energy_j
    assert found.saved.energy_j == pytest.approx(per_iteration_j * built.iterations)
    assert found.used.energy_j == pytest.approx(built.governed.energy_j * built.iterations)
    assert found.used.label is found.saved.label is Label.SIMULATED


def test_unknown_energy_is_said(tmp_path, capsys):
    directory, _ = written(tmp_path)  # measured, and no energy on record
    assert report.build(directory, FACTORS).footprint.used is None
    flags = ["--price-per-kwh", "0.3", "--currency", "EUR"]
    assert main(["report", str(directory), *flags]) == 0
    assert "the energy of the whole run is not known" in capsys.readouterr().out


def test_text_html_and_json_say_the_same(tmp_path, capsys):
    directory, _ = written(tmp_path / "run", energy_j=3.6e7)
    flags = ["--grams-co2-per-kwh", "360", "--price-per-kwh", "0.36", "--currency", "<EUR>"]
    main(["report", str(directory), *flags])
    text = capsys.readouterr().out
    assert "used 36 MJ: 3.6 kg CO2, 3.6 <EUR> [measured]; saved " in text
    assert "(by your factors: 360 g CO2 and 0.36 <EUR> per kWh)" in text
    main(["report", str(directory), *flags, "--json"])
    found = json.loads(capsys.readouterr().out)["footprint"]
    assert found["factors"]["grams_co2_per_kwh"] == 360.0
    assert found["used"]["cost"] == pytest.approx(3.6)
    main(["report", str(directory), *flags, "--html", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert "Used 36 MJ: 3.6 kg CO2, 3.6 &lt;EUR&gt; [measured]; saved" in page


def test_nothing_without_a_factor(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory, _ = written(tmp_path / "run", energy_j=3.6e7)
    main(["report", str(directory)])
    assert "CO2" not in capsys.readouterr().out
    main(["report", str(directory), "--json"])
    assert json.loads(capsys.readouterr().out)["footprint"] is None
    assert "CO2" not in html.page(report.build(directory))


def test_one_factor_alone(tmp_path, capsys):
    directory, _ = written(tmp_path, energy_j=3.6e7)
    main(["report", str(directory), "--grams-co2-per-kwh", "0"])
    text = capsys.readouterr().out
    assert "used 36 MJ: 0 mg CO2 [measured]" in text
    assert "(by your factors: 0 g CO2 per kWh)" in text


def test_factors_of_the_configuration_and_flags_above_them(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory, _ = written(tmp_path / "run", energy_j=3.6e7)
    (tmp_path / "kilter.toml").write_text(
        'max-slowdown = "1%"\n[report]\nprice_per_kwh = 0.5\ncurrency = "CHF"\n'
    )
    main(["report", str(directory)])
    assert "5 CHF" in capsys.readouterr().out
    main(["report", str(directory), "--price-per-kwh", "0.25"])
    assert "2.5 CHF" in capsys.readouterr().out
    assert resolve({}, {}, tmp_path, ()).goal.max_slowdown == 0.01


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--grams-co2-per-kwh", "nan"], "not a finite number"),
        (["--grams-co2-per-kwh", "inf"], "not a finite number"),
        (["--grams-co2-per-kwh", "-1"], "not a finite number from 0 on"),
        (["--grams-co2-per-kwh", "380000"], "more than the 3000"),
        (["--grams-co2-per-kwh", "380g"], "'380g' is not a number"),
        (["--price-per-kwh", "0.3"], "go together"),
        (["--currency", "EUR"], "go together"),
        (["--price-per-kwh", "-0.3", "--currency", "EUR"], "not a finite number from 0 on"),
        (["--price-per-kwh", "1e9", "--currency", "EUR"], "more than the"),
        (["--price-per-kwh", "0.3", "--currency", "a\x1b[2J"], "write EUR"),
        (["--price-per-kwh", "0.3", "--currency", " "], "write EUR"),
    ],
)
def test_wrong_flags(tmp_path, capsys, flags, message):
    directory, _ = written(tmp_path, energy_j=3.6e7)
    assert main(["report", str(directory), *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert flags[0] in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[report]\ngrams_co2_per_kwh = nan\n", "report.grams_co2_per_kwh: "),
        ("[report]\ngrams_co2_per_kwh = true\n", "'True' is not a number"),
        ("[report]\ngrams = 3\n", "unknown key 'report.grams'"),
        ("report = 3\n", "expected a table [report]"),
        ("[report]\ncurrency = ['EUR']\n", "expected one value"),
    ],
)
def test_wrong_table_is_said_before_a_run_begins(tmp_path, content, message):
    (tmp_path / "kilter.toml").write_text(content)
    with pytest.raises(UsageError, match=str(tmp_path)) as error:
        resolve({}, {}, tmp_path, ())
    assert message in str(error.value)


@given(
    grams=st.floats(allow_nan=True, allow_infinity=True),
    price=st.floats(allow_nan=True, allow_infinity=True),
)
def test_factors_that_are_taken_give_finite_numbers(grams, price):
    try:
        found = Factors(grams_co2_per_kwh=grams, price_per_kwh=price, currency="EUR")
    except UsageError:
        return
    assert 0.0 <= found.grams_co2_per_kwh <= 3000.0
    assert math.isfinite(found.price_per_kwh * 1e12)
