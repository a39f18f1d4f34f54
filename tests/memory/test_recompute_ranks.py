"""`--recompute` on two ranks: they choose alike, at the same iterations, and nothing stays behind.

Each job runs governed first, until the ranks have chosen, and then plainly for as many iterations.
"""

from __future__ import annotations

import json
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kilter.core.events import Failed, Moved, Refused, read_events
from kilter.testing.warm_python import WarmPython

ROWS, WIDTH = 256, 32
HEAD = """
import atexit, gc, hashlib, json, os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
plain = json.loads(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(32, 32), nn.Linear(32, 32), nn.Dropout(0.1)
    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(x.sin())))).cos()

class Layer(Block):
    gradient_checkpointing = False
    def __call__(self, x):
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(super().__call__, x)
        return super().__call__(x)

class Model(nn.Module):
    supports_gradient_checkpointing = True
    def __init__(self, layer):
        super().__init__()
        self.layers, self.rest = nn.Sequential(*(layer() for _ in range(4))), nn.Linear(32, 32)
        self.register_buffer("seen", torch.zeros(1))
    def forward(self, x):
        return self.rest(self.layers(x))

def flags():
    return [m.gradient_checkpointing for m in net.modules() if isinstance(m, Layer)]

def left():
    names = {"gradient_checkpointing", "_gradient_checkpointing_func"}
    return sum(len(names & set(vars(m))) for m in net.modules())

chosen, seen, digest = [], [], hashlib.sha256()
if plain is None:
    from kilter.memory import iteration_times, rank_agreement, recompute_choice, way_comparison
    stay = recompute_choice.RecomputeChoice._stay
    compared = way_comparison.WayComparison._compared
    def noted(choice, why):
        stay(choice, why)
        chosen.append(choice.words)
    def faster(comparison):
        \"\"\"Where it is this machine's turn to be slow says nothing here.\"\"\"
        operations = recompute_choice.RecomputeWay.OPERATIONS
        return {way: (way is operations) + 1.0 for way in compared(comparison)}
    recompute_choice.RecomputeChoice._stay = noted
    way_comparison.WayComparison._compared = faster
    iteration_times.MEASURED, way_comparison.TURNS = 3, 1
    rank_agreement.LEAD_S = 0.5
layer = Layer
for kind in (Layer, Block, Model):
    kind.__module__ = kind.forward.__module__ = "transformers.models.here"
"""
TAIL = """
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
torch.manual_seed(10 + rank)

def step():
    loss = model(torch.randn(256, 32)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seen.append(flags())
    digest.update(loss.detach().float().numpy().tobytes())

def go_on():
    if plain is not None:
        return len(seen) < plain
    left_over = torch.tensor(float(not chosen or len(seen) < 40))
    dist.all_reduce(left_over)
    return bool(left_over) and len(seen) < 2000

def end():
    digest.update(torch.get_rng_state().numpy().tobytes())
    for tensor in (*net.parameters(), *net.buffers()):
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digest.update(tensor.detach().numpy().tobytes())
    found = {"digest": digest.hexdigest(), "flags": seen, "chosen": chosen}
    with open(f"{'governed' if plain is None else 'plain'}-{rank}", "w") as file:
        json.dump(found, file)
"""
LOOP = """
while go_on():
    step()
end()
dist.barrier()
if plain is not None:
    os._exit(0)  # gloo's threads sometimes abort a process that is done and ends as usual
atexit.register(lambda: open(f"left-{rank}", "w").write(str(left())))
del model
dist.destroy_process_group()
"""
DDP = "net = Model(layer)\nmodel = DistributedDataParallel(net, %s)\n"
FSDP = """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
net = Model(layer)
half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
options = {"mp_policy": half} if %(mixed)s else {}
for each in net.layers:
    if %(nested)s:
        fully_shard(each.up, **options)
        fully_shard(each.down, **options)
    fully_shard(each, **options)
model = fully_shard(net)
"""


def governed(
    warm: WarmPython,
    tmp_path: Path,
    source: str,
    how: str = "auto",
    *,
    codes: tuple[int, ...],
    more: tuple[str, ...] = (),
) -> list[str]:
    """What the ranks write to stderr."""
    (tmp_path / "train.py").write_text(source)
    small = ("--min-bytes", str(ROWS * WIDTH * 2), "--bytes-per-s", "2e5")
    options = ("--memory-budget", "60%", "--recompute", how, "--device", "null", "--out", "run")
    options += more
    command = ("-m", "kilter.testing.stand_in", *small, "run", *options, "train.py", "null")
    ranks = warm.run_ranks(2, command, cwd=tmp_path)
    said = [rank.stderr for rank in ranks]
    assert tuple(rank.returncode for rank in ranks) == codes, "\n".join(said)
    return said


def both(
    warm: WarmPython,
    tmp_path: Path,
    source: str,
    how: str = "auto",
    *,
    failed: tuple[int, int] = (0, 0),
    more: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """What each rank has seen, with the bits of the plain run and as many errors of ours."""
    said = governed(warm, tmp_path, source, how, codes=(0, 0), more=more)
    found = [json.loads((tmp_path / f"governed-{rank}").read_text()) for rank in range(2)]
    iterations = str(len(found[0]["flags"]))
    ranks = warm.run_ranks(2, ("train.py", iterations), cwd=tmp_path)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    for rank in range(2):
        assert len(events(tmp_path, rank, Failed)) == failed[rank], said
        plain = json.loads((tmp_path / f"plain-{rank}").read_text())
        assert found[rank]["digest"] == plain["digest"]
        assert (tmp_path / f"left-{rank}").read_text() == "0"
    return found


def events(tmp_path: Path, rank: int, kind: type) -> list[Any]:
    record = read_events(tmp_path / "run" / f"events-rank{rank}.jsonl")
    return [event for event in record if isinstance(event, kind)]


@pytest.mark.parametrize(
    "wrap",
    [
        DDP % "find_unused_parameters=True",
        DDP % "static_graph=True, gradient_as_bucket_view=True",
        FSDP % {"mixed": False, "nested": False},
        FSDP % {"mixed": True, "nested": True},
    ],
    ids=["ddp", "ddp static", "fsdp2", "fsdp2 mixed and nested"],
)
def test_the_ranks_choose_alike_at_the_same_iterations(
    wrap: str, warm: WarmPython, tmp_path: Path
) -> None:
    one, other = both(warm, tmp_path, HEAD + wrap + TAIL + LOOP)
    assert one["chosen"] == other["chosen"] != []
    assert one["chosen"][0].startswith("the model's own checkpointing is on (Model): ")
    assert one["flags"] == other["flags"]
    turns = one["flags"]
    changes = [a != b for a, b in pairwise(turns)]
    assert sum(changes) == 3  # on, off, and on for good
    assert turns[-1][0]
    moved = [events(tmp_path, rank, Moved)[-1] for rank in range(2)]
    assert all(each.own_checkpointing for each in moved)
    assert all(each.peak_bytes <= each.budget_bytes for each in moved)


@pytest.mark.parametrize(
    "wrap",
    [DDP % "find_unused_parameters=True", FSDP % {"mixed": True, "nested": False}],
    ids=["ddp", "fsdp2"],
)
def test_the_ranks_choose_alike_where_shapes_keep_changing(
    wrap: str, warm: WarmPython, tmp_path: Path
) -> None:
    """Passes have the plan of a larger one, or none, and tensors are offloaded on demand."""
    head = HEAD.replace("iteration_times.MEASURED,", "iteration_times.MIXED,")
    changing = TAIL.replace("torch.randn(256, 32)", "torch.randn(256 + len(seen) * 37 % 1009, 32)")
    one, other = both(warm, tmp_path, head + wrap + changing + LOOP)
    assert one["chosen"] == other["chosen"] != []
    assert one["chosen"][0].startswith("the model's own checkpointing is on (Model): ")
    assert one["chosen"][0].endswith(
        "with tensors recomputed by plans or offloaded on demand [measured]"
    )
    assert one["flags"] == other["flags"]


@pytest.mark.parametrize("still_planned", [True, False], ids=["planned", "not planned on rank 1"])
def test_ranks_begin_with_what_an_earlier_run_of_theirs_chose(
    still_planned: bool, warm: WarmPython, tmp_path: Path
) -> None:
    """Or none of them does, and all compare."""
    history = ("--history", str(tmp_path / "history.sqlite"))
    source = HEAD + DDP % "" + TAIL + LOOP
    governed(warm, tmp_path, source, codes=(0, 0), more=(*history, "--out", "before"))
    if not still_planned:
        source = source.replace("LEAD_S = 0.5", NO_PLAN)
    one, other = both(warm, tmp_path, source, more=history)
    assert one["chosen"] == other["chosen"]
    assert one["flags"] == other["flags"]
    changes = [a != b for a, b in pairwise(one["flags"])]
    (words,) = one["chosen"]
    assert ("an earlier run of this job chose that (" in words) is still_planned
    assert sum(changes) == (1 if still_planned else 5)  # on and off again; on, off, and on for good
    assert one["flags"][-1][0]


def test_ranks_recompute_the_calls_that_an_earlier_run_of_theirs_chose(
    warm: WarmPython, tmp_path: Path
) -> None:
    """Rank 0 tells the other, which searches for none either."""
    history = ("--history", str(tmp_path / "history.sqlite"))
    wrap = DDP % "static_graph=True, gradient_as_bucket_view=True"
    head = HEAD.replace("layer = Layer", "layer = Block")
    source = head + wrap + TAIL + LARGEST_CALLS + LOOP
    governed(warm, tmp_path, source, codes=(0, 0), more=(*history, "--out", "before"))
    assert [(tmp_path / f"searched-{rank}").exists() for rank in range(2)] == [True, True]
    for rank in range(2):
        (tmp_path / f"searched-{rank}").unlink()
    one, other = both(warm, tmp_path, source, more=history)
    assert one["chosen"] == other["chosen"]
    (words,) = one["chosen"]
    assert words.startswith("calls of modules are recomputed where they pay: an earlier run of")
    assert [(tmp_path / f"searched-{rank}").exists() for rank in range(2)] == [False, False]


LARGEST_CALLS = """
if plain is None:
    from kilter.memory.engine import call_choice
    levels = call_choice.levels
    def largest(choices, *_):
        open(f"searched-{rank}", "w").close()
        return levels(choices)[0]
    call_choice.best_set, call_choice.levels = largest, lambda _: []
    call_choice.AS_GOOD = 1e3
    from kilter.memory.host_time import HostTime
    HostTime._measure = lambda *_: None
"""
NO_PLAN = """LEAD_S = 0.5
    turn = recompute_choice.RecomputeChoice._turn
    def first_fails(choice):
        found = turn(choice)
        if found is not None and not fails:
            fails.append(rank)
            return recompute_choice.TurnNote("Model", 1.0, 1, None, "no plan" if rank == 1 else "")
        return found
    fails = []
    recompute_choice.RecomputeChoice._turn = first_fails
"""


ACCIDENT = """
atexit.register(lambda: open(f"left-{rank}", "w").write(str(left())))
while len(seen) < 4000:
    step()
    if any(seen[-1]):
        open(f"on-{rank}", "w").close()
        if %s:
            while not os.path.exists(f"on-{1 - rank}"):  # an accident breaks the other's step
                time.sleep(0.01)
            break
%s
"""


@pytest.mark.parametrize(
    ("where", "what", "codes"),
    [
        ("rank == 1", "raise OSError('the reader of the data failed')", (1, 1)),
        ("rank == 1", "os.kill(os.getpid(), signal.SIGKILL)", (1, -signal.SIGKILL)),
        ("rank == 0", "os.kill(os.getpid(), signal.SIGKILL)", (-signal.SIGKILL, 1)),
        ("True", "signal.raise_signal(signal.SIGINT)", (-signal.SIGINT, -signal.SIGINT)),
    ],
    ids=["a rank fails", "a rank is killed", "rank 0 is killed", "ctrl-c"],
)
def test_after_an_accident_no_model_is_left_with_checkpointing_on(
    where: str, what: str, codes: tuple[int, int], warm: WarmPython, tmp_path: Path
) -> None:
    source = HEAD + DDP % "" + TAIL + ACCIDENT % (where, what)
    governed(warm, tmp_path, source, codes=codes)
    for rank in range(2):
        assert (tmp_path / f"on-{rank}").exists()
        killed = codes[rank] == -signal.SIGKILL
        assert killed or (tmp_path / f"left-{rank}").read_text() == "0"


BROKEN = """
def broken(choice, settled):
    raise ArithmeticError("an error of ours")

def go_on():
    if plain is not None:
        return len(seen) < plain
    on = sum(map(any, seen))
    if on == 2 and rank == 1:
        recompute_choice.RecomputeChoice.iteration_ended = broken
    return on < 60 and len(seen) < 600
"""


def test_where_one_rank_has_stepped_aside_the_others_stay_as_they_are(
    warm: WarmPython, tmp_path: Path
) -> None:
    """Blocks of all ranks go on being run a second time, which may take collectives."""
    source = HEAD + DDP % "" + TAIL + BROKEN + LOOP
    one, other = both(warm, tmp_path, source, failed=(0, 1))
    assert one["flags"] == other["flags"]
    assert sum(map(any, one["flags"])) == 60
    (*_, moved) = events(tmp_path, 0, Moved)
    assert moved.recompute_choice == (
        "the model's own checkpointing is on (Model): not all ranks came to the end of a turn"
    )


SEGMENTS = """
def go_on():
    if plain is None and len(seen) == 39:
        from kilter.memory.engine import Swapper
        engines = [each for each in gc.get_objects() if type(each) is Swapper]
        chosen.extend(each.recomputes_calls for each in engines)
    return len(seen) < 40
"""


@pytest.mark.parametrize(
    ("wrap", "recomputed"),
    [
        (DDP % "static_graph=True, gradient_as_bucket_view=True", True),
        (FSDP % {"mixed": False, "nested": False}, False),
    ],
    ids=["ddp", "fsdp2"],
)
def test_calls_of_modules(wrap: str, recomputed: bool, warm: WarmPython, tmp_path: Path) -> None:
    """Those that read sharded weights, whose memory is freed in between, are left alone."""
    source = HEAD.replace("layer = Layer", "layer = Block") + wrap + TAIL + SEGMENTS + LOOP
    found = both(warm, tmp_path, source, "segments")
    assert [each["chosen"] for each in found] == [[recomputed]] * 2
    refused = {each.code for each in events(tmp_path, 0, Refused)}
    assert refused == set() if recomputed else {"recipe_reads_sharded_weights"}
