"""Which simulated cards there are. Apart from the profiles, so that asking costs no import."""

from __future__ import annotations

from importlib import resources


def names() -> tuple[str, ...]:
    """The profiles that ship with kilter."""
    files = (resources.files("kilter.device.sim") / "profiles").iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))
