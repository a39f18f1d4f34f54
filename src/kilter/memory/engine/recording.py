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

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from kilter.memory.engine.aliases import StorageReference, view_of
from kilter.memory.engine.recompute import Foreign
from kilter.memory.engine.unset_memory import UnsetMemory
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
_PUT = "index_put_"
"""It sets all elements of a vector where it is given as many indices (the inverse of a permutation,
by which mixtures of experts put their tokens back). Should one come twice, what the program reads
of the vector is not determined without us either."""
_BATCH_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
_STATISTICS, _TRAINED = (3, 4), 5
"""These are the places of arguments of theirs. Trained, they update the statistics of the run,
which the schema does not say, and do not read them."""
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
_SCAN = "cumsum"
"""It has an order where there are several rows: PyTorch's own kernels add up each of them in one
way (ATen/native/cuda/ScanUtils.cuh). Only a single row goes to a library's scan, which has none."""
_KINDS = (torch.Tensor, torch.nn.Parameter)


class Ref(NamedTuple):
    """A tensor among the arguments of an operation: a storage, and the tensor's layout."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, storage: int, tensor: torch.Tensor) -> Ref:
        """This tensor, whose storage has this number."""
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        return cls(storage, tensor.dtype, size, stride, offset)

    def on(self, base: torch.Tensor) -> torch.Tensor:
        """The tensor, given one that has the storage."""
        size, stride, offset = self.size, self.stride, self.offset
        if base.dtype is not self.dtype:
            return view_of(base, self.dtype, size, stride, offset)
        if base.size() == size and base.stride() == stride and base.storage_offset() == offset:
            return base
        return base.as_strided(size, stride, offset)


class Rules(NamedTuple):
    """What holds for every call of an operation. The compiled recorder asks for the same."""

    name: str
    full_name: str
    """It has the namespace and the overload."""
    looks: bool
    """It only gives another view of its argument."""
    ends: str
    """Why no call is recorded in which it runs; empty if it may be recorded."""
    refused: bool
    """Nothing is recomputed by it."""
    random: bool
    writes: tuple[int, ...]
    """It writes to the arguments at these positions."""
    writes_named: tuple[str, ...]
    unordered: bool
    memory: bool
    fills: bool
    puts: bool
    norm: bool
    scans: bool


def rules_named(name: str, overload: str) -> Rules:
    """The rules of an operation, by the name and the overload of its schema."""
    namespace, _, own = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), own)
    return rules_of(getattr(packet, overload or "default"))


@cache
def rules_of(operation: Any) -> Rules:
    schema = getattr(operation, "_schema", None)
    if schema is None:
        why, name = "an operation of higher order", str(operation)
        return Rules(name, name, False, why, True, False, (), (), *(False,) * 6)
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
        full_name=operation.name(),
        looks=looks,
        ends=ends,
        refused=name in _STATEFUL,
        random=torch.Tag.nondeterministic_seeded in operation.tags,
        writes=tuple(positions),
        writes_named=tuple(named),
        unordered=name.removesuffix("_") in _UNORDERED,
        memory=name in _MEMORY,
        fills=name in _FILL,
        puts=name == _PUT,
        norm=name in _BATCH_NORMS,
        scans=name.removesuffix("_") == _SCAN,
    )


class Step(NamedTuple):
    """One operation that ran."""

    operation: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """A `Ref` stands for each tensor."""
    reads: frozenset[int]
    writes: frozenset[int]
    makes: tuple[tuple[int, int], ...]
    """They are the places of results, with the storages that they brought."""
    generator: torch.Generator | None
    """The step draws from this generator."""
    state: torch.Tensor | None
    """The generator was in this state before."""
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
    """This is the object itself. (Others that are made here, below autograd, would count versions
    of their own.)"""
    version: int


def root_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The parameter that a tensor is, or is a view of."""
    base: Any = tensor if type(tensor) is torch.nn.Parameter else tensor._base
    if tensor.is_leaf and tensor.requires_grad:
        return tensor
    return base if type(base) is torch.nn.Parameter else None


class Rerun(Protocol):
    """Operations that make some storages."""

    def operations(self) -> Sequence[str]:
        """Their names, in order."""

    def run(self, bases: dict[int, torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Carry them out on what they have to be given, by storage; gives what was wanted, and None
        for what an operation makes only where gradients are recorded. Storages that no later one
        reads are freed on the way."""


class CallRecorder(ABC):
    """The operations of one call, and of those in it.

    A storage has a number. It is that of one storage as long as the recorder lives, also after the
    storage is gone, since weak references keep addresses from being used again.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[torch.Tensor, int, Any]] = []
        """What autograd has been given for the tensors that it keeps as they are."""
        self._left: dict[int, int] = {}
        """It has the storage of each tensor that was evicted meanwhile, by the tensor's number in
        the pass."""

    @property
    @abstractmethod
    def position(self) -> int:
        """How many operations were recorded."""

    @abstractmethod
    def numbers_of(self, tensors: Sequence[torch.Tensor]) -> Sequence[int]:
        """The numbers of their storages; -1 for one that no operation has met."""

    @abstractmethod
    def made_at(self, number: int) -> int:
        """By storage, the operation that made it; -1 for what was there before."""

    @abstractmethod
    def end(self, why: str) -> None:
        """Nothing is recorded any more."""

    @abstractmethod
    def program(
        self,
        begin: int,
        wanted: Sequence[int],
        there: Set[int],
        like: Sequence[torch.Tensor] = (),
    ) -> tuple[Rerun, dict[int, Given | None]]:
        """The operations since `begin` that make these storages (in the layouts of the tensors
        `like`, if these are given), and the storages that have to be given to them: those from
        before `begin`, and those that are `there` in any case. With what was met before it was
        made; None for what was made since the recording began. `Foreign` if the operations would
        not make the same bits."""

    def leaves(self, several: Sequence[Saved]) -> None:
        """Tensors are evicted, whose addresses may become those of other storages."""
        numbers = self.numbers_of([saved.alias for saved in several if saved.alias is not None])
        pairs = zip(several, numbers, strict=True)
        self._left |= {saved.number: number for saved, number in pairs if number >= 0}

    def storages_of(self, several: Sequence[Saved]) -> Sequence[int]:
        """The numbers of the storages of tensors, evicted or not; -1 for one that has none."""
        here = [saved for saved in several if saved.number not in self._left]
        aliases = [saved.alias for saved in here if saved.alias is not None]
        if len(aliases) == len(several):
            return self.numbers_of(aliases)
        numbers = iter(self.numbers_of(aliases))
        return [
            left if left is not None else -1 if saved.alias is None else next(numbers)
            for saved in several
            for left in (self._left.get(saved.number),)
        ]

    def kept_since(self, begin: int) -> dict[int, tuple[torch.Tensor, int, Any]]:
        """By storage, what autograd keeps as it is, without the first `begin` of that."""
        kept = [one for one in self.kept[begin:] if type(one[0]) in _KINDS]
        numbers = self.numbers_of([one[0] for one in kept])
        return {n: one for n, one in zip(numbers, kept, strict=True) if n >= 0}


class OperationRecorder(CallRecorder):
    """In Python, where there is no compiled one (`compiled_recorder.py`)."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Step] = []
        self._given: dict[int, Given] = {}
        self._made_at: list[int] = []
        self._ended = ""
        """Why nothing is recorded any more."""
        self._numbers: dict[int, int] = {}
        self._references: list[StorageReference] = []
        self._versions: list[int] = []
        self._blank: dict[int, UnsetMemory] = {}
        """These storages were not set as a whole since they were made."""
        self._reads: set[int] = set()
        """The step that is being noted reads these."""

    @property
    def position(self) -> int:
        return len(self._steps)

    def numbers_of(self, tensors: Sequence[torch.Tensor]) -> Sequence[int]:
        return [self._numbers.get(one.untyped_storage()._cdata, -1) for one in tensors]

    def made_at(self, number: int) -> int:
        return self._made_at[number]

    def end(self, why: str) -> None:
        self._ended = self._ended or why

    def note(
        self, rules: Rules, operation: Any, args: Any, kwargs: Any, made: Any, drawn: Any
    ) -> None:
        """An operation has run. `drawn` is a random one's generator and the state before."""
        if rules.ends:
            self.end(rules.ends)
        if self._ended:
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
        if rules.norm and args[_TRAINED]:
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
            self._fills(rules, (*refs, *named.values()), writes)
        results = [(i, one) for i, one in enumerate(_leaves(made)) if isinstance(one, torch.Tensor)]
        makes = [
            (place, self._count(result, len(self._steps)))
            for place, result in results
            if result.untyped_storage()._cdata not in self._numbers
        ]
        if rules.memory:
            sizes = {place: result.nbytes for place, result in results}
            self._blank.update((number, UnsetMemory(sizes[place])) for place, number in makes)
        if makes or writes:
            sums = any(result.is_floating_point() for _, result in results)
            unordered = rules.unordered and not (rules.scans and _in_rows(refs))
            refused = rules.refused or (sums and unordered)
            generator, state = drawn
            self._steps.append(
                Step(
                    operation,
                    rules.full_name,
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
        """What was not set may only be set now."""
        for number in self._blank.keys() & (self._reads | writes):
            sets = refs and (rules.fills or (rules.puts and _puts_all(refs)))
            met = [ref for ref in _leaves(refs) if type(ref) is Ref and ref.storage == number]
            if not sets or met != [refs[0]]:
                raise Foreign("memory is read that no operation has set")
            _, dtype, *view = met[0]
            if self._blank[number].set(*view, each_bytes=dtype.itemsize):
                del self._blank[number]

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
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise Foreign("an operation reads a tensor of another layout")
        if tensor.is_conj() or tensor.is_neg():
            raise Foreign("an operation reads numbers that are kept with another sign")
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        version = tensor._version
        if number is None:
            number = self._count(tensor, -1)
            self._given[number] = Given(tensor, version)
        elif self._versions[number] != version:
            raise Foreign("a tensor was written to by what is no operation")
        self._reads.add(number)
        return Ref.of(number, tensor)

    def _count(self, tensor: torch.Tensor, step: int) -> int:
        storage, number = tensor.untyped_storage(), len(self._made_at)
        self._references.append(StorageReference(storage))
        self._numbers[storage._cdata] = number
        self._versions.append(tensor._version)
        self._made_at.append(step)
        return number

    # Recomputing some of the storages

    def program(
        self,
        begin: int,
        wanted: Sequence[int],
        there: Set[int],
        like: Sequence[torch.Tensor] = (),
    ) -> tuple[Rerun, dict[int, Given | None]]:
        if self._ended:  # operations of the call may be missing
            raise Foreign(self._ended)
        if any(number < 0 or self._made_at[number] < begin for number in wanted):
            raise Foreign("what was saved was not made in the call")
        since = self._steps[begin:]
        written = {number for step in since for number in step.writes}
        needed, given = set(wanted), set()
        if not needed.isdisjoint(self._blank):
            raise Foreign("memory is read that no operation has set")
        chosen = []
        for step in reversed(since):
            made = {number for _, number in step.makes}
            if needed.isdisjoint(made) and needed.isdisjoint(step.writes):
                continue
            if step.refused:
                raise Foreign(f"{step.name} may give something else the next time")
            chosen.append(step)
            for number in step.reads:
                before = self._made_at[number] < begin
                if before or (number not in written and number in there):
                    given.add(number)
                else:
                    needed.add(number)
        if not written.isdisjoint(given):
            raise Foreign("the call has written to what it reads")
        layouts = [Ref.of(number, one) for number, one in zip(wanted, like, strict=False)]
        return _Steps(chosen[::-1], wanted, layouts), {n: self._given.get(n) for n in sorted(given)}


def _puts_all(refs: Sequence[Any]) -> bool:
    """`index_put_` of a vector is given as many indices as that has elements."""
    target, indices, *_ = refs
    accumulates = refs[3:4] == (True,)
    if type(target) is not Ref or len(indices) != 1 or type(indices[0]) is not Ref or accumulates:
        return False
    index = indices[0]
    return index.dtype is torch.int64 and len(target.size) == 1 and index.size == target.size


def _in_rows(refs: Sequence[Any]) -> bool:
    """A scan along one of several dimensions."""
    tensor, dim, *_ = refs
    if type(tensor) is not Ref or type(dim) is not int or not tensor.size:
        return False
    return bool(tensor.size.numel() != tensor.size[dim])


class _Steps:
    """A `Rerun`."""

    def __init__(
        self, steps: Sequence[Step], wanted: Sequence[int], layouts: Sequence[Ref]
    ) -> None:
        self._steps = steps
        self._wanted = wanted
        self._layouts = layouts

    def operations(self) -> Sequence[str]:
        return [step.name for step in self._steps]

    def run(self, bases: dict[int, torch.Tensor]) -> Sequence[torch.Tensor | None]:
        last: dict[int, int] = {}
        for index, step in enumerate(self._steps):
            last.update(dict.fromkeys(step.reads, index))
        for index, step in enumerate(self._steps):
            step.again(bases)
            for number in step.reads:
                if last[number] == index and number not in self._wanted:
                    del bases[number]
            for _, number in step.makes:
                if number not in last and number not in self._wanted:
                    del bases[number]
        if self._layouts:
            return [layout.on(bases[layout.storage]) for layout in self._layouts]
        return [bases[number] for number in self._wanted]


class CompiledRecorder(CallRecorder):
    """The same without Python for each operation: `recorder.cpp`."""

    def __init__(self, compiled: Any) -> None:
        super().__init__()
        self._compiled = compiled
        self._native = compiled.Recorder()
        compiled.record(self._native, self.kept)

    def stop(self) -> None:
        self._compiled.record(None, None)

    @property
    def position(self) -> int:
        return int(self._native.position())

    def numbers_of(self, tensors: Sequence[torch.Tensor]) -> Sequence[int]:
        numbers: list[int] = self._native.numbers_of(tensors)
        return numbers

    def made_at(self, number: int) -> int:
        return int(self._native.made_at(number))

    def end(self, why: str) -> None:
        self._native.end(why)

    def kept_since(self, begin: int) -> dict[int, tuple[torch.Tensor, int, Any]]:
        kept: dict[int, tuple[torch.Tensor, int, Any]] = self._native.kept_since(self.kept, begin)
        return kept

    def program(
        self,
        begin: int,
        wanted: Sequence[int],
        there: Set[int],
        like: Sequence[torch.Tensor] = (),
    ) -> tuple[Rerun, dict[int, Given | None]]:
        rerun, found, why = self._native.program(begin, wanted, there, like)
        if rerun is None:
            raise Foreign(why)
        given: dict[int, Given | None] = {}
        for number, tensor, version in found:
            if tensor is not None and type(tensor) not in _KINDS:
                raise Foreign(f"an operation reads a {type(tensor).__name__}")
            given[number] = None if tensor is None else Given(tensor, version)
        return rerun, given


# --- recording operations -------------------------------------------------------------------------


class Recording:
    """Passes the operations of this thread to a recorder. One at a time."""

    def __init__(
        self,
        recorder: CallRecorder,
        guard: Callable[..., bool],
        unrecorded: Callable[..., Any],
    ) -> None:
        """`guard` calls a function of ours, and says whether it came to its end; `unrecorded` calls
        one while nothing is recorded."""
        self.recorder = recorder
        self._guard = guard
        self.unrecorded = unrecorded

    def met(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Carry out an operation, and have a recorder in Python note it."""
        assert isinstance(self.recorder, OperationRecorder)
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
"""It records now."""


def begin(guard: Callable[..., bool], compiled: Any = None) -> CallRecorder:
    """Record from here on, if nothing records already; by the `compiled` library if there is
    one."""
    global present
    if present is None:
        _listen(compiled)
        if compiled is None:
            present = Recording(OperationRecorder(), guard, unrecorded)
        else:
            present = Recording(CompiledRecorder(compiled), guard, compiled.unrecorded)
        torch_internals.include_dispatch_key(_key(), True)
    return present.recorder


def stop() -> None:
    """Record nothing from here on. (What the key meets after an interruption in here is carried out
    as it is.)"""
    global present
    before, present = present, None
    if before is not None and isinstance(before.recorder, CompiledRecorder):
        before.recorder.stop()
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
    """The dispatch key. Nothing comes to it but from threads that include it."""
    return torch_internals.dispatch_key_named("Fake")


def _met(operation: Any, *args: Any, **kwargs: Any) -> Any:
    include: Any = torch_internals.include_dispatch_key
    recording = present
    if recording is None:  # an interrupted end
        include(_key(), False)
        return operation(*args, **kwargs)
    try:
        include(_key(), False)
        return recording.met(operation, args, kwargs)
    finally:
        include(_key(), present is not None)


_listening: list[Any] = []
"""What has the kernels that are registered for the key: the compiled library, or None and those of
torch's, whose kernels are registered as long as they live."""


def _listen(compiled: Any) -> None:
    """Have operations come to the compiled kernel, or to the one in Python."""
    if _listening and _listening[0] is compiled:
        return
    if _listening and _listening[0] is not None:
        _listening[0].listen(False)
    _listening.clear()  # frees the library of the kernel in Python
    if compiled is not None:
        compiled.listen(True)
        _listening.append(compiled)
    else:
        ours = torch.library.Library("_", "IMPL")
        ours.fallback(_met, "Fake")
        # What a kernel in Python returns has a Python object for good. The framework makes objects
        # of other classes (parameters, subclasses) from what these two return, which need none.
        past = torch.library.Library("aten", "IMPL")
        for name in ("alias", "detach"):
            past.impl(name, torch.library.fallthrough_kernel, "Fake")
        _listening.extend((None, ours, past))


def unrecorded(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function while nothing is recorded."""
    include: Any = torch_internals.include_dispatch_key
    try:
        include(_key(), False)
        return function(*args)
    finally:
        include(_key(), present is not None)
