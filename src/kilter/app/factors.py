"""What a kilowatt-hour emits and costs: numbers that only the user can know.

There is no default factor: they depend on place, hour and contract, and a wrong number with a label
would still be a wrong number. Imports nothing that a script might want to import itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kilter.core.errors import UsageError

MOST_GRAMS = 3000.0
"""One kWh emits at most this: old lignite power stations emit half of it. More is a slip of the
unit."""
MOST_PRICE = 1e6
"""One kWh costs at most this, in the currency with the smallest unit."""
_MOST_LETTERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """What one kilowatt-hour emits and costs. `None`: not given, and not shown."""

    grams_co2_per_kwh: float | None = None
    price_per_kwh: float | None = None
    currency: str | None = None

    def __post_init__(self) -> None:
        _check("grams_co2_per_kwh", self.grams_co2_per_kwh, MOST_GRAMS, "grams per kWh, as in 380")
        _check("price_per_kwh", self.price_per_kwh, MOST_PRICE, "the price of one kWh, as in 0.31")
        if (self.price_per_kwh is None) != (self.currency is None):
            raise UsageError("price_per_kwh and currency go together: 0.31 and EUR, for example")
        if self.currency is not None and not (
            self.currency.isprintable() and 0 < len(self.currency.strip()) <= _MOST_LETTERS
        ):
            raise UsageError(f"currency={self.currency!r} is none: write EUR, or $")

    @property
    def given(self) -> bool:
        """There is something to show."""
        return self.grams_co2_per_kwh is not None or self.price_per_kwh is not None


def _check(name: str, value: float | None, most: float, meant: str) -> None:
    if value is None:
        return
    if not math.isfinite(value) or value < 0.0:
        raise UsageError(f"{name}={value:g} is not a finite number from 0 on: write {meant}")
    if value > most:
        raise UsageError(f"{name}={value:g} is more than the {most:g} that can be: write {meant}")
