"""A program whose signal handler raises in the middle of the profiler's window, once at each line
of ours and of torch's that switch the profiler: `python interrupted_window.py patient|at-once`.

Each line is tried in a fork, in which the exception comes the first time that the line is reached:
every second line, the others in the other way, or all with `KILTER_TEST_ALL_LINES=1`.
Prints a JSON list of `[line, what is wrong afterwards]`; a crash is `ended with -11`.
"""

import json
import os
import sys

import torch
import torch.autograd.profiler as switched
import torch.profiler
from torch import nn

from kilter.observe import profiler_window
from kilter.observe.iteration_clock import IterationClock

TORCH_S = ("profile._prepare_trace", "profile._start_trace", "profile.__exit__")


class Late(Exception):
    pass


class RaisesAtLine:
    """Raises at the `number`-th of the lines reached, each counted once."""

    def __init__(self, number):
        self.number = number
        self.lines = []

    def calls(self, frame, _event, _argument):
        code = frame.f_code
        ours = code.co_filename == profiler_window.__file__
        theirs = code.co_filename == switched.__file__ and code.co_qualname in TORCH_S
        return self.line if ours or theirs else None

    def line(self, frame, event, _argument):
        name = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
        if event == "line" and name not in self.lines:
            self.lines.append(name)
            if len(self.lines) == self.number:
                sys.settrace(None)
                raise Late
        return self.line


def iteration(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def observed(number, patient):
    """The line at which the exception came, or None, and what was wrong afterwards."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    marks = IterationClock(lambda index, t_s: window.iteration_ended(index))
    window = profiler_window.Window(marks, after=2, patient=patient)
    marks.start()
    raises = RaisesAtLine(number)
    sys.settrace(raises.calls)
    for _ in range(8):
        try:
            iteration(model, optimizer)
        except Late:
            torch.set_grad_enabled(True)
    try:
        marks.stop()
        window.close()
    except Late:
        pass
    sys.settrace(None)
    window.close()
    window.trace()
    state = window.state.value
    wrong = [] if state in ("done", "failed") else [f"the window is {state}"]
    if torch.autograd._profiler_enabled() or switched._is_profiler_enabled:
        wrong.append("the profiler is on")
    with torch.profiler.profile() as own:
        torch.ones(2).add(1)
    if "aten::add" not in {event.name for event in own.events()}:
        wrong.append("the program's own profiler sees nothing")
    hooks = torch.nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        wrong.append("there are hooks on all modules")
    if switched.profile._prepare_trace.__module__ != switched.__name__:
        wrong.append("torch.profiler is not as it was")
    return (raises.lines[-1] if len(raises.lines) >= number else None), wrong


def in_a_fork(number, patient):
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        with os.fdopen(writes, "w") as out:
            json.dump(observed(number, patient), out)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as seen:
        said = seen.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(said) if said else (f"line {number}", [f"ended with {code}"])


def main():
    patient = sys.argv[1] == "patient"
    torch.set_num_threads(1)
    model = nn.Linear(4, 4)
    iteration(model, torch.optim.SGD(model.parameters(), lr=0.1))  # imports what is imported late
    found = []
    line = ""
    every = bool(os.environ.get("KILTER_TEST_ALL_LINES"))
    number = 1 if patient or every else 2
    while line is not None:
        line, wrong = in_a_fork(number, patient)
        found.append((line, wrong))
        number += 1 if every else 2
    print(json.dumps(found))


if __name__ == "__main__":
    main()
