"""What is found out about a saved tensor: the compiled library and Python say the same. And what it
does by itself at the events of a plan."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from kilter.memory.engine import CpuStandIn, Swapper, recording  # noqa: E402
from kilter.memory.engine.modified import Modified  # noqa: E402
from kilter.memory.engine.operation_graph import HeldSource  # noqa: E402
from kilter.memory.engine.pass_record import use_code  # noqa: E402
from kilter.memory.engine.pass_under_plan import DueMoves  # noqa: E402
from kilter.memory.engine.position import NO_STEPS, StepKind  # noqa: E402
from kilter.memory.engine.ready import NOTHING_DUE, Due, ReadyStep, packed_steps  # noqa: E402
from kilter.memory.engine.recompute import WRITTEN, Recipe  # noqa: E402
from kilter.memory.engine.recording import unrecorded  # noqa: E402
from kilter.memory.engine.saved_hooks import innermost_are_ours  # noqa: E402
from kilter.memory.engine.store import (  # noqa: E402
    EVICTED,
    OUTPUT,
    PREFETCHING,
    RESIDENT,
    Pass,
    Saved,
    View,
    _is_cast_of_parameter,
    kept,
)
from kilter.memory.engine.tensor_hooks import TensorHooks  # noqa: E402
from kilter.memory.plan.problem import Link  # noqa: E402
from kilter.observe import torch_internals  # noqa: E402
from kilter.session.fence import Fence  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of kinds of tensors that are not finished

MIN_BYTES = 1024


class Own(Tensor):
    """A class of the program's."""


class OwnParameter(nn.Parameter):
    pass


def graph(*size: int) -> Tensor:
    """A result, not a leaf."""
    return torch.randn(size, requires_grad=True) * 2


def with_attribute(tensor: Tensor) -> Tensor:
    tensor.note = "the program's"
    return tensor


def written(tensor: Tensor) -> Tensor:
    return tensor.add_(1).mul_(2)


def resized(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        tensor.untyped_storage().resize_(0)
    return tensor


def part() -> Tensor:
    return torch.empty(0).set_(torch.zeros(4096, dtype=torch.uint8).untyped_storage(), 64, (512,))


def left_behind() -> Tensor:
    """A view of a tensor that has other memory since."""
    base = torch.randn(32, 32)
    view = base.t()
    base.data = torch.zeros(32, 32)
    return view


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(32, 32))


KINDS: dict[str, Callable[[], Tensor]] = {
    "a leaf": lambda: torch.randn(32, 32),
    "a leaf with a gradient": lambda: torch.randn(32, 32, requires_grad=True),
    "a parameter": lambda: nn.Parameter(torch.randn(32, 32)),
    "a parameter of its own class": lambda: OwnParameter(torch.randn(32, 32)),
    "a result": lambda: graph(32, 32),
    "a small result": lambda: graph(4, 4),
    "an empty one": lambda: graph(0, 32),
    "a number": graph,
    "with an attribute": lambda: with_attribute(graph(32, 32)),
    "small, with an attribute": lambda: with_attribute(graph(4)),
    "written to": lambda: written(graph(32, 32)),
    "a view": lambda: graph(32, 32).t(),
    "a small view": lambda: graph(32, 32)[:2, :2],
    "a reshaped view": lambda: graph(32, 32).view(64, 16),
    "an expanded view": lambda: graph(1, 32).expand(64, 32),
    "a detached view": lambda: graph(32, 32).t().detach(),
    "of four dimensions": lambda: graph(2, 8, 8, 8).contiguous(memory_format=torch.channels_last),
    "a view of that": lambda: graph(2, 8, 8, 8).contiguous(memory_format=torch.channels_last)[
        :, 1:
    ],
    "transposed in memory": lambda: (
        torch.empty_strided((32, 32), (1, 32)).zero_().requires_grad_() * 2
    ),
    "of integers": lambda: torch.arange(1024),
    "complex": lambda: torch.randn(32, 32, dtype=torch.complex64),
    "a conjugate": lambda: torch.randn(32, 32, dtype=torch.complex64).conj(),
    "a negative": lambda: torch.randn(32, 32, dtype=torch.complex64).conj().imag,
    "all zeros": lambda: torch._efficientzerotensor((32, 32)),
    "sparse": lambda: torch.eye(64).to_sparse(),
    "sparse by rows": lambda: torch.eye(64).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(32, 32), torch.randn(16, 32)]),
    "of the program's class": lambda: torch.randn(32, 32).as_subclass(Own),
    "on another device": lambda: torch.empty(32, 32, device="meta"),
    "NumPy's": lambda: torch.from_numpy(np.ones((32, 32), np.float32)),
    "of a buffer": lambda: torch.frombuffer(bytearray(4096), dtype=torch.float32),
    "shared": lambda: torch.randn(32, 32).share_memory_(),
    "without its memory": lambda: resized(torch.randn(32, 32)),
    "functional": lambda: torch._to_functional_tensor(torch.randn(32, 32)),
    "a part of a storage": part,
    "a view of what has other memory": left_behind,
    "a storage of another type": lambda: torch.zeros(4096, dtype=torch.uint8).view(torch.float32),
    "a view of a parameter": lambda: parameter().t(),
    "a cast of a parameter": lambda: parameter().to(torch.bfloat16),
    "a view of a cast": lambda: parameter().to(torch.bfloat16).t(),
    "a cast of a result": lambda: graph(32, 32).to(torch.bfloat16),
    "a view of a subclass's": lambda: torch.randn(32, 32).as_subclass(Own).t(),
    "a view of a parameter's subclass": lambda: OwnParameter(torch.randn(32, 32)).t(),
}


def described(value: Any, tensor: Tensor) -> Any:
    """What two answers have in common, although each has tensors and references of its own."""
    if isinstance(value, Saved):
        return "saved", *described((value.alias, value.version, value.plain, value.key), tensor)
    if isinstance(value, Tensor):
        if value is tensor:
            return "itself"
        functional = torch._is_functional_tensor(value)
        storage = None if functional else value.untyped_storage()._cdata
        layout = value.size(), value.stride(), value.storage_offset()
        flags = (
            value.requires_grad,
            value.grad_fn,
            value._base,
            value._version,
            value.is_inference(),
        )
        return type(value), value.dtype, storage, layout, flags
    if hasattr(value, "attributes"):
        return "reference", value() is tensor, value.attributes
    if isinstance(value, tuple):
        return type(value), *(described(one, tensor) for one in value)
    return type(value), value


def same(ask: Callable[[Any], Any], both: tuple[Any, Any], tensor: Tensor) -> Any:
    """The answer of both engines, or the class of the error."""
    answers: list[Any] = []
    for engine in both:
        try:
            answers.append(described(ask(engine), tensor))
        except (RuntimeError, NotImplementedError) as error:
            answers.append((type(error), str(error)))
    assert answers[0] == answers[1]
    return answers[0]


def hooks_of(engine: Swapper, fence: Any = None) -> TensorHooks:
    """They call the engine for nothing."""
    store, cpu = engine._store, torch.device("cpu")
    return TensorHooks(store, cpu, MIN_BYTES, lambda *taken: taken, lambda _: None, fence)


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_same_is_taken_and_kept(both: tuple[Any, Any], kind: str) -> None:
    """What the hook gives, or calls the engine with."""
    with_library, in_python = hooks_of(both[0]), hooks_of(both[1])
    position = with_library.use_library({}, [], {}, len, len)
    tensor = KINDS[kind]()
    for pack in (with_library._pack, position.pack):
        same(lambda pack: pack(tensor), (pack, in_python._pack), tensor)


def test_the_library_decides_on_ordinary_tensors_and_on_no_others(both: tuple[Any, Any]) -> None:
    position = both[0].hooks.use_library({}, [], {}, len, len)
    decided = {kind: position.save(make()) is not None for kind, make in KINDS.items()}
    assert all(decided[kind] for kind in ("a result", "a small view", "a parameter"))
    assert not any(decided[kind] for kind in ("sparse", "nested", "a conjugate", "functional"))


TAKEN = (
    "a result", "with an attribute", "written to", "a view", "a reshaped view", "a detached view",
    "of four dimensions", "a view of that", "transposed in memory", "of integers", "complex",
    "a leaf", "a cast of a parameter", "a view of a cast", "a cast of a result",
    "a storage of another type",
)  # fmt: skip


@pytest.mark.parametrize("kind", TAKEN)
def test_the_same_is_held_and_handed_out(both: tuple[Any, Any], kind: str) -> None:
    tensor = KINDS[kind]()
    taken = both[1].hooks.takes(tensor)
    assert taken is not None

    def save(engine: Any) -> Any:
        store = engine._store
        within = store.begin()
        saved = store.save(tensor, *taken, within, 3)
        views = store.view(saved, tensor), store.view(saved, tensor[1:])
        kept = store.kept(tensor, 7, within)[:4]
        read = [store.tensor_of(view) for view in views]
        assert [type(view) for view in views] == [View, View]
        assert [one._version for one in read] == [tensor._version] * 2
        assert torch.equal(read[0], tensor)
        assert torch.equal(read[1], tensor[1:])
        layouts = [(one.dtype, one.stride(), one.data_ptr(), one.requires_grad) for one in read]
        return (saved, *(view[1:] for view in views), kept, *layouts)

    same(save, both, tensor)
    cast = both[0]._store.compiled.is_cast_of_parameter(tensor)
    assert cast is _is_cast_of_parameter(tensor)


def test_what_is_held_counts_the_program_s_writes(both: tuple[Any, Any]) -> None:
    tensor = graph(4, 4)
    kept, _, _ = both[0].hooks.use_library({}, [], {}, len, len).save(tensor)
    tensor.add_(1)
    assert kept._version == tensor._version == 1
    assert kept.data_ptr() == tensor.data_ptr()


class Counts(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Sees(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mode", "under"),
    [(nullcontext, False), (Counts, True), (Sees, True), (forward_ad.dual_level, True)],
)
def test_modes_of_the_program_are_seen(
    both: tuple[Any, Any], mode: Callable[[], AbstractContextManager[Any]], under: bool
) -> None:
    library, tensor = both[0]._store.compiled, graph(32, 32)
    with mode():
        assert library.under_a_mode() is under
        assert (both[0].hooks.use_library({}, [], {}, len, len).save(tensor) is None) is under
    assert not library.under_a_mode()


def test_an_error_of_what_is_not_recorded_is_raised(both: tuple[Any, Any]) -> None:
    def fail(value: int) -> None:
        raise ValueError(value)

    for call in (both[0]._store.compiled.unrecorded, unrecorded):
        with pytest.raises(ValueError, match="3"):
            call(fail, 3)
        assert call(max, 1, 2) == 2


# Events of a plan

SIZE, CODE, OTHER = 4096, -1, -3


class Walk:
    """A pass of two events under a plan: a tensor is saved, and used."""

    def __init__(
        self,
        engine: Any,
        kind: StepKind = StepKind.KEPT,
        *,
        size_bytes: int = SIZE,
        call: Any = None,
        read: bool = False,
        version: int = 0,
        due: Due | None = None,
        within: Pass | None = None,
        moves: DueMoves | None = None,
        recipe_of: Callable[[Tensor], Any] = lambda _: None,
        recipes: dict[int, Any] | None = None,
        attend: Callable[[bool, Saved | None], None] = lambda moves, saved: None,
    ) -> None:
        self.fence = Fence(lambda where, error: None)
        self.lent: list[int] = []
        self.attend, self.attended = attend, list[tuple[bool, Saved | None]]()
        self.hosts: dict[int, Tensor] = {}
        self.recipes = {} if recipes is None else recipes
        self.within = within or engine._store.begin()
        moves = moves or DueMoves(engine._store)
        self.followed = moves.by_number
        self.calls = None if call is None else SimpleNamespace(present=call)
        self.at = engine._store.compiled.Position(
            hooks_of(engine, self.fence),
            moves.overdue,
            self.lent,
            self.followed,
            recipe_of,
            lambda *asked: self.attended.append(asked) or self.attend(*asked),
        )
        step = ReadyStep(
            size_bytes,
            number=0,
            due=due,
            followed=kind in (StepKind.RECOMPUTED, StepKind.TAKEN),
            recomputed=kind is StepKind.RECOMPUTED,
            called=call is not None,
            read=read,
            version=version,
        )
        assert step.kind is kind
        self.expect(step, step._replace(expected=CODE))

    def expect(self, *steps: ReadyStep) -> None:
        """These are the next events."""
        self.at.event = 0
        within = weakref.ref(self.within)
        self.at.follow(packed_steps(steps), self.hosts, self.recipes, within, self.calls)


def test_events_of_the_plan_are_seen_to(both: tuple[Any, Any]) -> None:
    walk, tensor = Walk(both[0]), graph(32, 32)
    packed = walk.at.save(tensor)
    assert described(packed[:3], tensor) == described(kept(tensor), tensor)
    assert packed[3:] == (CODE, walk.within)
    assert walk.at.event == 1
    assert walk.at.use(packed) is packed[0]
    assert walk.at.event == 2
    assert len(walk.at.save(tensor)) == 2  # after the last event
    assert walk.at.event == 2
    assert not walk.attended


def test_python_is_called_where_a_call_leaves(both: tuple[Any, Any]) -> None:
    seen: list[int] = []
    walk = Walk(both[0], due=Due((), (-1,), ()), attend=lambda *_: seen.append(walk.at.event))
    packed = walk.at.save(graph(32, 32))
    assert walk.at.use(packed) is packed[0]
    assert walk.attended == [(True, None), (True, None)]
    assert seen == [1, 2]  # the event has been counted


def test_what_the_program_raises_meanwhile_passes(both: tuple[Any, Any]) -> None:
    def fail(moves: bool, saved: Saved | None) -> None:
        raise KeyboardInterrupt

    walk = Walk(both[0], due=Due((), (-1,), ()), attend=fail)
    with pytest.raises(KeyboardInterrupt):
        walk.at.save(graph(32, 32))
    assert walk.fence.down


def test_what_is_small_is_no_event(both: tuple[Any, Any]) -> None:
    walk = Walk(both[0])
    packed = walk.at.save(graph(4, 4))
    assert walk.at.use(packed) is packed[0]
    assert walk.at.event == 0


def down(walk: Walk) -> None:
    walk.fence.down = True


def gone(walk: Walk) -> None:
    del walk.within


EXCEPTIONS: dict[str, Callable[[Walk], object]] = {
    "kilter stepped aside": down,
    "tensors are lent": lambda walk: walk.lent.append(1),
    "the plan was dropped": lambda walk: walk.at.follow(
        NO_STEPS, {}, {}, weakref.ref(walk.within), None
    ),
    "the pass is over": gone,
}


@pytest.mark.parametrize("exception", list(EXCEPTIONS))
def test_python_sees_to_all_if(both: tuple[Any, Any], exception: str) -> None:
    walk, tensor = Walk(both[0]), graph(32, 32)
    if exception != "the pass is over":
        packed = walk.at.save(tensor)
        EXCEPTIONS[exception](walk)
        assert walk.at.use(packed) is None
        walk = Walk(both[0])
    EXCEPTIONS[exception](walk)
    assert len(walk.at.save(tensor)) == 2
    assert walk.at.event == 0


def test_other_events_than_the_plan_s_are_left_to_python(both: tuple[Any, Any]) -> None:
    walk, tensor = Walk(both[0]), graph(32, 32)
    assert len(walk.at.save(graph(64, 64))) == 2
    walk = Walk(both[0])
    packed = walk.at.save(tensor)
    foreign = (*packed[:4], Pass())
    assert walk.at.use(foreign) is None
    assert walk.at.use((*packed[:3], OTHER, packed[4])) is None
    assert walk.at.event == 1
    tensor.add_(1)
    assert walk.at.use(packed) is None  # Python raises the framework's error


def followed(both: tuple[Any, Any], tensor: Tensor) -> tuple[Walk, Any]:
    """A pass whose tensor the engine follows, at its use; and what autograd was given."""
    store, walk = both[0]._store, Walk(both[0], StepKind.RECOMPUTED)
    taken = both[0].hooks.takes(tensor)
    view = store.view(store.save(tensor, *taken, walk.within, 0), tensor)
    walk.at.event = 1
    return walk, view


def in_backward(ask: Callable[[], Any], *, retain_graph: bool = False) -> Any:
    """The answer while backward runs."""
    answers = []
    result = torch.ones(1, requires_grad=True) * 2
    result.register_hook(lambda _: answers.append(ask()))
    result.backward(retain_graph=retain_graph)
    return answers[0]


@pytest.mark.parametrize("kind", TAKEN)
def test_what_is_followed_and_there_is_handed_out(both: tuple[Any, Any], kind: str) -> None:
    tensor = KINDS[kind]()
    walk, view = followed(both, tensor)
    found = in_backward(lambda: walk.at.use(view))
    expected = both[0]._store.tensor_of(view)
    assert described(found, tensor) == described(expected, tensor)
    assert torch.equal(found, tensor)
    assert view.saved.handed_out
    assert walk.at.event == 2


ELSEWHERE: dict[str, Callable[[Walk, Any], object]] = {
    "was written to": lambda walk, saved: saved.alias.add_(1),
    "is of another pass": lambda walk, saved: setattr(saved, "within", Pass()),
    "is another one": lambda walk, saved: setattr(saved, "number", 1),
    "is used once kilter stepped aside": lambda walk, saved: down(walk),
    "is used while tensors are lent": lambda walk, saved: walk.lent.append(1),
}


@pytest.mark.parametrize("exception", list(ELSEWHERE))
def test_what_is_followed_is_left_to_python_if_it(both: tuple[Any, Any], exception: str) -> None:
    walk, view = followed(both, graph(32, 32))
    state = view.saved.state
    ELSEWHERE[exception](walk, view.saved)
    assert in_backward(lambda: walk.at.use(view)) is None
    assert not view.saved.handed_out
    assert walk.at.event == 1
    view.saved.state = state  # as the engine counts


def test_what_is_not_there_is_fetched_by_python(both: tuple[Any, Any]) -> None:
    tensor = graph(32, 32)
    walk, view = followed(both, tensor)
    store, saved = both[0]._store, view.saved
    bits = tensor.detach().clone()
    del tensor
    assert store.offload_unplanned(saved)
    store.evict(saved)
    assert in_backward(lambda: walk.at.use(view)) is None  # nothing has fetched it
    assert not saved.handed_out
    walk.at.event = 1
    walk.attend = lambda moves, one: store.fetch(one)
    assert torch.equal(in_backward(lambda: walk.at.use(view)), bits)
    assert walk.attended == [(False, saved), (False, saved)]
    assert saved.handed_out


def test_in_a_backward_that_retains_its_graph_python_lends_it(both: tuple[Any, Any]) -> None:
    walk, view = followed(both, graph(32, 32))
    assert in_backward(lambda: walk.at.use(view), retain_graph=True) is None
    assert walk.at.use(view) is None  # nor where the program looks at what is saved
    assert in_backward(lambda: walk.at.use(view)) is not None


COUNTS = ("alive", "held_bytes", "held_peak_bytes", "segment_peak_bytes")


def nodes_of(tensor: Tensor) -> list[Any]:
    """Those that made the tensor, and what it is a view of."""
    made = [one.grad_fn for one in (tensor, tensor._base) if one is not None]
    return [node for node in made if node is not None]


def taken_over(
    engine: Any, tensor: Tensor, *, called: bool = False, read: bool = False, version: int = 0
) -> tuple[Any, Any, Any, Any, list[int]]:
    """A tensor is saved under a plan that offloads it, or has a call make it: what autograd is
    given, the saved storage, the call, what is noted at its node, and the counts."""
    taken = engine.hooks.takes(tensor)
    assert taken is not None
    size_bytes, key = taken
    call = SimpleNamespace(members=[]) if called else None
    store = engine._store
    for node in nodes_of(tensor):
        node.metadata.pop(OUTPUT, None)
        node.metadata.pop(WRITTEN, None)
    if store.compiled is None:
        within = store.begin()
        saved = store.save(tensor, size_bytes, key, within, 0)
        if call is not None:
            call.members.append(saved.itself)
            saved.recipe = call
        view = store.view(saved, tensor)
        if tensor._version != version:
            store.mark_written(tensor)
        elif read:
            store.mark(view, tensor)
    else:
        walk = Walk(
            engine, StepKind.TAKEN, size_bytes=size_bytes, call=call, read=read, version=version
        )
        view = walk.at.save(tensor)
        assert walk.at.event == 1
        assert type(view) is View
        saved = view.saved
        assert walk.followed == {0: saved.itself}
        assert saved.within is walk.within
    assert store._resident[key] is saved.itself
    assert saved.itself() is saved
    assert saved.store is store
    noted = None if tensor.grad_fn is None else tensor.grad_fn.metadata.get(OUTPUT)
    return view, saved, call, noted, [getattr(store.counts, name) for name in COUNTS]


ROLES = [{}, {"called": True}, {"read": True}, {"read": True, "version": 1}]


@pytest.mark.parametrize("roles", ROLES, ids=str)
@pytest.mark.parametrize("kind", TAKEN)
def test_a_tensor_is_taken_over_as_python_does(
    both: tuple[Any, Any], kind: str, roles: dict[str, Any]
) -> None:
    tensor, answers = KINDS[kind](), []
    for engine in both:
        view, saved, call, noted, counts = taken_over(engine, tensor, **roles)
        alike = {
            name: getattr(saved, name)
            for name in Saved.__slots__
            if name not in ("__weakref__", "alias", "recipe", "store", "within")
        }
        if call is not None:
            assert call.members == [saved.itself]
        assert saved.recipe is call
        if noted is not None:
            assert noted[0] is saved.itself
            noted = described(noted[1], tensor)
        written = [WRITTEN in node.metadata for node in nodes_of(tensor)]
        assert len(set(written)) <= 1
        answers.append((alike, described(view, tensor), noted, written, counts))
    assert answers[0] == answers[1]


def test_what_was_taken_over_is_counted_until_it_is_gone(both: tuple[Any, Any]) -> None:
    store = both[0]._store
    counts = store.counts
    view, saved, *_ = taken_over(both[0], graph(32, 32))
    assert (counts.alive, counts.held_bytes, counts.held_peak_bytes) == (1, SIZE, SIZE)
    assert torch.equal(view(), saved.alias)
    del view, saved, _
    assert (counts.alive, counts.held_bytes, counts.held_peak_bytes) == (0, 0, SIZE)
    assert not store._resident


def test_what_is_saved_once_more_is_the_same(both: tuple[Any, Any]) -> None:
    tensor, store = graph(32, 32), both[0]._store
    walk = Walk(both[0], StepKind.TAKEN)
    first = walk.at.save(tensor)
    walk.at.event = 0
    again = walk.at.save(tensor[1:])
    assert again.saved is first.saved
    assert described(again, tensor) == described(store.view(first.saved, tensor[1:]), tensor)
    assert (store.counts.alive, walk.at.event) == (1, 1)
    walk.at.event = 0
    tensor.add_(1)
    assert len(walk.at.save(tensor)) == 2  # another value: Python drops the plan


KNOWN: dict[str, Callable[[Any, Walk, Tensor], object]] = {
    "is another one": lambda store, walk, tensor: store.save(
        tensor, SIZE, tensor.untyped_storage()._cdata, walk.within, 1
    ),
    "is not the first of that number": lambda store, walk, tensor: walk.followed.update({0: None}),
    "may be written to without a trace": lambda store, walk, tensor: store.touched(tensor),
}


@pytest.mark.parametrize("case", list(KNOWN))
def test_a_tensor_is_left_to_python_that(both: tuple[Any, Any], case: str) -> None:
    walk, tensor, store = Walk(both[0], StepKind.TAKEN), graph(32, 32), both[0]._store
    before = KNOWN[case](store, walk, tensor)
    alive = store.counts.alive
    assert walk.at.save(tensor) == both[0].hooks.takes(tensor)
    assert (store.counts.alive, walk.at.event) == (alive, 0)
    del before


# Tensors that leave for their recipes

RECIPE: Any = type("Made", (), {})()


def test_the_recipe_of_what_is_recomputed_is_read(both: tuple[Any, Any]) -> None:
    asked: list[Tensor] = []
    tensor = graph(32, 32)

    def read(one: Tensor) -> Any:
        asked.append(one)
        return RECIPE

    walk = Walk(both[0], StepKind.RECOMPUTED, recipe_of=read)
    assert walk.at.save(tensor).saved.recipe is RECIPE
    assert asked[0] is tensor
    walk = Walk(both[0], StepKind.RECOMPUTED, recipe_of=read, version=1)
    assert walk.at.save(tensor).saved.recipe is None
    assert len(asked) == 1
    walk = Walk(both[0], StepKind.RECOMPUTED)
    assert walk.at.save(tensor).saved.recipe is None


def test_an_error_in_reading_a_recipe_is_left_to_the_fence(both: tuple[Any, Any]) -> None:
    def fail(error: type[BaseException]) -> Callable[[Tensor], Any]:
        def read(_: Tensor) -> Any:
            raise error

        return read

    tensor, store = graph(32, 32), both[0]._store
    walk = Walk(both[0], StepKind.RECOMPUTED, recipe_of=fail(ValueError))
    assert walk.at.save(tensor) == both[0].hooks.takes(tensor)
    assert walk.fence.down
    assert (store.counts.alive, walk.at.event, walk.followed) == (0, 0, {})
    walk = Walk(both[0], StepKind.RECOMPUTED, recipe_of=fail(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        walk.at.save(tensor)


class Moving:
    """A tensor whose recipe reads another one, both saved, and what is done to it at events."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.store = engine, engine._store
        self.moves = DueMoves(self.store)
        self.within = self.store.begin()
        self.walk = None
        if self.store.compiled is not None:
            self.walk = Walk(engine, within=self.within, moves=self.moves, attend=self._attend)
        self.source, _ = self._save(6)
        self.saved, self.view = self._save(7)
        self.recipe = recipe = Recipe.__new__(Recipe)
        recipe.sources = recipe.closed = (self.source,)
        recipe.parameters, recipe.given, recipe.in_backward, recipe.told = (), (), False, False
        self.saved.recipe = recipe
        self.bits = bits = self.saved.alias.clone()
        recipe.dtype, recipe.size, recipe.stride = bits.dtype, bits.size(), bits.stride()
        recipe.calls = lambda given: bits.clone()
        flat = self.store.backend.reserve(SIZE)
        self.hosts = {7: flat.view(torch.float32).view(32, 32)}
        if self.walk is not None:
            self.walk.hosts = self.hosts
        self.due = NOTHING_DUE
        self.held: list[Any] = []
        self.by_python = 0
        """So many events were left to Python, wholly or in part."""

    def _save(self, number: int) -> tuple[Saved, View]:
        tensor = graph(32, 32)
        taken = self.engine.hooks.takes(tensor)
        saved = self.store.save(tensor, *taken, self.within, number)
        self.moves.follow(number, saved)
        return saved, self.store.view(saved, tensor)

    def carry_out(self, due: Due) -> None:
        """This is due at an event."""
        self.due = due
        if self.walk is None:
            self._in_python()
        else:
            assert len(self.saves_another()) == 5

    def saves_another(self) -> Any:
        """The event: what autograd is given for another tensor."""
        self.walk.expect(ReadyStep(SIZE, number=0, due=self.due))
        return self.walk.at.save(graph(32, 32))

    def _in_python(self) -> None:
        self.by_python += 1
        if self.moves.overdue:
            self.moves.catch_up()
        self.moves.carry_out(SimpleNamespace(hosts=self.hosts), self.due)  # type: ignore[arg-type]

    def _attend(self, moves: bool, saved: Saved | None) -> None:
        if moves:
            self._in_python()
        if saved is not None:
            self.store.fetch(saved)

    def used(self) -> None:
        """Backward is given it, with the bits that it had."""
        if self.walk is None:
            found = self.store.hand_out(self.view)
        else:
            self.walk.expect(ReadyStep(use_code(7), number=7))
            found = in_backward(lambda: self.walk.at.use(self.view))
        assert torch.equal(found, self.bits)

    def left(self) -> tuple[Any, ...]:
        """What has become of it."""
        told = [[one() for one in found] for found in self.store._dependents.values()]
        transfer = self.saved.transfer
        return (
            self.saved.state,
            self.saved.alias is None,
            self.saved.handed_out,
            self.saved.recipe is None,
            self.saved.key in self.store._resident,
            self.recipe.told,
            told == [[self.saved]],
            transfer is not None and [getattr(transfer, name) is None for name in TRANSFER],
            {number: host is None for number, host in self.moves.overdue.items()},
            [getattr(self.store.counts, name) for name in (*COUNTS, *MOVED)],
        )


TRANSFER = "host", "departure", "arrival", "pooled"
MOVED = "evicted", "evicted_bytes", "recomputed", "out_bytes", "in_bytes"
OFFLOAD, EVICT, PREFETCH = Due((7,), (), ()), Due((), (7,), ()), Due((), (), (7,))


def hold(one: Moving) -> None:
    one.held.append(one.saved.alias[1:])


def hold_source(one: Moving) -> None:
    one.held.append(one.source.alias[1:])


def let_go(one: Moving) -> None:
    one.held.clear()


def write(one: Moving) -> None:
    one.saved.alias.add_(1)


def write_source(one: Moving) -> None:
    one.source.alias.add_(1)


def without_recipe(one: Moving) -> None:
    one.saved.recipe = None


def with_a_call(one: Moving) -> None:
    one.saved.recipe = SimpleNamespace(  # type: ignore[assignment]
        ready=lambda: True, told=True, recompute=lambda saved: [(saved, one.bits.clone())]
    )


def elsewhere(one: Moving) -> None:
    one.hosts[7] = one.store.backend.reserve(SIZE)  # not in the tensor's shape yet


def reads_a_parameter(one: Moving) -> None:
    one.held.append(parameter())
    one.recipe.parameters = (HeldSource(one.held[0], 0),)


def writes_to_it(one: Moving) -> None:
    with torch.no_grad():
        one.held[0].add_(1)


def sets(name: str, *, of: str = "saved") -> Callable[[Moving], None]:
    return lambda one: setattr(getattr(one, of), name, True)


def its_source_left(one: Moving) -> None:
    one.store._leave([(one.source, one.source.alias)])


def forget(one: Moving) -> None:
    one.moves.by_number.clear()


MOVING: dict[str, tuple[list[Due | Callable[[Moving], None]], int]] = {
    "it leaves for its recipe": ([EVICT], EVICTED),
    "whoever changes its source knows": ([sets("told", of="recipe"), EVICT], EVICTED),
    "backward has it": ([sets("handed_out"), EVICT], RESIDENT),
    "its source left": ([its_source_left, EVICT], EVICTED),
    "the program holds it": ([hold, EVICT], RESIDENT),
    "the program held it": ([hold, EVICT, NOTHING_DUE, let_go, NOTHING_DUE], EVICTED),
    "it was written to": ([write, EVICT], RESIDENT),
    "it may have been written to": ([sets("touched"), EVICT], RESIDENT),
    "its source was written to": ([write_source, EVICT], RESIDENT),
    "the program holds its source": ([hold_source, EVICT], RESIDENT),
    "the program held its source": ([hold_source, EVICT, let_go, NOTHING_DUE], EVICTED),
    "it leaves in backward alone": ([sets("in_backward", of="recipe"), EVICT], RESIDENT),
    "it reads a parameter": ([reads_a_parameter, EVICT], EVICTED),
    "it reads one that was written to": ([reads_a_parameter, writes_to_it, EVICT], RESIDENT),
    "it is recomputed": ([EVICT, Moving.used], RESIDENT),
    "a call makes it": ([with_a_call, EVICT, Moving.used], RESIDENT),
    "no recipe was read": ([without_recipe, EVICT], RESIDENT),
    "nobody asks for it": ([forget, OFFLOAD, EVICT, PREFETCH], RESIDENT),
    "it is copied": ([OFFLOAD], RESIDENT),
    "it is copied once": ([OFFLOAD, OFFLOAD], RESIDENT),
    "it leaves for the host": ([OFFLOAD, EVICT], EVICTED),
    "it leaves at one event": ([Due((7,), (7,), ())], EVICTED),
    "it comes back": ([OFFLOAD, EVICT, PREFETCH], PREFETCHING),
    "it is used once it is back": ([OFFLOAD, EVICT, PREFETCH, Moving.used], RESIDENT),
    "it is late": ([without_recipe, OFFLOAD, EVICT, Moving.used], RESIDENT),
    "it never left": ([OFFLOAD, PREFETCH, Moving.used], RESIDENT),
    "it goes to memory of another shape": ([elsewhere, OFFLOAD, EVICT, PREFETCH], PREFETCHING),
    "it was written to meanwhile": ([without_recipe, OFFLOAD, write, EVICT], RESIDENT),
    "the program holds it as it is copied": ([hold, OFFLOAD, EVICT], RESIDENT),
    "it is copied late": ([hold, OFFLOAD, EVICT, let_go, NOTHING_DUE, PREFETCH], PREFETCHING),
    "it was to be back before it left": ([hold, OFFLOAD, PREFETCH, let_go, NOTHING_DUE], RESIDENT),
}
"""What is done, and where it is then."""
BY_PYTHON = {
    "a call makes it",
    "it goes to memory of another shape",
    "it was written to meanwhile",
}
"""In these the library leaves something to Python."""


@pytest.mark.parametrize("case", list(MOVING))
def test_a_tensor_leaves_and_comes_back_as_python_has_it(both: tuple[Any, Any], case: str) -> None:
    steps, state = MOVING[case]
    answers = []
    for engine in both:
        moving, found = Moving(engine), []
        for step in steps:
            if isinstance(step, Due):
                moving.carry_out(step)
            else:
                step(moving)
            found.append(moving.left())
        if moving.walk is not None:
            assert bool(moving.by_python) == (case in BY_PYTHON)
        moving.held.clear()
        answers.append(found)
        assert moving.saved.state == state
    assert answers[0] == answers[1]


def test_nothing_is_loaded_before_a_call_has_left(both: tuple[Any, Any]) -> None:
    """There is memory for it only then, and it is Python that gives up what the call has saved."""
    moving, seen = Moving(both[0]), []
    for due in (OFFLOAD, EVICT):
        moving.carry_out(due)

    def attend(moves: bool, saved: Saved | None) -> None:
        seen.append(moving.saved.state)
        moving._attend(moves, saved)

    moving.walk.attend = attend
    moving.carry_out(Due((), (-1,), (7,)))
    assert seen == [EVICTED]
    assert moving.saved.state == PREFETCHING


def test_while_operations_are_recorded_python_sees_to_it(both: tuple[Any, Any]) -> None:
    moving = Moving(both[0])
    moving.due = EVICT
    recording.begin(lambda function, *args: function(*args) is None, both[0]._store.compiled)
    try:
        assert len(moving.saves_another()) == 2
    finally:
        recording.stop()
    assert moving.saved.state != EVICTED


def test_where_what_a_recipe_reads_was_modified_python_raises(both: tuple[Any, Any]) -> None:
    moving = Moving(both[0])
    moving.carry_out(EVICT)

    def fail(given: Any) -> Tensor:
        raise Modified(moving.bits, 0)

    moving.recipe.calls = fail
    moving.walk.attend = lambda moves, saved: None
    moving.walk.expect(ReadyStep(use_code(7), number=7))
    assert in_backward(lambda: moving.walk.at.use(moving.view)) is None
    assert not moving.walk.fence.down
    moving.recipe.calls = lambda given: moving.bits.clone()
    assert torch.equal(moving.store.hand_out(moving.view), moving.bits)


@pytest.mark.parametrize("name", ["copy_out", "wait", "alloc_like", "copy_in"])
def test_an_error_in_a_copy_has_kilter_step_aside(
    both: tuple[Any, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = Moving(both[0])
    without_recipe(moving)

    def fail(*_: Any) -> None:
        raise ValueError(name)

    monkeypatch.setattr(moving.store.backend, name, fail)
    for moving.due in (OFFLOAD, EVICT, PREFETCH):
        if not moving.walk.fence.down:
            assert len(moving.saves_another()) == 5
    assert moving.walk.fence.down
    monkeypatch.undo()
    assert torch.equal(moving.store.hand_out(moving.view), moving.bits)


def test_a_position_holds_nothing_alive(both: tuple[Any, Any]) -> None:
    class Fence:
        down = False

    fence = Fence()
    library = both[0]._store.compiled
    position = library.Position(hooks_of(both[0], fence), {}, [], {}, len, len)
    fence.position = position
    reference = weakref.ref(fence)
    del fence, position
    gc.collect()
    assert reference() is None


@pytest.mark.usefixtures("both")
def test_hooks_of_the_library_take_the_place_of_ours() -> None:
    """After the first pass under a plan, and until the end."""
    link = Link(to_host_bytes_per_s=1e5, to_device_bytes_per_s=1e5, both_bytes_per_s=2e5)
    seen: list[bool] = []

    def train(swapper: Swapper | None) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.GELU())])
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        losses = []
        with swapper or nullcontext():
            for _ in range(10):
                loss = net(torch.randn(64, 16)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                if swapper is not None:
                    pack, unpack = torch_internals.top_saved_hooks(True)
                    seen.append(type(pack.__self__) is type(unpack.__self__) is not TensorHooks)
                    assert innermost_are_ours()
        assert torch_internals.top_saved_hooks(True) is None
        return [*losses, *net.parameters()]

    plain = train(None)
    swapper = Swapper(CpuStandIn(), budget_bytes=30_000, link=link, min_bytes=1024)
    assert all(torch.equal(a, b) for a, b in zip(train(swapper), plain, strict=True))
    report = swapper.report()
    assert report.recomputed > 0
    assert (seen[0], seen[-1]) == (False, True)
    assert seen == sorted(seen)
    assert report.deviations == 0
