"""Stand-ins for Hugging Face's Trainer, Lightning and Accelerate: their protocols of callbacks and
loggers, and nothing else of them.

`install(name)` puts the modules that the callbacks of `kilter.connect` import into `sys.modules`.
What is modelled was read in transformers 5.23, lightning 2.6 and accelerate 1.15: the order of
events, what each is given, that Hugging Face logs a last row before `on_train_end` and tells nobody
of an exception, that Lightning closes its loggers after `on_train_end` and calls `on_exception`,
and that Accelerate leaves the optimizer's step out while gradients accumulate.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


class ClosedLogger(Exception):
    """A row came after the logger was closed."""


@dataclass
class Logger:
    """Keeps the rows; like a real one, it takes none once it is closed."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    closed: bool = False

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self.closed:
            raise ClosedLogger
        self.rows.append(dict(metrics))


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None


class _HuggingFaceBase:
    """`transformers.TrainerCallback`: an event that is not overridden does nothing."""

    on_train_begin = on_step_begin = on_substep_end = on_step_end = on_log = on_train_end = _ignore


@dataclass
class _State:
    global_step: int = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)


class HuggingFaceTrainer:
    """`transformers.Trainer`, whose loggers are callbacks that come before those of the user."""

    def __init__(self, logger: Logger, callbacks: Sequence[Any] = ()) -> None:
        self.logger = logger
        self.callbacks = list(callbacks)
        self.state = _State()

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def train(self, step: Callable[[], None], steps: int, accumulate: int) -> None:
        self._event("on_train_begin")
        for _ in range(steps):
            self._event("on_step_begin")
            for _ in range(accumulate - 1):
                self._event("on_substep_end")
            step()
            self.state.global_step += 1
            self._event("on_step_end")
        self.log({"train_runtime": 1.0})
        self.logger.closed = True
        self._event("on_train_end")

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.logger.log_metrics(logs)
        self._event("on_log", logs=logs)

    def _event(self, event: str, **more: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(None, self.state, None, model=None, optimizer=None, **more)


class _LightningBase:
    """`lightning.pytorch.Callback`."""

    on_train_start = on_train_batch_start = on_train_batch_end = _ignore
    on_train_end = on_exception = _ignore


class LightningTrainer:
    """`lightning.pytorch.Trainer`."""

    def __init__(self, logger: Logger, callbacks: Sequence[Any]) -> None:
        self.loggers = [logger]
        self.callbacks = list(callbacks)
        self.global_step = 0

    def fit(self, step: Callable[[], None], steps: int, accumulate: int) -> None:
        try:
            self._event("on_train_start")
            for index in range(steps * accumulate):
                self._event("on_train_batch_start", None, index)
                if (index + 1) % accumulate == 0:
                    step()
                    self.global_step += 1
                self._event("on_train_batch_end", None, None, index)
            self._event("on_train_end")
        except BaseException as error:
            self._event("on_exception", error)
            raise
        finally:
            for logger in self.loggers:
                logger.closed = True

    def _event(self, event: str, *more: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, None, *more)


class Accelerator:
    """`accelerate.Accelerator`."""

    def __init__(self, logger: Logger, accumulate: int) -> None:
        self.logger = logger
        self.sync_gradients = True
        self._accumulate, self._batches = accumulate, 0

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self._batches += 1
        self.sync_gradients = self._batches % self._accumulate == 0
        yield

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.logger.log_metrics(values, step)

    def end_training(self) -> None:
        self.logger.closed = True


def install(name: str) -> None:
    """Make `import transformers`, or `lightning.pytorch`, find the stand-in. Accelerate is not
    imported by its callback."""
    if name == "huggingface":
        found = ModuleType("transformers")
        found.TrainerCallback = _HuggingFaceBase  # type: ignore[attr-defined]
        sys.modules["transformers"] = found
    elif name == "lightning":
        found = ModuleType("lightning.pytorch")
        found.Callback = _LightningBase  # type: ignore[attr-defined]
        sys.modules["lightning"] = ModuleType("lightning")
        sys.modules["lightning.pytorch"] = found
