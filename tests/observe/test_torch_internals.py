"""Private names of torch stand in one place, exist in the installed one, and are looked up late."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kilter
from kilter.observe import torch_internals
from kilter.observe.torch_internals import ATTRIBUTES, SAVED_BY_NODES, TABLE, Internal, holder_of
from kilter.testing.warm_python import WarmPython

SOURCES = Path(kilter.__file__).parent
HOME = SOURCES / "observe" / "torch_internals"
PROGRAMS = ("harm_snippets.py", "harm_programs")
"""Programs of users that the benchmark of harm runs; what they touch is not kilter's."""
PYTHONS_OWN = {
    *("_getframe", "_current_frames", "_exit", "_actions", "_add_action"),
    *("_args_from_interpreter_flags", "_run_module_as_main", "_SubParsersAction"),
}
"""Private names of Python's standard library."""
PRIVATE = re.compile(r"_(?!_)\w+")
MODULE = re.compile(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*")


parsed = functools.cache(ast.parse)


def trees(*, home: bool) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(SOURCES.rglob("*.py")):
        ours = path.is_relative_to(HOME)
        if ours == home and not any(name in path.parts for name in PROGRAMS):
            yield path, parsed(path.read_text(encoding="utf-8"))


def names_of_kilter() -> set[str]:
    """Private names that some class or module of kilter defines."""
    found = set()
    for _, tree in trees(home=False):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def path_of(node: ast.Attribute) -> str:
    """`a.b.c`; what is not a name at the root is left out."""
    parts, base = [node.attr], node.value
    while isinstance(base, ast.Attribute):
        parts.append(base.attr)
        base = base.value
    parts += [base.id] if isinstance(base, ast.Name) else []
    return ".".join(reversed(parts))


def strays(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Private names of torch in a module of kilter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if MODULE.fullmatch(name):
                    yield name
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if MODULE.fullmatch(alias.name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if MODULE.fullmatch(node.value):
                yield node.value
        elif isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            path = path_of(node).replace("self._torch.", "torch.")
            known = node.attr in {*own, *ATTRIBUTES, *PYTHONS_OWN}
            if MODULE.fullmatch(path) or not (known or node.attr.startswith(SAVED_BY_NODES)):
                yield path


def test_private_names_of_torch_stand_in_one_place() -> None:
    own = names_of_kilter()
    found = {
        f"{path.relative_to(SOURCES)}: {name}"
        for path, tree in trees(home=False)
        if path.name != "learning.py"  # has private names of scikit-learn, and does not know torch
        for name in strays(tree, own)
        if not name.startswith(("weakref.", "python_process."))  # Python's own
    }
    assert found == set()


@pytest.mark.parametrize(
    "line",
    [
        "from torch._C import _functorch",
        "from torch.utils import _pytree",
        "import torch._dynamo.utils",
        "x = torch._C._current_graph_task_id()",
        "x = self._torch._C._autograd",
        "x = tensor._unheard_of",
        "x = torch.distributed.distributed_c10d._get_default_store()",
        "x = sys.modules.get('torch._dynamo.utils')",
    ],
)
def test_a_stray_name_is_found(line: str) -> None:
    assert list(strays(ast.parse(line), {"_torch"}))


def test_every_name_that_is_used_is_in_the_table() -> None:
    known = {*TABLE, *vars(torch_internals)}
    for path, tree in trees(home=False):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and path_of(node) == f"torch_internals.{node.attr}":
                assert node.attr in known, f"{path}: {node.attr}"


def test_the_names_of_branches_are_in_the_table() -> None:
    paths = {entry.path.rpartition(".")[2] for entry in TABLE.values()}
    kept = {*paths, *ATTRIBUTES, "_C", "_ops", "_dynamo", "_pytree"}
    (tree,) = (tree for path, tree in trees(home=True) if path.name == "branches.py")
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {name for name in used if PRIVATE.fullmatch(name)} <= kept


def test_the_installed_torch_has_them_all(warm: WarmPython) -> None:
    assert torch_internals.missing() == ()
    code = (
        "import torch\n"
        "from kilter.observe import torch_internals\n"
        "for name, entry in torch_internals.TABLE.items():\n"
        "    if torch.version.cuda or not entry.only_cuda:\n"
        "        assert getattr(torch_internals, name) is not None, entry\n"
    )
    done = warm.run(["-c", code])
    assert done.returncode == 0, done.stderr


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Internal("torch._C._no_such_name", "nothing is moved")
    nowhere = Internal("torch._no_such_package.module.name", "nothing is compiled")
    slow = Internal("torch._inductor._no_such_file", "nothing is compiled")
    fine = Internal("torch._C._current_graph_task_id", "nothing")
    monkeypatch.setattr(torch_internals, "TABLE", {"a": gone, "b": fine, "c": nowhere, "d": slow})
    assert torch_internals.missing() == (gone, nowhere, slow)
    with pytest.raises(AttributeError):
        _ = torch_internals.a


def test_doctor_shows_what_is_missing(tmp_path: Path) -> None:
    """A torch of another version, which has none of what kilter needs."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("class version:\n    cuda = None\n")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "kilter.app.cli.main", "doctor", "--json", "--device", "null"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    checks = {c["found"]: c for c in json.loads(done.stdout)["checks"] if c["name"] == "torch"}
    (name,) = (name for name in checks if "torch._C._current_autograd_node" in name)
    assert "has no torch._C._current_autograd_node: a memory budget is given up" in name
    assert checks[name]["status"] == "warning"
    assert checks[name]["advice"] == "use a PyTorch of 2.8 to 2.15"
    assert not any("_cuda_getDevice" in found for found in checks)  # it was built without CUDA


def test_a_name_that_is_replaced_is_looked_up_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    holder, name = holder_of("push_saved_hooks")
    assert torch_internals.push_saved_hooks is getattr(holder, name)
    monkeypatch.setattr(holder, name, print)
    assert torch_internals.push_saved_hooks is print


def test_an_unknown_name_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'unheard_of'"):
        _ = torch_internals.unheard_of


def test_looking_at_the_table_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from kilter.observe import torch_internals\n"
        "assert torch_internals.anything_compiled() is False\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "assert torch_internals.current_graph_task() == -1\n"
        "assert torch_internals.missing() == ()\n"
        "assert 'torch._dynamo.utils' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
