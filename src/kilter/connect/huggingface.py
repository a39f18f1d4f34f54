"""`kilter.HuggingFaceCallback`: a Hugging Face `Trainer` under `kilter.govern`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from kilter.connect.governing import Governing


class HuggingFaceCallback(TrainerCallback):  # type: ignore[misc]
    """Governs each `train()`; the options are those of `kilter.govern`.

        trainer = Trainer(...)
        trainer.add_callback(kilter.HuggingFaceCallback(trainer, max_slowdown=0.02))

    With the trainer given, the rows of the summary go through `Trainer.log` to everything that it
    reports to (Weights & Biases, TensorBoard, MLflow). The protocol of callbacks has no way there,
    so that in `Trainer(..., callbacks=[kilter.HuggingFaceCallback()])` they are added to
    `trainer.state.log_history` alone.
    """

    def __init__(self, trainer: Any = None, **options: Any) -> None:
        self._trainer = trainer
        self._governing = Governing(options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._governing.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the optimizer has stepped, once for all batches of an accumulated gradient."""
        self._governing.mark()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """The last row of a training is logged before its loggers are closed (`on_train_end`)."""
        if logs is not None and "train_runtime" in logs:
            self._end(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end(state)

    def _end(self, state: Any) -> None:
        rows = self._governing.end()
        if rows and self._trainer is not None:
            self._governing.hand(self._trainer.log, rows)
        elif rows:
            state.log_history.append({**rows, "step": state.global_step})
