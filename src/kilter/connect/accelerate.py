"""`kilter.AccelerateCallback`: a training loop of Hugging Face Accelerate under `kilter.govern`."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from kilter.connect.governing import Governing


class AccelerateCallback:
    """Governs the body of the `with`; the options are those of `kilter.govern`. The rows of the
    summary go through `Accelerator.log` to all of its trackers.

        with kilter.AccelerateCallback(accelerator, max_slowdown=0.02) as governing:
            for batch in batches:
                with accelerator.accumulate(model):
                    ...
                    optimizer.step()
                    governing.step_end()
        accelerator.end_training()

    Accelerate has no callbacks. Without `step_end`, iterations end where the optimizer steps.
    """

    def __init__(self, accelerator: Any, **options: Any) -> None:
        self._accelerator = accelerator
        self._governing = Governing(options)

    def __enter__(self) -> AccelerateCallback:
        self._governing.begin()
        return self

    def step_end(self) -> None:
        """After `optimizer.step()`, which Accelerate leaves out while gradients accumulate."""
        if self._accelerator.sync_gradients:
            self._governing.mark()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        rows = self._governing.end(error)
        if rows and error is None:
            self._governing.hand(self._accelerator.log, rows)
