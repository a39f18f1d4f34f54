"""Ways to run one job: each gets its iterations, and the fastest stays."""

from __future__ import annotations

from kilter.act.race import JUDGED, Race, Way

LEAN = Way(each_s=1e-4)
LEANER = Way(each_s=1e-3)


def run(race: Race, took: dict[Way, float], *, counted: bool = True) -> int:
    """Borders until the race is over."""
    now_s, borders = 0.0, 0
    while race.running:
        now_s += took[race.now]
        borders += 1
        race.border(now_s, counts=counted)
        if race.timed or borders % 20 == 0:
            race.turn()
    return borders


def started(took: dict[Way, float]) -> Race:
    """A race whose first way has run for long."""
    race = Race()
    for border in range(2 * JUDGED):
        race.border(border * took[race.now], counts=True)
    assert race.timed
    assert race.start(LEAN, LEANER) == LEAN
    assert not race.timed
    return race


def test_the_fastest_stays() -> None:
    for fastest in (Way(), LEAN, LEANER):
        took = dict.fromkeys((Way(), LEAN, LEANER), 1.0) | {fastest: 0.9}
        race = started(took)
        assert run(race, took) == 2 * (JUDGED + 1)
        assert race.now == fastest
        assert len(race.results) == 3


def test_of_equals_the_first_stays() -> None:
    took = dict.fromkeys((Way(), LEAN, LEANER), 1.0)
    race = started(took)
    run(race, took)
    assert race.now == Way()


def test_a_way_that_never_runs_under_a_plan_loses() -> None:
    took = dict.fromkeys((Way(), LEAN, LEANER), 1.0)
    race = started(took)
    run(race, took | {LEAN: 0.1}, counted=False)
    assert race.now == Way()


def test_what_ran_without_a_plan_is_not_among_the_ways() -> None:
    race = Race()
    assert race.start(LEAN, LEANER) == LEAN
    run(race, {LEAN: 2.0, LEANER: 1.0})
    assert race.now == LEANER
    assert [way for _, way in race.results] == [LEAN, LEANER]


def test_an_iteration_after_one_that_does_not_count_is_not_timed() -> None:
    race = Race()
    for border in range(10 * JUDGED):
        race.border(float(border), counts=border % 2 == 0)
    assert not race.timed
