"""`kilter restore` while job and watcher are frozen past their deadline, then with `--force`."""

import os
import signal
import time

from restoring import freeze_watcher, machine, restore, show_setting

from kilter.testing.box import LOW

EXPECT = {
    "restore: exit code is 0 only if all is back": True,
    "restore: says why not": True,
    "restore --force: exit code is 0 only if all is back": True,
    "back": True,
}

with machine() as box:
    job = box.start()
    job.ask("enter")
    job.ask("set", hold_s=2.0, **LOW)
    freeze_watcher(box)
    os.kill(job.pid, signal.SIGSTOP)
    time.sleep(3.0)
    restore(box)
    restore(box, "--force")
    show_setting(box)
