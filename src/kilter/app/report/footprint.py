"""What the energy of a run means in carbon and money, by factors that the user gives. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kilter.app.factors import Factors
from kilter.app.report.evidence import Arm, Judgement
from kilter.core.events import Block
from kilter.core.label import Label
from kilter.core.setting import Setting
from kilter.core.units import KWH_J, show_energy


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Some energy, and what it emits and costs. `None`: no factor was given."""

    energy_j: float
    grams_co2: float | None
    cost: float | None
    label: Label
    """Where the energy comes from; the factors are the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a run used and saved, and by which factors."""

    factors: Factors
    used: Amount | None
    """The whole run used this; on a simulated device it is what the script's iterations would take
    there. None: not known."""
    saved: Amount | None
    """It is below zero if more was used than by default. None: nothing was concluded, or not
    known."""
    happened: bool
    """It was saved; False: it would be."""


def footprint_of(
    factors: Factors | None,
    *,
    run: Amount | None,
    judged: Judgement,
    iterations: int,
    label: Label,
    happened: bool,
    found: Setting,
    blocks: Sequence[Block],
) -> Footprint | None:
    """None without a factor. `run` is the energy of the whole run, where it was measured.

    What was saved is counted block by block over the iterations that really ran under another
    setting, the search included, against the default's mean. What would be saved is the
    difference of one iteration times the iterations of the script.
    """
    if factors is None or not factors.given:
        return None
    saved_j = (
        _saved_j(blocks, found, judged.baseline) if happened else _would_save_j(iterations, judged)
    )
    if run is None and judged.governed.energy_j is not None and label is Label.SIMULATED:
        run = amount(factors, judged.governed.energy_j * iterations, label)
    return Footprint(
        factors=factors,
        used=run,
        saved=None if saved_j is None else amount(factors, saved_j, label),
        happened=happened,
    )


def _saved_j(blocks: Sequence[Block], found: Setting, baseline: Arm) -> float | None:
    if baseline.energy_j is None:
        return None
    ours = [block for block in blocks if block.setting != found and not block.rehearsed]
    if any(block.energy_j is None for block in ours):
        return None
    return math.fsum(
        block.iterations * (baseline.energy_j - (block.energy_j or 0.0)) for block in ours
    )


def _would_save_j(iterations: int, judged: Judgement) -> float | None:
    base_j, ours_j = judged.baseline.energy_j, judged.governed.energy_j
    return None if base_j is None or ours_j is None else iterations * (base_j - ours_j)


def amount(factors: Factors | None, energy_j: float, label: Label) -> Amount:
    """What that much energy emits and costs."""
    kwh = energy_j / KWH_J
    grams = None if factors is None else factors.grams_co2_per_kwh
    price = None if factors is None else factors.price_per_kwh
    return Amount(
        energy_j=energy_j,
        grams_co2=None if grams is None else kwh * grams,
        cost=None if price is None else kwh * price,
        label=label,
    )


# In words.


def sentence(footprint: Footprint) -> str:
    """`used 12.3 MJ: 1.3 kg CO2, 1.06 EUR [measured]; saved 1.2 MJ: ... (by your factors: ...)`."""
    factors, used, saved = footprint.factors, footprint.used, footprint.saved
    if used is None:
        text = "the energy of the whole run is not known, so its carbon and cost are not either"
    else:
        verb = "would use" if used.label is Label.SIMULATED else "used"
        text = f"{verb} {_shown(used, factors)}"
    if saved is not None and saved.energy_j:
        would = "" if footprint.happened else "would "
        if saved.energy_j > 0.0:
            verb = "save" if would else "saved"
        else:
            verb = "take more than the default by" if would else "took more than the default by"
        text += f"; {would}{verb} {_shown(saved, factors)}"
    return f"{text} (by your factors: {factors_text(factors)})"


def factors_text(factors: Factors) -> str:
    """`380 g CO2 and 0.31 EUR per kWh`."""
    parts = []
    if factors.grams_co2_per_kwh is not None:
        parts.append(f"{factors.grams_co2_per_kwh:g} g CO2")
    if factors.price_per_kwh is not None:
        parts.append(f"{factors.price_per_kwh:g} {factors.currency}")
    return f"{' and '.join(parts)} per kWh"


def _shown(amount: Amount, factors: Factors) -> str:
    parts = []
    if amount.grams_co2 is not None:
        parts.append(f"{_mass(abs(amount.grams_co2))} CO2")
    if amount.cost is not None:
        parts.append(f"{abs(amount.cost):.3g} {factors.currency}")
    return f"{show_energy(abs(amount.energy_j))}: {', '.join(parts)} [{amount.label.value}]"


def _mass(grams: float) -> str:
    for unit, size in (("t", 1e6), ("kg", 1e3), ("g", 1.0), ("mg", 1e-3)):
        if grams >= size:
            return f"{grams / size:.3g} {unit}"
    return f"{grams / 1e-3:.2g} mg"
