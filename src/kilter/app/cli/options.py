"""Argument types that several verbs share."""

from __future__ import annotations

import argparse

from kilter.core.errors import UsageError
from kilter.core.units import parse_fraction


def fraction(text: str) -> float:
    """`2%` or `0.02`, as an argparse type."""
    try:
        return parse_fraction(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
