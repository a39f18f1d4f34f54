"""Role groups on a simulated pipeline: every stage has its slack, the job has one contract."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from kilter.clocks.conductor import Conductor, GovernorProgram
from kilter.clocks.plan.governor import Phase, plan_of
from kilter.clocks.plan.roles import MOST_ROLES
from kilter.core.events import AnyEvent, Block
from kilter.core.label import Label
from kilter.core.messages import LocalMessages
from kilter.core.plan import Goal
from kilter.core.setting import Sample, Setting, Supported
from kilter.core.units import MHZ
from kilter.observe.end_times import Iteration

TOP_HZ = 1500 * MHZ
SUPPORTED = Supported(sm_clocks_hz=tuple(mhz * MHZ for mhz in range(750, 1501, 75)))


class Card:
    """Hands on a card whose power falls steeply with its clock."""

    def __init__(self) -> None:
        self.clock_hz = TOP_HZ

    def apply(self, setting: Setting) -> None:
        self.clock_hz = setting.sm_clock_hz or TOP_HZ

    def check(self) -> None:
        pass

    def settled(self) -> bool:
        return True

    def mean_power_w(self, begin_s: float, end_s: float) -> float | None:
        return 100.0 + 200.0 * (self.clock_hz / TOP_HZ) ** 3

    def sustained(self) -> Setting:
        return Setting(sm_clock_hz=TOP_HZ)

    def recent(self) -> Sequence[Sample]:
        return ()


class Pipeline:
    """Ranks in lockstep; `lasts` makes the iteration's time of the ranks' slownesses (1 = top)."""

    def __init__(self, roles: list[str], lasts: Callable[[list[float]], float]) -> None:
        self.cards = [Card() for _ in roles]
        self.lasts = lasts
        self.events: list[AnyEvent] = []
        self.random = random.Random(0)
        messages = LocalMessages()
        self.program = GovernorProgram(
            Goal(max_slowdown=0.02),
            Setting(),
            SUPPORTED,
            self.cards[0],
            seed=0,
            roles=lambda: self.conductors[0].roles,
        )
        self.conductors = [
            Conductor(
                card,
                messages,
                found=Setting(),
                rank=rank,
                world_size=len(roles),
                sensor_period_s=0.01,
                orders=self.program.orders() if rank == 0 else None,
                record=self.events.append if rank == 0 else lambda event: None,
                clock=lambda: self.now_s,
                role=roles[rank],
            )
            for rank, card in enumerate(self.cards)
        ]
        self.now_s = 0.0
        self.done = 0

    def run_until_held(self, iterations: int = 60_000) -> None:
        while self.conductors[0].phase is not Phase.HOLD:
            assert self.done < iterations, "no decision"
            self.iterate()
        for _ in range(50):
            self.iterate()

    def iterate(self) -> None:
        lasted = self.lasts([TOP_HZ / card.clock_hz for card in self.cards])
        lasted *= 1 + self.random.gauss(0.0, 0.002)
        self.now_s += lasted
        for conductor in self.conductors:
            conductor.iteration(Iteration(self.done, self.now_s, lasted))
        self.done += 1

    def slowdown(self) -> float:
        """Of the settings that are held now, without noise."""
        held = self.lasts([TOP_HZ / card.clock_hz for card in self.cards])
        return held / self.lasts([1.0] * len(self.cards)) - 1


def test_a_stage_with_slack_goes_down_and_the_critical_one_stays() -> None:
    job = Pipeline(
        ["first", "first", "last", "last"], lambda s: 0.1 * max(*s[:2], 0.6 * max(s[2:]))
    )
    job.run_until_held()
    clocks_hz = [card.clock_hz for card in job.cards]
    assert clocks_hz[0] == clocks_hz[1] >= 0.97 * TOP_HZ
    assert clocks_hz[2] == clocks_hz[3] <= 0.75 * TOP_HZ
    assert job.slowdown() < 0.02
    choice = job.program.choice
    assert choice.roles["last"] == Setting(sm_clock_hz=clocks_hz[2])
    assert "last: " in choice.reason
    assert choice.energy_ratio < 0.95
    plan = plan_of(choice, Setting(), Label.SIMULATED)
    assert ("last", choice.roles["last"]) in {(a.role, a.setting) for a in plan.actions}


def test_groups_that_all_cost_time_share_one_contract() -> None:
    """Each alone could slow the job down by as much as the whole bound."""
    job = Pipeline(["a", "b", "c"], lambda s: 0.1 * (0.7 + 0.1 * sum(s)))
    job.run_until_held()
    assert job.slowdown() < 0.025
    assert job.program.choice.log_time < 0.02


def test_settings_that_only_harm_together_are_not_kept_together() -> None:
    """Either stage may go down, both may not: no search of one group can know."""

    def lasts(slowness: list[float]) -> float:
        return 0.1 * max(1.0, 0.75 * slowness[0] * slowness[1])

    job = Pipeline(["a", "b"], lasts)
    job.run_until_held()
    assert job.slowdown() < 0.02
    assert sum(card.clock_hz < TOP_HZ for card in job.cards) >= 1


def test_what_is_judged_is_the_whole_job_against_the_whole_default() -> None:
    job = Pipeline(["first", "last"], lambda s: 0.1 * max(s[0], 0.6 * s[1]))
    job.run_until_held()
    judged = [e for e in job.events if isinstance(e, Block) and e.phase == "confirm"]
    assert {block.arm for block in judged} == {"baseline", "candidate"}
    energies = {
        arm: {round(b.energy_j or 0.0, 1) for b in judged if b.arm == arm}
        for arm in ("baseline", "candidate")
    }
    assert min(energies["baseline"]) > max(energies["candidate"])
    assert min(energies["baseline"]) == pytest.approx(2 * 300.0 * 0.1, rel=0.02)


@pytest.mark.parametrize("roles", [["same"] * 3, [str(n) for n in range(MOST_ROLES + 1)]])
def test_one_group_or_too_many_share_one_setting(roles: list[str]) -> None:
    job = Pipeline(roles, lambda s: 0.1 * (0.9 + 0.1 * max(s)))
    job.run_until_held()
    assert job.program.choice.roles == {}
    assert len({card.clock_hz for card in job.cards}) == 1
    assert job.cards[0].clock_hz < TOP_HZ
