"""The rows of `kilter bench faults` for sections: what deaths and hung collectives leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from kilter.app.bench.faults import try_out
from kilter.app.bench.section_faults import RANDOM_SECTION_ACCIDENTS, SECTION_ACCIDENTS
from kilter.testing.section_box import SectionBox

LEFT_OUT = (
    "after a section",  # nothing is low then, as before the first command
    "one rank's conductor while all are low, the job goes on",  # as of a program alone
    "a collective hangs while all ranks are low, and the job is killed",  # as a trainer that hangs
)
SHORTER = [name for name in SECTION_ACCIDENTS if not name.endswith(LEFT_OUT)]
"""`kilter bench faults` has every one. Three ranks that import torch take more than ten others."""


@pytest.mark.parametrize("name", SHORTER)
def test_every_accident_leaves_the_cards_as_found(name: str, tmp_path: Path) -> None:
    row = try_out(name, SECTION_ACCIDENTS[name], SectionBox(tmp_path))
    assert row.ok, row


@pytest.mark.parametrize("name", RANDOM_SECTION_ACCIDENTS)
def test_random_moments(name: str, tmp_path: Path) -> None:
    row = try_out(name, RANDOM_SECTION_ACCIDENTS[name], SectionBox(tmp_path), 2)
    assert row.ok, row
