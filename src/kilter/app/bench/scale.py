"""`kilter bench scale`: how a decision about clocks scales with the number of ranks.

Simulated ranks, each with the conductor and the messages of a real one, share one real TCP store on
this machine. Rank 0 and the store have processes of their own, so that their processor time is
known; the other ranks share a few.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from kilter.app.bench.scale_ranks import MadeUpGpu, RankSeen, RanksJob, RanksSeen, quantile
from kilter.app.cli.options import positive
from kilter.app.cli.output import print_json
from kilter.core.errors import KilterError, UsageError
from kilter.core.label import Label

HELP = "Simulated ranks against a real TCP store: messages, time and processor time of a decision."
EPILOG = """\
A decision is one block of iterations judged by all ranks: from the moment at which the last rank
has measured it until every rank has taken the next order. After a third of the time the last rank
is silent for a while, and for good in the last quarter. Needs torch, and about 1.5 GB for
1,024 ranks. The ranks share the cores of this machine: on a busy one, times are upper bounds.

examples:
  kilter bench scale
  kilter bench scale --ranks 1024 --seconds 60 --json
"""

RANK_SILENT_S = 4.0
"""How long the last rank is silent."""
RANKS_MODULE = "kilter.app.bench.scale_ranks"


class ScaleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One number of ranks: a row of the table has many columns. Counts are per decision."""

    ranks: int
    decisions: int
    agreed_p50_s: float | None
    agreed_p95_s: float | None
    rank0_notes: float
    """Rank 0 posts, reads and drops so many messages."""
    rank0_looks: float
    """Rank 0 asks so many times for messages that are not there yet."""
    most_notes: float
    """The rank with most of them has so many of what `rank0_notes` counts."""
    all_notes: float
    """All ranks together post, read and drop so many."""
    rank_notes: float
    """The usual rank (the median) has so many of them."""
    rank_looks: float
    rank0_core_share: float
    """Rank 0's process takes so much processor time, simulated iterations included, over time."""
    store_core_share: float
    longest_step_s: float
    """Any rank's session spent at most this at a stretch, with one rank late and then lost."""
    after_late: int
    """Decisions after the late rank has come back."""
    late_ticks_share: float
    """This machine began so many of the rounds too late: above 0.1, times say little."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", default="64,256,1024", metavar="N,...", help="numbers of ranks (64,256,1024)"
    )
    parser.add_argument("--seconds", type=float, default=40.0, metavar="S", help="each (40)")
    parser.add_argument(
        "--processes", type=positive, default=2, metavar="P", help="for the ranks (2)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    try:
        counts = [int(word) for word in args.ranks.split(",")]
    except ValueError:
        raise UsageError(f"--ranks {args.ranks}: write numbers, as in 64,1024") from None
    if min(counts) < 2 or not args.seconds >= 10.0:
        raise UsageError("at least 2 ranks and 10 seconds are needed")
    rows = []
    for count in counts:
        if not args.json:
            print(f"{count} simulated ranks, {args.seconds:g} s ...", file=sys.stderr)
        rows.append(measure(count, seconds=args.seconds, processes=args.processes))
    if args.json:
        print_json("kilter.bench.scale/1", Label.SIMULATED, {"rows": rows})
        return 0
    print("simulated ranks against a real TCP store on this machine; counts are per decision")
    print(
        "  ranks  decisions  agreed in p50    p95   rank 0: notes  looks   core   all notes"
        "   store   longest step"
    )
    for row in rows:
        print(
            f"  {row.ranks:>5}  {row.decisions:>9}  {_seconds(row.agreed_p50_s):>13}"
            f"  {_seconds(row.agreed_p95_s):>5}  {row.rank0_notes:>14.1f}  {row.rank0_looks:>5.1f}"
            f"  {row.rank0_core_share * 100:>4.1f} %  {row.all_notes:>10.0f}"
            f"  {row.store_core_share * 100:>4.1f} %  {row.longest_step_s * 1e3:>9.0f} ms"
        )
        print(f"         the usual rank: {row.rank_notes:.1f} notes, {row.rank_looks:.1f} looks")
        if row.late_ticks_share > 0.1:
            print(f"         this machine was too busy in {row.late_ticks_share:.0%} of the rounds")
    return 0


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def measure(count: int, *, seconds: float, processes: int, iteration_s: float = 0.1) -> ScaleRow:
    """One job of so many ranks."""
    _allow_connections(count)
    rest = list(range(1, count))
    shares = [[0], *(rest[n::processes] for n in range(min(processes, len(rest))))]
    late = (count - 1, seconds / 3, seconds / 3 + RANK_SILENT_S)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(_process("serve"))
        port = int(_answer(store) or 0)
        if not port:
            raise KilterError("the store did not start: is torch installed?")
        job = RanksJob(
            port=port,
            world_size=count,
            ranks=(),
            seconds=seconds,
            iteration_s=iteration_s,
            sensor_period_s=iteration_s / 2,
            silent=(late, (count - 1, 0.75 * seconds, seconds)),
        )
        running = [stack.enter_context(_process("drive")) for _ in shares]
        for process, share in zip(running, shares, strict=True):
            _tell(process, msgspec.json.encode(replace(job, ranks=tuple(share))))
        if any(_answer(process) != b"connected\n" for process in running):
            raise KilterError("some of the ranks could not connect to the store")
        begin_s = time.monotonic() + 1.0
        for process in running:
            _tell(process, b"%f" % begin_s)
        time.sleep(max(0.0, begin_s - time.monotonic()))
        _tell(store, b"")
        seen = [_seen(process, seconds + 600.0) for process in running]
        assert store.stdin is not None
        store.stdin.close()
        store_cpu_s = float(_answer(store) or "nan")
    return _row(job, seen, begin_s, late[2], store_cpu_s)


def _row(
    job: RanksJob,
    seen: Sequence[RanksSeen],
    begin_s: float,
    late_until_s: float,
    store_cpu_s: float,
) -> ScaleRow:
    count, seconds = job.world_size, job.seconds
    ranks = sorted((rank for part in seen for rank in part.ranks), key=lambda rank: rank.rank)
    agreed = agreements(ranks)
    decisions = max(ranks[0].blocks, 1)
    quiet = [agreed_s for at_s, agreed_s in agreed if not _disturbed(at_s - begin_s, seconds)]
    return ScaleRow(
        ranks=count,
        decisions=ranks[0].blocks,
        agreed_p50_s=quantile(quiet, 0.5) if quiet else None,
        agreed_p95_s=quantile(quiet, 0.95) if quiet else None,
        rank0_notes=ranks[0].notes / decisions,
        rank0_looks=ranks[0].looks / decisions,
        most_notes=max(rank.notes for rank in ranks) / decisions,
        all_notes=sum(rank.notes for rank in ranks) / decisions,
        rank_notes=statistics.median(rank.notes for rank in ranks) / decisions,
        rank_looks=statistics.median(rank.looks for rank in ranks) / decisions,
        rank0_core_share=seen[0].cpu_s / seconds,
        store_core_share=store_cpu_s / seconds,
        longest_step_s=max(rank.longest_step_s for rank in ranks),
        after_late=sum(at_s - begin_s > late_until_s for at_s, _ in agreed),
        late_ticks_share=max(part.late_ticks / part.ticks for part in seen),
    )


def _disturbed(at_s: float, seconds: float) -> bool:
    """A block was over while a rank was silent."""
    return (
        seconds / 3 - 1.0 <= at_s <= seconds / 3 + RANK_SILENT_S + 1.0
        or at_s >= 0.75 * seconds - 1.0
    )


def agreements(ranks: Sequence[RankSeen | MadeUpGpu]) -> list[tuple[float, float]]:
    """When each block was over on all ranks, and how long it took until all had the next order."""
    blocks = min(min(len(r.measured_s), len(r.ordered_s) - 1) for r in ranks)
    found = []
    for block in range(blocks):
        over_s = max(rank.measured_s[block] for rank in ranks)
        found.append((over_s, max(rank.ordered_s[block + 1] for rank in ranks) - over_s))
    return found


def _tell(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line + b"\n")
    process.stdin.flush()


def _answer(process: subprocess.Popen[bytes]) -> bytes:
    """The next line."""
    assert process.stdout is not None
    return process.stdout.readline()


def _process(what: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", RANKS_MODULE, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Without it torch warns once for each connection whose other end has no host name.
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )


def _seen(process: subprocess.Popen[bytes], most_s: float) -> RanksSeen:
    try:
        out, _ = process.communicate(timeout=most_s)
        return msgspec.json.decode(out, type=RanksSeen)
    except (subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        process.kill()
        raise KilterError(f"some of the ranks did not come to their end ({error})") from error


def _allow_connections(count: int) -> None:
    """Each rank has one to the store."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * count + 100
    if soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise UsageError(f"{count} ranks need {needed} open files: ulimit -n allows {hard}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
