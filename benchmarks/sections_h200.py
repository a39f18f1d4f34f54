"""Communication sections of unchanged programs on two GPUs: what is found, what finding it costs,
and how far the commands of a dry run are from the real edges.

    KILTER_READ_ONLY=1 python benchmarks/sections_h200.py --out DIR --budget-s 330
        [--rows tp_nvlink,fsdp2_nvlink,infer_nvlink,pp_nvlink,ddp_sockets]

One JSON object per row in DIR/rows.jsonl and a short line on stdout, as soon as a row is known; the
edges of a row are read while the next one runs, and follow as a row of their own. Everything that
helps to understand a failure is in DIR/ROW/. Nothing is ever set on a device.

probe        the marker alone, in one process: is it written in the order of the stream, and when
NAME is ddp, fsdp2, tp (tensor parallel), infer (the same, in inference mode) or pp (1F1B, two
stages of unequal length).

NAME_nvlink  `plain`, whose own profiler records five iterations in the end (DIR/ROW/plain), and
             then `governed`
NAME_sockets `governed` over NCCL's sockets (about 5.2 GB/s)

`governed` is the same program under `kilter run --sections --dry-run`, with these changes:

- Cost. Between two windows all that kilter does in the program's process (hooks, thread, sensors)
  is left out in every second block of iterations, in pairs of random order, the same on all ranks.
  What kilter costs is the ratio of the two blocks of a pair, so that drift of the host does not
  count. The conductor, a process of its own, goes on in both. The window is counted apart.
- Edges. After that, windows of 50 iterations are recorded while the commands go on, and kept. Every
  edge in them is held against the command that was written down for it.
- Switches take 0.5 ms, and any number of calls is allowed, so that every program has commands; DDP
  over sockets has the GPU's own profile. A GPU without a profile has that of an H200.

Losses, parameters and numbers of collectives are compared after the first iterations.
Without GPUs the programs run on gloo, to test this script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

SOURCE = Path(__file__).resolve().parents[1] / "src"
FAST_SWITCH_S = 0.5e-3
TRACED = 5
"""Iterations that the plain program records with a profiler of its own."""
BEGINS = 10
"""Iterations of a window, beside all of which its edges are told once more."""
BLOCK = 6
"""Iterations with kilter, or without; the first one is not counted."""
PLAIN_S = 45.0
END_S = 8.0
SMALL_TIMES = 4.0
"""As long, where the model is small: that machine is slow."""
BESIDE_S = 30.0
"""For the last edges to be read."""
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}

PROGRAM = """
import hashlib, json, os, sys, time, types
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F

kind, steps, width, layers, batch, length, out = sys.argv[1], *map(int, sys.argv[2:7]), sys.argv[7]
checked, traced = int(os.environ["CHECKED"]), int(os.environ["TRACED"])
vocabulary = 32000 if torch.cuda.is_available() else 64
rank, cuda = int(os.environ["RANK"]), torch.cuda.is_available()
with open(f"{out}/rank{rank}.pid", "w") as file:
    file.write(str(os.getpid()))
head = 64 if cuda else 16
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = False


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x):
        x = self.tokens(x) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def stage_forward(self, x):
    with torch.autocast(device.type, torch.bfloat16):
        x = self.tokens(x) if self.places is None else self.tokens(x) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


torch.manual_seed(0)
with device:
    model = Gpt()
if kind == "ddp":
    trained = nn.parallel.DistributedDataParallel(model)
elif kind == "fsdp2":
    from torch.distributed.fsdp import fully_shard
    for block in model.blocks:
        fully_shard(block)
    trained = fully_shard(model)
elif kind == "pp":
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    early = layers // 2 - 1  # the second stage has more layers, and the head
    if rank == 0:
        model.blocks, model.norm, model.head = model.blocks[:early], nn.Identity(), nn.Identity()
    else:
        model.blocks, model.tokens, model.places = model.blocks[early:], nn.Identity(), None
    model.forward = types.MethodType(stage_forward, model)
    trained = model
    stage = PipelineStage(model, rank, dist.get_world_size(), device)
    pipeline = Schedule1F1B(stage, batch, loss_fn=lambda y, t: F.cross_entropy(
        y.flatten(0, 1).float(), t.flatten()))
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from torch.distributed.tensor.parallel import parallelize_module
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, {
            **{name: ColwiseParallel() for name in ("q", "k", "v", "up")},
            **{name: RowwiseParallel() for name in ("o", "down")},
        })
    trained = model
sharded = [p for p in trained.parameters() if hasattr(p, "to_local")]
whole = [p for p in trained.parameters() if not hasattr(p, "to_local")]
groups = [{"params": each} for each in (sharded, whole) if each]
optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=cuda) if kind != "infer" else None
generator = torch.Generator(device).manual_seed(7 if kind in ("tp", "pp", "infer") else rank)
losses, ends, host = [], [], [time.perf_counter()]


def note():
    if cuda:
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()


def told():
    digest = hashlib.sha256()
    for p in trained.parameters():
        local = p.to_local() if hasattr(p, "to_local") else p
        digest.update(local.detach().cpu().numpy().tobytes())
    collectives = {}
    for group, name in dist.distributed_c10d._world.pg_names.items():
        try:
            collectives[name] = group._get_sequence_number_for_group()
        except RuntimeError as error:
            collectives[name] = str(error)[:80]
    return {
        "losses": [each.item().hex() for each in losses],
        "parameters": digest.hexdigest(), "collectives": collectives,
    }


def profiler():
    found = torch.profiler.profile()
    found.start()
    return found


note()
profiled = None
for step in range(steps):
    if step == steps - traced:
        profiled = profiler()
    x = torch.randint(vocabulary, (batch, length), device=device, generator=generator)
    if kind == "infer":
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16):
            loss = trained(x).float().mean()
    elif kind == "pp":
        optimizer.zero_grad()
        if rank == 0:
            pipeline.step(x)
            loss = torch.zeros((), device=device)
        else:
            parts = []
            pipeline.step(target=x.roll(-1, 1), losses=parts)
            loss = torch.stack(parts).mean()
        optimizer.step()
    else:
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(trained(x).flatten(0, 1), x.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    losses.append(loss.detach())
    note()
    host.append(time.perf_counter())
    if profiled is not None:
        profiled.step()
    if step + 1 == checked:
        at_check = told()
if profiled is not None:
    profiled.stop()
    profiled.export_chrome_trace(f"{out}/trace-rank{rank}.json.gz")
if cuda:
    torch.cuda.synchronize()
times = [a.elapsed_time(b) * 1e-3 for a, b in zip(ends, ends[1:])] if cuda else [
    b - a for a, b in zip(host, host[1:])]
with open(f"{out}/rank{rank}.json", "w") as file:
    json.dump({
        "times_s": times, "host_s": [b - a for a, b in zip(host, host[1:])], **at_check,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
    }, file)
dist.barrier()
dist.destroy_process_group()
"""

GOVERNED = """
import sys
import governed_changes
from kilter.app.cli.main import main
sys.exit(main())
"""

GOVERNED_CHANGES = '''
"""Blocks without kilter, long windows whose traces are kept, and a card with fast switches."""
import os, shutil, sys
import msgspec
from kilter.clocks import inside_controller, section_card, section_controller, section_windows
from kilter.core.errors import FileError
from kilter.core.rank_trace import IterationMarks
from kilter.observe.iteration_clock import IterationClock
from kilter.observe.sampler import Sampler
from kilter.session.live import LiveRun
from sections_h200 import Share, is_on

keep, share = os.environ["EDGES_KEEP"], msgspec.json.decode(os.environ["SHARE"], type=Share)
section_windows.CHECK_ITERATIONS = 5
section_windows.WINDOW_SHARE = 1e9
section_controller.WINDOW_FAILURES = 10**6
reader_of, card_of, begun = section_windows._reader, section_card.card_of, [0]
due, profile_of = section_windows.SectionWindows.due, inside_controller.profile_of


def step():
    return vars(sys.modules["__main__"]).get("step", -1)


def left_out(owner, name, instead):
    original = getattr(owner, name)
    def changed(self, *args):
        return original(self, *args) if is_on(step(), share) else instead(self)
    setattr(owner, name, changed)


for owner, name in (
    (IterationClock, "_stepped"), (IterationClock, "_module_returned"), (LiveRun, "_tick")
):
    left_out(owner, name, lambda self: None)
left_out(Sampler, "poll", lambda self: self.record.latest)


def due_later(self, run):
    early = begun[0] > 0 and step() < share.edges_from
    return due(self, run) and not early and begun[0] <= share.windows


def reader(seen, run, marked_s):
    original = reader_of(seen, run, marked_s)
    marks = IterationMarks(
        annotated_s=seen.ends_s, marked_s={n: marked_s[n] for n in seen.ends_s if n in marked_s})

    def read(path):
        begun[0] += 1
        name = f"{keep}/window{begun[0]}-rank{run.ranks.rank}"
        shutil.copyfile(path, name + ".json")
        with open(name + ".marks.json", "wb") as file:
            file.write(msgspec.json.encode(marks))
        section_windows.GPU_WINDOW_ITERATIONS = section_windows.WINDOW_ITERATIONS = share.window
        if begun[0] == 1:
            return original(path)
        raise FileError("kept, and read when all is over")

    return read


def card(profile, **options):
    if not share.switch_s:
        return card_of(profile, **options)
    found = card_of(profile, **{**options, "switch_s": share.switch_s})
    return msgspec.structs.replace(found, calls_per_s=1e6)


section_windows._reader, section_card.card_of = reader, card
section_windows.SectionWindows.due = due_later
inside_controller.profile_of = lambda card: profile_of(card) or "h200"
'''

PROBE = '''
import json, os, sys, time, traceback
import torch
from kilter.observe.cuda_driver import CudaDriver
from kilter.observe.marker import Marker, MarkerReader
from kilter.observe.stream_marker import StreamMarker

found = {"torch": torch.__version__, "cuda": torch.version.cuda}
device = torch.device("cuda", 0)
x = torch.ones(1 << 20, device=device)
torch.cuda.synchronize()


def attempt(name, function):
    try:
        found[name] = function()
    except BaseException as error:
        found[name] = {"error": repr(error), "traceback": traceback.format_exc()}


def marks(fill):
    """Ten marks behind 20 ms of work each, given all at once, and when they were seen."""
    page, driver = Marker(), CudaDriver()
    if fill:
        driver.writes_values = lambda: False
    begin = time.perf_counter()
    on_gpu = StreamMarker(page, driver, torch.cuda)
    on_gpu.mark(0, device)
    first_s = time.perf_counter() - begin
    torch.cuda.synchronize()
    reader, looks, ends = MarkerReader(page.file.number), [], []
    begin, spent = time.monotonic(), []
    for i in range(1, 11):
        torch.cuda._sleep(40_000_000)
        t = time.perf_counter()
        on_gpu.mark(i, device)
        spent.append(time.perf_counter() - t)
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
    given_s = time.monotonic() - begin
    while page.last < 10 and time.monotonic() < begin + 20:
        passed = reader.look()
        if passed is not None:
            looks.append((passed.iteration, passed.t_s - begin, passed.within_s))
        time.sleep(0.0001)
    passed = reader.look()
    if passed is not None:
        looks.append((passed.iteration, passed.t_s - begin, passed.within_s))
    torch.cuda.synchronize()
    by_event = [ends[0].elapsed_time(e) for e in ends]
    by_marker = [(t - looks[0][1]) * 1e3 for _, t, _ in looks] if looks else []
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000)
        on_gpu.mark(11, device)
    side.synchronize()
    time.sleep(0.01)
    on_side_stream = page.last
    captured = None
    graph, y = torch.cuda.CUDAGraph(), torch.ones(4, device=device)
    with torch.cuda.graph(graph):
        y += 1
        on_gpu.mark(12, device)
    graph.replay()
    torch.cuda.synchronize()
    captured = page.last
    on_gpu.close()
    (torch.ones(8, device=device) * 2).sum().item()
    return {
        "registered_and_first_mark_ms": first_s * 1e3, "mark_us": [s * 1e6 for s in spent],
        "given_after_ms": given_s * 1e3, "looks": looks,
        "marker_ms": by_marker, "event_ms": by_event,
        "writes_values": not on_gpu._fills, "on_side_stream": on_side_stream, "captured": captured,
        "unregistered": on_gpu._there is None,
    }


def in_trace():
    """What of a mark stands in a trace of the profiler, and on which streams."""
    from torch.profiler import ProfilerActivity, profile
    page, driver = Marker(), CudaDriver()
    on_gpu = StreamMarker(page, driver, torch.cuda)
    on_gpu.mark(0, device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        for i in range(3):
            (x * 2).sum()
            on_gpu.mark(i + 1, device)
        torch.cuda.synchronize()
    p.export_chrome_trace("/tmp/kilter-probe.json")
    with open("/tmp/kilter-probe.json") as file:
        content = json.load(file)
    os.unlink("/tmp/kilter-probe.json")
    on_gpu.close()
    events = [e for e in content["traceEvents"] if e.get("ph") == "X"]
    kinds = ("cuda_runtime", "cuda_driver", "kernel", "gpu_memset")
    names = [(e.get("cat"), e["name"][:60], e.get("tid"), e.get("args", {}).get("stream"))
             for e in events if e.get("cat") in kinds]
    host = [e.get("tid") for e in events if e.get("cat") == "cpu_op"]
    return {"events": names, "tids_of_cpu_ops": sorted(set(map(str, host))),
            "base_ns": content.get("baseTimeNanoseconds"), "now_ns": time.time_ns(),
            "first_ts": events[0]["ts"]}


attempt("write", lambda: marks(False))
attempt("fill", lambda: marks(True))
attempt("in_trace", in_trace)
print(json.dumps(found))
'''


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What a row's iterations are for."""

    checked: int = 60
    """Iterations after which losses, parameters and numbers of collectives are compared."""
    cost_from: int = 80
    pairs: int = 0
    """Of blocks with kilter and without."""
    edges_from: int = 40
    windows: int = 0
    """Long ones, for edges."""
    window: int = 50
    switch_s: float = FAST_SWITCH_S
    limit_s: float = 90.0

    @property
    def iterations(self) -> int:
        return self.edges_from + self.windows * (self.window + 20) + 20


def share_of(kind: str, network: str, *, small: bool) -> Share:
    if small:
        return Share(checked=20, cost_from=45, pairs=2, edges_from=70, windows=2, window=8)
    if network == "sockets":
        own = 0.0 if kind == "ddp" else FAST_SWITCH_S
        return Share(checked=20, edges_from=30, windows=4, switch_s=own, limit_s=150.0)
    if kind == "pp":
        return Share(edges_from=80, windows=1)
    begin, pairs = (200, 10) if kind == "infer" else (80, 16)
    return Share(cost_from=begin, pairs=pairs, edges_from=begin + 2 * BLOCK * pairs, windows=4)


def is_on(step: int, share: Share) -> bool:
    """Whether kilter works in this iteration of the program."""
    pair, place = divmod(step - share.cost_from, 2 * BLOCK)
    if not 0 <= pair < share.pairs:
        return True
    return (place < BLOCK) == (random.Random(pair).random() < 0.5)


def environment(sockets: bool, folder: Path) -> dict[str, str]:
    """Of every child; nothing may be set on a device."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("KILTER")}
    paths = [str(SOURCE), str(Path(__file__).resolve().parent), kept.get("PYTHONPATH", "")]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        **(SOCKETS if sockets else {}),
        "KILTER_READ_ONLY": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TMPDIR": str(folder),
    }


def child(
    command: list[str], environ: dict[str, str], folder: Path, name: str, limit_s: float
) -> dict[str, Any]:
    """Run, keep its output in the folder; a child that hangs is ended with all its processes."""
    begin = time.monotonic()
    out, err = folder / f"{name}.stdout", folder / f"{name}.stderr"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            command, stdout=stdout, stderr=stderr, env=environ, cwd=folder, start_new_session=True
        )
        try:
            rc: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            rc = f"ended after {limit_s:.0f} s"
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            # torchrun's ranks have process groups of their own.
            for rank in folder.glob(f"{name}/rank?.pid"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(rank.read_text()), signal.SIGKILL)
            process.kill()
            process.wait()
    lines = err.read_text(errors="replace").splitlines()
    said = [line for line in lines if line.startswith("kilter")]
    found: dict[str, Any] = {"rc": rc, "took_s": round(time.monotonic() - begin, 1), "said": said}
    if rc != 0:
        ours = [line for line in lines if "elastic" not in line and "torch/nn/modules" not in line]
        found["stderr"] = [line[:300] for line in ours[:70]]
    return found


class Row:
    """One program on one network."""

    def __init__(self, name: str, args: argparse.Namespace, folder: Path, by_s: float) -> None:
        self.kind, self.network = name.split("_")
        self.folder = folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.program = self.folder / f"train_{self.kind}.py"
        self.program.write_text(PROGRAM)
        self.args = args
        self.by_s = by_s
        self.share = share_of(self.kind, self.network, small=args.small)
        self.found: dict[str, Any] = {"row": name}

    @property
    def sizes(self) -> list[str]:
        """Width, layers, batch, length. Wide where the cost counts, so that the GPU is the slower
        one and not the host, whose times vary."""
        if self.args.small:
            return ["64", "2", "2", "64"]
        wide = {"tp": ["2048", "4", "16", "1024"], "fsdp2": ["2048", "4", "8", "1024"]}
        return {"ddp": ["1152", "12", "8", "1024"], **wide}.get(
            self.kind, ["1024", "12", "8", "1024"]
        )

    def start(self, how: str) -> dict[str, Any]:
        """One run of the program: `plain` or `governed`."""
        folder, share = self.folder / how, self.share
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        governed = how == "governed"
        iterations = share.iterations if governed else share.checked + TRACED + 1
        environ = environment(self.network == "sockets", self.folder)
        environ |= {"CHECKED": str(share.checked), "TRACED": str(0 if governed else TRACED)}
        program = [str(self.program), self.kind, str(iterations), *self.sizes, str(folder)]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2"]
        left_s = self.by_s - time.monotonic()
        own_s = (share.limit_s if governed else PLAIN_S) * (SMALL_TIMES if self.args.small else 1.0)
        limit_s = max(1.0, min(own_s, left_s))
        if governed:
            wrapper = self.folder / "governed_run.py"
            wrapper.write_text(GOVERNED)
            wrapper.with_name("governed_changes.py").write_text(GOVERNED_CHANGES)
            environ["EDGES_KEEP"] = str(folder)
            environ["SHARE"] = msgspec.json.encode(share).decode()
            kilter = ["run", "--sections", "--dry-run", "--out", str(folder / "run")]
            if self.args.device:
                kilter += ["--device", self.args.device]
            command += [str(wrapper), *kilter, *program]
        else:
            command += program
        found = child(command, environ, self.folder, how, limit_s)
        found["ranks"] = [json.loads(p.read_text()) for p in sorted(folder.glob("rank?.json"))]
        return found

    def measure(self) -> None:
        alone = self.args.no_plain or self.network == "sockets"
        hows = ["governed"] if alone else ["plain", "governed"]
        ranks = {}
        for how in hows:
            run = self.found[how] = self.start(how)
            ranks[how] = run.pop("ranks")
            run["iteration_s"] = [median(rank["times_s"][25:]) for rank in ranks[how]]
            run["host_iteration_s"] = [median(rank["host_s"][25:]) for rank in ranks[how]]
            run["peak_bytes"] = [rank["peak_bytes"] for rank in ranks[how]]
        governed = ranks["governed"]
        if all(ranks.values()) and len(hows) == 2:
            for name in ("losses", "parameters", "collectives"):
                same = [r[name] for r in ranks["plain"]] == [r[name] for r in governed]
                self.found[f"same_{name}"] = same
            self.found["collectives"] = [r["collectives"] for r in governed]
            self.found["window_s"] = [
                beyond(g, self.share.checked) - beyond(p, self.share.checked)
                for p, g in zip(ranks["plain"], governed, strict=True)
            ]
        if self.share.pairs:
            self.found["cost"] = [cost(rank["times_s"], self.share) for rank in governed]
        self.found["times_ms"] = [[round(s * 1e3, 3) for s in r["times_s"]] for r in governed]
        self.found["report"] = report_of(self.folder / "governed" / "run")


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def beyond(rank: dict[str, Any], last: int) -> float:
    """What the iterations up to `last` take more than the usual time, where one takes half as long
    again: that of the profiler's window."""
    times = rank["times_s"]
    usual = statistics.median(times[25:])
    return sum(s - usual for s in times[8:last] if s > 1.5 * usual)


def cost(times_s: list[float], share: Share) -> dict[str, Any]:
    """Of kilter between two windows: in percent of the iteration, with an interval of 95 %. What
    disturbs a host makes iterations longer: the lowest tenth has least of that."""
    means, medians, pairs = [], [], []
    for pair in range(share.pairs):
        begin = share.cost_from + 2 * BLOCK * pair
        halves = [times_s[b + 1 : b + BLOCK] for b in (begin, begin + BLOCK)]
        if not is_on(begin, share):
            halves.reverse()
        on, off = halves
        pairs.append(halves)
        means.append(math.log(statistics.fmean(on) / statistics.fmean(off)) * 100)
        medians.append(math.log(statistics.median(on) / statistics.median(off)) * 100)
    return {
        "pairs": share.pairs,
        "by_means_percent": interval(means),
        "by_medians_percent": interval(medians),
        "by_lowest_tenths_percent": lowest_tenths(pairs),
    }


def lowest_tenths(pairs: list[list[list[float]]]) -> dict[str, float]:
    """The interval by drawing pairs anew."""
    draw = random.Random(0)

    def ratio(chosen: list[list[list[float]]]) -> float:
        on, off = (sorted(s for pair in chosen for s in pair[half]) for half in (0, 1))
        place = len(on) // 10
        return (on[place] / off[place] - 1) * 100

    drawn = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(2000))
    return {"ratio": ratio(pairs), "from": drawn[50], "to": drawn[-51]}


def interval(values: list[float]) -> dict[str, float]:
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return {"mean": mean, "from": mean - half, "to": mean + half}


def report_of(run: Path) -> dict[str, Any]:
    """The answer, the costs and the refusals of a run, and statistics of its commands."""
    found: dict[str, Any] = {}
    try:
        report = json.loads((run / "report.json").read_text())
        found = {"sections": report.get("sections"), "refused": report.get("refused")}
    except (OSError, ValueError) as error:
        found["error"] = repr(error)
    for path in sorted(run.glob("*.jsonl")):
        if path.name.startswith("commands"):
            found[path.name] = commands_of(path)
        elif path.name.startswith("edges"):
            found[path.name] = len(path.read_text().splitlines())
        else:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[path.name] = [
                e for e in lines if e["event"] in ("refused", "failed", "sectioned")
            ]
    found["files"] = sorted(p.name for p in run.glob("*"))
    return found


def commands_of(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    sent = [line for line in lines if line["state"] != "left out"]
    return {
        "count": len(lines),
        "states": Counter(f"{c['edge']}: {c['state']} {c['why']}".strip() for c in lines),
        "iterations": [min(c["iteration"] for c in sent), max(c["iteration"] for c in sent)]
        if sent
        else [],
        "keys": Counter(f"{c['edge']} {c['key']}" for c in sent).most_common(12),
        "late_ms": spread([c["late_s"] for c in sent]),
    }


def spread(values: list[float]) -> dict[str, Any]:
    """Of signed seconds, in ms."""
    if not values:
        return {"n": 0}
    ordered, sizes = sorted(values), sorted(abs(v) for v in values)
    at = [ordered[int(share * (len(ordered) - 1))] for share in (0.0, 0.05, 0.5, 0.95, 1.0)]
    return {
        "n": len(values),
        "size_p50_ms": round(sizes[len(sizes) // 2] * 1e3, 4),
        "size_p95_ms": round(sizes[int(0.95 * (len(sizes) - 1))] * 1e3, 4),
        "signed_0_5_50_95_100_ms": [round(v * 1e3, 4) for v in at],
        "within_5_ms": sum(v <= 0.005 for v in sizes) / len(sizes),
    }


def edges_of(folder: Path, gloo: bool) -> list[dict[str, Any]]:
    """Of both ranks. In a process of its own."""
    os.nice(10)
    sys.path.insert(0, str(SOURCE))
    return [attempted(rank_errors, folder, rank, gloo) for rank in range(2)]


def rank_errors(folder: Path, rank: int, gloo: bool) -> dict[str, Any]:
    """Every command of one rank in the long windows against the edge that it was for."""
    from kilter.clocks.plan.sections import places
    from kilter.clocks.plan.timing import Commanded, edges
    from kilter.core.rank_trace import IterationMarks
    from kilter.observe.host_timeline import read_host_rank
    from kilter.observe.rank_traces import KernelTable, read_rank

    found: dict[str, Any] = {"files": sorted(p.name for p in folder.glob("*"))}
    real, numbers, lengths = {}, set(), []
    places_in_window: dict[int, int] = {}
    for path in sorted(folder.glob(f"window*-rank{rank}.json")):
        if path.name.startswith("window1-"):
            continue
        marks = msgspec.json.decode(
            path.with_suffix(".marks.json").read_bytes(), type=IterationMarks
        )
        if gloo:
            trace = read_host_rank(path, marks.annotated_s, rank=rank)
        else:
            trace = read_rank(path, table=KernelTable(), otherwise=rank, marks=marks)
        real |= {(e.iteration, e.edge, e.key): e for e in edges(places(trace))}
        numbers |= {w.number for w in trace.iterations}
        places_in_window |= {w.number: n for n, w in enumerate(trace.iterations)}
        lengths += [w.end_s - w.begin_s for w in trace.iterations]
    found["window_iterations"] = len(numbers)
    found["window_iteration_s"] = median(lengths)
    found["real_edges"] = Counter(f"{edge} {key}" for _, edge, key in real).most_common(12)
    log = folder / "run" / f"commands-rank{rank}.jsonl"
    # There is none where no section of this rank has commands.
    lines = log.read_bytes().rpartition(b"\n")[0].splitlines() if log.exists() else []
    commands = [msgspec.json.decode(line, type=Commanded) for line in lines]
    pairs = [
        (c, real[c.iteration, c.edge, c.key])
        for c in commands
        if c.state != "left out" and (c.iteration, c.edge, c.key) in real
    ]
    found["commands_in_window"] = sum(c.iteration in numbers for c in commands)
    found["left_out_in_window"] = Counter(
        c.why for c in commands if c.iteration in numbers and c.state == "left out"
    )
    found["error"] = spread([c.edge_s - e.t_s for c, e in pairs])
    for edge in ("down", "up"):
        found[f"error_{edge}"] = spread([c.edge_s - e.t_s for c, e in pairs if c.edge == edge])
    # The profiler delays the first iterations of each of its windows.
    off = {(c.iteration, c.edge, c.key): c.edge_s - e.t_s for c, e in pairs}
    found["beyond_5_ms_by_place"] = sorted(
        Counter(
            places_in_window[each[0]] for each, off_s in off.items() if abs(off_s) > 0.005
        ).items()
    )
    found["error_from_the_tenth_on"] = spread(
        [off_s for each, off_s in off.items() if places_in_window[each[0]] >= BEGINS]
    )
    # The marker of the iteration itself: as the conductor saw it, against the trace.
    found["marker"] = spread(
        [
            c.marker_s - e.marker_s
            for c, e in pairs
            if c.marker_s is not None
            and e.marker_s is not None
            and abs(c.marker_s - e.marker_s) < 0.5 * (median(lengths) or 0.0)
        ]
    )
    by_key: dict[str, list[float]] = {}
    for c, e in pairs:
        by_key.setdefault(f"{c.edge} {c.key}", []).append(c.edge_s - e.t_s)
    found["by_key"] = {key: spread(off) for key, off in by_key.items()}
    return found


def attempted(function: Any, *arguments: Any) -> Any:
    """A failure is part of the result."""
    try:
        return function(*arguments)
    except Exception:  # a benchmark tells what went wrong, and goes on
        return {"error": traceback.format_exc().splitlines()[-12:]}


def probe(folder: Path) -> dict[str, Any]:
    here = folder / "probe"
    here.mkdir(parents=True, exist_ok=True)
    (here / "probe.py").write_text(PROBE)
    command = [sys.executable, str(here / "probe.py")]
    found = child(command, environment(False, here), here, "probe", PLAIN_S)
    try:
        found["found"] = json.loads((here / "probe.stdout").read_text().splitlines()[-1])
    except (IndexError, ValueError) as error:
        found["error"] = repr(error)
    driver = shutil.which("nvidia-smi")
    if driver:
        query = "--query-gpu=name,driver_version,clocks.sm,persistence_mode"
        asked = subprocess.run([driver, query, "--format=csv"], capture_output=True, timeout=30)
        found["gpus"] = asked.stdout.decode().splitlines()
    return {"row": "probe", **found}


def tell(row: dict[str, Any]) -> None:
    """A few short lines."""
    print(f"== {row['row']}, after {row['after_s']} s", flush=True)
    for how in ("plain", "governed"):
        if how in row:
            run = row[how]
            times = [round(s * 1e3, 2) for s in run.get("iteration_s", []) if s is not None]
            print(f"   {how}: exit {run['rc']}, {run['took_s']} s, {times} ms/iteration")
            for line in [*run["said"], *run.get("stderr", [])[:40]]:
                print(f"      {line[:220]}")
    for key in ("same_losses", "same_parameters", "same_collectives", "cost", "window_s"):
        if key in row:
            print(f"   {key}: {json.dumps(row[key])}")
    for rank, errors in enumerate(row.get("edges", [])):
        names = ("window_iterations", "error", "error_down", "error_up", "marker")
        shown = {name: errors[name] for name in names if name in errors}
        print(f"   edges of rank {rank}: {json.dumps(shown or errors)[:2000]}")
    for key in ("found", "error"):
        if row.get(key):
            print(f"   {key}: {json.dumps(row[key])[:6000]}")
    sys.stdout.flush()


class Book:
    """Rows as they become known; the edges of earlier rows are read meanwhile."""

    def __init__(self, out: Path, pool: ProcessPoolExecutor) -> None:
        self._path, self._pool = out / "rows.jsonl", pool
        self._begin_s = time.monotonic()
        self._reading: dict[str, Future[list[dict[str, Any]]]] = {}

    def add(self, row: dict[str, Any]) -> None:
        row["after_s"] = round(time.monotonic() - self._begin_s, 1)
        with self._path.open("a") as lines:
            print(json.dumps(row), file=lines)
        attempted(tell, row)

    def read_edges(self, name: str, folder: Path, gloo: bool) -> None:
        self._reading[name] = self._pool.submit(edges_of, folder, gloo)

    def look(self, wait_s: float = 0.0) -> None:
        by_s = time.monotonic() + wait_s
        while any(time.monotonic() < by_s and not f.done() for f in self._reading.values()):
            time.sleep(0.2)
        for name in [name for name, future in self._reading.items() if future.done()]:
            self.add({"row": f"{name}, edges", "edges": self._reading.pop(name).result()})


def keep_small(folder: Path, out: Path) -> None:
    """All but the windows of the profiler."""
    for path in folder.glob("*/governed/window*-rank?.json"):
        path.unlink()
    ignored = shutil.ignore_patterns("kilter-*", "torchelastic*", "*.py", "tmp*", "__pycache__")
    shutil.copytree(folder, out, dirs_exist_ok=True, ignore=ignored)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    everything = "tp_nvlink,fsdp2_nvlink,infer_nvlink,pp_nvlink,ddp_sockets"
    parser.add_argument("--rows", default=everything)
    parser.add_argument("--budget-s", type=float, default=3600.0, help="for all rows together")
    parser.add_argument("--no-plain", action="store_true", help="edges and cost alone")
    parser.add_argument("--device", default="", help="instead of the GPU that is there")
    parser.add_argument("--small", action="store_true", help="a tiny model, to test this script")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic()
    pool = ProcessPoolExecutor(max_workers=4)
    with tempfile.TemporaryDirectory(prefix="sections-") as directory:
        folder, book = Path(directory), Book(args.out, pool)
        for name in args.rows.split(","):
            if name == "probe":
                book.add(probe(folder))
                continue
            row = Row(name, args, folder, begin_s + args.budget_s)
            if failed := attempted(row.measure):
                row.found |= failed
            book.add(row.found)
            if row.share.windows:
                book.read_edges(name, folder / name / "governed", args.small)
            book.look()
        book.look(BESIDE_S)
        keep_small(folder, args.out)
    print(f"{time.monotonic() - begin_s:.0f} s; everything is in {args.out}", flush=True)
    pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    main()
