"""Plays a search that is a coroutine of orders to its end."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")
_Result = TypeVar("_Result")


def driven(
    orders: Generator[_Asked, _Answer, _Result], answer: Callable[[_Asked], _Answer]
) -> _Result:
    """What a search returns when each of its orders gets this answer."""
    try:
        order = next(orders)
        while True:
            order = orders.send(answer(order))
    except StopIteration as end:
        result: _Result = end.value
        return result
