"""`trace.json` and `plan.json` of a run. Several controllers contribute; each file is always whole.

Only rank 0 writes them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from kilter.core import codec
from kilter.core.plan import Plan
from kilter.core.trace import IterationTrace
from kilter.observe.chrome import chrome


class RunFiles:
    """The files in `directory`. `command` becomes the source of the trace; `writes` is false on
    ranks other than 0."""

    def __init__(self, directory: Path, *, command: tuple[str, ...], writes: bool) -> None:
        self.directory = directory
        self._source = " ".join(command)
        self._writes = writes
        self._operations: IterationTrace | None = None
        self._memory: tuple[IterationTrace, Plan] | None = None

    def save_operations(self, trace: IterationTrace) -> IterationTrace:
        """The operations of an iteration with their kernels; returned with its source."""
        self._operations = replace(trace, source=self._source)
        if self._writes:
            self._save_trace()
            drawn = msgspec.json.encode(chrome(self._operations))
            codec.write_atomically(self.directory / "trace.chrome.json", drawn)
        return self._operations

    def save_memory(self, trace: IterationTrace, plan: Plan) -> None:
        """A memory plan came into force: it can be read, and planned again, from the files."""
        self._memory = replace(trace, source=self._source), plan
        if self._writes:
            self._save_trace()
            codec.save(self.directory / "plan.json", plan)

    def save_clocks(self, plan: Plan) -> None:
        """The plan of the clocks, with the memory plan that it was found under."""
        if self._memory is not None:
            plan = replace(plan, memory=self._memory[1].memory)
        codec.save(self.directory / "plan.json", plan)

    def _save_trace(self) -> None:
        """The operations with their kernels, the required data, or one inside the other."""
        memory = None if self._memory is None else self._memory[0]
        if self._operations is not None:
            codec.save(self.directory / "trace.json", replace(self._operations, memory=memory))
        elif memory is not None:
            codec.save(self.directory / "trace.json", memory)
