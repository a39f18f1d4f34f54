"""Dead and frozen runs on a fake GPU, for the rows about `kilter restore`."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jobs
from seen import show

from kilter.testing.box import FOUND, Box, find_watcher


@contextmanager
def machine() -> Iterator[Box]:
    """A machine with a fake GPU, whose processes are killed at the end."""
    root = Path("machine").absolute()
    root.mkdir()
    box = Box(root)
    try:
        yield box
    finally:
        watcher = find_watcher(box.state_directory)
        if watcher is not None:
            os.kill(watcher, signal.SIGKILL)
        box.close()


def freeze_watcher(box: Box) -> None:
    watcher = find_watcher(box.state_directory)
    assert watcher is not None
    os.kill(watcher, signal.SIGSTOP)


def restore(box: Box, *options: str) -> None:
    """Run `kilter restore`, and show whether its exit code tells what the GPU stands at."""
    done = jobs.kilter("restore", "--all", *options, **box.environ())
    back = box.setting() == FOUND
    name = " ".join(("restore", *options))
    show(
        **{
            f"{name}: exit code is 0 only if all is back": (done.returncode == 0) == back,
            f"{name}: says why not": back or bool((done.stdout + done.stderr).strip()),
        }
    )


def show_setting(box: Box) -> None:
    show(back=box.setting() == FOUND)
