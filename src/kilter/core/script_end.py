"""How the user's script has ended, as a value."""

from __future__ import annotations

import msgspec


class ScriptEnd(msgspec.Struct, frozen=True):
    """By default it ran to its end. As text: `finished`, `exit 3`, `raised ValueError`."""

    raised: str | None = None
    """It is the class name of the exception that nothing caught."""
    exit_code: int = 0

    @property
    def finished(self) -> bool:
        return self.raised is None and self.exit_code == 0

    @property
    def out_of_memory(self) -> bool:
        return self.raised == "OutOfMemoryError"

    def __str__(self) -> str:
        if self.raised is not None:
            return f"raised {self.raised}"
        return f"exit {self.exit_code}" if self.exit_code else "finished"


def end_of(error: BaseException | None) -> ScriptEnd:
    """From the exception that left the script, if one did."""
    if error is None:
        return ScriptEnd()
    if isinstance(error, SystemExit):
        code = error.code
        return ScriptEnd(exit_code=0 if code is None else code if isinstance(code, int) else 1)
    return ScriptEnd(raised=type(error).__name__)
