"""`kilter.size`: will it fit, and at what cost? From shapes, before anything is allocated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from kilter.core.errors import PlanError, UsageError
from kilter.core.label import Label
from kilter.core.units import MIB, show_bytes, show_count, show_fraction, show_time
from kilter.memory.plan.choose import MemoryPlan, plan
from kilter.memory.plan.microbatch import Division, divided
from kilter.memory.plan.problem import H200_PCIE5, Link, Problem
from kilter.observe import torch_internals

if TYPE_CHECKING:
    import torch

    from kilter.memory.engine.shapes import Shapes

AUTOCAST = {"bf16": "bfloat16", "fp16": "float16", "off": None}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"foreach": True}),
    "adamw-fused": ("AdamW", {"fused": True}),
    "adam": ("Adam", {"foreach": True}),
    "sgd": ("SGD", {"foreach": True}),
    "sgd-momentum": ("SGD", {"foreach": True, "momentum": 0.9}),
}
"""What a GPU job gets from `torch.optim` by default (`foreach`), or asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How an iteration gets under a budget, and what it costs. Simulated."""

    budget_bytes: int
    how: str
    """What has to move, in words; empty if nothing does."""
    fits: bool
    plan: MemoryPlan | None
    """It is for activations; None where none is needed, or none is possible."""
    compute_s: float
    """Forward and backward take this with everything kept."""
    division: Division | None
    """The fewest equal pieces of the batch that fit with everything kept (`kilter.divided`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a training iteration takes. Simulated, in bytes of the framework's allocations."""

    shapes: Shapes
    card: str
    link: Link
    samples: int | None
    """The first dimension of all inputs has so many, if they agree on that."""
    batch_norm: bool
    launch_s: float
    """What an operation takes on the card however small its batch."""
    label: Label = Label.SIMULATED

    @property
    def peak_bytes(self) -> int:
        """With everything kept, as the job runs without kilter."""
        return self.shapes.peak_bytes

    @property
    def least_bytes(self) -> tuple[tuple[str, int], ...]:
        """The smallest peak for each thing that may move, each line with all above it."""
        shapes = self.shapes
        step_bytes = shapes.step_bytes
        kept, used_up = (
            self._problem(record, 1).floor_bytes for record in (shapes.record, shapes.used_up)
        )
        streamed = used_up - shapes.state_bytes + 2 * shapes.bucket_state_bytes
        found = [
            ("activations offloaded or recomputed", max(kept, step_bytes)),
            ("gradients consumed as they arrive", used_up),
        ]
        if shapes.state_bytes > 2 * shapes.bucket_state_bytes:
            found.append(("optimizer state on the host", streamed))
        return tuple(found)

    def fit(self, budget_bytes: int) -> Fit:
        """How this gets under a budget: by moving as little as does it, or in pieces."""
        found = self.moved(budget_bytes)
        return replace(found, division=self._divided(budget_bytes)) if found.how else found

    def moved(self, budget_bytes: int) -> Fit:
        """By moving as little as does it, in the order above. No pieces are looked for, which
        takes long for a large batch."""
        shapes = self.shapes
        compute_s = sum(shapes.record.operation_s)
        fit = partial(Fit, budget_bytes=budget_bytes, compute_s=compute_s, division=None)
        if self.peak_bytes <= budget_bytes:
            return fit(how="", fits=True, plan=None)
        words: list[str] = []
        for number, (what, least_bytes) in enumerate(self.least_bytes):
            words.append(what)
            if least_bytes > budget_bytes:
                continue
            problem = self._problem(shapes.record if number == 0 else shapes.used_up, budget_bytes)
            if number == 2:
                offloaded_bytes = shapes.state_bytes - 2 * shapes.bucket_state_bytes
                levels = tuple(level - offloaded_bytes for level in problem.resident_bytes)
                problem = replace(problem, resident_bytes=levels)
            try:
                return fit(how=", ".join(words), fits=True, plan=plan(problem))
            except PlanError:
                continue
        return fit(how=", ".join(words), fits=False, plan=None)

    def _divided(self, budget_bytes: int) -> Division | None:
        shapes = self.shapes
        fixed_bytes = shapes.weights_bytes + shapes.gradients_bytes + shapes.state_bytes
        if self.samples is None or max(fixed_bytes, shapes.step_bytes) > budget_bytes:
            return None
        problem = self._problem(shapes.used_up, budget_bytes)
        # From the second piece on all gradients are there throughout.
        levels = tuple(level + shapes.gradients_bytes for level in problem.resident_bytes)
        problem = replace(problem, resident_bytes=levels)
        cut = partial(divided, problem, fixed_bytes=fixed_bytes, fixed_s=self.launch_s)
        counts = (n for n in range(2, self.samples + 1) if self.samples % n == 0)
        fewest = next((n for n in counts if cut(n).peak_bytes <= budget_bytes), None)
        if fewest is None or self.batch_norm:
            return None
        return Division(pieces=fewest, plan=plan(cut(fewest)))

    def _problem(self, record: Any, budget_bytes: int) -> Problem:
        problem, _ = record.problem(link=self.link, budget_bytes=budget_bytes, min_bytes=MIB)
        return problem  # type: ignore[no-any-return]

    def as_json(self, fit: Fit | None = None) -> dict[str, Any]:
        """The object that `kilter size --json` prints."""
        shapes = self.shapes
        found: dict[str, Any] = {
            "label": self.label.value,
            "card": self.card,
            "weights_bytes": shapes.weights_bytes,
            "gradients_bytes": shapes.gradients_bytes,
            "state_bytes": shapes.state_bytes,
            "inputs_bytes": shapes.inputs_bytes,
            "saved_bytes": shapes.saved_bytes,
            "saved": len(shapes.record.data),
            "peak_bytes": shapes.peak_bytes,
            "peak_at": self._peak_at(),
            "least_bytes": [{"how": how, "bytes": size} for how, size in self.least_bytes],
            "compute_s": sum(shapes.record.operation_s),
            "fit": None,
        }
        if fit is not None:
            found["fit"] = {
                "budget_bytes": fit.budget_bytes,
                "fits": fit.fits,
                "how": fit.how,
                "plan": None if fit.plan is None else _numbers(fit.plan),
                "pieces": None if fit.division is None else fit.division.pieces,
                "pieces_s": None if fit.division is None else fit.division.plan.iteration_s,
            }
        return found

    def _peak_at(self) -> str:
        record = self.shapes.record
        if self.shapes.step_bytes >= record.peak_bytes:
            return "the optimizer's step"
        event = record.level_bytes.index(record.peak_bytes)
        name = record.names[event]
        where = "backward" if event >= record.backward_from else "forward"
        return where if name == "forward" else f"{where}, {name}"

    def __str__(self) -> str:
        shapes = self.shapes
        rows = [
            ("weights", show_bytes(shapes.weights_bytes)),
            ("gradients", show_bytes(shapes.gradients_bytes)),
            ("optimizer state", show_bytes(shapes.state_bytes)),
            ("kept for backward", f"{show_bytes(shapes.saved_bytes)} in {len(shapes.record.data)}"),
            ("peak", f"{show_bytes(shapes.peak_bytes)}, in {self._peak_at()}"),
        ]
        for number, (how, size_bytes) in enumerate(self.least_bytes):
            rows.append(
                (
                    "" if number else "at least",
                    f"{show_bytes(size_bytes)}, {'and ' * (number > 0)}{how}",
                )
            )
        return "\n".join(f"{name:<18} {text}" for name, text in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The answer to "how large may the batch be?". Simulated; 0: not even one sample fits."""

    budget_bytes: int
    as_it_is: int
    with_plan: int
    how: str
    """What has to move for `with_plan`, in words; empty if nothing gains by it."""

    def __str__(self) -> str:
        text = f"{_count(self.as_it_is)} as it is"
        if self.with_plan > self.as_it_is:
            text += f", {_count(self.with_plan)} with {self.how}"
        return f"{text} (largest batch within {show_bytes(self.budget_bytes)})"


def _count(batch: int) -> str:
    return f"{batch} or more" if batch == MOST_BATCH else str(batch or "none")


MOST_BATCH = 2**20
"""No larger one is looked for."""
_FIRST_GUESS = 8
MOST_SIZES = 80
"""One search asks for so many batches, at most: sizes grow nearly in proportion, so six are enough.
Every third guess halves what is left, so that any growth ends within this."""


def largest_batch(sized: Callable[[int], Size], budget_bytes: int) -> LargestBatch | None:
    """The largest batches that fit a budget as they are, and with whatever may move. None where
    the size does not depend on the batch."""
    sized = functools.cache(sized)
    if sized(_FIRST_GUESS).as_json() == sized(2 * _FIRST_GUESS).as_json():
        return None
    plain = _largest(
        lambda n: sized(n).peak_bytes, lambda n: sized(n).peak_bytes <= budget_bytes, budget_bytes
    )
    moved = _largest(
        lambda n: sized(n).least_bytes[-1][1],
        lambda n: sized(n).moved(budget_bytes).fits,
        budget_bytes,
    )
    how = sized(moved).moved(budget_bytes).how if moved > plain else ""
    return LargestBatch(
        budget_bytes=budget_bytes, as_it_is=plain, with_plan=max(plain, moved), how=how
    )


def _largest(bytes_of: Callable[[int], int], fits: Callable[[int], bool], budget_bytes: int) -> int:
    """The largest batch that fits: guessed where the line through two known sizes meets the budget,
    within what is known to fit and not to fit."""
    low, high = 0, MOST_BATCH + 1
    other, guess = 0, _FIRST_GUESS
    for number in range(MOST_SIZES):
        if fits(guess):
            other, low = low, guess
        else:
            other = high = guess
        if high - low <= 1:
            break
        guess = (low + high) // 2 if high <= MOST_BATCH else 2 * low
        halve = high <= MOST_BATCH and number % 3 == 2
        if low > 0 < other and not halve and (more_bytes := bytes_of(other) - bytes_of(low)) != 0:
            bytes_a_sample = more_bytes / (other - low)
            guess = low + int((budget_bytes - bytes_of(low)) / bytes_a_sample)
        guess = min(max(guess, low + 1), high - 1)
    return low


def told(fit: Fit, card: str) -> list[str]:
    """A fit in a line or two."""
    budget = show_bytes(fit.budget_bytes)
    if fit.fits and not fit.how:
        return [f"{budget}: fits as it is"]
    lines = [f"{budget}: does not fit, whatever moves"]
    if fit.plan is not None:
        lines = [
            f"{budget}: fits with {fit.how}",
            f"{show_count(fit.plan.swapped, 'tensor')} offloaded, "
            f"{fit.plan.recomputed} recomputed: "
            f"{_slower(fit, fit.plan.iteration_s)} on an imagined {card}",
        ]
    division = fit.division
    if division is not None:
        lines.append(
            f"or in {division.pieces} pieces of the batch (kilter.divided): "
            f"{_slower(fit, division.plan.iteration_s)}; results differ by order of summation"
        )
    return lines


def _slower(fit: Fit, iteration_s: float) -> str:
    more = show_fraction(iteration_s / fit.compute_s - 1, signed=True)
    return f"forward and backward {show_time(fit.compute_s)} -> {show_time(iteration_s)} ({more})"


def _numbers(value: MemoryPlan) -> dict[str, Any]:
    found = asdict(value)
    for name in ("schedule", "label"):
        found.pop(name)
    return found


def size(
    model: torch.nn.Module,
    *inputs: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: str | Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer] = "adamw",
    autocast: str = "bf16",
    card: str = "h200",
    link: Link = H200_PCIE5,
    **named: Any,
) -> Size:
    """What a training iteration of `model(*inputs, **named)` takes, without running it.

    Only shapes matter: model and inputs may lie on the meta device (`with torch.device("meta")`),
    where they take nothing. `loss` makes a scalar of the model's output; without it the output's
    own `loss` is taken, or the sum of what it returns. `optimizer` is one of `OPTIMIZERS` or
    makes one from parameters; `autocast` is `bf16`, `fp16` or `off`. Times are those of a simulated
    `card` with this `link`.

    The kernels that autograd would run on a CPU decide what is kept. They take a little more than
    a GPU's: under autocast a softmax copies what it reads. Nothing of what `forward` does beside
    tensors is undone: it runs a few times. Raises `UsageError` for wrong arguments and for a model
    that looks at values.
    """
    import torch

    from kilter.device.sim.profile import load_profile
    from kilter.memory.engine.shapes import Clocked, shapes_of

    if autocast not in AUTOCAST:
        raise UsageError(f"autocast {autocast!r} is not one of {', '.join(AUTOCAST)}")
    dtype = AUTOCAST[autocast]
    profile = load_profile(card)
    shapes = shapes_of(
        model,
        inputs,
        named,
        loss=loss or _own_loss,
        optimizer=_made(optimizer) if isinstance(optimizer, str) else optimizer,
        autocast=None if dtype is None else getattr(torch, dtype),
        clocked=Clocked(
            roofline=profile.roofline,
            sm_hz=profile.knobs.sm_highest_hz,
            memory_hz=profile.knobs.memory_clocks_hz[-1],
        ),
    )
    return Size(
        shapes=shapes,
        card=card,
        link=link,
        samples=_samples(inputs, named),
        batch_norm=any(
            isinstance(m, torch_internals.BatchNorm) and m.training for m in model.modules()
        ),
        launch_s=profile.roofline.launch_s,
    )


def _samples(inputs: tuple[Any, ...], named: dict[str, Any]) -> int | None:
    import torch

    leaves = torch_internals.pytree.tree_leaves((inputs, named))
    counts = {int(t.size(0)) for t in leaves if isinstance(t, torch.Tensor) and t.dim()}
    return counts.pop() if len(counts) == 1 else None


def on_meta(function: Callable[..., Any], **named: Any) -> Any:
    """What `function` returns where tensors have shapes and no bytes."""
    import torch

    with torch.device("meta"):
        return function(**named)


def _made(name: str) -> Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]:
    import torch

    if name not in OPTIMIZERS:
        raise UsageError(f"optimizer {name!r} is not one of {', '.join(OPTIMIZERS)}")
    kind, options = OPTIMIZERS[name]
    return partial(getattr(torch.optim, kind), lr=1e-3, **options)


def _own_loss(output: Any) -> torch.Tensor:
    import torch

    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    leaves = torch_internals.pytree.tree_leaves(output)
    trained = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    sums = [t.float().sum() for t in trained if t.is_floating_point()]
    if not sums:
        what = "complex tensors alone" if trained else "no tensor with a gradient"
        raise UsageError(f"the model returns {what}: give a loss, which has to be real")
    return torch.stack(sums).sum()
