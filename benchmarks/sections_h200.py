"""Communication sections of unchanged programs on two GPUs: what is found, what finding it costs,
and how far the commands of a dry run are from the real edges.

    KILTER_READ_ONLY=1 python benchmarks/sections_h200.py --out DIR
        [--rows probe,ddp_nvlink,fsdp2_nvlink,tp_nvlink,ddp_sockets,fsdp2_sockets,tp_sockets]

One JSON object per row in DIR/rows.jsonl, a short line each on stdout, and everything that helps to
understand a failure in DIR/ROW/. Nothing is ever set on a device.

probe        the marker alone, in one process: is it written in the order of the stream, and when
NAME is ddp, fsdp2, tp (tensor parallel), infer (the same, forward only) or pp (1F1B, two stages of
unequal length).

NAME_nvlink  the program plain, under `kilter run --sections --dry-run`, and plain again
NAME_sockets the same over NCCL's sockets (about 5.2 GB/s); all but ddp have the edges run alone

Real edges come from a run of their own (`edges`) of the same program: after the first window of the
profiler, from which the commands are planned, a second one of 50 iterations is recorded while the
commands go on, and kept. Only these two things are changed in it. Its trace is read when all is
over, and every edge in it is held against the command that was written down for that edge. So that
FSDP2 and tensor parallel programs have commands at all, their edges run plans with a switch of
0.5 ms and any number of calls; that of DDP plans with the GPU's own profile.

Without GPUs the programs run on gloo, to test this script.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

EDGES_WINDOW = 50
FAST_SWITCH_S = 0.5e-3
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
CHILD_S = 170
LAST_ITERATIONS = 60
"""Of the plain run at the end."""

PROGRAM = """
import hashlib, json, os, sys, time, types
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F

kind, steps, width, layers, batch, length, out = sys.argv[1], *map(int, sys.argv[2:7]), sys.argv[7]
vocabulary = 32000 if torch.cuda.is_available() else 64
rank, cuda = int(os.environ["RANK"]), torch.cuda.is_available()
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


note()
for step in range(steps):
    x = torch.randint(vocabulary, (batch, length), device=device, generator=generator)
    if kind == "infer":
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
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
losses = [each.item().hex() for each in losses]
digest = hashlib.sha256()
for p in trained.parameters():
    local = p.to_local() if hasattr(p, "to_local") else p
    digest.update(local.detach().cpu().numpy().tobytes())
times = [a.elapsed_time(b) * 1e-3 for a, b in zip(ends, ends[1:])] if cuda else [
    b - a for a, b in zip(host, host[1:])]
collectives = {}
for group, name in dist.distributed_c10d._world.pg_names.items():
    try:
        collectives[name] = group._get_sequence_number_for_group()
    except RuntimeError as error:
        collectives[name] = str(error)[:80]
with open(f"{out}/rank{rank}.json", "w") as file:
    json.dump({
        "times_s": times, "host_s": [b - a for a, b in zip(host, host[1:])], "losses": losses,
        "parameters": digest.hexdigest(), "collectives": collectives,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
    }, file)
dist.barrier()
dist.destroy_process_group()
"""

EDGES_RUN = """
import sys
import edges_changes
from kilter.app.cli.main import main
sys.exit(main())
"""

EDGES_CHANGES = '''
"""A long second window whose trace is kept, and a card with fast switches."""
import os, shutil
import msgspec
from kilter.clocks import section_card, section_windows
from kilter.core.errors import FileError
from kilter.core.rank_trace import IterationMarks

keep, window = os.environ["EDGES_KEEP"], int(os.environ["EDGES_WINDOW"])
switch_s = float(os.environ["EDGES_SWITCH_S"])
section_windows.CHECK_ITERATIONS = 25
section_windows.WINDOW_SHARE = 1e9
reader_of, card_of, begun = section_windows._reader, section_card.card_of, [0]


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
        section_windows.GPU_WINDOW_ITERATIONS = section_windows.WINDOW_ITERATIONS = window
        if begun[0] == 1:
            return original(path)
        section_windows.CHECK_ITERATIONS = 10**6
        raise FileError("kept, and read when all is over")

    return read


def card(profile, **options):
    if not switch_s:
        return card_of(profile, **options)
    found = card_of(profile, **{**options, "switch_s": switch_s})
    return msgspec.structs.replace(found, calls_per_s=1e6)


section_windows._reader, section_card.card_of = reader, card
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


def environment(sockets: bool, folder: Path) -> dict[str, str]:
    """Of every child; nothing may be set on a device."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("KILTER")}
    paths = [str(Path(__file__).resolve().parents[1] / "src"), kept.get("PYTHONPATH", "")]
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


def child(command: list[str], environ: dict[str, str], folder: Path, name: str) -> dict[str, Any]:
    """Run, keep its output in the folder; a child that hangs is ended with all its processes."""
    begin = time.monotonic()
    out, err = folder / f"{name}.stdout", folder / f"{name}.stderr"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            command, stdout=stdout, stderr=stderr, env=environ, cwd=folder, start_new_session=True
        )
        try:
            rc: int | str = process.wait(CHILD_S)
        except subprocess.TimeoutExpired:
            rc = f"killed after {CHILD_S} s"
            os.killpg(process.pid, signal.SIGKILL)
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

    def __init__(self, name: str, args: argparse.Namespace, folder: Path) -> None:
        self.name = name
        self.kind, self.network = name.split("_")
        self.folder = folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.program = self.folder / f"train_{self.kind}.py"
        self.program.write_text(PROGRAM)
        self.args = args
        self.found: dict[str, Any] = {"row": name}

    @property
    def sizes(self) -> list[str]:
        """Width, layers, batch, length."""
        if self.args.small:
            return ["64", "2", "2", "64"]
        if self.kind == "ddp":
            return ["1152", "12", "8", "1024"]
        return ["1024", "12", "8", "1024"]

    def start(self, how: str, iterations: int) -> dict[str, Any]:
        """One run of the program: `plain`, `governed`, `edges` or `last`."""
        folder = self.folder / how
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        environ = environment(self.network == "sockets", self.folder)
        program = [str(self.program), self.kind, str(iterations), *self.sizes, str(folder)]
        ranks = ["--standalone", "--nproc-per-node", "2"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *ranks]
        kilter = ["run", "--sections", "--dry-run", "--out", str(folder / "run")]
        if self.args.device:
            kilter += ["--device", self.args.device]
        if how == "governed":
            command = [sys.executable, "-m", "kilter", *kilter, *ranks, *program]
        elif how == "edges":
            wrapper = self.folder / "edges_run.py"
            wrapper.write_text(EDGES_RUN)
            wrapper.with_name("edges_changes.py").write_text(EDGES_CHANGES)
            environ["EDGES_KEEP"], environ["EDGES_WINDOW"] = str(folder), str(EDGES_WINDOW)
            own = self.kind == "ddp" and not self.args.small
            environ["EDGES_SWITCH_S"] = "0" if own else str(FAST_SWITCH_S)
            command = [*torchrun, str(wrapper), *kilter, *program]
        else:
            command = [*torchrun, *program]
        found = child(command, environ, self.folder, how)
        ranks_found = [json.loads(p.read_text()) for p in sorted(folder.glob("rank?.json"))]
        found["ranks"] = ranks_found
        return found

    def compare(self) -> None:
        """Plain, governed and plain again."""
        n = self.args.iterations
        runs = {"plain": self.start("plain", n), "governed": self.start("governed", n)}
        runs["last"] = self.start("last", min(n, LAST_ITERATIONS))
        for how, run in runs.items():
            ranks = run.pop("ranks")
            self.found[how] = run
            run["iteration_s"] = [median(rank["times_s"][25:]) for rank in ranks]
            run["host_iteration_s"] = [median(rank["host_s"][25:]) for rank in ranks]
            run["collectives"] = [rank["collectives"] for rank in ranks]
            run["_ranks"] = ranks
        plain, governed, last = (runs[how].pop("_ranks") for how in ("plain", "governed", "last"))
        self.found["same_losses"] = bool(plain) and [r["losses"] for r in plain] == [
            r["losses"] for r in governed
        ]
        self.found["same_parameters"] = bool(plain) and [r["parameters"] for r in plain] == [
            r["parameters"] for r in governed
        ]
        self.found["same_losses_of_both_plain_runs"] = bool(plain) and [
            r["losses"][: len(s["losses"])] for r, s in zip(plain, last, strict=False)
        ] == [r["losses"] for r in last]
        self.found["same_collectives"] = bool(plain) and [r["collectives"] for r in plain] == [
            r["collectives"] for r in governed
        ]
        self.found["peak_bytes"] = [
            [r["peak_bytes"] for r in each] for each in (plain, governed, last)
        ]
        if plain and governed and last:
            self.found["cost"] = cost(plain, governed, last)
            for r, rank in enumerate(governed):
                self.found.setdefault("governed_times_ms", []).append(
                    [round(s * 1e3, 2) for s in rank["times_s"]]
                )
                self.found.setdefault("plain_times_ms", []).append(
                    [round(s * 1e3, 2) for s in plain[r]["times_s"]]
                )
        self.found["report"] = report_of(self.folder / "governed" / "run")

    def edges(self) -> None:
        """Commands of a dry run against the edges of a long window at the same time."""
        n = self.args.edge_iterations or (150 if self.network == "sockets" else 320)
        run = self.start("edges", n)
        ranks = run.pop("ranks")
        run["iteration_s"] = [median(rank["times_s"][25:]) for rank in ranks]
        run["report"] = report_of(self.folder / "edges" / "run")
        folder, gloo = self.folder / "edges", self.args.small
        run["errors"] = [attempted(rank_errors, folder, r, gloo) for r in range(2)]
        self.found["edges"] = run


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def cost(plain: list[Any], governed: list[Any], last: list[Any]) -> list[dict[str, Any]]:
    """Of each rank. An iteration counts as disturbed if it takes half as long again as the median;
    what it takes beyond the median is the cost of windows."""
    found = []
    for p, g, q in zip(plain, governed, last, strict=True):
        skip = 25
        usual = statistics.median(p["times_s"][skip:])
        later = statistics.median(q["times_s"][skip:])
        calm = statistics.median(g["times_s"][skip:])
        beyond = sum(max(0.0, s - calm) for s in g["times_s"][8:] if s > 1.5 * calm)
        beyond -= sum(max(0.0, s - usual) for s in p["times_s"][8:] if s > 1.5 * usual)
        base = (usual + later) / 2
        total_p, total_g = sum(p["times_s"][8:]), sum(g["times_s"][8:])
        found.append(
            {
                "plain_s": usual,
                "plain_last_s": later,
                "governed_s": calm,
                "steady_percent": (calm / base - 1) * 100,
                "drift_of_plain_percent": (later / usual - 1) * 100,
                "windows_s": beyond,
                "whole_run_percent": (total_g / total_p - 1) * 100,
                "half_percent_from_s": max(0.0, beyond) / 0.005,
            }
        )
    return found


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
            kinds = ("Refused", "Failed")
            found[path.name] = [e for e in lines if e.get("type") in kinds]
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


def rank_errors(folder: Path, rank: int, gloo: bool) -> dict[str, Any]:
    """Every command of one rank against the edge that it was for."""
    import msgspec

    from kilter.clocks.plan.sections import places
    from kilter.clocks.plan.timing import Commanded, edges
    from kilter.core.rank_trace import IterationMarks
    from kilter.observe.host_timeline import read_host_rank
    from kilter.observe.rank_traces import KernelTable, read_rank

    found: dict[str, Any] = {"files": sorted(p.name for p in folder.glob("*"))}
    for number in (1, 2):
        path = folder / f"window{number}-rank{rank}.json"
        if path.exists():
            found[f"window{number}_bytes"] = path.stat().st_size
    path = folder / f"window2-rank{rank}.json"
    marks = msgspec.json.decode(path.with_suffix(".marks.json").read_bytes(), type=IterationMarks)
    if gloo:
        trace = read_host_rank(path, marks.annotated_s, rank=rank)
    else:
        trace = read_rank(path, table=KernelTable(), otherwise=rank, marks=marks)
    lengths = [w.end_s - w.begin_s for w in trace.iterations]
    found["window_iterations"] = len(trace.iterations)
    found["window_iteration_s"] = median(lengths)
    ahead = [
        trace.origin_s + w.begin_s - marks.marked_s[w.number]
        for w in trace.iterations
        if w.number in marks.marked_s
    ]
    found["gpu_behind_host_ms"] = spread(ahead)
    real = {(e.iteration, e.edge, e.key): e for e in edges(places(trace))}
    found["real_edges"] = Counter(f"{edge} {key}" for _, edge, key in real).most_common(12)
    log = folder / "run" / f"commands-rank{rank}.jsonl"
    commands = [msgspec.json.decode(line, type=Commanded) for line in log.read_bytes().splitlines()]
    pairs = [
        (c, real[c.iteration, c.edge, c.key])
        for c in commands
        if c.state != "left out" and (c.iteration, c.edge, c.key) in real
    ]
    numbers = {w.number for w in trace.iterations}
    found["commands_in_window"] = sum(c.iteration in numbers for c in commands)
    found["left_out_in_window"] = Counter(
        c.why for c in commands if c.iteration in numbers and c.state == "left out"
    )
    found["error"] = spread([c.edge_s - e.t_s for c, e in pairs])
    for edge in ("down", "up"):
        found[f"error_{edge}"] = spread([c.edge_s - e.t_s for c, e in pairs if c.edge == edge])
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
    found["worst"] = [
        msgspec.to_builtins({"command": c, "real": e})
        for c, e in sorted(pairs, key=lambda pair: -abs(pair[0].edge_s - pair[1].t_s))[:5]
    ]
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
    found = child([sys.executable, str(here / "probe.py")], environment(False, here), here, "probe")
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


def measure(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if name == "probe":
        return probe(folder)
    row = Row(name, args, folder)
    if row.network == "nvlink" or row.kind == "ddp":
        row.found["compared"] = attempted(row.compare)
    if row.network == "sockets":
        row.found["edges_run"] = attempted(row.edges)
    return row.found


def keep_small(folder: Path) -> None:
    """The first windows' traces are kept packed; the long ones are dropped when they were read."""
    for path in folder.glob("*/edges/window*-rank*.json"):
        if path.name.endswith(".marks.json"):
            continue
        if path.name.startswith("window1"):
            with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb", 6) as packed:
                shutil.copyfileobj(plain, packed)
        path.unlink()


def tell(row: dict[str, Any]) -> None:
    """A short line."""
    print(f"== {row['row']}", flush=True)
    for how in ("plain", "governed", "last", "edges"):
        if how in row:
            run = row[how]
            times = [round(s * 1e3, 2) for s in run["iteration_s"] if s is not None]
            print(f"   {how}: exit {run['rc']}, {run['took_s']} s, {times} ms/iteration")
            for line in [*run["said"], *run.get("stderr", [])[:40]]:
                print(f"      {line[:220]}")
    for key in ("same_losses", "same_parameters", "same_collectives", "cost"):
        if key in row:
            print(f"   {key}: {json.dumps(row[key])}")
    for r, errors in enumerate(row.get("edges", {}).get("errors", [])):
        shown = {k: errors.get(k) for k in ("error", "error_down", "error_up", "marker")}
        print(f"   edges of rank {r}: {json.dumps(shown)}")
    for key in ("found", "error", "compared", "edges_run"):
        if row.get(key):
            print(f"   {key}: {json.dumps(row[key])[:6000]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    everything = "probe,ddp_nvlink,fsdp2_nvlink,tp_nvlink,ddp_sockets,fsdp2_sockets,tp_sockets"
    parser.add_argument("--rows", default=everything)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--edge-iterations", type=int, default=0)
    parser.add_argument("--device", default="", help="instead of the GPU that is there")
    parser.add_argument("--small", action="store_true", help="a tiny model, to test this script")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sections-") as directory:
        folder = Path(directory)
        with open(args.out / "rows.jsonl", "a") as lines:
            for name in args.rows.split(","):
                row = attempted(measure, name, args, folder)
                row.setdefault("row", name)
                row["after_s"] = round(time.monotonic() - begin, 1)
                print(json.dumps(row), file=lines, flush=True)
                attempted(tell, row)
        keep_small(folder)
        shutil.copytree(
            folder,
            args.out,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("kilter-*", "torchelastic*", "*.py", "tmp*"),
        )
    print(f"{time.monotonic() - begin:.0f} s in all; everything is in {args.out}", flush=True)


if __name__ == "__main__":
    main()
