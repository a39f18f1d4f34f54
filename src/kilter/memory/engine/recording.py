"""Records the operations that ran in the call of a module, so that they can be run again.

The operations are recorded where the dispatcher hands them to the kernels, below autograd and
autocast, so the list does not depend on any Python code: whatever a module reads (a counter, a
file, NumPy's random numbers, the value of a tensor), the list holds the operations that followed
from it. Run again on the same tensors, each with the random state that it found, the operations
make the same bits, unless one is not a function of its arguments; such operations are refused.

The recorder is registered at a dispatch key of PyTorch that nothing else uses. A
`TorchDispatchMode` does not serve: some operations run otherwise while a mode is active.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kilter.memory.engine.aliases import StorageReference, view_of
from kilter.memory.engine.recompute import Foreign
from kilter.observe import torch_internals

if TYPE_CHECKING:
    from kilter.memory.engine.store import Saved

_MEMORY = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)
"""They give memory without setting it."""
_FILL = frozenset(
    {"fill_", "zero_", "copy_", "bernoulli_", "uniform_", "normal_", "random_", "exponential_"}
)
"""They set all elements of the first argument, whatever those were."""
_BATCH_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
_STATISTICS, _TRAINED = (3, 4), 5
"""Arguments of theirs. Trained, they update the statistics of the run, which the schema does not
say, and do not read them."""
_MOVED = frozenset(
    {"set_", "resize_", "resize_as_", "_resize_output_", "record_stream", "_conj", "_neg_view"}
)
"""They change what memory a tensor has, or how it is read."""
_STATEFUL = frozenset(
    {
        "_cudnn_rnn",
        "miopen_rnn",
        "_cudnn_init_dropout_state",
        "from_file",
        "batch_norm_update_stats",
        "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
        "_batch_norm_with_update",
    }
)
"""They read or write more than their schema says."""
_UNORDERED = frozenset(
    {
        "index_add", "scatter_add", "scatter_reduce", "index_put", "_index_put_impl", "put",
        "index_reduce", "cumsum", "bincount", "histc", "kthvalue", "median", "nll_loss2d_forward",
        "_ctc_loss", "_embedding_bag", "_embedding_bag_forward_only", "segment_reduce",
        "_histogramdd_from_bin_cts", "_segment_reduce", "_cumsum", "grid_sampler_2d_backward",
    }
)  # fmt: skip
"""On a GPU they add floating point numbers in no fixed order (torch.use_deterministic_algorithms
has the list)."""
_KINDS = (torch.Tensor, torch.nn.Parameter)


class Ref(NamedTuple):
    """A tensor among the arguments of an operation: a storage, and the tensor's layout."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def on(self, base: torch.Tensor) -> torch.Tensor:
        """The tensor, given one that has the storage."""
        size, stride, offset = self.size, self.stride, self.offset
        if base.dtype is not self.dtype:
            return view_of(base, self.dtype, size, stride, offset)
        if base.size() == size and base.stride() == stride and base.storage_offset() == offset:
            return base
        return base.as_strided(size, stride, offset)


class Rules(NamedTuple):
    """What holds for every call of an operation."""

    name: str
    looks: bool
    """It only gives another view of its argument."""
    ends: str
    """Why no call is recorded in which it runs; empty if it may be recorded."""
    refused: bool
    """Nothing is recomputed by it."""
    random: bool
    writes: tuple[int, ...]
    """Positions of the arguments that it writes to."""
    writes_named: tuple[str, ...]


@cache
def rules_of(operation: Any) -> Rules:
    schema = getattr(operation, "_schema", None)
    if schema is None:
        return Rules(str(operation), False, "an operation of higher order", True, False, (), ())
    namespace, _, name = schema.name.partition("::")
    positions, named, looks = [], [], False
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            positions.append(position)
            named.append(argument.name)
    if not positions:
        looks = any(returned.alias_info is not None for returned in schema.returns)
    ends = ""
    if namespace != "aten":  # what it reads and writes is not known
        ends = f"{schema.name} is not the framework's"
    elif name in _MOVED or torch.Tag.inplace_view in operation.tags:
        ends = f"{name} changes the memory of a tensor"
    return Rules(
        name=name,
        looks=looks,
        ends=ends,
        refused=name in _STATEFUL,
        random=torch.Tag.nondeterministic_seeded in operation.tags,
        writes=tuple(positions),
        writes_named=tuple(named),
    )


class Step(NamedTuple):
    """One operation that ran."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """With a `Ref` for each tensor."""
    reads: frozenset[int]
    writes: frozenset[int]
    makes: tuple[tuple[int, int], ...]
    """Places of results, with the storages that they brought."""
    generator: torch.Generator | None
    """The one that it draws from."""
    state: torch.Tensor | None
    """Of the generator, before."""
    refused: bool

    def again(self, bases: dict[int, torch.Tensor]) -> None:
        """Carry it out; `bases` has a tensor for each storage, and gets those that are made."""
        args = [_put(value, bases) for value in self.args]
        kwargs = {name: _put(value, bases) for name, value in self.kwargs.items()}
        if self.generator is None:
            made = self.operation(*args, **kwargs)
        else:
            drawn = self.generator.get_state()
            try:
                self.generator.set_state(self.state)
                made = self.operation(*args, **kwargs)
            finally:
                self.generator.set_state(drawn)
        results = list(_leaves(made))
        for place, storage in self.makes:
            bases[storage] = results[place]


def _put(value: Any, bases: dict[int, torch.Tensor]) -> Any:
    kind = type(value)
    if kind is Ref:
        return value.on(bases[value.storage])
    if kind is list or kind is tuple:
        return kind(_put(item, bases) for item in value)
    return value


def _leaves(value: Any) -> Iterator[Any]:
    """What is in lists, and lists in them."""
    if type(value) in (list, tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


class Given(NamedTuple):
    """A tensor from before the recording."""

    tensor: torch.Tensor
    """The object itself. (Others that are made here, below autograd, would count versions of their
    own.)"""
    version: int
    root: torch.Tensor | None
    """The parameter that it is, or is a view of."""


class OperationRecorder:
    """The operations of one call, and of those in it.

    A storage has a number. It is that of one storage as long as the recorder lives, also after the
    storage is gone, since weak references keep addresses from being used again.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.given: dict[int, Given] = {}
        """By storage, what was there before."""
        self.kept: dict[int, tuple[int, torch.Tensor]] = {}
        """By storage: a tensor that autograd keeps as it is, and the step before which it did."""
        self.saved: dict[int, int] = {}
        """By its number in the pass, the storage of a tensor that the engine has taken over."""
        self.made_at: list[int] = []
        """By storage, the step that made it; -1 for what was there before."""
        self.ended = ""
        """Why nothing is recorded any more."""
        self.ended_at = 0
        self._numbers: dict[int, int] = {}
        self._references: list[StorageReference] = []
        self._versions: list[int] = []
        self._blank: set[int] = set()
        """Storages that were not set since they were made."""
        self._reads: set[int] = set()
        """Of the step that is being noted."""

    def number_of(self, key: int) -> int | None:
        """The number of a storage, by address."""
        return self._numbers.get(key)

    def saves(self, saved: Saved) -> None:
        """The engine has taken a tensor over from autograd, and may evict it from now on."""
        number = self.number_of(saved.key)
        if number is not None:
            self.saved[saved.number] = number

    def storage_of(self, saved: Saved) -> int | None:
        """The number of a tensor's storage, evicted or not."""
        number = self.saved.get(saved.number)
        if number is None and saved.alias is not None:  # else the address may be another storage's
            number = self.number_of(saved.key)
        return number

    def end(self, why: str) -> None:
        if not self.ended:
            self.ended, self.ended_at = why, len(self.steps)

    def keeps(self, tensor: torch.Tensor, held: torch.Tensor) -> None:
        """Autograd keeps a tensor as it is, by holding this object."""
        if self.ended or type(tensor) not in _KINDS:
            return
        try:
            self.kept[self._ref(tensor).storage] = len(self.steps), held
        except (Foreign, RuntimeError) as error:
            self.end(str(error))

    def note(
        self, rules: Rules, operation: Any, args: Any, kwargs: Any, made: Any, drawn: Any
    ) -> None:
        """An operation has run. `drawn` is a random one's generator and the state before."""
        if rules.ends:
            self.end(rules.ends)
        if self.ended:
            return
        try:
            self._note(rules, operation, args, kwargs, made, drawn)
        except (Foreign, RuntimeError) as error:  # not every tensor has a storage, or a version
            self.end(str(error))

    def _note(
        self, rules: Rules, operation: Any, args: Any, kwargs: Any, made: Any, drawn: Any
    ) -> None:
        self._reads = set()
        writes: set[int] = set()
        if rules.name in _BATCH_NORMS and args[_TRAINED]:
            writes = {self._ref(args[i]).storage for i in _STATISTICS if args[i] is not None}
            args = tuple(None if i in _STATISTICS else one for i, one in enumerate(args))
            self._reads.clear()
        refs = tuple(self._taken(value) for value in args)
        named = {name: self._taken(value) for name, value in kwargs.items()}
        for position, name in zip(rules.writes, rules.writes_named, strict=True):
            target = refs[position] if position < len(refs) else named.get(name)
            for ref in _leaves(target):
                if type(ref) is Ref:
                    writes.add(ref.storage)
                    self._versions[ref.storage] += 1
        if self._blank:
            self._fills(rules, refs, writes)
        makes, sums = [], False
        for place, result in enumerate(_leaves(made)):
            if isinstance(result, torch.Tensor):
                sums |= result.is_floating_point()
                key = result.untyped_storage()._cdata
                if key not in self._numbers:
                    makes.append((place, self._count(result, len(self.steps))))
        if rules.name in _MEMORY:
            self._blank.update(number for _, number in makes)
        if makes or writes:
            refused = rules.refused or (sums and rules.name.removesuffix("_") in _UNORDERED)
            generator, state = drawn
            self.steps.append(
                Step(
                    operation,
                    refs,
                    named,
                    frozenset(self._reads),
                    frozenset(writes),
                    tuple(makes),
                    generator,
                    state,
                    refused,
                )
            )

    def _fills(self, rules: Rules, refs: tuple[Any, ...], writes: set[int]) -> None:
        """What was not set may only be set as a whole now."""
        for number in self._blank & (self._reads | writes):
            target = refs[0] if rules.name in _FILL and refs else None
            whole = (
                type(target) is Ref
                and target.storage == number
                and target.offset == 0
                and target.size.numel() == _elements(self.steps[self.made_at[number]])
            )
            if not whole:
                raise Foreign("memory is read that no operation has set")
            self._blank.discard(number)

    def _taken(self, value: Any) -> Any:
        """An argument, with a `Ref` for each tensor."""
        if isinstance(value, torch.Tensor):
            return self._ref(value)
        if type(value) in (list, tuple):
            return type(value)(self._taken(item) for item in value)
        if isinstance(value, torch.Generator):
            raise Foreign("a generator of the program's is drawn from")
        return value

    def _ref(self, tensor: torch.Tensor) -> Ref:
        if type(tensor) not in _KINDS:
            raise Foreign(f"an operation reads a {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_nested:
            raise Foreign("an operation reads a tensor of another layout")
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        version = tensor._version
        if number is None:
            number = self._count(tensor, -1)
            base: Any = tensor if type(tensor) is torch.nn.Parameter else tensor._base
            leaf = tensor.is_leaf and tensor.requires_grad
            root = tensor if leaf else base if type(base) is torch.nn.Parameter else None
            self.given[number] = Given(tensor, version, root)
        elif self._versions[number] != version:
            raise Foreign("a tensor was written to by what is no operation")
        self._reads.add(number)
        return Ref(number, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _count(self, tensor: torch.Tensor, step: int) -> int:
        storage, number = tensor.untyped_storage(), len(self.made_at)
        self._references.append(StorageReference(storage))
        self._numbers[storage._cdata] = number
        self._versions.append(tensor._version)
        self.made_at.append(step)
        return number

    # Recomputing some of the storages

    def program(
        self, begin: int, end: int, wanted: Iterable[int], there: Callable[[int], bool]
    ) -> tuple[tuple[Step, ...], tuple[int, ...]]:
        """The steps from `begin` to `end` that make these storages, and the storages that have to
        be given to them: those from before, and those that are `there` in any case. `Foreign` if
        the steps would not make the same bits."""
        if self.ended and self.ended_at < end:
            raise Foreign(self.ended)
        written = {number for step in self.steps[begin:end] for number in step.writes}
        needed, given = set(wanted), set()
        if not self._blank.isdisjoint(needed):
            raise Foreign("memory is read that no operation has set")
        chosen = []
        for step in reversed(self.steps[begin:end]):
            made = {number for _, number in step.makes}
            if needed.isdisjoint(made) and needed.isdisjoint(step.writes):
                continue
            if step.refused:
                raise Foreign(f"{step.operation} may give something else the next time")
            chosen.append(step)
            for number in step.reads:
                before = self.made_at[number] < begin
                if before or (number not in written and there(number)):
                    given.add(number)
                else:
                    needed.add(number)
        if not written.isdisjoint(given):
            raise Foreign("the call has written to what it reads")
        return tuple(reversed(chosen)), tuple(sorted(given))


def _elements(step: Step) -> int:
    """How many elements a tensor has whose memory a step has made; -1 if that is not known."""
    sizes = [value for value in step.args if type(value) in (list, tuple, torch.Size)]
    if step.operation._schema.name == "aten::empty_like":
        return int(step.args[0].size.numel()) if type(step.args[0]) is Ref else -1
    return int(torch.Size(sizes[0]).numel()) if sizes else -1


def carried_out(
    steps: tuple[Step, ...], bases: dict[int, torch.Tensor], wanted: Iterable[int]
) -> dict[int, torch.Tensor]:
    """The wanted storages, each as the tensor that a step has made. Storages that no later step
    reads are freed on the way."""
    kept = frozenset(wanted)
    last: dict[int, int] = {}
    for index, step in enumerate(steps):
        last.update(dict.fromkeys(step.reads, index))
    for index, step in enumerate(steps):
        step.again(bases)
        for number in step.reads:
            if last[number] == index and number not in kept:
                del bases[number]
        for _, number in step.makes:
            if number not in last and number not in kept:
                del bases[number]
    return {number: bases[number] for number in kept}


# --- recording operations -------------------------------------------------------------------------


class Recording:
    """Passes the operations of this thread to a recorder. One at a time."""

    def __init__(self, guard: Callable[..., bool]) -> None:
        """`guard` calls a function of ours, and says whether it came to its end."""
        self.recorder = OperationRecorder()
        self._guard = guard

    def hears(self, tensor: torch.Tensor, held: torch.Tensor) -> None:
        """Autograd keeps a tensor as it is, by holding this object."""
        if not self._guard(self.recorder.keeps, tensor, held):
            self.recorder.end("kilter stepped aside")

    def takes_over(self, saved: Saved) -> None:
        """The engine holds a tensor in autograd's place."""
        if not self._guard(self.recorder.saves, saved):
            self.recorder.end("kilter stepped aside")

    def met(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Carry out an operation, and note it."""
        drawn: list[Any] = []
        guard = self._guard
        if not guard(_before, operation, args, kwargs, drawn):
            self.recorder.end("kilter stepped aside")
        made = operation(*args, **kwargs)
        if drawn and not guard(
            self.recorder.note, drawn[0], operation, args, kwargs, made, drawn[1]
        ):
            self.recorder.end("kilter stepped aside")
        return made


present: Recording | None = None
"""What records now."""


def begin(guard: Callable[..., bool]) -> OperationRecorder:
    """Record from here on, if nothing records already."""
    global present
    if present is None:
        key = _key()
        present = Recording(guard)
        torch_internals.include_dispatch_key(key, True)
    return present.recorder


def stop() -> None:
    """Record nothing from here on. (What the key meets after an interruption in here is carried out
    as it is.)"""
    global present
    present = None
    torch_internals.include_dispatch_key(_key(), False)


def _before(operation: Any, args: Any, kwargs: Any, drawn: list[Any]) -> None:
    rules = rules_of(operation)
    if rules.looks and not rules.ends:
        return
    if not rules.random:
        drawn += (rules, (None, None))
        return
    tensors = (value for value in _leaves(args) if isinstance(value, torch.Tensor))
    device = next((one.device for one in tensors), kwargs.get("device"))
    cuda = device is not None and device.type == "cuda"
    generator = torch.default_generator
    if cuda:
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    drawn += (rules, (generator, generator.get_state()))


@cache
def _key() -> Any:
    """The dispatch key, with the one kernel that is registered for it. Nothing comes to the key but
    from threads that include it."""
    key = torch_internals.dispatch_key_named("Fake")
    include: Any = torch_internals.include_dispatch_key

    def met(operation: Any, *args: Any, **kwargs: Any) -> Any:
        recording = present
        if recording is None:  # an interrupted end
            include(key, False)
            return operation(*args, **kwargs)
        try:
            include(key, False)
            return recording.met(operation, args, kwargs)
        finally:
            include(key, present is not None)

    _library.append(torch.library.Library("_", "IMPL"))
    _library[0].fallback(met, "Fake")
    return key


_library: list[torch.library.Library] = []
"""As long as it lives the kernel is registered."""


def unrecorded(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function while nothing is recorded."""
    include: Any = torch_internals.include_dispatch_key
    try:
        include(_key(), False)
        return function(*args)
    finally:
        include(_key(), present is not None)
