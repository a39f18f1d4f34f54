"""Runs small programs under observation and tells what was seen, as JSON.

`python observed.py` runs the program on stdin in a fresh process: torch is not imported before
the program imports it. `python observed.py serve` imports torch once and then runs every program
(a JSON string on one line) in a fork of itself: faster where the import does not matter. A list of
one program is run without being observed. Programs that are observed may use `MARKS` and `WINDOW`.
"""

import importlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable

from kilter.observe import inference_watch
from kilter.observe.iteration_clock import IterationClock
from kilter.observe.profiler_window import Window


def observe(program: str) -> dict[str, object]:
    """Runs it and describes what was seen."""
    if "INFERENCE_AFTER_S" in program:  # it waits for that long
        inference_watch.INFERENCE_AFTER_S = 0.5
    marks = IterationClock(lambda index, t_s: window.iteration_ended(index))
    window = Window(marks, after=3)
    warnings.simplefilter("error")
    window.start()
    marks.start()
    torch_before = "torch" in sys.modules
    exec(compile(program, "program.py", "exec"), {"MARKS": marks, "WINDOW": window})
    marks.stop()
    window.close()
    trace = window.trace()
    iterations = marks.finished()
    return {
        "torch_before": torch_before,
        "torch_after": "torch" in sys.modules,
        "source": marks.source,
        "why_not": marks.why_not,
        "threads": marks.threads,
        "iteration_ends": marks.index + 1,
        "iterations": len(iterations),
        "skipped": [i.index for i in iterations if i.skipped],
        "timelines": sorted({i.timeline for i in iterations}),
        "window": window.state.value,
        "window_why_not": window.why_not,
        "averaged": trace.iterations if trace else None,
        "operations": [
            {"name": o.name, "kind": o.kind.value, "flops": o.flops}
            for o in (trace.operations if trace else ())
        ],
    }


def plain(program: str) -> None:
    """The same program without being observed."""
    exec(compile(program, "program.py", "exec"), {})


def in_a_fork(run: Callable[[str], object], program: str) -> dict[str, object]:
    """Its exit code, and what it wrote on stdout and stderr."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = 1
            try:
                print(json.dumps(run(program)), flush=True)
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return {"code": os.waitstatus_to_exitcode(status), "out": texts[0], "err": texts[1]}


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        for module in ("torch", "torch._dynamo", "torch.utils.flop_counter"):
            importlib.import_module(module)
        for line in sys.stdin:
            asked = json.loads(line)
            run, program = (plain, asked[0]) if isinstance(asked, list) else (observe, asked)
            print(json.dumps(in_a_fork(run, program)), flush=True)
    else:
        print(json.dumps(observe(sys.stdin.read())))
