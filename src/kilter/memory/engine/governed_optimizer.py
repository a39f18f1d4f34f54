"""One optimizer, and whether its gradients may be consumed inside backward.

That depends on the kind of optimizer and on what the watched iterations show. The user says that
later iterations do nothing else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch

from kilter.core.reasons import Reason
from kilter.memory import messages
from kilter.memory.engine.backend import CopyEvent
from kilter.memory.engine.gradients import Followed, GradientPlace
from kilter.memory.engine.stream import StateBucket, local_of
from kilter.memory.plan.state import StatePlan

ELEMENTWISE = frozenset(
    {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD"}
)
"""These optimizers of `torch.optim` treat each parameter on its own: bucket by bucket they compute
what they compute at once, bit for bit."""


class GradientPhase(Enum):
    """How gradients of an optimizer are treated: WATCHING is followed by CONSUMING or KEEPING, and
    CONSUMING may be followed by KEEPING."""

    WATCHING = "watching"
    CONSUMING = "consuming"
    KEEPING = "keeping"


class StateInBuckets:
    """The state of one optimizer, and how it streams."""

    def __init__(self) -> None:
        self.buckets: list[StateBucket] = []
        """They stand in the order in which their gradients arrive; there are none where the
        optimizer cannot be run bucket by bucket."""
        self.bucket_of: dict[int, int] = {}
        """Each parameter is in the bucket of this number."""
        self.streams = False
        self.room_bytes: int | None = None
        """What the plan was made for."""
        self.plan: StatePlan | None = None
        self.anew = False
        """After the next step another plan is made, also for the same room."""
        self.chosen: StatePlan | None = None
        """A plan that was made together with that of the pass."""


class RoundOfVisits:
    """From the first gradient, or the begin of the step, to the end of the program's step."""

    def __init__(self) -> None:
        self.open = False
        self.had_state: set[int] = set()
        """These parameters had state before this round."""
        self.visited: set[int] = set()
        self.updated: set[int] = set()
        """These buckets were updated in this round."""
        self.room_bytes = 0
        """State may take so much in it."""

    def end(self) -> None:
        """All updates are done."""
        self.open = False
        self.visited.clear()
        self.updated.clear()


class GradientEvidence:
    """What was seen of the gradients of one iteration, from the first one to the step."""

    def __init__(self) -> None:
        self.settings: Any = None
        """The groups had these options when the first gradient arrived."""
        self.seen: dict[int, tuple[int, int]] = {}
        """Gradients arrived with this storage and version."""
        self.marks: list[tuple[int, CopyEvent]] = []
        self.arrives_s: dict[int, float] = {}
        """In the last iteration that was watched, each parameter's gradient arrived so long after
        the first one."""
        self.at: dict[int, int] = {}
        """A parameter's gradient arrives in this operation of the pass."""

    def arrived(self, parameter: Any, event: Callable[[], int | None]) -> None:
        """A gradient was accumulated; `event` gives the operation of the pass, if it is known."""
        if id(parameter) not in self.at and (at := event()) is not None:
            self.at[id(parameter)] = at

    def end(self, elapsed_s: Callable[[CopyEvent, CopyEvent], float]) -> None:
        """The step is over, and what was issued until then can be timed."""
        if self.marks:
            zero = self.marks[0][1]
            self.arrives_s = {key: max(0.0, elapsed_s(zero, mark)) for key, mark in self.marks}

    def forget(self) -> None:
        """What follows is another iteration."""
        self.settings = None
        self.marks.clear()
        self.seen.clear()


class StepSeen:
    """What a step has shown after which it was planned how state streams."""

    def __init__(self) -> None:
        self.update_s_per_byte = 0.0
        """An update takes so long for each byte of gradients; 0: not known."""
        self.room_bytes = 0
        """State may take so much in a step; 0: not known."""
        self.missed = 0
        """So many steps had less room than that."""
        self.looks = False
        """The present step is looked at."""
        self._updates: list[tuple[CopyEvent, CopyEvent, int]] = []
        """Begin and end of updates, for so many bytes of gradients."""
        self._own: tuple[CopyEvent, int] | None = None

    def updated(self, begun: CopyEvent, end: CopyEvent, gradient_bytes: int) -> None:
        """What is resident was updated, with nothing to wait for."""
        self._updates.append((begun, end, gradient_bytes))

    def own_step_begins(self, begun: CopyEvent, gradient_bytes: int) -> None:
        """The rest of the step is the program's own."""
        self._own = begun, gradient_bytes

    def ended(self, end: CopyEvent, elapsed_s: Callable[[CopyEvent, CopyEvent], float]) -> None:
        """The step that was looked at was issued; may wait for it."""
        if self._own is not None:
            begun, own_bytes = self._own
            self.updated(begun, end, own_bytes)
        gradient_bytes = sum(size_bytes for _, _, size_bytes in self._updates)
        if gradient_bytes:
            took_s = sum(elapsed_s(begun, end) for begun, end, _ in self._updates)
            self.update_s_per_byte = took_s / gradient_bytes
        self.looks, self._own = False, None
        self._updates.clear()


class GovernedOptimizer:
    """One optimizer: its gradients, its state, and what was decided for both."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.phase = GradientPhase.WATCHING
        self.steps = 0
        self.state = StateInBuckets()
        self.round = RoundOfVisits()
        self.evidence = GradientEvidence()
        self.step_seen = StepSeen()
        self.told = False
        """Whether `changed` was last called while gradients were consumed."""
        self.followed: list[Followed] = []
        """They are in the order in which gradients arrive."""
        self.group_of = {
            id(p): index
            for index, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        self.refused: dict[Reason, None] = {}
        """Why gradients are kept or state stays, each reason once."""
        self.stash: list[tuple[Any, torch.Tensor]] = []
        """It holds gradients that are hidden from the program's own step, since they were used
        already."""
        self.handles: list[Any] = []
        """They are hooks on the optimizer; the first two run before and after its step."""
        self.note_state()

    @property
    def optimizer(self) -> Any:
        return self._optimizer()

    @property
    def fit(self) -> bool:
        """It can be run bucket by bucket."""
        return bool(self.state.buckets)

    @property
    def took(self) -> bool:
        """Gradients of this iteration were used up, and the program has not called step yet."""
        return any(f.place is GradientPlace.TAKEN for f in self.followed)

    @property
    def altered(self) -> bool:
        """The groups have other parameters than at the first step."""
        groups = self.optimizer.param_groups
        return [id(p) for group in groups for p in group["params"]] != list(self.group_of)

    def options(self) -> list[Any]:
        """Everything that the step reads from the groups, comparable."""
        return [
            sorted(
                (key, (id(value), value._version) if hasattr(value, "_version") else value)
                for key, value in group.items()
                if key != "params"
            )
            for group in self.optimizer.param_groups
        ]

    def stand_innermost(self) -> None:
        """Have our hooks called closest to the step: after the program's own hooks before the step,
        which may change gradients, and before its hooks after the step."""
        if self.handles:
            before, after = self.handles[:2]
            self.optimizer._optimizer_step_pre_hooks.move_to_end(before.id)
            self.optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)

    def note_state(self) -> None:
        """A round of visits begins."""
        self.round.had_state = {id(p) for p in self.optimizer.state}

    def order_state(self) -> None:
        """Sort state that was made in a round of visits into the order in which the optimizer's own
        step makes it."""
        states = self.optimizer.state
        if len(states) > len(self.round.had_state):
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    if p in states and id(p) not in self.round.had_state:
                        states[p] = states.pop(p)
            self.note_state()

    # Reasons

    def say(self, reason: Reason) -> None:
        self.refused[reason] = None

    def keep_state(self, reason: Reason) -> None:
        self.state.streams = False
        self.say(messages.state_stays(reason))

    def watching(self) -> bool:
        """Whether an objection can still keep the gradients from being consumed."""
        return self.phase is GradientPhase.WATCHING

    def object_to(self, reason: Reason) -> None:
        """Something was seen that forbids consuming, and no harm is done yet."""
        if self.phase is not GradientPhase.KEEPING:
            self.phase = GradientPhase.KEEPING
            self.say(messages.gradients_kept(reason))

    def unfit(self, device: torch.device, followed: Mapping[int, Followed]) -> Reason | None:
        """Why this optimizer cannot be run bucket by bucket."""
        kind = type(self.optimizer)
        if kind.__name__ not in ELEMENTWISE or not kind.__module__.startswith("torch.optim."):
            return messages.unknown_optimizer(kind.__name__)
        if not hasattr(kind.step, "__wrapped__"):
            return messages.step_replaced(kind.__name__)
        for group in self.optimizer.param_groups:
            if group.get("differentiable"):
                return messages.DIFFERENTIABLE
            if group.get("capturable"):
                return messages.CAPTURABLE
            if len({(p.dtype, p.device) for p in group["params"]}) > 1:
                return messages.MIXED_GROUP
            for p in group["params"]:
                reason = _unusual(p, device)
                if reason is not None:
                    return reason
                if id(p) in followed:
                    followed[id(p)].owner.object_to(messages.TWO_OPTIMIZERS)
                    return messages.TWO_OPTIMIZERS
        return None

    def watch(self, parameter: Any, gradient: torch.Tensor) -> None:
        """A gradient has arrived in a watched iteration."""
        if gradient.requires_grad or gradient.layout is not torch.strided:
            self.object_to(messages.SPARSE_OR_GRAPH)
            return  # there may be no storage to recognise it by
        # A hook of the program might change a gradient that we have used already.
        hooks = parameter._post_accumulate_grad_hooks.values()
        if not all(str(getattr(h, "__module__", "")).startswith("kilter.") for h in hooks):
            self.object_to(messages.GRADIENT_HOOKS)
        self.evidence.seen[id(parameter)] = _state_of(gradient)

    def judge(self, gradient_of: Callable[[Any], torch.Tensor | None], device_type: str) -> None:
        """At the begin of the step, object to what the watched iteration shows."""
        if self.evidence.settings is not None and self.evidence.settings != self.options():
            self.object_to(messages.OPTIONS_CHANGE)
        if getattr(self.optimizer, "grad_scale", None) is not None:
            self.object_to(messages.UNSCALED_BY_STEP)
        if torch.is_autocast_enabled(device_type):
            self.object_to(messages.STEP_UNDER_AUTOCAST)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.object_to(messages.SHARED_GRADIENTS)
        for f in self.followed:
            gradient = gradient_of(f.parameter)
            before = self.evidence.seen.get(id(f.parameter))
            if gradient is None or before is None or gradient.is_sparse:
                continue
            if before != _state_of(gradient):
                self.object_to(messages.GRADIENTS_CHANGED)


def _unusual(parameter: Any, device: torch.device) -> Reason | None:
    """Why this parameter is not updated apart from the others."""
    plain = type(parameter) is torch.nn.Parameter or local_of(parameter) is not parameter
    if not plain or parameter.is_sparse or parameter.is_complex():
        kind_name, dtype = type(parameter).__name__, str(parameter.dtype)
        return messages.unusual_parameter(kind_name, dtype, str(parameter.layout))
    if parameter.device != device:
        return messages.parameters_elsewhere(str(parameter.device))
    return None


def _state_of(gradient: torch.Tensor) -> tuple[int, int]:
    """Storage and version, by which a changed gradient is recognised."""
    return gradient.untyped_storage()._cdata, gradient._version
