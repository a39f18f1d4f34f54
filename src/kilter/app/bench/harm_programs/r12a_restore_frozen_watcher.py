"""`kilter restore` after the job was killed while its watcher was frozen."""

from restoring import freeze_watcher, machine, restore

EXPECT = {
    "restore: exit code is 0 only if all is back": True,
    "restore: says why not": True,
}

with machine() as box:
    job = box.low()
    freeze_watcher(box)
    job.kill()
    restore(box)
