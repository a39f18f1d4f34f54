"""A program that is forked from a warm Python cannot tell, where that is promised."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from kilter.testing.warm_python import WarmPython


def test_arguments_directory_and_environment_are_its_own(warm: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("name = 'beside'")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\nimport beside\n"
        "print(sys.argv, os.getcwd(), sorted(os.environ), __name__, beside.name)\n"
        "print(sys.stdin.read())\n"
    )
    done = warm.run([str(program), "a", "--b"], cwd=tmp_path, environ={"ONLY": "this"})
    said = f"{[str(program), 'a', '--b']} {tmp_path} ['ONLY'] __main__ beside\n\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_modules_code_and_python_path(warm: WarmPython, tmp_path: Path) -> None:
    (tmp_path / "found.py").write_text("import sys\nprint(__name__, sys.argv[1:])")
    environ = {"PYTHONPATH": str(tmp_path)}
    assert warm.run(["-m", "found", "x"], environ=environ).stdout == "__main__ ['x']\n"
    assert warm.run(["-c", "import found"], environ=environ).stdout == "found []\n"
    assert "No module named" in warm.run(["-c", "import found"], environ={}).stderr
    (tmp_path / "torch.py").write_text("name = 'in place of torch'")
    told = warm.run(["-c", "import torch; print(torch.name)"], environ=environ).stdout
    assert told == "in place of torch\n"


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        ("raise SystemExit(7)", 7),
        ("raise ValueError('no')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os; os._exit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    ],
)
def test_its_end_is_told(code: str, ends: int, warm: WarmPython) -> None:
    assert warm.run(["-c", code]).returncode == ends


def test_at_its_end_handlers_are_called_and_objects_are_freed(warm: WarmPython) -> None:
    code = (
        "import atexit, ctypes\n"
        "class Freed:\n    def __del__(self): print('freed')\n"
        "atexit.register(print, 'handler')\n"
        "kept = Freed()\nctypes.CDLL(None).printf(b'from C\\n')\nprint('last line')\n"
    )
    done = warm.run(["-c", code])
    assert (done.returncode, done.stderr) == (0, "")
    # C writes when its buffer is full, or at the end
    lines = done.stdout.splitlines()
    assert sorted(lines) == ["freed", "from C", "handler", "last line"]
    assert lines.index("last line") < lines.index("handler") < lines.index("freed")


def test_what_processes_write_at_once_is_all_there(warm: WarmPython) -> None:
    """One of them writes where another one has just written."""
    code = "import os\nos.write(1, b'one\\n')\nos.lseek(1, 0, os.SEEK_SET)\nos.write(1, b'two\\n')"
    assert warm.run(["-c", code]).stdout == "one\ntwo\n"


def test_one_that_does_not_end_is_killed_with_its_children(
    warm: WarmPython, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(
        "import os, time\nos.fork()\nopen(f'{os.getpid()}', 'w').close()\ntime.sleep(600)\n"
    )
    with open(os.devnull, "r+b") as nothing:
        process = warm.start(
            ["program.py"], cwd=tmp_path, environ=os.environ, streams=[nothing] * 3
        )
    while len(pids := [path.name for path in tmp_path.glob("[0-9]*")]) < 2:
        time.sleep(0.01)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    while any(Path("/proc", pid).exists() for pid in pids):
        time.sleep(0.01)
    assert warm.run(["-c", "print('still there')"]).stdout == "still there\n"


def test_it_has_torch_and_nothing_of_kilter_and_ends_with_its_owner() -> None:
    code = "import sys; print('torch' in sys.modules, 'kilter.session.lifecycle' in sys.modules)"
    with WarmPython(os.environ) as python:
        assert python.run(["-c", code]).stdout == "True False\n"
        pid = python._process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
