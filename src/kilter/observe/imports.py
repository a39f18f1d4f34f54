"""Runs something once a module has been imported, and says which torch there is, without
importing it."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

ImportAction = Callable[[], object]


class after_import:  # noqa: N801
    """Calls `action()` when `name` has been imported by the program; at once if it already is.

    A finder at the front of `sys.meta_path` waits for `name`, hands the work to the finders
    behind it, and is gone, with its loader, before the module's first line runs: nothing that
    looks at the module's `__loader__` or `__spec__` sees us. `action` runs after its last line;
    what it raises would appear in the program's `import`, so it must not raise. A module that
    fails to import leaves us waiting for the next attempt; of one whose import has begun before
    `install`, in another thread, the end is not noticed.
    """

    def __init__(self, name: str, action: ImportAction) -> None:
        self._name = name
        self._action: ImportAction | None = action

    def install(self) -> None:
        """Begin to wait."""
        module = sys.modules.get(self._name)
        if module is None or getattr(module.__spec__, "_initializing", False):
            sys.meta_path.insert(0, self)
        else:
            self._arrived()

    def cancel(self) -> None:
        """Stop waiting; `action` will not be called. Twice is once."""
        self._action = None
        self._withdraw()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Part of python's protocol for finders."""
        if name != self._name:
            return None
        # Only those behind us: another one of our kind in front of us is asking us right now.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            # Python leaves out finders of the old kind, which have `find_module` only.
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(name, path, target) if find_spec else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def _withdraw(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _arrived(self) -> None:
        self._withdraw()
        action, self._action = self._action, None
        if action is not None:
            action()


class _Loader(Loader):
    def __init__(self, loader: Loader, waiting: after_import) -> None:
        self._loader, self._waiting = loader, waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._waiting._arrived()


def torch_version() -> str | None:
    """Of the one that is installed; None without one."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
