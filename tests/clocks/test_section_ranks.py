"""The rows of `kilter bench faults` for sections: what deaths and hung collectives leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from kilter.app.bench.faults import try_out_sections
from kilter.app.bench.section_faults import (
    RANDOM_SECTION_ACCIDENTS,
    SECTION_ACCIDENTS,
    SectionAccident,
)

SHORTER = [s for s in SECTION_ACCIDENTS if not s.__name__.endswith("after_a_section")]
"""Nothing is low then, as before the first command."""


@pytest.mark.parametrize("scenario", SHORTER, ids=lambda scenario: scenario.__name__)
def test_every_accident_leaves_the_cards_as_found(
    scenario: SectionAccident, tmp_path: Path
) -> None:
    row = try_out_sections(scenario, tmp_path)
    assert row.ok, row


@pytest.mark.parametrize("scenario", RANDOM_SECTION_ACCIDENTS, ids=lambda one: one.__name__)
def test_random_moments(scenario: SectionAccident, tmp_path: Path) -> None:
    row = try_out_sections(scenario, tmp_path, 2)
    assert row.ok, row
