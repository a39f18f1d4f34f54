"""Messages between the ranks of a job: named notes in one place that all ranks can reach.

Never a collective, never a wait: a rank leaves a message and looks whether another's is there.
"""

from __future__ import annotations

from typing import Protocol

from kilter.core.errors import KilterError


class MessagesGone(KilterError):
    """The messages cannot be reached any more: the process that kept them has ended."""


class RankMessages(Protocol):
    """Messages by name. No call waits for another rank; each may raise `MessagesGone`."""

    def post(self, name: str, message: bytes) -> None:
        """Leave a message; each name is used once."""

    def look(self, name: str) -> bytes | None:
        """The message of that name, or None if it is not there yet."""

    def settle(self, name: str, proposal: bytes) -> bytes:
        """Leave a message unless there is one of that name, and give the one that is there then:
        all ranks get the same. Waits for the store's answer."""

    def drop(self, name: str) -> None:
        """Remove a message that every rank has read; harmless if it is not there."""

    def close(self) -> None:
        """Nothing more is asked."""


class LocalMessages:
    """The messages of a process that is alone."""

    def __init__(self) -> None:
        self._messages: dict[str, bytes] = {}

    def post(self, name: str, message: bytes) -> None:
        self._messages[name] = message

    def look(self, name: str) -> bytes | None:
        return self._messages.get(name)

    def settle(self, name: str, proposal: bytes) -> bytes:
        return self._messages.setdefault(name, proposal)

    def drop(self, name: str) -> None:
        self._messages.pop(name, None)

    def close(self) -> None:
        self._messages.clear()
