"""Waiting for an import without importing, and without being seen."""

import importlib
import sys
from importlib.machinery import SourceFileLoader

import pytest

from kilter.observe.imports import after_import


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module that can be imported in this test only; gives its name."""

    def write(body="value = 1\n", name="kilter_test_module"):
        (tmp_path / f"{name}.py").write_text(body)
        importlib.invalidate_caches()
        return name

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    sys.modules.pop("kilter_test_module", None)


@pytest.fixture(autouse=True)
def _nothing_left():
    before = list(sys.meta_path)
    yield
    assert sys.meta_path == before


def test_the_action_runs_after_the_module_s_last_line(module):
    name, seen = module(), []
    after_import(name, lambda: seen.append(sys.modules[name].value)).install()
    assert seen == []
    importlib.import_module(name)
    assert seen == [1]


def test_a_module_that_is_already_there(module):
    name, seen = module(), []
    importlib.import_module(name)
    after_import(name, lambda: seen.append(1)).install()
    assert seen == [1]


def test_nothing_of_ours_is_in_the_module(module):
    name = module()
    after_import(name, lambda: None).install()
    found = importlib.import_module(name)
    assert type(found.__loader__) is SourceFileLoader
    assert found.__spec__.loader is found.__loader__
    assert importlib.reload(found).value == 1


def test_several_that_wait_for_the_same_module(module):
    name, seen = module(), []
    for number in range(3):
        after_import(name, lambda number=number: seen.append(number)).install()
    importlib.import_module(name)
    assert sorted(seen) == [0, 1, 2]


def test_a_module_that_fails_is_waited_for_again(module):
    name, seen = module("raise OSError('no')\n"), []
    waiting = after_import(name, lambda: seen.append(1))
    waiting.install()
    with pytest.raises(OSError, match="no"):
        importlib.import_module(name)
    assert seen == []
    module("value = 22\n")
    importlib.import_module(name)
    assert seen == [1]


def test_a_missing_module_is_missing_in_the_usual_way():
    waiting = after_import("kilter_no_such_module", lambda: None)
    waiting.install()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("kilter_no_such_module")
    waiting.cancel()


def test_cancelled_is_cancelled(module):
    name, seen = module(), []
    waiting = after_import(name, lambda: seen.append(1))
    waiting.install()
    waiting.cancel()
    waiting.cancel()
    importlib.import_module(name)
    assert seen == []


def test_a_finder_of_the_old_kind_behind_us_is_left_out_as_python_does(module, monkeypatch):
    class OldFinder:
        def find_module(self, name, path=None):
            return None

    name, seen = module(), []
    monkeypatch.setattr(sys, "meta_path", [OldFinder(), *sys.meta_path])
    after_import(name, lambda: seen.append(1)).install()
    assert importlib.import_module(name).value == 1
    assert seen == [1]
    monkeypatch.undo()
