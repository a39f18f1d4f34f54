"""Hooks behind the fence that may refuse what the program does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kilter.session.fence import Fence


def fenced_hook(
    fence: Fence | None,
    hook: Callable[..., None],
    refusal: type[Exception],
    step_aside: Callable[[], None],
) -> Callable[..., None]:
    """The hook, which may raise a `refusal` in the program. After an error of ours `step_aside` is
    called in place of the hook."""
    if fence is None:
        return hook

    def refused(*args: Any) -> Exception | None:
        try:
            hook(*args)
        except refusal as error:
            return error
        return None

    def fenced(*args: Any) -> None:
        found = [] if fence.down else fence.ask(refused, *args)
        if not found:
            step_aside()
        elif found[0] is not None:
            raise found[0]

    return fenced
