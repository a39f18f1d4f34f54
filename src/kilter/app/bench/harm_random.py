"""`kilter bench harm --programs N`: random training programs, plain and under kilter.

A program is drawn from its seed alone. A worker runs a batch of programs one after the other, each
inside `kilter.govern` or plainly; the CPU stands in for a GPU, with a link so slow that tensors are
recomputed. What a program prints, and how it ends, has to be the same. A worker that dies is
followed by another one, which begins behind the program that it died of. Workers are forked from a
Python that has imported torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import textwrap
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from kilter.app.bench import harm_snippets as pieces
from kilter.app.bench.harm import HARM_SCHEMA, RECOMPUTE_VARIABLE, record_of
from kilter.app.cli.output import print_json
from kilter.core.label import Label
from kilter.lease.journal import STATE_VARIABLE
from kilter.testing.warm_python import WarmPython

BATCH = 25
"""One process runs so many programs."""
BATCH_S = 400.0
ENVIRON = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
MIN_BYTES = 256
CHOICE_STEPS, CHOICE_MEASURED = 60, 2
"""With `--recompute auto` a program has so many iterations, and so many of each way are measured,
so that one is chosen before the program ends."""
LINKS: tuple[tuple[float, bool], ...] = ((1e4, False), (1e5, True), (1e6, False), (1e12, True))
"""Each has the speed of the link in bytes per second, and whether the CPU's memory counts as a
GPU's, so that gradients, optimizer state and weights move too. Program number `s` runs in way
`s % 4`."""


# Drawing a program ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Budget:
    """How a program is governed."""

    bytes_per_s: float
    as_card: bool
    share: str
    gradients: str
    weights: str


def budget_of(seed: int) -> Budget:
    draw = random.Random(f"budget {seed}")
    bytes_per_s, as_card = LINKS[seed % len(LINKS)]
    share = draw.choice(("15%" if as_card else "80%", "40%", "50%", "60%"))
    weights = "offload" if as_card and seed // len(LINKS) % 2 else "keep"
    return Budget(bytes_per_s, as_card, share, draw.choice(("auto", "auto", "keep")), weights)


def source_of(seed: int, recompute: str = "operations") -> str:
    """The program of a seed, complete and runnable by itself."""
    draw = random.Random(seed)
    steps = 30 if budget_of(seed).as_card else 18
    if recompute == "auto":
        steps = CHOICE_STEPS
    names = [draw.choice(list(pieces.LAYERS)) for _ in range(draw.randint(3, 7))]
    order = [draw.randrange(len(names)) for _ in range(draw.randint(0, 3))]
    mode = draw.choice(("one", "one", "two", "in backward", "closure", "groups"))
    parts = [
        pieces.HEADER.format(seed=seed, width=draw.choice((8, 16)), steps=steps),
        *(_block(number, name) for number, name in enumerate(names)),
        _net(len(names), order),
        pieces.HELPERS,
        _optimizers(draw, mode),
        _loop(draw, mode),
    ]
    return "\n".join(parts)


def _block(number: int, name: str) -> str:
    more, result = pieces.LAYERS[name]
    lines = [
        f"\nclass Block{number}(Block):  # {name}",
        "    def __init__(self):",
        f"        super().__init__({number})",
        *([f"        {more}"] if more else []),
        "",
        "    def forward(self, x):",
        f"        return {result}",
    ]
    return "\n".join(lines) + "\n"


def _net(blocks: int, again: Sequence[int]) -> str:
    made = ", ".join(f"Block{number}()" for number in range(blocks))
    order = [*range(blocks), *again]
    return f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([{made}])

    def forward(self, x):
        for number in {order}:
            x = self.blocks[number](x).clamp(-3, 3)
        return x.float().flatten(1).mean(1)
"""


def _optimizers(draw: random.Random, mode: str) -> str:
    first, second = draw.choice(pieces.OPTIMIZER_SOURCES), draw.choice(pieces.OPTIMIZER_SOURCES)
    if mode == "two":
        made = f"""[{first.replace("PARAMETERS", "each[::2]")},
            {second.replace("PARAMETERS", "each[1::2]")}]"""
    elif mode == "groups":
        groups = "[{'params': each[::2]}, {'params': each[1::2], 'lr': 1e-4}]"
        made = f"[{first.replace('PARAMETERS', groups)}]"
    elif mode == "in backward":
        made = f"[{first.replace('PARAMETERS', '[p]')} for p in each]"
    elif mode == "closure":
        made = "[torch.optim.LBFGS(each, lr=1e-2, max_iter=2)]"
    else:
        made = f"[{first.replace('PARAMETERS', 'each')}]"
    hooks = """
    for p, o in zip(each, made):
        def step_now(p, o=o):
            o.step()
            o.zero_grad()
        p.register_post_accumulate_grad_hook(step_now)"""
    return f"""
def make_optimizers(model):
    each = list(model.parameters())
    made = {made}{hooks if mode == "in backward" else ""}
    return made


def groups():
    return [g for o in optimizers for g in o.param_groups]


def zero():
    for o in optimizers:
        o.zero_grad(set_to_none={draw.random() < 0.8})
"""


def _loop(draw: random.Random, mode: str) -> str:
    """From the first line of the main code to the last."""

    def some(texts: Sequence[str], most: int) -> list[str]:
        chosen = draw.sample(texts, draw.randint(0, most))
        return [text.replace("{n}", str(draw.randint(1, 4))) for text in chosen]

    middle = some(pieces.AFTER_FORWARD, 3)
    if draw.random() < 0.3:
        middle += some(pieces.RAISES, 1)
    step = "optimizer.step()"
    if mode == "closure":
        step = "optimizer.step(lambda: closure(x))"
    elif mode == "in backward":
        step = "pass"
    inside = [
        "parameters = [p for p in model.parameters() if p.requires_grad]",
        "small = [p for p in parameters if p.dim() == 1]",
        "means = [p.detach().clone() for p in model.parameters()] if step == 0 else means",
        f"x = torch.randn({draw.choice((8, 16, 24))}, T, W)",
        *some(pieces.BEFORE_FORWARD, 2),
        "loss = model(x).square().mean()",
        *middle,
        "loss.backward()",
        "print(step, bits(loss))",
        *some(pieces.AFTER_BACKWARD, 2),
        f"for optimizer in optimizers:\n    {step}",
        *some(pieces.AFTER_STEP, 2),
        "zero()",
    ]
    ends = some(pieces.END, 1) if draw.random() < 0.4 else []
    return "\n".join(
        (
            "\ndef closure(x):\n    zero()\n    loss = model(x).square().mean()",
            "    loss.backward()\n    return loss\n\n",
            "signal.signal(signal.SIGALRM, alarm)",
            "threads, from_threads = [], []",
            "model = Net()\noptimizers = make_optimizers(model)",
            *some(pieces.SETUP, 2),
            "try:",
            "    for step in range(STEPS):",
            "        try:",
            *(textwrap.indent(text, " " * 12) for text in inside),
            "        except Exception as error:",
            "            print(step, 'raised', kind(error))",
            "            zero()",
            "        finally:",
            "            if SEEN:",
            "                print(SEEN)",
            "                SEEN.clear()",
            "finally:",
            "    gc.enable()",
            "    for handle in HANDLES:",
            "        handle.remove()",
            "for thread in threads:",
            "    thread.join()",
            "print(bits(*model.parameters()), sorted(from_threads), bits(torch.rand(1)))",
            "state = [s[name] for o in optimizers for s in o.state.values() for name in s]",
            "print(bits(*(t for t in state if torch.is_tensor(t))))",
            *ends,
        )
    )


# Running programs, in a worker ------------------------------------------------------------------


def worker(words: Sequence[str]) -> None:
    """`plain|governed DIRECTORY SEED...`: one line of JSON on `DIRECTORY/results` per program.

    All programs of a worker are run in the same way.
    """
    faulthandler.enable()
    how, place, *seeds = words
    if how == "governed":
        from kilter.memory import iteration_times
        from kilter.testing.stand_in import prepare

        budget = budget_of(int(seeds[0]))
        prepare(bytes_per_s=budget.bytes_per_s, min_bytes=MIN_BYTES, as_card=budget.as_card)
        vars(iteration_times)["MEASURED"] = CHOICE_MEASURED
    _import_and_freeze()
    results = Path(place, "results")
    for seed in map(int, seeds):
        out = Path(place, f"out-{seed}")
        printed = _run_program(seed, out if how == "governed" else None)
        with results.open("a") as file:
            errors, moved = record_of(out)
            counts = (0, 0) if moved is None else (moved.planned, moved.recomputed)
            file.write(json.dumps([seed, printed, errors, *counts]) + "\n")


def _import_and_freeze() -> None:
    """Let collections of garbage, of which programs ask for many, leave out what is imported."""
    module = types.ModuleType("imports")
    exec(pieces.HEADER.format(seed=0, width=8, steps=1), module.__dict__)
    gc.collect()
    gc.freeze()


def _run_program(seed: int, out: Path | None) -> str:
    """What it prints, with its end in the last line."""
    import kilter

    name, recompute = f"random_program_{seed}", os.environ[RECOMPUTE_VARIABLE]
    module = types.ModuleType(name)
    sys.modules[name] = module
    code = compile(source_of(seed, recompute), f"{name}.py", "exec")
    printed = io.StringIO()
    governed: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if out is not None:
        budget = budget_of(seed)
        governed = kilter.govern(
            memory_budget=budget.share,
            gradients=budget.gradients,
            weights=budget.weights,
            recompute=recompute,
            device="null",
            out=out,
            history="off",
        )
    try:
        with contextlib.redirect_stdout(printed), governed:
            exec(code, module.__dict__)
        end = "finished"
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # all that a program may end with
        end = f"{type(error).__name__}: {error}"
    del sys.modules[name]
    module.__dict__.clear()
    gc.collect()
    return f"{printed.getvalue()}{end}\n"


# Comparing --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """What a worker tells of one program; `printed` is None if the worker died of it."""

    printed: str | None
    errors: tuple[str, ...] = ()
    planned: int = 0
    recomputed: int = 0
    death: str = ""


@dataclass(frozen=True, slots=True)
class Compared:
    """One program, plain and governed."""

    seed: int
    difference: str
    """It is empty if there is none."""
    planned: bool
    recomputed: bool
    unnamed: bool
    """They are equal, but for `_MAKER` in a message."""


def run_batch(how: str, seeds: Sequence[int], warm: WarmPython) -> dict[int, ProgramResult]:
    """In as few processes as survive."""
    found: dict[int, ProgramResult] = {}
    left = list(seeds)
    while left:
        with tempfile.TemporaryDirectory(prefix="harm-") as place:
            death = _run_worker(how, Path(place), left, warm)
            for seed, printed, errors, planned, recomputed in _results(Path(place)):
                found[seed] = ProgramResult(printed, tuple(errors), planned, recomputed)
        left = [seed for seed in left if seed not in found]
        if left:
            found[left.pop(0)] = ProgramResult(None, death=death)
    return found


def _run_worker(how: str, place: Path, seeds: Sequence[int], warm: WarmPython) -> str:
    """How it died, if it did."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KILTER")}
    environ[RECOMPUTE_VARIABLE] = os.environ.get(RECOMPUTE_VARIABLE, "operations")
    environ |= {**ENVIRON, STATE_VARIABLE: str(place)}
    command = ["-m", __name__, how, str(place), *map(str, seeds)]
    log = place / "log"
    with open(os.devnull, "rb") as nothing, log.open("wb") as file:
        streams = (nothing, file, file)
        process = warm.start(command, cwd=Path.cwd(), environ=environ, streams=streams)
        try:
            code = process.wait(BATCH_S).returncode
        except subprocess.TimeoutExpired:
            return f"hung, or {len(seeds)} programs took more than {BATCH_S:g} s"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line]
    lines = [line for line in lines if not line.startswith("kilter")]
    return f"exit code {code}: {' / '.join(lines[:6])}" if code else ""


def _results(place: Path) -> Iterator[tuple[int, str, list[str], int, int]]:
    results = place / "results"
    if results.exists():
        for line in results.read_text().splitlines():
            yield json.loads(line)


_MAKER = re.compile(r", which is output 0 of \w+,(?= is at version)")
"""It is found in autograd's error about a change in place. Where a view was changed in place, the
node that made the saved tensor is hidden within another one, and hooks cannot tell its name."""


def compare(seeds: Sequence[int], warm: WarmPython) -> list[Compared]:
    plain, governed = run_batch("plain", seeds, warm), run_batch("governed", seeds, warm)
    return [_compared(seed, plain[seed], governed[seed]) for seed in seeds]


def _compared(seed: int, plain: ProgramResult, governed: ProgramResult) -> Compared:
    difference, unnamed = _difference(plain, governed), False
    if difference and plain.printed is not None and governed.printed is not None:
        rest = _difference(
            replace(plain, printed=_MAKER.sub("", plain.printed)),
            replace(governed, printed=_MAKER.sub("", governed.printed)),
        )
        if not rest:
            difference, unnamed = "", True
    return Compared(seed, difference, governed.planned > 0, governed.recomputed > 0, unnamed)


def _difference(plain: ProgramResult, governed: ProgramResult) -> str:
    if plain.printed is None:
        return f"the plain program died: {plain.death}"
    if governed.printed is None:
        return f"died: {governed.death}"
    pairs = zip(plain.printed.splitlines(), governed.printed.splitlines(), strict=False)
    for number, (left, right) in enumerate(pairs, start=1):
        if left != right:
            return f"line {number} of its output: {left[:200]!r} became {right[:200]!r}"
    if plain.printed != governed.printed:
        return "its output has another length"
    return f"an error of kilter: {governed.errors[0]}" if governed.errors else ""


# The verb ---------------------------------------------------------------------------------------


def run(count: int, first: int, *, jobs: int, as_json: bool) -> int:
    """Programs `first` to `first + count - 1`; what differs is printed with its source."""
    seeds = range(first, first + count)
    batches = []
    for way in range(len(LINKS)):
        alike = [seed for seed in seeds if seed % len(LINKS) == way]
        batches += [alike[i : i + BATCH] for i in range(0, len(alike), BATCH)]
    found: list[Compared] = []
    with WarmPython(os.environ | ENVIRON) as warm, ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(compare, batch, warm) for batch in batches]):
            found += done.result()
            differ = [program.seed for program in found if program.difference]
            told = f"{len(found)} of {count} programs: {len(differ)} differ"
            if differ:
                told += f" (seed{'s' * (len(differ) > 1)} {', '.join(map(str, differ[:20]))})"
            print(told, file=sys.stderr, flush=True)
    found.sort(key=lambda program: program.seed)
    wrong = [program for program in found if program.difference]
    if as_json:
        _print_json(found)
    else:
        print(_as_text(found))
    return int(bool(wrong))


def _print_json(found: Sequence[Compared]) -> None:
    rows = [
        {"seed": program.seed, "difference": program.difference}
        for program in found
        if program.difference
    ]
    summary = {
        "n": len(found),
        "differ": len(rows),
        "planned": sum(program.planned for program in found),
        "recomputed": sum(program.recomputed for program in found),
        "unnamed": sum(program.unnamed for program in found),
    }
    print_json(HARM_SCHEMA, Label.SIMULATED, {"rows": rows, "summary": summary})


def _as_text(found: Sequence[Compared]) -> str:
    wrong = [program for program in found if program.difference]
    recompute = os.environ[RECOMPUTE_VARIABLE]
    lines = []
    if len(wrong) == 1:
        lines += [source_of(wrong[0].seed, recompute), ""]
    lines += [
        f"seed {program.seed}: {program.difference}\n"
        f"    again, with its source: kilter bench harm --programs 1 --seed {program.seed} "
        f"--recompute {recompute}"
        for program in wrong
    ]
    planned = sum(program.planned for program in found)
    recomputed = sum(program.recomputed for program in found)
    unnamed = [str(program.seed) for program in found if program.unnamed]
    if unnamed:
        lines.append(
            "Autograd's error about a change in place does not name the operation that made the "
            f"tensor, and else they are equal: seeds {', '.join(unnamed)}."
        )
    lines.append(
        f"{len(found)} random programs, {planned} of them under a memory plan and {recomputed} "
        f"with recomputed tensors: {len(wrong)} differ."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    worker(sys.argv[1:])
