"""What is found out about a saved tensor: the compiled library and Python say the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from kilter.memory.engine import CpuStandIn, Swapper  # noqa: E402
from kilter.memory.engine.recording import unrecorded  # noqa: E402
from kilter.memory.engine.store import Saved, View, _is_cast_of_parameter  # noqa: E402
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
    found[0]._store.use_library()
    assert found[0]._store.compiled is not None
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


def pack(engine: Any, tensor: Tensor) -> Any:
    """What the hook would give, or what it would call the engine with."""
    engine.hooks._save_large = lambda tensor, size_bytes, key: ("taken", tensor, size_bytes, key)
    return engine.hooks._pack(tensor)


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_same_is_taken_and_kept(both: tuple[Any, Any], kind: str) -> None:
    tensor = KINDS[kind]()
    same(lambda engine: pack(engine, tensor), both, tensor)


def test_the_library_decides_on_ordinary_tensors_and_on_no_others(both: tuple[Any, Any]) -> None:
    library, device = both[0]._store.compiled, torch.device("cpu")
    decided = {
        kind: library.pack(make(), device, MIN_BYTES) is not None for kind, make in KINDS.items()
    }
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
    tensor = graph(32, 32)
    kept, _, _ = both[0]._store.compiled.pack(tensor, torch.device("cpu"), 10**6)
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
        assert (library.pack(tensor, torch.device("cpu"), MIN_BYTES) is None) is under
    assert not library.under_a_mode()


def test_an_error_of_what_is_not_recorded_is_raised(both: tuple[Any, Any]) -> None:
    def fail(value: int) -> None:
        raise ValueError(value)

    for call in (both[0]._store.compiled.unrecorded, unrecorded):
        with pytest.raises(ValueError, match="3"):
            call(fail, 3)
        assert call(max, 1, 2) == 2
