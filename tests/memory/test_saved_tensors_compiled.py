"""What is found out about a saved tensor: the compiled library and Python say the same. And what it
does by itself at the events of a plan."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
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
from kilter.memory.engine.operation_graph import HeldSource  # noqa: E402
from kilter.memory.engine.position import NO_STEPS, StepKind  # noqa: E402
from kilter.memory.engine.ready import Due, ReadyStep, packed_steps  # noqa: E402
from kilter.memory.engine.recompute import Recipe  # noqa: E402
from kilter.memory.engine.recording import unrecorded  # noqa: E402
from kilter.memory.engine.store import (  # noqa: E402
    EVICTED,
    OUTPUT,
    Pass,
    Saved,
    View,
    _is_cast_of_parameter,
    kept,
)
from kilter.memory.engine.tensor_hooks import TensorHooks  # noqa: E402
from kilter.memory.plan.problem import Link  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of kinds of tensors that are not finished

MIN_BYTES = 1024
LINK = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)


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


@pytest.fixture
def both(recorder_is_built: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """An engine with the compiled library, and one in Python."""
    from kilter.memory.engine import compiled_recorder

    monkeypatch.setenv("XDG_STATE_HOME", str(recorder_is_built))
    monkeypatch.setenv(compiled_recorder.BUILD, "on")
    compiled_recorder.built_path.cache_clear()
    found = [
        Swapper(CpuStandIn(), budget_bytes=10**9, link=LINK, min_bytes=MIN_BYTES) for _ in range(2)
    ]
    assert found[0].hooks.use_library({}, [], {}, len, len) is not None
    yield found[0], found[1]
    compiled_recorder.built_path.cache_clear()


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


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_same_is_taken_and_kept(both: tuple[Any, Any], kind: str) -> None:
    """What the hook gives, or calls the engine with."""

    def hooks(engine: Swapper) -> TensorHooks:
        return TensorHooks(
            engine._store,
            torch.device("cpu"),
            MIN_BYTES,
            lambda *taken: taken,
            lambda _: None,
            None,
        )

    with_library, in_python = hooks(both[0]), hooks(both[1])
    assert with_library.use_library({}, [], {}, len, len) is not None
    tensor = KINDS[kind]()
    same(lambda hooks: hooks._pack(tensor), (with_library, in_python), tensor)


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


# Quiet events

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
        evict: tuple[int, ...] = (),
        moves: bool = False,
        recipe_of: Callable[[Tensor], Any] = lambda _: None,
        attend: Callable[[Saved | None], None] = lambda _: None,
    ) -> None:
        self.fence = SimpleNamespace(down=False)
        self.overdue: dict[int, None] = {}
        self.lent: list[int] = []
        self.attend, self.attended = attend, list[Saved | None]()
        self.within = engine._store.begin()
        self.followed: dict[int, weakref.ref[Saved]] = {}
        self.at = engine._store.compiled.Position(
            self.overdue,
            self.lent,
            self.fence,
            torch.device("cpu"),
            MIN_BYTES,
            engine._store,
            self.followed,
            recipe_of,
            lambda saved: self.attended.append(saved) or self.attend(saved),
            engine._store.lone_users,
        )
        offload = (1,) if moves else ()
        step = ReadyStep(
            size_bytes,
            number=0,
            due=Due(offload, evict, ()) if offload or evict else None,
            followed=kind in (StepKind.RECOMPUTED, StepKind.TAKEN),
            recomputed=kind is StepKind.RECOMPUTED,
            called=call is not None,
            read=read,
            version=version,
        )
        assert step.kind is kind
        others = [ReadyStep(SIZE, number, recomputed=True) for number in evict]
        steps = packed_steps([step, step._replace(expected=CODE), *others])
        calls = None if call is None else SimpleNamespace(present=call)
        self.at.follow(steps, weakref.ref(self.within), calls)


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


def test_python_is_called_where_copies_are_due(both: tuple[Any, Any]) -> None:
    seen: list[int] = []
    walk = Walk(both[0], moves=True, attend=lambda _: seen.append(walk.at.event))
    packed = walk.at.save(graph(32, 32))
    assert walk.at.use(packed) is packed[0]
    assert walk.attended == [None, None]
    assert seen == [1, 2]  # the event has been counted


def test_python_is_called_while_something_is_overdue(both: tuple[Any, Any]) -> None:
    walk, tensor = Walk(both[0]), graph(32, 32)
    walk.overdue[1] = None
    packed = walk.at.save(tensor)
    walk.overdue.clear()
    assert walk.at.use(packed) is packed[0]
    assert walk.attended == [None]


def test_an_error_in_python_is_the_program_s_where_no_fence_is(both: tuple[Any, Any]) -> None:
    def fail(_: Saved | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Walk(both[0], moves=True, attend=fail).at.save(graph(32, 32))


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
    "the plan was dropped": lambda walk: walk.at.follow(NO_STEPS, weakref.ref(walk.within), None),
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
    walk.attend = store.fetch
    assert torch.equal(in_backward(lambda: walk.at.use(view)), bits)
    assert walk.attended == [saved, saved]
    assert saved.handed_out


def test_in_a_backward_that_retains_its_graph_python_lends_it(both: tuple[Any, Any]) -> None:
    walk, view = followed(both, graph(32, 32))
    assert in_backward(lambda: walk.at.use(view), retain_graph=True) is None
    assert walk.at.use(view) is None  # nor where the program looks at what is saved
    assert in_backward(lambda: walk.at.use(view)) is not None


COUNTS = ("alive", "held_bytes", "held_peak_bytes", "segment_peak_bytes")


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
    if tensor.grad_fn is not None:
        tensor.grad_fn.metadata.pop(OUTPUT, None)
    if store.compiled is None:
        within = store.begin()
        saved = store.save(tensor, size_bytes, key, within, 0)
        if call is not None:
            call.members.append(saved.itself)
            saved.recipe = call
        view = store.view(saved, tensor)
        if read and tensor._version == version:
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
        answers.append((alike, described(view, tensor), noted, counts))
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
    assert (store.counts.alive, walk.at.event, walk.followed) == (0, 0, {})
    walk = Walk(both[0], StepKind.RECOMPUTED, recipe_of=fail(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        walk.at.save(tensor)


class Leaving:
    """A tensor whose recipe reads another one, both saved, at the event at which it leaves."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.store = engine, engine._store
        self.walk = walk = Walk(engine, evict=(7,)) if self.store.compiled else None
        self.within = self.store.begin() if walk is None else walk.within
        self.source, self.saved = self._save(6), self._save(7)
        self.recipe = recipe = Recipe.__new__(Recipe)
        recipe.sources = recipe.closed = (self.source,)
        recipe.parameters, recipe.in_backward, recipe.told = (), False, False
        self.saved.recipe = recipe
        if walk is not None:
            walk.followed[7] = self.saved.itself
        self.held: list[Any] = []

    def _save(self, number: int) -> Saved:
        tensor = graph(32, 32)
        saved: Saved = self.store.save(
            tensor, *self.engine.hooks.takes(tensor), self.within, number
        )
        return saved

    def carried_out(self) -> tuple[Any, ...]:
        """What is left of it, by whoever sees to it."""
        counts = self.store.counts
        if self.walk is not None:
            assert len(self.walk.at.save(graph(32, 32))) == 5
            self.seen_to = not self.walk.attended
        if self.walk is None or not self.seen_to:
            self.store.evict(self.saved)
        told = [[one() for one in found] for found in self.store._dependents.values()]
        return (
            self.saved.state,
            self.saved.alias is None,
            self.saved.key in self.store._resident,
            self.recipe.told,
            told == [[self.saved]],
            [getattr(counts, name) for name in (*COUNTS, "evicted", "evicted_bytes")],
        )


LEAVING: dict[str, tuple[Callable[[Leaving], object], bool, bool]] = {
    "it is as planned": (lambda one: None, True, True),
    "whoever changes its source knows": (lambda one: setattr(one.recipe, "told", True), True, True),
    "backward has it": (lambda one: setattr(one.saved, "handed_out", True), True, False),
    "its source left": (lambda one: one.store._leave([(one.source, one.source.alias)]), True, True),
    "the program holds it": (lambda one: one.held.append(one.saved.alias[1:]), False, False),
    "it was written to": (lambda one: one.saved.alias.add_(1), False, False),
    "it may have been written to": (lambda one: setattr(one.saved, "touched", True), False, False),
    "its source was written to": (lambda one: one.source.alias.add_(1), False, False),
    "the program holds its source": (
        lambda one: one.held.append(one.source.alias[1:]),
        False,
        False,
    ),
    "it may leave in backward alone": (
        lambda one: setattr(one.recipe, "in_backward", True),
        False,
        False,
    ),
    "it reads a parameter": (
        lambda one: setattr(one.recipe, "parameters", (HeldSource(parameter(), 0),)),
        False,
        True,
    ),
    "no recipe was read": (lambda one: setattr(one.saved, "recipe", None), False, False),
    "it was evicted": (
        lambda one: (
            one.engine._store.offload_unplanned(one.saved) and one.engine._store.evict(one.saved)
        ),
        True,
        True,
    ),
}
"""What is done before, whether the library sees to it, and whether it leaves."""


@pytest.mark.parametrize("case", list(LEAVING))
def test_a_tensor_leaves_for_its_recipe_as_python_has_it(both: tuple[Any, Any], case: str) -> None:
    before, seen_to, leaves = LEAVING[case]
    answers = []
    for engine in both:
        leaving = Leaving(engine)
        before(leaving)
        answers.append(leaving.carried_out())
        if leaving.walk is not None:
            assert leaving.seen_to is seen_to
        leaving.held.clear()
    assert answers[0] == answers[1]
    assert (answers[0][0] == EVICTED) is leaves


def test_while_operations_are_recorded_python_sees_to_it(both: tuple[Any, Any]) -> None:
    leaving = Leaving(both[0])
    recording.begin(lambda function, *args: function(*args) is None, both[0]._store.compiled)
    try:
        assert len(leaving.walk.at.save(graph(32, 32))) == 2
    finally:
        recording.stop()
    assert leaving.saved.state != EVICTED


def test_a_position_holds_nothing_alive(both: tuple[Any, Any]) -> None:
    class Fence:
        down = False

    fence = Fence()
    cpu, store = torch.device("cpu"), both[0]._store
    position = store.compiled.Position({}, [], fence, cpu, MIN_BYTES, store, {}, len, len, 1)
    fence.position = position
    reference = weakref.ref(fence)
    del fence, position
    gc.collect()
    assert reference() is None
