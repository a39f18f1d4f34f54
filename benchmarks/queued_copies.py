"""What copies between a GPU and its host do to a program beside them.

    python benchmarks/queued_copies.py [--gib 2]

Offloading keeps both directions of the link busy. While copies run on streams of their own, this
times what a program does meanwhile: 300 views of a small tensor and a loop of Python (nothing of
the device), 400 launches of a small kernel, and reading or sending one number, once. Copies are
queued all at once, in pieces of three sizes, on one stream for each direction or on two that take
turns piece by piece, each waiting for the other: whether a number that is read waits for all that
is queued, for one piece, or not at all, shows by that. Printed are medians in microseconds, and
what all the copies take alone. Needs a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from itertools import cycle

import torch

PIECES_MIB = (256, 32, 1)
STREAMS = (1, 2)
ROUNDS = 7
WAYS = ("none", "out", "in", "both")


class Copies:
    """Host memory and device memory of one size, and some streams for each direction."""

    def __init__(self, size_bytes: int, streams: int) -> None:
        self._host = [torch.empty(size_bytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
        self._device = [torch.empty(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._streams = [[torch.cuda.Stream() for _ in range(streams)] for _ in range(2)]

    def queue(self, way: str, piece_bytes: int) -> None:
        """All bytes, in pieces, one way (`out`, to the host; `in`) or both."""
        for number, name in enumerate(("out", "in")):
            if way not in (name, "both"):
                continue
            pieces = (
                self._host[number].split(piece_bytes),
                self._device[number].split(piece_bytes),
            )
            before: torch.cuda.Stream | None = None
            turns = cycle(self._streams[number])
            for host, device, stream in zip(*pieces, turns, strict=False):
                if before not in (None, stream):
                    stream.wait_stream(before)
                with torch.cuda.stream(stream):
                    target, source = (host, device) if name == "out" else (device, host)
                    target.copy_(source, non_blocking=True)
                before = stream


def works() -> dict[str, Callable[[], object]]:
    small, number = torch.zeros(64, 64), torch.zeros((), device="cuda")

    def views() -> None:
        for _ in range(300):
            small.view(-1)

    def python() -> None:
        found: dict[int, tuple[int, object]] = {}
        for i in range(3000):
            found[i & 63] = (i, found.get(i & 31))

    def launches() -> None:
        for _ in range(400):
            number.add_(1)

    def send() -> None:
        torch.tensor(1.0, device="cuda")

    return {
        "300 views": views,
        "a loop of Python": python,
        "400 launches": launches,
        "reading a number": number.item,
        "sending a number": send,
    }


def took_us(work: Callable[[], object], copies: Copies, way: str, piece_bytes: int) -> float:
    """The median of what it takes right after all copies were queued."""
    times_us = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        copies.queue(way, piece_bytes)
        begin_s = time.perf_counter()
        work()
        times_us.append(1e6 * (time.perf_counter() - begin_s))
    torch.cuda.synchronize()
    return statistics.median(times_us)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=2.0, help="queued each way (default 2)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("queued_copies.py needs a GPU, and PyTorch sees none")
    if args.gib <= 0:
        parser.error("--gib must be above 0")
    for streams in STREAMS:
        copies = Copies(int(args.gib * 2**30), streams)
        print(f"streams for each direction: {streams}")
        for piece_mib in PIECES_MIB:
            for way in WAYS[1:]:
                torch.cuda.synchronize()
                begin_s = time.perf_counter()
                copies.queue(way, piece_mib * 2**20)
                queued_us = 1e6 * (time.perf_counter() - begin_s)
                torch.cuda.synchronize()
                done_us = 1e6 * (time.perf_counter() - begin_s)
                row = f"queued in {queued_us:8.0f} us, done in {done_us:8.0f} us"
                print(f"{way:5} pieces of {piece_mib:3} MiB: {row}")
        for name, work in works().items():
            for _ in range(2):  # what it needs is loaded
                work()
            for piece_mib in PIECES_MIB:
                row = [
                    f"{way} {took_us(work, copies, way, piece_mib * 2**20):8.0f}" for way in WAYS
                ]
                print(f"{name:17} pieces of {piece_mib:3} MiB: {'  '.join(row)} us", flush=True)


if __name__ == "__main__":
    main()
