"""`kilter.LightningCallback`: a Lightning `Trainer` under `kilter.govern`."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from kilter.connect.governing import Governing

if (
    TYPE_CHECKING
    or "lightning.pytorch" in sys.modules
    or (
        "pytorch_lightning" not in sys.modules and importlib.util.find_spec("lightning") is not None
    )
):
    from lightning.pytorch import Callback
else:  # the same framework under its other name; its Trainer refuses callbacks of the first
    from pytorch_lightning import Callback


class LightningCallback(Callback):  # type: ignore[misc]
    """Governs each `fit()`; the options are those of `kilter.govern`. The rows of the summary go to
    all loggers of the trainer.

        Trainer(callbacks=[kilter.LightningCallback(max_slowdown=0.02)]).fit(model)
    """

    def __init__(self, **options: Any) -> None:
        self._governing = Governing(options)
        self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps = trainer.global_step
        self._governing.begin()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """An iteration ends with the batch in which optimizers stepped, not with those before it
        whose gradients are accumulated."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._governing.mark()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        rows = self._governing.end()
        for logger in trainer.loggers if rows else ():
            self._governing.hand(logger.log_metrics, rows, step=trainer.global_step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._governing.end(exception)
