"""The memory that a training iteration takes, from shapes alone, before anything is allocated.

The model runs forward, backward and step on fake tensors, which have sizes and no bytes. A
dispatch mode counts what is alive after every operation and times the operations by a roofline,
one after the other; the engine's own `Watch` is called from autograd's hooks as in a real pass,
tries the same recipes, and makes the same record for the same planners. A model of billions of
parameters takes seconds and no GPU. All figures are simulated.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kilter.core.errors import UsageError
from kilter.core.units import MIB
from kilter.memory.engine.backend import CopyEvent
from kilter.memory.engine.norms import note_epsilon
from kilter.memory.engine.pass_record import PassRecord, again_code, use_code
from kilter.memory.engine.store import Pass, Store, View, kept, whole
from kilter.memory.engine.trial import TrialTerms
from kilter.memory.engine.watch import Watch
from kilter.memory.host_memory import HostLimit
from kilter.memory.plan.state import Update, in_buckets
from kilter.model.roofline import Roofline
from kilter.observe import torch_internals

if TYPE_CHECKING:
    import torch


_DROPOUT_OF_HEADS = 10
"""Among the arguments of `multi_head_attention_forward`, `dropout_p` has this place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocked:
    """How fast the imagined card is: its roofline, at these clocks."""

    roofline: Roofline
    sm_hz: float
    memory_hz: float

    def seconds(self, flops: float, bytes_moved: float) -> float:
        return float(self.roofline.busy_s(flops, bytes_moved, self.sm_hz, self.memory_hz))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What an iteration takes, in bytes of the framework's allocations. Simulated."""

    weights_bytes: int
    """Parameters and buffers take this."""
    gradients_bytes: int
    state_bytes: int
    inputs_bytes: int
    saved_bytes: int
    """What autograd keeps from forward to backward besides parameters, each storage once."""
    peak_bytes: int
    """The whole iteration takes this, the optimizer's step with it."""
    step_bytes: int
    """It is the peak in the optimizer's step."""
    record: PassRecord
    """It holds forward and backward with everything kept."""
    used_up: PassRecord
    """It is forward and backward with gradients consumed as they arrive."""
    bucket_state_bytes: int
    """At least so much optimizer state is on the device at any time if the state is streamed."""


class _Memory:
    """The backend for `Watch`: levels and moments come from the dispatch mode."""

    holds = None

    def __init__(self, clocked: Clocked) -> None:
        import torch

        # Not a GPU, even where there is one: a kernel of ours, or of an extension, that is launched
        # without the framework's knowledge would be given addresses of nothing.
        self.device = torch.device("cpu")
        self.host = HostLimit()
        self._fakes = torch_internals.fake_tensor.FakeTensor
        self._clocked = clocked
        self.live_bytes = 0
        self.now_s = 0.0
        self._peak_bytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        self._twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """One of the same shape, on the device that is counted."""
        import torch

        made = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self.device
        )
        self.hold(made)
        return made

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same for a tensor on the meta device that is no argument of the job: labels in
        a loss, tables of a model. Always the same one."""
        if tensor.device.type != "meta" or isinstance(tensor, self._fakes):
            return tensor
        found = self._twins.get(id(tensor))
        if found is None:
            found = self._twins[id(tensor)] = tensor, self.fake(tensor)
        return found[1]

    def hold(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage until its last reference is gone."""
        storage = tensor.untyped_storage()
        key, size_bytes = storage._cdata, storage.nbytes()
        if key in self._known or tensor.device.type != self.device.type:
            return

        def gone(_: Any) -> None:
            del self._known[key]
            self.live_bytes -= size_bytes

        self._known[key] = weakref.ref(storage, gone)
        self.live_bytes += size_bytes
        self._peak_bytes = max(self._peak_bytes, self.live_bytes)

    def spend(self, flops: float, bytes_moved: float) -> None:
        self.now_s += self._clocked.seconds(flops, bytes_moved)

    def use_library(self, compiled: Any) -> None:
        """Nothing is copied."""

    def mark(self) -> CopyEvent:
        return self.now_s

    def reached(self, mark: CopyEvent) -> bool:
        return True

    def elapsed_s(self, begin: CopyEvent, end: CopyEvent) -> float:
        return float(end - begin)

    def keep_busy(self, seconds: float) -> None:
        """Nothing runs."""

    def used_bytes(self) -> int | None:
        return self.live_bytes

    def peak_bytes(self) -> int | None:
        peak_bytes, self._peak_bytes = self._peak_bytes, self.live_bytes
        return peak_bytes


def shapes_of(
    model: torch.nn.Module,
    inputs: Sequence[Any],
    named: Mapping[str, Any],
    *,
    loss: Callable[[Any], torch.Tensor],
    optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer],
    autocast: torch.dtype | None,
    clocked: Clocked,
    min_bytes: int = MIB,
) -> Shapes:
    """One iteration of `model(*inputs, **named)`, `loss` of its output, backward and `optimizer`.

    The model's own tensors are read for their shapes only, so it may lie on the meta device. Its
    `forward` runs four times on fake tensors of a CPU, whose kernels decide what is kept.
    `UsageError` if it asks for a value that only real tensors have.
    """
    fake = torch_internals.fake_tensor
    try:
        # Of a small model no tensor has so many bytes: then all of them are recorded.
        for least_bytes in (min_bytes, 0):
            memory = _Memory(clocked)
            with (
                _without_log(fake.__name__),
                fake.FakeTensorMode(allow_non_fake_inputs=True),
                _counting(memory),
            ):
                faked = _FakeModel(model, inputs, named, memory, loss, autocast)
                shapes = _Job(faked, memory, optimizer, least_bytes).run()
            if shapes is not None:
                return shapes
    except (fake.DataDependentOutputException, fake.DynamicOutputShapeException) as error:
        raise UsageError(
            f"the model asks for a value that only real data have ({error.func}): its memory "
            "cannot be known from shapes"
        ) from error
    except fake.UnsupportedOperatorException as error:
        raise UsageError(f"{error.func} says nothing of the shapes it makes") from error
    raise UsageError(
        "no tensor was seen being saved for backward, so there is nothing to plan: there is none, "
        "or saved-tensor hooks of the model itself (save_on_cpu, say) take them"
    )


@contextmanager
def _without_log(name: str) -> Iterator[None]:
    """Without the traceback that PyTorch logs of an error beside raising it."""
    log = logging.getLogger(name)
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled


def _counting(memory: _Memory) -> Any:
    """A dispatch mode that reports every operation below autograd to `memory`."""
    import torch
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten
    pytree = torch_internals.pytree

    class Counting(torch_internals.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            args, named = pytree.tree_map_only(torch.Tensor, memory.twin, (args, kwargs or {}))
            if func is aten.equal.default:
                return True  # recipes make the same bytes; that is tried where there are bytes
            if func is aten.detach.default and not isinstance(args[0], torch.Tensor):
                return torch.tensor(args[0])  # what an operation saved of a number
            made = func(*args, **named)
            outputs = [t for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
            for tensor in outputs:
                if tensor.layout is not torch.strided:
                    raise UsageError(
                        f"{func} makes a sparse tensor: its memory cannot be known from shapes"
                    )
                memory.hold(tensor)
            if not func.is_view:
                read = [t for t in pytree.tree_leaves((args, named)) if isinstance(t, torch.Tensor)]
                formula = flop_registry.get(func._overloadpacket)
                flops = 0.0 if formula is None else formula(*args, **named, out_val=made)
                memory.spend(float(flops), float(sum(t.nbytes for t in (*read, *outputs))))
            return made

    return Counting()


def _attention_as_on_gpu() -> Any:
    """A mode that leaves dropout out of the attention that one kernel computes: with it a CPU keeps
    the whole matrix of attention, where a GPU's kernels keep a seed."""
    import torch

    attention = torch.nn.functional.scaled_dot_product_attention
    heads = torch.nn.functional.multi_head_attention_forward

    class WithoutDropout(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            named = dict(kwargs or {})
            if func is attention:
                named |= zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False)
                args, named["dropout_p"] = args[:3], 0.0
            elif func is heads and not named.get("need_weights", True):
                args = (*args[:_DROPOUT_OF_HEADS], 0.0, *args[_DROPOUT_OF_HEADS + 1 :])
            return func(*args, **named)

    return WithoutDropout()


class _FakeModel:
    """The model, its inputs and its loss, on fake tensors."""

    def __init__(
        self,
        model: Any,
        inputs: Sequence[Any],
        named: Mapping[str, Any],
        memory: _Memory,
        loss: Callable[[Any], torch.Tensor],
        autocast: torch.dtype | None,
    ) -> None:
        import torch

        self.model, self._loss, self._autocast = model, loss, autocast
        self.parameters = {
            name: memory.fake(p).requires_grad_(p.requires_grad)
            for name, p in model.named_parameters()
        }
        self._buffers = {name: memory.fake(b) for name, b in model.named_buffers()}
        self.weights_bytes = memory.live_bytes
        tree_map = torch_internals.pytree.tree_map_only
        self._inputs, self._named = tree_map(
            torch.Tensor, memory.fake, (tuple(inputs), dict(named))
        )
        self.inputs_bytes = memory.live_bytes - self.weights_bytes
        self._device_type = memory.device.type

        class ModelHolder(torch.nn.Module):  # type: ignore[misc]
            def forward(self, function: Callable[[], None]) -> None:
                function()

        self._holder = ModelHolder()
        self._holder.model = model

    def hold(self, function: Callable[[], None]) -> None:
        """Call `function` while the model has the fake tensors in the place of its own. In backward
        it needs them, too, where parts of it are checkpointed."""
        import torch

        tensors = {**self.parameters, **self._buffers}
        held = {f"model.{name}": tensor for name, tensor in tensors.items()}
        with _attention_as_on_gpu():
            torch.func.functional_call(self._holder, held, (function,))

    def loss(self) -> torch.Tensor:
        """Forward, within `hold`."""
        import torch

        with torch.autocast(self._device_type, self._autocast, enabled=self._autocast is not None):
            return self._loss(self.model(*self._inputs, **self._named))


class _Job:
    """The iterations."""

    def __init__(
        self,
        model: _FakeModel,
        memory: _Memory,
        optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer],
        min_bytes: int,
    ) -> None:
        import torch

        self._torch = torch
        self._memory = memory
        self._model = model
        self._min_bytes = min_bytes
        self._trained = [p for p in model.parameters.values() if p.requires_grad]
        if not self._trained:
            raise UsageError("the model has no parameter that is trained: there is no backward")
        self._optimizer = optimizer(self._trained)
        self._store = Store(memory)  # type: ignore[arg-type]
        self._store.unpack_hooks = (self._unpack,)
        self._owned = {t.untyped_storage()._cdata for t in model.parameters.values()}
        self._watch: Watch | None = None
        self._within: Pass | None = None

    def run(self) -> Shapes | None:
        """The record of the pass; None if no tensor that was kept for backward is large enough."""
        memory = self._memory
        self._iteration()  # makes gradients and state
        record = self._iteration()
        if not record.data:
            return None
        step_bytes = memory.peak_bytes() or 0
        state_bytes = sum(
            value.nbytes
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, self._torch.Tensor) and value.device.type == memory.device.type
        )
        gradients_bytes = sum(p.nbytes for p in self._trained)
        updates = [
            Update(gradient_bytes=p.nbytes, state_bytes=state_bytes * p.nbytes // gradients_bytes)
            for p in reversed(self._trained)
        ]
        buckets = in_buckets(updates)
        order = list(reversed(self._trained))
        used_up = self._iteration(buckets=[order[b.first : b.first + b.count] for b in buckets])
        # Last: recomputing beside the real tensors takes memory, some of it for good (the fake mode
        # remembers whose storage was looked at).
        tried = self._iteration(trial=True)
        for one in (record, used_up):
            one.learn(tried)
        return Shapes(
            weights_bytes=self._model.weights_bytes,
            gradients_bytes=gradients_bytes,
            state_bytes=state_bytes,
            inputs_bytes=self._model.inputs_bytes,
            saved_bytes=sum(datum.size_bytes for datum in record.data),
            peak_bytes=max(record.peak_bytes, step_bytes),
            step_bytes=step_bytes,
            record=record,
            used_up=used_up,
            bucket_state_bytes=max(bucket.state_bytes for bucket in buckets),
        )

    def _iteration(
        self, *, trial: bool = False, buckets: Sequence[Sequence[Any]] = ()
    ) -> PassRecord:
        torch = self._torch
        memory = self._memory
        handles = [
            p.register_post_accumulate_grad_hook(hook)
            for bucket in buckets
            for hook in [_used_up(bucket)]
            for p in bucket
        ]
        norms = [
            module.register_forward_hook(note_epsilon)
            for module in self._model.model.modules()
            if type(module) is torch.nn.LayerNorm
        ]
        self._within = self._store.begin()
        self._watch = watch = Watch(self._store, trial=TrialTerms() if trial else None)
        memory.peak_bytes()

        def forward_and_backward() -> None:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, *self._store.unpack_hooks):
                loss = self._model.loss()
            if not hasattr(loss, "backward"):
                raise UsageError(f"the loss has to be a tensor; it is a {type(loss).__name__}")
            loss.backward()

        try:
            self._model.hold(forward_and_backward)
        finally:
            for handle in (*handles, *norms):
                handle.remove()
        record = watch.record()
        self._watch = self._within = None
        if not buckets:
            self._optimizer.step()
        self._optimizer.zero_grad()
        return record

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        if (
            tensor.nbytes < self._min_bytes
            or storage._cdata in self._owned
            or tensor.device.type != self._memory.device.type
        ):
            return kept(tensor)
        store, watch = self._store, self._watch
        assert watch is not None
        assert self._within is not None
        saved = store.find(tensor, storage._cdata, self._within)
        size_bytes = storage.nbytes()
        watch.enter(size_bytes if saved is None else again_code(saved.number), used=False)
        if saved is None:
            saved = store.save(tensor, size_bytes, storage._cdata, self._within, watch.saved)
            watch.save(saved, tensor)
        watch.leave()
        return store.view(saved, tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is not View:
            return whole(packed)
        watch = self._watch
        if watch is None:
            return self._store.tensor_of(packed)
        watch.enter(use_code(packed.saved.number), used=True)
        tensor = self._store.tensor_of(packed)
        watch.use(packed.saved)
        watch.leave()
        return tensor


def _used_up(bucket: Sequence[Any]) -> Callable[[Any], None]:
    """Frees the gradients of a bucket once all of them have arrived."""
    missing = len(bucket)

    def arrived(parameter: Any) -> None:
        nonlocal missing
        missing -= 1
        if missing == 0:
            for member in bucket:
                member.grad = None

    return arrived
