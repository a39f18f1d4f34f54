"""The fence: the one place in the package that catches everything.

Nothing of ours may end, hang or change a user's training. Whatever goes wrong in our code that
runs inside it ends here: it is told once, and kilter steps aside. Everywhere else errors are
specific.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from kilter.core.errors import KilterError

T = TypeVar("T")


class Fence:
    """Calls functions of ours on behalf of the user's program.

    `aside(where, error)` is called with the first error; after it nothing inside is run any
    more. What the user's program raises, KeyboardInterrupt and SystemExit pass.
    """

    def __init__(self, aside: Callable[[str, str], None]) -> None:
        self._aside = aside
        self._told = False
        self.down = False

    def __call__(self, function: Callable[..., Any]) -> Callable[..., None]:
        """`function` behind the fence. Its result is dropped."""

        @functools.wraps(function)
        def fenced(*args: Any, **kwargs: Any) -> None:
            if not self.down:
                self.run(function, *args, **kwargs)

        return fenced

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        """Run it now, also after an error. Whether it came to its end."""
        return bool(self.ask(function, *args, **kwargs))

    def ask(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Run it now, also after an error; its result, or nothing if it did not come to its end."""
        try:
            return [function(*args, **kwargs)]
        except Exception as error:
            first, self._told = not self._told, True
            if first:
                self.run(self._tell, getattr(function, "__qualname__", repr(function)), error)
                self.down = True
            return []

    def _tell(self, where: str, error: Exception) -> None:
        """Stepping aside may fail, too: that is behind the fence like everything else."""
        self._aside(where, describe(error))


def describe(error: Exception) -> str:
    """One line: ours say what to do; for others the place in the code helps to mend it."""
    if isinstance(error, KilterError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
