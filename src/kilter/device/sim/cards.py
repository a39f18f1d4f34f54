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
    words = re.findall(r"[a-z0-9]+", card.lower())
    runs = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, i + 4)}
    return next((name for name in names() if name in runs), None)
