"""A HiGHS solver that prints nothing: what it prints would stand in the program's own output."""

from __future__ import annotations

from typing import Any


def quiet_solver() -> Any:
    """A new `highspy.Highs`. `ImportError` without highspy."""
    import highspy

    base: Any = highspy.Highs

    class Quiet(base):  # type: ignore[misc]
        def enableCallbacks(self) -> Any:  # noqa: N802 (the library's name)
            """The constructor of highspy 1.16 calls this first, which prints the solver's name,
            unless the output is already off."""
            self.setOptionValue("output_flag", False)
            return super().enableCallbacks()

    solver = Quiet()
    solver.setOptionValue("output_flag", False)  # older constructors do not call it
    return solver
