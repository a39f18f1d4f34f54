"""Units at the borders. Inside everything is SI (s, J, W, Hz, bytes, fractions)."""

from __future__ import annotations

import math
import re

from kilter.core.errors import UsageError

MHZ = 1e6
MILLI = 1e-3
MICRO = 1e-6
KWH_J = 3.6e6
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_BYTES = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": TIB,
}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z%]*)\s*", re.IGNORECASE)


def parse_fraction(text: str) -> float:
    """`"2%"` -> 0.02, `"0.02"` -> 0.02. A bare number of 1 or more is refused: it is ambiguous."""
    if text.lstrip().startswith("-"):
        raise UsageError(f"{text!r} is below zero: write 2%, or 0")
    match = _NUMBER.fullmatch(text)
    if match is None or match[2] not in ("", "%"):
        raise UsageError(f"{text!r} is not a fraction: write 2% or 0.02")
    value = float(match[1]) / (100.0 if match[2] == "%" else 1.0)
    if not math.isfinite(value):
        raise UsageError(f"{text!r} is not a finite fraction: write 2% or 0.02")
    if value >= 1.0:
        raise UsageError(f"{text!r} is 100 % or more: write 2% for two percent, or 0.02")
    return value


def parse_bytes(text: str) -> int:
    """`"24GiB"` -> 25769803776. K, M, G and T alone mean KiB, MiB, GiB and TiB."""
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in _BYTES:
        raise UsageError(f"{text!r} is not a size: write 24GiB, 800MB or a number of bytes")
    value = float(match[1]) * _BYTES[match[2].lower()]
    if not math.isfinite(value) or value < 1:
        raise UsageError(f"{text!r} is not a size of at least one byte")
    return int(value)


_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}


def parse_seconds(text: str) -> float:
    """`"60s"` -> 60.0, `"2min"` -> 120.0; a bare number is seconds."""
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in _SECONDS:
        raise UsageError(f"{text!r} is not a time: write 60s or 2min")
    seconds = float(match[1]) * _SECONDS[match[2].lower()]
    if not math.isfinite(seconds):
        raise UsageError(f"{text!r} is not a finite time: write 60s or 2min")
    return seconds


def show_fraction(value: float | None, *, signed: bool = False) -> str:
    """0.0213 -> `"2.1 %"`, None -> `"unknown"`."""
    if value is None:
        return "unknown"
    rounded = round(value * 100, 1) + 0.0  # no "-0.0"
    return f"{rounded:{'+' if signed else ''}.1f} %"


def show_count(count: int, noun: str) -> str:
    """2, block -> `"2 blocks"`; 3, process -> `"3 processes"`."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{'' if count == 1 else ending}"


def show_pace(slowdown: float) -> str:
    """0.021 -> `"2.1 % slower"`, -0.021 -> `"2.1 % faster"`, 0.0001 -> `"as fast"`."""
    shown = show_fraction(abs(slowdown))
    if shown == show_fraction(0.0):
        return "as fast"
    return f"{shown} {'slower' if slowdown > 0.0 else 'faster'}"


def show_bytes(value: float | None) -> str:
    """25769803776 -> `"24.0 GiB"`, None -> `"unknown"`."""
    if value is None:
        return "unknown"
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(value) >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def show_time(seconds: float | None) -> str:
    """0.0728 -> `"72.8 ms"`, None -> `"unknown"`."""
    if seconds is None:
        return "unknown"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e9:.3g} ns"


def show_duration(seconds: float) -> str:
    """5400.0 -> `"1.5 h"`, 90.0 -> `"1.5 min"`, 12.34 -> `"12.3 s"`."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def show_energy(joules: float | None) -> str:
    """49.3 -> `"49.3 J"`, None -> `"unknown"`."""
    if joules is None:
        return "unknown"
    for unit, size in (("MJ", 1e6), ("kJ", 1e3), ("J", 1.0), ("mJ", 1e-3), ("uJ", 1e-6)):
        if abs(joules) >= size:
            return f"{joules / size:.3g} {unit}"
    return f"{joules:.3g} J"


def show_clock(hertz: float | None) -> str:
    """1.335e9 -> `"1335 MHz"`, None -> `"default"`."""
    return "default" if hertz is None else f"{hertz / MHZ:.0f} MHz"


def show_power(watts: float | None) -> str:
    """685.1 -> `"685 W"`, None -> `"unknown"`."""
    return "unknown" if watts is None else f"{watts:.0f} W"
