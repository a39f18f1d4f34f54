"""Argument types that several verbs share."""

from __future__ import annotations

import argparse

from kilter.core.errors import KilterError
from kilter.core.plan import Goal, Objective
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
