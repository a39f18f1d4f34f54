"""The compiled recorder where it cannot be built, and what it is built for."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
from kilter.memory.engine import compiled_recorder


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv(compiled_recorder.BUILD, "on")
    compiled_recorder.built_path.cache_clear()
    return tmp_path


def left(state: Path) -> set[str]:
    return {path.suffix for path in state.rglob("*") if path.is_file()}


def build_by(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """This Python program takes the compiler's place."""
    command = [sys.executable, "-c", code]
    monkeypatch.setattr(compiled_recorder, "_command", lambda compiler, made: command)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert compiled_recorder.to_build()
    reason = compiled_recorder.build()
    assert reason is not None
    assert "no C++ compiler was found" in reason.text
    assert compiled_recorder.library() is None


def test_a_build_that_fails_says_why_and_leaves_nothing(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_recorder.shutil, "which", lambda name: name)
    build_by(monkeypatch, "raise SystemExit('error: no room for objects')")
    reason = compiled_recorder.build()
    assert reason is not None
    assert "no room for objects" in reason.text
    assert left(state) <= {".lock"}


def test_a_build_that_hangs_is_ended(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_recorder.shutil, "which", lambda name: name)
    build_by(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(compiled_recorder, "LONGEST_BUILD_S", 0.2)
    reason = compiled_recorder.build()
    assert reason is not None
    assert "timed out" in reason.text
    assert left(state) <= {".lock"}


def test_a_folder_that_cannot_be_made_is_a_reason(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_recorder.shutil, "which", lambda name: name)
    (state / "kilter").write_text("a file")
    reason = compiled_recorder.build()
    assert reason is not None
    assert "in Python" in reason.text


def test_switched_off_nothing_is_built_or_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled_recorder.BUILD, "off")
    assert not compiled_recorder.to_build()
    assert compiled_recorder.library() is None


def test_another_python_has_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = compiled_recorder.built_path()
    monkeypatch.setattr(sys.implementation, "cache_tag", "another")
    compiled_recorder.built_path.cache_clear()
    assert compiled_recorder.built_path() != ours
