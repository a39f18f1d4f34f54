"""What code might do is found where it can be reached by name, and nowhere else."""

from __future__ import annotations

import functools
import json
import sys
import textwrap
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from kilter.observe.mentions import callers, mention

NAMES = frozenset({"grad", "clip"})
REST = """
def helper(): pass
def run():
    helper()
    return frame()
"""
PROGRAMS = {
    "nothing": ("", None),
    "an attribute in the running function": ("def run():\n    x.grad\n    return frame()", 2),
    "in a branch": ("def run():\n    if 0 > 1: x.grad\n    return frame()", 2),
    "a string": ("def run():\n    getattr(x, 'grad')\n    return frame()", 2),
    "a nested function": ("def run():\n    lambda: x.grad\n    return frame()", 2),
    "another function": ("def log():\n    return x.grad" + REST, 2),
    "a method": ("class Log:\n    def end(self):\n        return self.x.grad" + REST, 3),
    "a static method": ("class Log:\n  @staticmethod\n  def end(): x.grad" + REST, 3),
    "a property": ("class Log:\n  @property\n  def norm(self): return x.grad" + REST, 3),
    "behind a decorator": ("def deco(f): return lambda: f()\n@deco\ndef log(): x.grad" + REST, 3),
    "behind a library's": ("import functools\n@functools.cache\ndef log(): x.grad" + REST, 3),
    "a callback": ("class Log:\n  def end(self): x.grad\nlog = [Log()]\ndel Log" + REST, 2),
    "in a dictionary": ("logs = {'a': lambda: x.grad}" + REST, 1),
    "a part of a function": (
        "import functools\nlog = functools.partial(lambda y: y.grad)" + REST,
        2,
    ),
    "a bound method": ("class Log:\n  def end(self): x.grad\nlog = Log().end\ndel Log" + REST, 2),
    "an object": ("class Log:\n  def end(self): x.grad\nlog = Log()\ndel Log" + REST, 2),
    "a local name": ("def run():\n    grad = 1\n    return frame()", None),
    "a longer word": ("def run():\n    x.zero_grad()\n    return frame()", None),
}


def program(tmp_path: Path, source: str) -> tuple[Path, dict[str, Any]]:
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(source if "def run" in source else source + REST))
    names: dict[str, Any] = {
        "__name__": "train",
        "__file__": str(file),
        "frame": lambda: sys._getframe(1),
        "x": SimpleNamespace(grad=0, zero_grad=lambda: None),
    }
    module = ModuleType("train")
    module.__dict__.update(names)
    exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
    return file, module.__dict__


def found(frame: FrameType) -> str | None:
    return mention(NAMES, iter([frame]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, line = PROGRAMS[name]
    file, names = program(tmp_path, source)
    module = ModuleType("train")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "train", module)
    place = found(names["run"]())
    assert place == (None if line is None else f"{file}:{line}")


def test_a_module_of_the_program_is_read_and_a_library_is_not(tmp_path: Path) -> None:
    _, names = program(tmp_path, "")
    names["json"], names["functools"] = json, functools
    assert found(names["run"]()) is None
    tools = ModuleType("tools")
    tools.__file__ = str(tmp_path / "tools.py")
    exec(compile("def log():\n    return x.grad", tools.__file__, "exec"), tools.__dict__)
    names["tools"] = tools
    assert found(names["run"]()) == f"{tools.__file__}:2"


def test_callers_leave_packages_out() -> None:
    frames = list(callers(skip=("_pytest", "pluggy")))
    assert frames[0].f_code.co_name == "test_callers_leave_packages_out"
    assert not any(f.f_globals["__name__"].startswith("_pytest") for f in frames)
