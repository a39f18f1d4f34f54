"""The state of each parameter's gradient, and a property that sees who reads and writes it.

While gradients are watched or consumed, `.grad` of parameters is a property of ours: the
framework's own descriptor cannot be hooked. Accesses from C++ are not seen, and need not be: they
are backward itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING, Any

from kilter.core.errors import UsageError
from kilter.memory import messages

if TYPE_CHECKING:
    import torch

    from kilter.memory.engine.governed_optimizer import GovernedOptimizer


class GradientConsumed(RuntimeError):
    """After a gradient was used up, the program did something with it that it had not done while it
    was watched."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}, but kilter has already updated parameters with the gradients of this "
            "iteration and freed them, as --gradients consume allows. The parameters are as after "
            "optimizer.step() with unmodified gradients. Leave --gradients consume "
            '(gradients="consume") out, so that gradients are kept'
        )


class GradientPlace(IntEnum):
    """The state of a gradient. NONE -> THERE -> STEPPED -> NONE in every training loop; for
    consumed gradients NONE -> TAKEN -> GONE -> NONE, where the plain run still has one at TAKEN and
    GONE."""

    NONE = 0
    THERE = 1
    """It was accumulated and is not used yet."""
    STEPPED = 2
    """The step has used it; it is not zeroed yet."""
    TAKEN = 3
    """Consumed in backward, before the program has called step."""
    GONE = 4


class Followed:
    """One parameter of an optimizer."""

    __slots__ = ("owner", "parameter", "place", "version")

    def __init__(
        self, parameter: torch.nn.Parameter, owner: GovernedOptimizer, place: GradientPlace
    ) -> None:
        self.parameter = parameter
        self.owner = owner
        self.place = place
        self.version: int = parameter._version
        """The parameter had this version when its gradient arrived or was taken."""

    def arrives(self) -> None:
        """Its gradient was accumulated."""
        if self.place is GradientPlace.TAKEN:
            raise GradientConsumed("there was a second backward before optimizer.step()")
        if self.place is GradientPlace.GONE:
            raise GradientConsumed("a gradient was not zeroed before the next backward")
        if self.place is not GradientPlace.NONE and self.owner.watching():
            self.owner.object_to(messages.ACCUMULATED)
        self.place = GradientPlace.THERE
        self.version = self.parameter._version

    def taken(self) -> None:
        """Its gradient was consumed by an update."""
        self.place = GradientPlace.TAKEN
        self.version = self.parameter._version

    def steps(self) -> None:
        """The program's step begins."""
        watching = self.owner.watching()
        if (
            self.place in (GradientPlace.THERE, GradientPlace.TAKEN)
            and self.version != self.parameter._version
        ):
            if self.place is GradientPlace.TAKEN:
                raise GradientConsumed("a parameter was changed between backward and step")
            if watching:
                self.owner.object_to(messages.PARAMETERS_CHANGED)
        if self.place is GradientPlace.THERE:
            self.place = GradientPlace.STEPPED
        elif self.place is GradientPlace.TAKEN:
            self.place = GradientPlace.GONE
        elif self.place is GradientPlace.GONE:
            raise GradientConsumed("optimizer.step() was called twice for one backward")
        elif self.place is GradientPlace.STEPPED and watching:
            self.owner.object_to(messages.STEPPED_TWICE)

    def runs(self) -> None:
        """A module that reads the parameter runs."""
        if self.place is GradientPlace.TAKEN:
            raise GradientConsumed("a module ran between backward and optimizer.step()")
        if self.place is GradientPlace.THERE and self.owner.watching():
            self.owner.object_to(messages.MODULES_RUN)


class Gradients(AbstractContextManager["Gradients"]):
    """The property on `torch.nn.Parameter` that sees reads and writes of gradients."""

    def __init__(self) -> None:
        self.followed: dict[int, Followed] = {}
        self.quiet = False
        """An optimizer's own step is running, and reads the gradients."""

    def __enter__(self) -> Gradients:
        """Install the property. `UsageError` if the class has one of that name already."""
        import torch

        if "grad" in vars(torch.nn.Parameter):
            raise UsageError("gradients are watched already; one memory engine at a time")
        plain: Any = torch.nn.Parameter.grad
        self.get: Callable[[Any], torch.Tensor | None] = plain.__get__
        self.put: Callable[[Any, torch.Tensor | None], None] = plain.__set__
        get, put, followed = self.get, self.put, self.followed

        def read(parameter: Any) -> Any:
            found = followed.get(id(parameter))
            if found is not None and found.place and not self.quiet:
                self._read(found, sys._getframe(1))
            return get(parameter)

        def write(parameter: Any, value: Any) -> None:
            found = followed.get(id(parameter))
            if found is not None:
                self._write(found, value, sys._getframe(1))
            put(parameter, value)

        def delete(parameter: Any) -> None:
            write(parameter, None)

        torch.nn.Parameter.grad = property(read, write, delete)
        return self

    def __exit__(self, *exception: object) -> None:
        self.ignore()

    def ignore(self) -> None:
        """Remove the property; `get` and `put` still work."""
        import torch

        if "grad" in vars(torch.nn.Parameter):
            del torch.nn.Parameter.grad
        self.followed.clear()

    def _read(self, found: Followed, frame: FrameType) -> None:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "zero_grad" and module.startswith("torch."):
            self._zeroed(found, frame)
        elif not module.startswith("kilter."):
            self._unexpected(found, "a gradient is read", frame)

    def _write(self, found: Followed, value: Any, frame: FrameType) -> None:
        if value is None and found.place in (
            GradientPlace.STEPPED,
            GradientPlace.GONE,
            GradientPlace.NONE,
        ):
            found.place = GradientPlace.NONE
            return
        if not frame.f_globals.get("__name__", "").startswith("kilter."):
            self._unexpected(found, "a gradient is set", frame)
        found.place = GradientPlace.NONE if value is None else GradientPlace.THERE

    def _zeroed(self, found: Followed, frame: FrameType) -> None:
        if found.place in (GradientPlace.TAKEN, GradientPlace.THERE):
            self._unexpected(found, "gradients are zeroed before the step", frame)
        elif found.place is GradientPlace.GONE:
            found.place = GradientPlace.NONE
            if not frame.f_locals.get("set_to_none", True):
                import torch

                found.owner.object_to(messages.ZEROED_IN_PLACE)
                self.put(found.parameter, torch.zeros_like(found.parameter))
                found.place = GradientPlace.STEPPED

    def _unexpected(self, found: Followed, what: str, frame: FrameType) -> None:
        reason = messages.touched(what, frame.f_code.co_filename, frame.f_lineno)
        if found.place in (GradientPlace.TAKEN, GradientPlace.GONE):
            raise GradientConsumed(reason.text)
        if found.owner.watching():
            found.owner.object_to(reason)
