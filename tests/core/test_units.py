"""Numbers as a person reads them."""

import pytest

from kilter.core.units import show_count, show_fraction, show_pace


@pytest.mark.parametrize(
    ("slowdown", "text"),
    [
        (0.0213, "2.1 % slower"),
        (-0.0213, "2.1 % faster"),
        (0.0004, "as fast"),
        (-0.0004, "as fast"),
        (0.0, "as fast"),
    ],
)
def test_a_slowdown_in_words(slowdown, text):
    assert show_pace(slowdown) == text


@pytest.mark.parametrize(
    ("value", "plain", "signed"),
    [(-0.0004, "0.0 %", "+0.0 %"), (-0.0213, "-2.1 %", "-2.1 %"), (0.0213, "2.1 %", "+2.1 %")],
)
def test_a_share_never_reads_minus_zero(value, plain, signed):
    assert show_fraction(value) == plain
    assert show_fraction(value, signed=True) == signed


def test_one_is_singular():
    assert [show_count(n, "block") for n in (0, 1, 2)] == ["0 blocks", "1 block", "2 blocks"]
