"""The peers of `kilter bench clocks` do what their systems do, on a table that is easy to read."""

import pytest

from kilter.app.bench import clocks
from kilter.core.plan import Goal
from kilter.device.sim.replay import load_tables

HEADER = "source,gpu,workload,core_mhz,mem_mhz,power_limit_w,time_s,power_w,energy_j"


@pytest.fixture
def tables(tmp_path):
    """Three jobs; slower clocks cost little time, half the time, all of it."""
    lines = [HEADER]
    for s in (0.1, 0.5, 0.9):
        for mhz in range(1500, 700, -50):
            f = mhz / 1500
            time, power = 1 - s + s / f, 60 + 190 * f**2.5
            lines.append(f"synthetic,Card,job{s},{mhz},,,{time},{power},{time * power}")
    path = tmp_path / "t.csv"
    path.write_text("\n".join(lines) + "\n")
    return {"t": load_tables(path)}


@pytest.mark.parametrize("policy", ["zeus", "mf-gpoeo", "geepafs", "gpoeo"])
def test_without_noise_a_peer_saves_and_keeps_its_bound(tables, policy):
    results = clocks.play(tables, [policy], Goal(max_slowdown=0.05), seeds=1, noise=0.0)
    assert all(r.iterations > 0 for r in results)
    assert sum(r.saving for r in results) > 0.1
    assert max(r.slowdown for r in results) < 0.055


def test_zeus_measures_every_setting_in_order(tables):
    (first, *_) = clocks.play(tables, ["zeus"], Goal(max_slowdown=0.05), seeds=1, noise=0.0)
    assert first.iterations == 50 * 16


def test_geepafs_probes_four_clocks_twice(tables):
    (first, *_) = clocks.play(tables, ["geepafs"], Goal(max_slowdown=0.05), seeds=1, noise=0.0)
    assert first.iterations == 2 * 4 * clocks.BLOCK


@pytest.mark.parametrize("policy", ["zeus", "mf-gpoeo", "geepafs", "gpoeo", "kilter"])
def test_a_job_too_short_to_decide_keeps_its_default_or_a_setting_within_the_bound(tables, policy):
    goal = Goal(max_slowdown=0.05)
    results = clocks.play(tables, [policy], goal, seeds=1, noise=0.0, budget_s=30.0)
    assert all(r.chose_default or r.slowdown <= 0.055 for r in results)
