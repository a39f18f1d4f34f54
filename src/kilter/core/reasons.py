"""Why something was refused or decided, as a value."""

from __future__ import annotations

import msgspec

REHEARSAL_CUT = "rehearsal_cut"
"""This code says that the rehearsal ended before its evidence was in."""
CLOCKS_REFUSED = "clocks_refused"
"""This code says that clocks may not be set here, or can be set no longer."""


class Reason(msgspec.Struct, frozen=True):
    """A program compares `code`, a person reads `text`, and `subject` names what it is about: a
    line of source, an operation, a tensor, a way. No code compares texts."""

    code: str
    subject: str
    text: str

    def __str__(self) -> str:
        return self.text
