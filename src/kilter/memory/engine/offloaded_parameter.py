"""The class of a parameter whose bytes are offloaded, and guards where it could be read unnoticed.

While its bytes are on the host a parameter has another class, `OffloadedParameter`. It is the same
object and still an `nn.Parameter`, but whatever Python code does with it goes through
`__torch_function__`, which fetches the bytes first: operations, lists of tensors, `.data`, copies,
checkpoints, printing. Code in C++ does not call `__torch_function__`. `AccessGuards` replaces the
functions by which it gets at parameters: hooks on saved tensors, `torch.func`, CUDA graphs.

A resident parameter is an ordinary one. Each write to it changes its version, except for writes
through `.data`, which is therefore a property of ours, and writes to its address.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from kilter.core.errors import UsageError
from kilter.core.reasons import Reason
from kilter.memory import messages
from kilter.memory.engine.replacements import Replacements
from kilter.memory.engine.saved_hooks import OUR_MODULES, around_disabling, is_ours
from kilter.observe import torch_internals

if TYPE_CHECKING:
    import torch

    from kilter.memory.engine.weight_store import WeightStore


class WeightsMoved(RuntimeError):
    """The program did what offloaded weights do not allow, and had not done so while watched."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}, but kilter moves weights between device and host in this run, to save their "
            "memory. Give it a larger memory budget, so that weights stay"
        )


def offloaded_class(fetch: Callable[[Any], None]) -> type[torch.nn.Parameter]:
    """The class of offloaded parameters. `fetch` makes one resident again."""
    import torch

    plain = torch.nn.Parameter
    tensor: Any = torch.Tensor
    untouched = {
        *(getattr(tensor, name).__get__ for name in _METADATA),
        tensor.grad.__set__,
        tensor.grad.__delete__,
        tensor.register_hook,
        tensor.register_post_accumulate_grad_hook,
    }

    class OffloadedParameter(torch.nn.Parameter):  # type: ignore[misc]
        """Given to existing parameters only; called, it makes an ordinary parameter."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs)

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in untouched:
                with torch_internals.DisableFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            _visit(args, OffloadedParameter, fetch)
            if kwargs:
                _visit(kwargs.values(), OffloadedParameter, fetch)
            return func(*args, **(kwargs or {}))

        def __deepcopy__(self, memo: Any) -> Any:
            fetch(self)
            return copy.deepcopy(self, memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            fetch(self)
            return self.__reduce_ex__(protocol)

    return OffloadedParameter


def _visit(values: Iterable[Any], kind: type, fetch: Callable[[Any], None]) -> None:
    """Fetch every parameter of the class `kind` among these values and what they contain."""
    for value in values:
        if type(value) is kind:
            fetch(value)
        elif isinstance(value, (list, tuple)):
            _visit(value, kind, fetch)
        elif isinstance(value, dict):
            _visit(value.values(), kind, fetch)


_METADATA = (
    "grad",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "_version",
    "dtype",
    "device",
    "is_cuda",
)


class AccessGuards(AbstractContextManager["AccessGuards"]):
    """Replaces functions of the framework that read a parameter without `__torch_function__`.
    `stop(reason)` makes all weights resident for good."""

    def __init__(self, store: WeightStore, stop: Callable[[Reason], None]) -> None:
        self._store = store
        self._stop = stop
        self._replaced = Replacements()
        self._end_around: Callable[[], None] = lambda: None
        self._graphs: set[int] = set()
        """It holds the identities of graphs that were captured since all weights stay on the
        device."""

    def __enter__(self) -> AccessGuards:
        """`UsageError` if another engine has replaced `Parameter.data` already."""
        import torch

        if "data" in vars(torch.nn.Parameter):
            raise UsageError("weights are moved already; one memory engine at a time")
        self._watch_data(torch)
        self._guard_hooks()
        self._end_around = around_disabling(self._functions_transformed)
        self._guard_graphs(torch)
        self._guard_streams(torch)
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_around()
        self._end_around = lambda: None
        self._replaced.undo()

    def _watch_data(self, torch: Any) -> None:
        plain: Any = torch.nn.Parameter.data
        fetch, wrote = self._store.fetch, self._store.wrote

        def read(parameter: Any) -> Any:
            data = plain.__get__(parameter)
            wrote(parameter)
            return data

        def write(parameter: Any, value: Any) -> None:
            fetch(parameter)
            plain.__set__(parameter, value)
            wrote(parameter)

        self._replaced.put(torch.nn.Parameter, "data", property(read, write))
        new = torch.nn.Parameter.__new__

        def made(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
            fetch(data)  # it compares classes
            return new(cls, data, requires_grad)

        self._replaced.put(torch.nn.Parameter, "__new__", staticmethod(made))

    def _guard_hooks(self) -> None:
        """A hook of the program may hand a parameter itself to backward."""
        push = torch_internals.push_saved_hooks

        def pushed(pack: Any, unpack: Any) -> None:
            push(pack, unpack if is_ours(unpack) else self._guarded(unpack))

        self._replaced.put(*torch_internals.holder_of("push_saved_hooks"), pushed)

    def _guarded(self, unpack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def guarded_unpack(packed: Any) -> Any:
            tensor = unpack(packed)
            self._store.fetch(tensor)
            return tensor

        return guarded_unpack

    @contextmanager
    def _functions_transformed(self) -> Iterator[None]:
        """`torch.func.grad` and its kin wrap arguments in C++: all weights are fetched before."""
        self._stop(messages.USES_FUNC)
        yield

    def _guard_graphs(self, torch: Any) -> None:
        """A captured graph has the addresses of weights in it: they must not move any more."""
        kind = torch.cuda.CUDAGraph
        begin, replay = kind.capture_begin, kind.replay

        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._stop(messages.CAPTURES_GRAPHS)
            self._graphs.add(id(graph))
            return begin(graph, *args, **kwargs)

        def replayed(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._stop(messages.REPLAYS_GRAPHS)
            if self._store.moved and id(graph) not in self._graphs:
                raise WeightsMoved("a CUDA graph is replayed that was captured before")
            return replay(graph, *args, **kwargs)

        self._replaced.put(kind, "capture_begin", capture_begin)
        self._replaced.put(kind, "replay", replayed)

    def _guard_streams(self, torch: Any) -> None:
        """Memory of an offloaded weight is reused by what comes next on the modules' stream, while
        work on another stream may still be reading the weight."""
        cuda = torch.cuda
        change = cuda.set_stream
        enter: Any = getattr(cuda.Stream, "__enter__", None)

        def leave_stream(stream: Any) -> None:
            if self._store.modules.foreign(stream):
                self._stop(messages.SEVERAL_STREAMS)

        def set_stream(stream: Any) -> None:
            if not sys._getframe(1).f_globals.get("__name__", "").startswith(OUR_MODULES):
                leave_stream(stream)
            change(stream)

        def entered(stream: Any) -> Any:
            leave_stream(stream)
            return enter(stream)

        self._replaced.put(cuda, "set_stream", set_stream)
        if enter is not None:
            self._replaced.put(cuda.Stream, "__enter__", entered)
