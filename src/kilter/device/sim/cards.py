"""Which simulated cards there are. Apart from the profiles, so that asking costs no import."""

from __future__ import annotations

import re
from importlib import resources


def names() -> tuple[str, ...]:
    """The profiles that ship with kilter."""
    files = (resources.files("kilter.device.sim") / "profiles").iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def profile_of(card: str) -> str | None:
    """The profile of a card by the name its vendor gives it ("NVIDIA GeForce RTX 3080 Ti"), if
    there is one. Whole words only: a GH200 is not an H200."""
    words = _words(card)
    runs = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, i + 4)}
    return next((name for name in names() if name in runs), None)


def stand_in_of(card: str) -> str | None:
    """The profile of another card with the same chip and SM clocks, to plan with where the card has
    none of its own and the running job has the last word."""
    return "h200" if {"h100", "hbm3"} <= set(_words(card)) else None


def _words(card: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", card.lower())
