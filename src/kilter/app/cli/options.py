"""Argument types that several verbs share."""

from __future__ import annotations

import argparse

from kilter.core.errors import KilterError
from kilter.core.units import parse_bytes, parse_fraction
from kilter.device.sim.cards import names
from kilter.device.sim.profile import Profile, load_profile


def fraction(text: str) -> float:
    """`2%` or `0.02`, as an argparse type."""
    try:
        return parse_fraction(text)
    except KilterError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def size(text: str) -> int:
    """`1MiB` or a number of bytes, as an argparse type."""
    try:
        return parse_bytes(text)
    except KilterError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def simulated(text: str) -> Profile:
    """`sim:NAME`, as an argparse type: the profile of that card."""
    kind, _, name = text.partition(":")
    if kind != "sim" or name not in names():
        raise argparse.ArgumentTypeError(f"{text!r}: choose sim:{', sim:'.join(names())}")
    return load_profile(name)
