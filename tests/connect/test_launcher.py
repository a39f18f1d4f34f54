"""A script cannot tell `kilter run` from python: each case is run by both and must end alike.

Compared are standard output, exit code or signal, and standard error but for kilter's own lines.
"""

from __future__ import annotations

import os
import py_compile
import signal
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kilter.session import fence
from kilter.testing.warm_python import WarmPython

KILTER = str(Path(sys.executable).with_name("kilter"))


@dataclass(frozen=True)
class Case:
    """Files, and what comes after `python` or after `kilter run`."""

    files: dict[str, str | bytes]
    command: tuple[str, ...] = ("script.py",)
    stdin: str = ""
    flags: tuple[str, ...] = ()
    """Of the interpreter."""
    environment: dict[str, str] = field(default_factory=dict)


def script(source: str | bytes, *arguments: str, **more: object) -> Case:
    return Case({"script.py": source}, ("script.py", *arguments), **more)  # type: ignore[arg-type]


CASES: dict[str, Case] = {}

# --- what the script sees ------------------------------------------------------------------------

CASES["what it sees"] = script(
    '''"""The documentation."""
import sys
print(sorted(globals()))
print(sys.argv)
print(__name__, __file__, __package__, __spec__, __doc__, __cached__, type(__loader__))
print(type(__builtins__), sys.modules["__main__"].__dict__ is globals())
import __main__; print(__main__)
import inspect, os, signal, threading, warnings
print(sorted(k for k in os.environ if 'KILTER' in k))
for s in signal.valid_signals(): print(s, signal.getsignal(s))
print(sys.excepthook is sys.__excepthook__, sys.unraisablehook is sys.__unraisablehook__)
print(sys.displayhook is sys.__displayhook__, sys.gettrace(), sys.getprofile())
print(threading.excepthook is threading.__excepthook__, sys.stdout is sys.__stdout__)
warnings.warn('old', DeprecationWarning); warnings.warn('new')
def f(): return 1
os.chdir('/')
print(inspect.getsource(f), open(__file__).read())
''',
    *("--help", "--json", "--", "-m", "x", "--max-slowdown", "9", "--dry", "-h", "", "-", "@f"),
)
CASES["arguments: double dash first"] = script("import sys; print(sys.argv)", "--", "a", "--", "b")
WHERE = "import sys, os; print(sys.path, sys.argv, __file__, os.getcwd())"
CASES["path"] = script(WHERE)
CASES["path: below"] = Case({"below/script.py": WHERE}, ("below/script.py",))
CASES["path: dot"] = Case({"below/script.py": WHERE}, ("./below/../below/script.py",))
CASES["path: safe"] = script(WHERE, flags=("-P",))
CASES["path: no user site, optimised"] = script(
    "import sys; assert False; print(sys.flags, __debug__)", flags=("-s", "-O", "-u")
)
CASES["annotations are evaluated"] = script("x: undefined = 1")
CASES["encoding cookie"] = script(
    "# coding: latin-1\nprint('\xe9', ascii('\xe9'))".encode("latin-1")
)
CASES["byte order mark"] = script("﻿print('é')".encode())
CASES["siblings hide the standard library"] = Case(
    {
        "script.py": "import argparse, queue, random, tomllib, numpy.here\n"
        "for m in argparse, queue, random, tomllib, numpy.here: print(m.__file__)\n"
        "import os, json; print(json.loads('[1]'))",
        "argparse.py": "",
        "queue.py": "",
        "random.py": "",
        "tomllib/__init__.py": "",
        "numpy/__init__.py": "",
        "numpy/here.py": "",
        "json/notes.txt": "a plain directory hides nothing",
        "os.py": "raise RuntimeError('built in: never found here')",
    }
)
CASES["warnings are errors"] = script("print(1)", flags=("-W", "error", "-X", "dev"))

# --- modules, directories, archives --------------------------------------------------------------

MODULE = "import sys; print(__name__, __file__, __package__, __spec__.name, sys.argv, sys.path)\n"
PACKAGE = {
    "pack/__init__.py": "import sys; print('imported with', sys.argv)",
    "pack/__main__.py": MODULE + "from . import part",
    "pack/part.py": "print('part', __name__)",
    "pack/fails.py": "def f(): raise ValueError(1)\nf()",
    "bare/__init__.py": "",
}
CASES["module"] = Case({"mod.py": MODULE}, ("-m", "mod", "--help", "--", "-m"))
CASES["module: package"] = Case(PACKAGE, ("-m", "pack", "x"))
CASES["module: submodule"] = Case(PACKAGE, ("-m", "pack.part"))
CASES["module: error"] = Case(PACKAGE, ("-m", "pack.fails"))
CASES["module: package without main"] = Case(PACKAGE, ("-m", "bare"))
CASES["module: missing"] = Case(PACKAGE, ("-m", "nowhere.to.be.found"))
CASES["module: interrupted"] = Case(
    {"mod.py": "import os, signal; os.kill(os.getpid(), signal.SIGINT)"}, ("-m", "mod")
)
CASES["module: safe path"] = Case({"mod.py": MODULE}, ("-m", "mod"), flags=("-P",))
CASES["directory"] = Case({"job/__main__.py": MODULE + "import part", "job/part.py": ""}, ("job",))
CASES["directory: safe path"] = Case({"job/__main__.py": MODULE}, ("job", "a"), flags=("-P",))
CASES["directory: no main"] = Case({"job/part.py": ""}, ("job",))
CASES["archive"] = Case({"job.zip": MODULE + "import part; print(part.__file__)"}, ("job.zip",))
CASES["bytecode"] = Case({"script.pyc": "import sys; print(__file__, sys.argv)"}, ("script.pyc",))
CASES["relative import"] = Case(
    {"pack/script.py": "from . import part", "pack/part.py": "", "pack/__init__.py": ""},
    ("pack/script.py",),
)

# --- standard input ------------------------------------------------------------------------------

CASES["stdin"] = script("import sys; print(sys.stdin.read().upper()); print(input())", stdin="a\nb")
CASES["stdin: script"] = Case(
    {}, ("-", "a"), stdin="import sys\nprint(sys.argv, __file__, sys.path, sys.stdin.read())\n1/0"
)

# --- how it ends ---------------------------------------------------------------------------------

ENDS = {
    "three": "sys.exit(3)",
    "text": "sys.exit('the reason')",
    "pair": "sys.exit((1, 2))",
    "subclass": "class Bye(SystemExit): pass\nraise Bye(5)",
    "_exit": "os._exit(7)",
    "abort": "os.abort()",
    "sigint": "os.kill(os.getpid(), signal.SIGINT)",
    "sigint caught": "try: os.kill(os.getpid(), 2); time.sleep(9)\n"
    "except KeyboardInterrupt: sys.exit(8)",
    "sigterm handled": "signal.signal(15, lambda *a: sys.exit(9)); os.kill(os.getpid(), 15)",
    "KeyboardInterrupt of many frames": "e = KeyboardInterrupt()\nfor _ in range(2000):\n"
    "    try: raise e\n    except KeyboardInterrupt: pass\nraise e",
    "KeyboardInterrupt subclass": "class K(KeyboardInterrupt): pass\nraise K",
    "execv": "sys.stdout.flush(); os.execv(sys.executable, ['python', '-c', 'exit(11)'])",
    "closed stdout": "print('lost'); os.close(1)",
}
for name, source in ENDS.items():
    CASES[f"end: {name}"] = script(
        "import atexit, os, signal, sys, time\natexit.register(print, 'atexit')\n"
        f"print('main', flush=True)\n{source}\n"
    )

ERRORS = {
    "chained": "def f(): raise ValueError('no')\ntry: f()\n"
    "except ValueError as e: raise RuntimeError('b') from e",
    "group": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])",
    "syntax": "x = = 1",
    "syntax late": "exec('y = (')",
    "import": "import there_is_no_such_module",
    "broken pipe": "raise BrokenPipeError(32, 'x')",
    "ours": "from kilter.core.errors import UsageError\nraise UsageError('2 elsewhere')",
    "excepthook": "import sys\nsys.excepthook = lambda k, v, t: print('hook', k, v, t.tb_lineno,"
    " t.tb_frame.f_code.co_name, v.__traceback__ is t, sys.last_traceback is t)\n1/0",
    "excepthook gone": "import sys\ndel sys.excepthook\nprint('x')",
    "excepthook exits": "import sys\nsys.excepthook = lambda *a: sys.exit(6)\n1/0",
    "excepthook afterwards": "import atexit, sys\nh = lambda *a: print('mine')\n"
    "sys.excepthook = h\natexit.register(lambda: print(sys.excepthook is h))\n1/0",
    "in a thread": "import threading\nt = threading.Thread(target=lambda: 1/0)\n"
    "t.start(); t.join()",
    "in atexit": "import atexit, sys\natexit.register(sys.exit, 3)\n",
    "no argv": "import sys\ndel sys.argv\n1/0",
}
for name, source in ERRORS.items():
    CASES[f"error: {name}"] = script(source)

# --- what needs a lasting __main__ ---------------------------------------------------------------

CASES["pickle"] = script(
    "import pickle, dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\n"
    "def f(): return 1\n"
    "print(pickle.loads(pickle.dumps(P(3))), pickle.loads(pickle.dumps(f))(), P.__module__)"
)
CASES["threads and atexit outlive main"] = script(
    "import atexit, pickle, sys, threading, time\n"
    "class P: pass\n"
    "def late(where):\n"
    "    assert type(pickle.loads(pickle.dumps(P()))) is P\n"
    "    print(where, __name__, sys.modules['__main__'].P is P, threading.current_thread().name)\n"
    "def thread():\n    threading.main_thread().join(); late('thread')\n"
    "atexit.register(late, 'atexit')\n"
    "threading.Thread(target=thread).start()\nprint('main ends')\n"
)
for method in ("spawn", "fork"):
    CASES[f"multiprocessing: {method}"] = script(
        "import multiprocessing, os, sys\n"
        "def work(x):\n    print(__name__, sys.argv, flush=True); return x * factor\n"
        "factor = 2\n"
        "if __name__ == '__main__':\n    factor = 3\n"
        f"    with multiprocessing.get_context('{method}').Pool(1) as pool:\n"
        "        print(pool.map(work, [1, 2]))\n",
        "a",
    )
CASES["multiprocessing: spawn from a module"] = Case(
    {
        "pack/__init__.py": "",
        "pack/job.py": "import multiprocessing\nfrom . import part\n"
        "def work(x): return __name__, __package__, part.two * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(work, [1]))\n",
        "pack/part.py": "two = 2",
    },
    ("-m", "pack.job"),
)
CASES["multiprocessing: no guard"] = script(
    "import multiprocessing as m\nm.set_start_method('spawn')\n"
    "p = m.Process(target=print); p.start(); p.join(); print(p.exitcode)"
)
CASES["fork"] = script(  # Python 3.12 warns of forks beside threads, and ours are there
    "import os, sys, warnings\nwarnings.simplefilter('ignore')\n"
    "sys.stdout.flush()\npid = os.fork()\n"
    "if pid:\n    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    "else:\n    raise SystemExit(5)\n"
)
WITH_TORCH: dict[str, Case] = {}
"""Nothing of how the interpreter starts is looked at."""

WITH_TORCH["fork: after the profiler has run"] = script(
    """
import os, sys, torch, warnings
warnings.simplefilter('ignore')
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for _ in range(30):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
sys.stdout.flush()
if pid := os.fork():
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
else:
    print("the child's own end")
    sys.exit(7)
"""
)
CASES["subprocess"] = script(
    "import subprocess, sys\n"
    "print(subprocess.run([sys.executable, '-c', 'import sys; print(sys.argv); sys.exit(3)'],"
    " capture_output=True))"
)
CASES["unittest"] = script(
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): print('ran')\n"
    "runner = unittest.TextTestRunner(stream=open('/dev/null', 'w'))\n"
    "unittest.main(argv=['x', '-v'], testRunner=runner)"
)
CASES["main is replaced"] = script("import sys\ndel sys.modules['__main__']\nprint(1)")
WITH_TORCH["training"] = script(
    """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), 16, num_workers=1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(2):
    for x, y in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        print(loss.item())
print(torch.rand(1).item())
"""
)


@dataclass(frozen=True)
class End:
    code: int
    stdout: str
    stderr: str


def environment_of(case: Case) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("KILTER", None)
    return environment | case.environment


def start(command: list[str], case: Case, directory: Path) -> End:
    done = subprocess.run(
        [sys.executable, *case.flags, *command],
        cwd=directory,
        env=environment_of(case),
        input=case.stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=900,
    )
    return end_of(done)


def start_warm(warm: WarmPython, command: list[str], case: Case, directory: Path) -> End:
    """As `start`, where it does not matter who has imported torch first. What is left of torch's
    modules at the end there, the bindings of triton 3.9 tell, with addresses."""
    environ = environment_of(case)
    end = end_of(warm.run(command, cwd=directory, environ=environ, timeout_s=900.0))
    return replace(end, stderr=end.stderr.partition("nanobind: leaked")[0])


def end_of(done: subprocess.CompletedProcess[str]) -> End:
    kept = [line for line in done.stderr.splitlines() if not line.startswith("kilter")]
    return End(done.returncode, done.stdout, "\n".join(kept))


def said(end: End) -> list[str]:
    """What all ranks printed; in torch 2.8 gloo does, too."""
    return sorted(line for line in end.stdout.splitlines() if not line.startswith("[Gloo]"))


def write(case: Case, directory: Path) -> None:
    for name, content in case.files.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".zip"):
            assert isinstance(content, str)
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr("__main__.py", content)
                archive.writestr("part.py", "")
        elif name.endswith(".pyc"):
            assert isinstance(content, str)
            source = file.with_suffix(".py")
            source.write_text(content)
            py_compile.compile(str(source), cfile=str(file))
        else:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("name", CASES)
def test_the_script_cannot_tell(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    job = tmp_path / "job"
    job.mkdir()
    write(case, job)
    options = ["--device", "null", "--out", str(tmp_path / "out")]
    governed = start([KILTER, "run", *options, *case.command], case, job)
    assert governed == start([*case.command], case, job)


@pytest.mark.parametrize("name", WITH_TORCH)
def test_a_script_with_torch_cannot_tell(name: str, warm: WarmPython, tmp_path: Path) -> None:
    case = WITH_TORCH[name]
    job = tmp_path / "job"
    job.mkdir()
    write(case, job)
    options = ["--device", "null", "--out", str(tmp_path / "out")]
    governed = start_warm(warm, ["-m", "kilter", "run", *options, *case.command], case, job)
    assert governed == start_warm(warm, [*case.command], case, job)
    assert governed.stdout


@pytest.mark.parametrize("name", ["what it sees", "stdin: script"])
def test_switched_off_it_is_python(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    write(case, tmp_path)
    off = Case(case.files, case.command, case.stdin, environment={"KILTER": "0"})
    (tmp_path / "kilter.toml").write_text("not read = when off")
    governed = start([KILTER, "run", "--device", "null", *case.command], off, tmp_path)
    assert governed == start([*case.command], off, tmp_path)


@pytest.mark.parametrize("name", ["what it sees", "module: interrupted"])
def test_as_a_module_of_python(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    job = tmp_path / "job"
    job.mkdir()
    write(case, job)
    options = ["--device", "null", "--out", str(tmp_path / "out")]
    governed = start(["-m", "kilter", "run", *options, *case.command], case, job)
    assert governed == start([*case.command], case, job)


def test_an_unknown_encoding_is_a_syntax_error(tmp_path: Path) -> None:
    """Not in the table: the compiler words it in another way for a file than for bytes."""
    case = script(b"# coding: nonsense\nprint(1)")
    write(case, tmp_path)
    end = start([KILTER, "run", "--device", "null", "script.py"], case, tmp_path)
    assert (end.code, end.stdout) == (1, "")
    assert "SyntaxError" in end.stderr
    assert "nonsense" in end.stderr


@pytest.mark.parametrize(
    ("number", "command"),
    [
        *((number, ["script.py"]) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGKILL)),
        *((number, ["-m", "script"]) for number in (signal.SIGINT, signal.SIGTERM)),
    ],
)
def test_a_signal_from_outside_ends_it_as_python(
    number: signal.Signals, command: list[str], tmp_path: Path
) -> None:
    case = script("import time\nprint('ready', flush=True)\ntime.sleep(600)")
    write(case, tmp_path)
    codes = []
    for launcher in ([KILTER, "run", "--device", "null", "--out", str(tmp_path / "out")], []):
        process = subprocess.Popen(
            [sys.executable, *launcher, *command],
            cwd=tmp_path,
            env=environment_of(case),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        process.communicate(timeout=900)
        codes.append(process.returncode)
    assert codes[0] == codes[1]


RANKS = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
here = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
line = f"{here} {total.item()} {sys.argv} {__name__} {sys.path[0]} {'KILTER_RUN' in os.environ}\\n"
os.write(1, line.encode())
dist.destroy_process_group()
sys.exit(3 if "fail" in sys.argv and here[0] == "1" else 0)
"""

ALONE = """
import os, sys
here = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
line = f"{here} {sys.argv} {__name__} {sys.path[0]} {'KILTER_RUN' in os.environ}\\n"
os.write(1, line.encode())
sys.exit(3 if "fail" in sys.argv and os.environ["RANK"] == "1" else 0)
"""
"""Ranks that do not talk with each other, and so need no torch."""


@pytest.mark.parametrize(
    ("source", "command"),
    [(RANKS, ["script.py", "--json"]), (ALONE, ["-m", "script", "-m"])],
    ids=["script", "module"],
)
def test_torchrun_options_start_its_workers(
    source: str, command: list[str], warm: WarmPython, tmp_path: Path
) -> None:
    case = script(source)
    write(case, tmp_path)
    torchrun = ["--standalone", "--nproc_per_node", "2"]
    options = ["--device", "null", *torchrun, "--out", str(tmp_path / "out")]
    governed = start_warm(warm, ["-m", "kilter", "run", *options, *command], case, tmp_path)
    plain = ["-m", "torch.distributed.run", *torchrun, *command]
    reference = start_warm(warm, plain, case, tmp_path)
    assert said(governed) == said(reference)
    assert len(said(governed)) == 2
    assert (governed.code, reference.code) == (0, 0)


def test_a_failing_rank_ends_torchrun_as_ever(warm: WarmPython, tmp_path: Path) -> None:
    case = script(ALONE)
    write(case, tmp_path)
    options = ["--device", "null", "--out", str(tmp_path / "out")]
    torchrun = ["--standalone", "--nproc-per-node=2", "script.py", "fail"]
    end = start_warm(warm, ["-m", "kilter", "run", *options, *torchrun], case, tmp_path)
    assert end.code == 1
    assert "script.py FAILED" in end.stderr
    assert "exitcode  : 3" in end.stderr
    assert fence.PACKAGE not in end.stderr


def test_under_somebody_elses_torchrun(warm: WarmPython, tmp_path: Path) -> None:
    case = script(RANKS)
    write(case, tmp_path)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ours = ["-m", "kilter", "run", "--device", "null", "--out", str(tmp_path / "out")]
    end = start_warm(warm, [*torchrun, *ours, "script.py"], case, tmp_path)
    assert end.code == 0
    assert len(said(end)) == 2


def test_switched_off_torchrun_starts_the_script_itself(tmp_path: Path) -> None:
    case = script(ALONE, environment={"KILTER": "0"})
    write(case, tmp_path)
    end = start([KILTER, "run", "--standalone", "--nproc-per-node=2", "script.py"], case, tmp_path)
    assert end.code == 0
    assert len(said(end)) == 2


def test_torch_is_imported_by_nobody_but_the_script(tmp_path: Path) -> None:
    case = script("import sys; print('torch' in sys.modules)")
    write(case, tmp_path)
    options = ["--device", "null", "--out", str(tmp_path / "out")]
    assert start([KILTER, "run", *options, "script.py"], case, tmp_path).stdout == "False\n"


def test_numpy_is_imported_by_nobody_but_the_script(tmp_path: Path) -> None:
    """`os.environ["OPENBLAS_NUM_THREADS"] = "1"` has an effect before the first import only."""
    case = script("import sys; print('numpy' in sys.modules)")
    write(case, tmp_path)
    options = ["--device", "null", "--out", str(tmp_path / "out")]
    assert start([KILTER, "run", *options, "script.py"], case, tmp_path).stdout == "False\n"


ORDER = """
import os, sys
from kilter.connect import launch
from kilter.connect.script import find_program

class Session:
    def __init__(self, options, ranks, voice, children):
        print("made", options.command, ranks)
    def __enter__(self): print("begins")
    def __exit__(self, kind, error, frames): print("ends", kind and kind.__name__, flush=True)

launch.Session = Session
options = launch.Options(
    goal=None, device="null", dry_run=True, out=None, command=("x",), json_summary=False
)
launch.run_governed(find_program(sys.argv[1:]), options, None)
"""


@pytest.mark.parametrize(
    ("last", "ending", "code"),
    [("pass", "None", 0), ("sys.exit(3)", "SystemExit", 3), ("1/0", "ZeroDivisionError", 1)],
)
def test_the_session_ends_before_threads_and_atexit(
    last: str, ending: str, code: int, tmp_path: Path
) -> None:
    source = (
        "import atexit, sys, threading\n"
        "atexit.register(print, 'atexit')\n"
        "def late(): threading.main_thread().join(); print('thread')\n"
        f"threading.Thread(target=late).start()\nprint('main')\n{last}\n"
    )
    case = Case({"script.py": source, "order.py": ORDER})
    write(case, tmp_path)
    end = start(["order.py", "script.py"], case, tmp_path)
    made, *rest = end.stdout.splitlines()
    assert made == "made ('x',) Ranks(rank=0, world_size=1, local_rank=0)"
    assert rest == ["begins", "main", f"ends {ending}", "thread", "atexit"]
    assert end.code == code


def test_a_script_typed_at_a_terminal_is_refused(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    done = subprocess.run(
        [sys.executable, KILTER, "run", "-"],
        cwd=tmp_path,
        env=environment_of(script("")),
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=900,
    )
    os.close(ours)
    os.close(theirs)
    assert (done.returncode, done.stdout) == (2, "")
    assert "terminal" in done.stderr
