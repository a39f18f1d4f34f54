"""What the loss of a job is over the samples of a batch, which says how gradients are weighted:
seen from autograd's graph, and from second derivatives, in the first steps."""

from __future__ import annotations

import collections
import functools
import math
import operator
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MEAN, SUM, BY_WEIGHTS, UNKNOWN = "mean", "sum", "by weights", "unknown"

_WEIGHTED = (
    "the loss is divided by the weights of its targets (ignore_index, weight, a count of tokens), "
    "not by their number: as with DDP itself, gradients depend on which rank has which samples"
)
UNSEEN = (
    "gradients are weighted as those of a loss that is a mean over the samples of each rank; "
    "whether this one is cannot be seen. If it is not, start the script with torchrun, or the "
    "daemon with `kilter share serve --policy fixed`"
)
_OF_BATCHES = (
    "the loss of a sample depends on the others of its batch (a contrastive loss, a norm or root "
    "over the batch), so that gradients would change with the shares; use a mean of losses of "
    "single samples"
)

_LINEAR = ("Mul", "Div", "Add", "Sub", "Neg", "ToCopy", "View", "Squeeze", "Unsqueeze")
_SUM, _MEAN = 2, 1
"""These numbers stand for `reduction` in what autograd saves of a loss."""
_MOST_ELEMENTS = 2**24
"""The models' outputs have at most so many: second derivatives need several times the memory."""
_MOST_NODES = 10_000
_MOST_LOOKS = 4
_MOST_TERMS = 64


class Losses:
    """Those of one job, backward pass by backward pass."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.outputs: list[torch.Tensor] = []
        """The models gave these for the batch that the script has."""
        self._kinds: set[str] = set()
        self._sums: dict[int, tuple[int, list[float | None]]] = {}
        """It has, for the losses with sums, by the number of the backward pass of a batch, its
        samples, and what each sum would be of ones."""
        self._scaled: dict[int, list[bool]] = {}
        """Which of their terms are sums over samples, once that is settled."""
        self._passes = self._looks = 0

    @property
    def have_sums(self) -> bool:
        return bool(self._sums)

    @property
    def note(self) -> str | None:
        if UNKNOWN in self._kinds or not (self._kinds or self._sums):
            return UNSEEN
        return _WEIGHTED if BY_WEIGHTS in self._kinds else None

    def see_output(self, output: object) -> None:
        self.outputs += [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]

    def next_batch(self) -> None:
        self.outputs.clear()
        self._passes = 0

    def look(
        self, losses: Sequence[torch.Tensor], samples: int, scale: Callable[[], float]
    ) -> str | None:
        """Before a backward pass of the first steps: why the job cannot be shared. `scale` tells
        that of the script's gradient scaler."""
        found = [term for loss in losses for term in terms(loss)]
        data = [node for node, _ in found if is_of_samples(node, self.outputs)]
        kinds = {kind(node) for node in data}
        if SUM in kinds:
            self._sums[self._passes] = samples, _sizes(found, scale())
        self._passes += 1
        self._looks += 1
        mixes = self._looks <= _MOST_LOOKS and mixes_samples(losses, self.outputs, samples)
        # As many terms of a kind as samples, or twice as many: these may grow with the batch.
        alike = collections.Counter(type(node) for node in data).values()
        of_each = samples > 2 and any(count % samples == 0 for count in alike)
        self._tell(kinds - {SUM} | ({UNKNOWN} if mixes is None or of_each else set()))
        of_batch = any(_has_classes_of_batch(node, self.outputs, samples) for node in data)
        return _OF_BATCHES if mixes or of_batch else None

    def weigh_sums(
        self,
        losses: Sequence[torch.Tensor],
        samples: int,
        scale: Callable[[], float],
        factor: float,
    ) -> None:
        """Later, before a backward pass, whose gradients will be weighted by samples: take sums
        over samples times `factor`, which undoes that. Whether a sum is one, or a mean, because it
        is divided by a number that grows with the batch, is seen at the first batch of another
        size."""
        number, self._passes = self._passes, self._passes + 1
        before, sizes = self._sums.get(number, (samples, []))
        found = [term for loss in losses for term in terms(loss)]
        if number not in self._scaled and samples != before:
            pairs = zip(sizes, _sizes(found, scale()), strict=False)
            grown = [now / then if then and now else 1.0 for then, now in pairs]
            self._scaled[number] = [math.isclose(g, samples / before, rel_tol=1e-4) for g in grown]
            means = [math.isclose(g, 1.0, rel_tol=1e-4) for g in grown]
            if not all(map(operator.or_, self._scaled[number], means)):
                self._tell({BY_WEIGHTS})
        for (node, _), is_sum in zip(found, self._scaled.get(number, []), strict=False):
            if is_sum and factor != 1.0:
                node.register_prehook(lambda gradients: tuple(g * factor for g in gradients))

    def _tell(self, news: set[str]) -> None:
        if BY_WEIGHTS in news - self._kinds:
            self._say(_WEIGHTED)
        self._kinds |= news


def watch_losses(seen: Callable[[list[torch.Tensor]], bool]) -> None:
    """Call `seen(losses)` before each backward pass until it returns False."""
    import torch

    backward = torch.autograd.backward  # `Tensor.backward` calls it as well
    within = False

    @functools.wraps(backward)
    def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal within
        if within:  # activation checkpointing, in the middle of a backward pass
            backward(tensors, *args, **kwargs)
            return
        losses = tensors if isinstance(tensors, list | tuple) else [tensors]
        goes_on = seen([loss for loss in losses if getattr(loss, "grad_fn", None) is not None])
        if not goes_on and torch.autograd.backward is watched:
            torch.autograd.backward = backward
        within = True
        try:
            backward(tensors, *args, **kwargs)
        finally:
            within = False

    torch.autograd.backward = watched


def terms(loss: torch.Tensor) -> Iterator[tuple[Any, list[Any]]]:
    """The losses whose weighted sum a loss is, as nodes of autograd's graph, each with the nodes of
    its factors and divisors."""
    pending: list[tuple[Any, int, list[Any]]] = [(loss.grad_fn, loss.output_nr, [])]
    for _ in range(_MOST_TERMS):
        if not pending:
            break
        node, number, factors = pending.pop()
        name = type(node).__name__
        parents = [edge for edge in node.next_functions if edge[0] is not None]
        if name == "_DDPSinkBackward":  # hands all outputs of a model on, as they are
            pending.append((*node.next_functions[number], factors))
        elif name.startswith(_LINEAR) and (len(parents) == 1 or name.startswith(("Add", "Sub"))):
            more = [node] if name.startswith(("Mul", "Div")) else []
            pending += [(*parent, factors + more) for parent in parents]
        else:
            yield node, factors


def is_of_samples(node: Any, outputs: Sequence[torch.Tensor]) -> bool:
    """Whether a term depends on what the models have put out; else on parameters alone."""
    given = {output.grad_fn for output in outputs if output.dim() > 0}
    return not given or not given.isdisjoint(_below(node))


def kind(node: Any) -> str:
    """What a term is over the elements that it is of."""
    name = type(node).__name__
    reduction = getattr(node, "_saved_reduction", None)
    if reduction == _SUM or name.startswith("SumBackward"):
        return SUM
    if reduction == _MEAN and hasattr(node, "_saved_total_weight"):
        weighted = node._saved_weight is not None
        weighted |= float(node._saved_total_weight) != node._saved_target.numel()
        return BY_WEIGHTS if weighted else MEAN
    return MEAN if reduction == _MEAN or name.startswith("MeanBackward") else UNKNOWN


def _sizes(found: Sequence[tuple[Any, Sequence[Any]]], scale: float) -> list[float | None]:
    """What the sums in a loss would be of ones; None for other terms."""
    return [
        math.prod(_summed(node)) * math.prod(map(_factor, factors)) / scale
        if kind(node) == SUM
        else None
        for node, factors in found
    ]


def _summed(node: Any) -> Sequence[int]:
    sizes: Sequence[int] | None = getattr(node, "_saved_self_sym_sizes", None)
    return node._saved_self.shape if sizes is None else sizes


def _factor(node: Any) -> float:
    other = getattr(node, "_saved_other", None)
    number = float(node._saved_self if other is None else other)
    return 1.0 / number if number and type(node).__name__.startswith("Div") else number


def _has_classes_of_batch(node: Any, outputs: Sequence[torch.Tensor], samples: int) -> bool:
    """Whether a cross entropy has the samples of the batch for its classes."""
    own = {size for output in outputs for size in output.shape[1:]}
    classes = node._saved_self.shape[1:2] if hasattr(node, "_saved_total_weight") else ()
    return bool(outputs) and samples > 1 and samples in classes and samples not in own


def _below(node: Any, ends: Container[Any] = ()) -> set[Any]:
    """The nodes of the graph that a node is computed from, and itself; not those below `ends`."""
    found, pending = {node}, [node]
    while pending and len(found) < _MOST_NODES:
        if (node := pending.pop()) in ends:
            continue
        parents = {parent for parent, _ in node.next_functions if parent is not None}
        pending += parents - found
        found |= parents
    return found


def mixes_samples(
    losses: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], samples: int
) -> bool | None:
    """Whether what one sample does to the loss depends on others of the batch, as in a contrastive
    loss, a norm, or the root of a mean: the gradient at the outputs of one then changes with those
    of another. None if no output of a model leads to the loss, or one of the program's own
    autograd functions lies between; False also where there are no second derivatives, or no
    dimension of the outputs is that of the samples."""
    try:
        return _mixes(losses, outputs, samples)
    except RuntimeError:  # no second derivative, or too little memory
        return False


def _mixes(
    losses: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], samples: int
) -> bool | None:
    import torch

    last = [each for each in outputs if each.dim() > 0]
    if len(last) > 1:
        behind = [_below(each.grad_fn) - {each.grad_fn} for each in last]
        last = [each for each in last if not any(each.grad_fn in nodes for nodes in behind)]
    if not (last and losses):
        return None
    ends = {each.grad_fn for each in outputs}
    for node in set().union(*(_below(loss.grad_fn, ends) for loss in losses)) - ends:
        own_function = isinstance(node, torch.autograd.function.BackwardCFunction)
        if own_function and type(node).__name__ != "_DDPSinkBackward":
            return None  # a function of the program's, which may count on being called once
    dims = [d for d in (0, 1) if all(x.dim() > d and x.shape[d] % samples == 0 for x in last)]
    if samples < 2 or not dims or sum(each.numel() for each in last) > _MOST_ELEMENTS:
        return False
    total = torch.stack([loss.sum() for loss in losses]).sum()
    slopes = torch.autograd.grad(total, last, create_graph=True, allow_unused=True)
    if all(slope is None for slope in slopes):
        return None
    return all(_crosses(slopes, last, samples, d, way) for d in dims for way in (True, False))


def _crosses(
    slopes: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor],
    samples: int,
    dim: int,
    blocks: bool,
) -> bool:
    """Whether the gradient at every other sample changes with the outputs of those between, if the
    samples lie along this dimension: whole batches one after another, or all rows of a sample."""
    import torch

    halves = []
    for each in outputs:
        row = torch.arange(length := each.shape[dim], device=each.device)
        half = (row % samples if blocks else row // (length // samples)) % 2 == 0
        halves.append(half.reshape([-1 if d == dim else 1 for d in range(each.dim())]))
    parts = [
        (slope * half).flatten() @ torch.linspace(1, 2, slope.numel()).to(slope)
        for slope, half in zip(slopes, halves, strict=True)
        if slope is not None and slope.requires_grad
    ]
    if not parts:
        return False
    seconds = torch.autograd.grad(parts, outputs, retain_graph=True, allow_unused=True)
    inside = across = 0.0
    for second, half in zip(seconds, halves, strict=True):
        if second is not None:
            inside = max(inside, float((second * half).abs().max()))
            across = max(across, float((second * ~half).abs().max()))
    return 1e-4 * inside < across < math.inf


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """What a model returns, or holds in its dictionaries, lists and tuples."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
