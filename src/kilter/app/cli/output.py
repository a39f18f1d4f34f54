"""How verbs print: JSON on standard output, progress, and a screen that is drawn anew."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kilter.core.errors import UsageError
from kilter.core.label import Label

_EVERY_S = 0.5


def print_json(schema: str, label: Label | str, fields: Mapping[str, Any]) -> None:
    """What `--json` prints: the schema, where the figures come from, and the fields."""
    print(msgspec.json.encode({"schema": schema, "label": label, **fields}).decode())


def show_progress(text: str = "") -> None:
    """Replace the last line of standard error where it is a terminal; nothing: clear it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def show_live(screen: Callable[[], str | None], *, otherwise: str) -> None:
    """Show the text, drawn anew twice a second, until it is None, or until Ctrl-C. `UsageError`
    without rich, which names the command to take `otherwise`."""
    try:
        from rich.live import Live
        from rich.text import Text
    except ImportError as error:
        raise UsageError(
            f"the live view needs rich: pip install 'kilter[top]'; or: {otherwise}"
        ) from error
    first = screen()
    if first is None:
        return
    try:
        with Live(Text(first, no_wrap=True), auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(_EVERY_S)
                text = screen()
                if text is None:
                    return
                live.update(Text(text, no_wrap=True), refresh=True)
    except KeyboardInterrupt:
        return
