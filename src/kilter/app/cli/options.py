"""Argument types that several verbs share."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from kilter.core.errors import KilterError, UsageError
from kilter.core.plan import Goal, Objective
from kilter.core.units import parse_bytes, parse_fraction, parse_seconds
from kilter.device.sim.cards import names
from kilter.device.sim.profile import Profile, load_profile

_Value = TypeVar("_Value")


def argument(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """As an argparse type: what is wrong with a value is said with the name of its option."""

    def read(text: str) -> _Value:
        try:
            return parse(text)
        except KilterError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


fraction, size = argument(parse_fraction), argument(parse_bytes)


@argument
def seconds(text: str) -> float:
    """`20s`; above 0."""
    value = parse_seconds(text)
    if value <= 0.0:
        raise UsageError(f"{text!r} has to be above 0")
    return value


@argument
def gigabytes_per_s(text: str) -> float:
    """Bytes per second, given in GB/s."""
    try:
        rate = float(text) * 1e9
    except ValueError:
        rate = math.nan
    if not 0.0 < rate < math.inf:
        raise UsageError(f"{text!r} is no rate in GB/s: it has to be a finite number above 0")
    return rate


@argument
def positive(text: str) -> int:
    """A number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{text!r} is not a number of at least 1")
    return int(text)


@argument
def output_file(text: str) -> Path:
    """A file that is written when the work is done. Its folder has to be there before: a typing
    mistake must not cost the work, nor make folders."""
    folder = Path(os.path.realpath(text)).parent
    if not text or Path(text).is_dir():
        raise UsageError(f"{text!r} is a folder; name a file in it")
    if not folder.is_dir():
        raise UsageError(f"{text!r} cannot be written: there is no folder {folder}")
    return Path(text)


@argument
def simulated(text: str) -> Profile:
    """`sim:NAME`: the profile of that card."""
    kind, _, name = text.partition(":")
    if kind != "sim" or name not in names():
        raise UsageError(f"{text!r}: choose sim:{', sim:'.join(names())}")
    return load_profile(name)


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """`a,b`: one or more of these words."""

    @argument
    def read(text: str) -> list[str]:
        found = [word for word in text.split(",") if word]
        wrong = [word for word in found if word not in known]
        if wrong or not found:
            raise UsageError(f"{(wrong or [text])[0]!r}: choose from {', '.join(known)}")
        return found

    return read


def add_goal_arguments(parser: argparse.ArgumentParser, *, max_slowdown: float) -> None:
    """What is wanted of the clocks, for `goal_of`."""
    parser.add_argument(
        "--max-slowdown",
        type=fraction,
        default=max_slowdown,
        metavar="S",
        help=f"contract ({max_slowdown:.0%}%)",
    )
    parser.add_argument(
        "--objective", choices=[o.value for o in Objective], default="energy", help="(energy)"
    )
    parser.add_argument(
        "--price-of-time",
        type=float,
        default=Goal().price_of_time,
        metavar="P",
        help="a setting has to save P times as large a fraction as it is slower (%(default)g)",
    )


def goal_of(args: argparse.Namespace) -> Goal:
    return Goal(
        max_slowdown=args.max_slowdown,
        objective=Objective(args.objective),
        price_of_time=args.price_of_time,
    )


def add_noise_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--noise", type=fraction, default=0.01, metavar="S", help="of an iteration (1%%)"
    )
