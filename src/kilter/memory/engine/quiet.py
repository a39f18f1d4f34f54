"""Calls under changed settings of the framework, which are put back even if a signal handler
raises.

A handler of the program may raise wherever python looks for signals: at the entry of each function
written in Python, also of an `__exit__`, and after a call. `torch.no_grad` is written in Python; if
its `__exit__` ends before the first line, gradients are off for the rest of the program. So each
setting is put back by one call into C, as the first thing in a `finally` of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from kilter.observe import torch_internals

T = TypeVar("T")


def ungraded(function: Callable[[], T]) -> T:
    """Call it with gradients off."""
    before = torch.is_grad_enabled()
    try:
        torch_internals.set_grad_enabled(False)
        return function()
    finally:
        torch_internals.set_grad_enabled(before)


def uncast(device_type: str, function: Callable[[], T]) -> T:
    """Call it outside of autocast."""
    before = torch.is_autocast_enabled(device_type)
    try:
        torch.set_autocast_enabled(device_type, False)
        return function()
    finally:
        torch.set_autocast_enabled(device_type, before)


def untangented(function: Callable[[], T]) -> T:
    """Call it without forward-mode derivatives: what it makes has no tangents."""
    before = torch_internals.is_forward_mode_enabled()
    try:
        torch_internals.set_forward_mode_enabled(False)
        return function()
    finally:
        torch_internals.set_forward_mode_enabled(before)


def unseen(function: Callable[[], T]) -> T:
    """Call it past the program's modes; both guards are written in C."""
    with torch_internals.DisableDispatch(), torch_internals.DisableFunction():
        return function()
