"""A screen that is drawn anew twice a second, for the verbs that watch something."""

from __future__ import annotations

import time
from collections.abc import Callable

from kilter.core.errors import UsageError

_EVERY_S = 0.5


def show_live(screen: Callable[[], str | None], *, otherwise: str) -> None:
    """Show the text until it is None, or until Ctrl-C. `UsageError` without rich, which names the
    command to take `otherwise`."""
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
