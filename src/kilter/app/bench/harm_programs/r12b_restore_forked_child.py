"""`kilter restore` after job and watcher were killed while a process that the job forked lives."""

import os
import signal

from restoring import machine, restore

from kilter.testing.box import kill_watcher

EXPECT = {
    "restore: exit code is 0 only if all is back": True,
    "restore: says why not": True,
}

with machine() as box:
    job = box.low()
    kill_watcher(box.state_directory)
    child = job.ask("fork", in_c=True)
    job.kill()
    try:
        restore(box)
    finally:
        os.kill(child, signal.SIGKILL)
