"""ForkedRanks of jobs that are forked from a process that has imported torch once: a start costs
milliseconds instead of seconds."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

HANG_TIMEOUT_S = 1200.0


class ForkedRanks:
    """Processes that run `function(rank, *arguments)` with a process group of torch. A rank that
    hangs for `HANG_TIMEOUT_S` says where, and ends with code 1."""

    def __init__(
        self, world: int, function: Callable[..., object], *arguments: Any, backend: str = "gloo"
    ) -> None:
        from torch.distributed import TCPStore

        # The store's thread begins after the forks: what it holds at a fork, such as the lock of
        # the resolver, would be held in the child for ever.
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        port = listener.getsockname()[1]
        self.pids = [
            fork(_rank, rank, world, listener, port, backend, function, arguments)
            for rank in range(world)
        ]
        self._store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def wait(self) -> list[int]:
        """The exit codes; the number of the signal, negative, of a rank that was killed."""
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]


def fork(function: Callable[..., object], *arguments: Any) -> int:
    """A child process that runs a function and ends; its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        faulthandler.dump_traceback_later(HANG_TIMEOUT_S, exit=True)
        function(*arguments)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _rank(
    rank: int,
    world: int,
    listener: socket.socket,
    port: int,
    backend: str,
    function: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    listener.close()
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "WORLD_SIZE": str(world), "RANK": str(rank)}
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    function(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()
