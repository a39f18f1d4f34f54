"""Runs a script with a plan of data ratios: `elastic_worker.py PLAN SCRIPT ARGS...`. PLAN is a JSON
list of ratios; rank 0 proposes each as soon as the one before is in force."""

import atexit
import faulthandler
import json
import runpy
import sys
import threading
import time

from kilter.session.fence import Fence
from kilter.sharing.elastic.agreement import propose
from kilter.sharing.elastic.job import ElasticJob
from kilter.sharing.elastic.scripts import find_in_script
from kilter.sharing.elastic.share import connect, resumed

faulthandler.dump_traceback_later(230, exit=True)  # a rank that hangs says where
plan = json.loads(sys.argv[1])
sys.argv = sys.argv[2:]


over = threading.Event()


def carry_out(share):
    store = connect(share.address)
    for number, ratios in enumerate(plan, start=1):
        # With every change all ranks pause: for a moment, or until somebody ends the pause.
        pause_s = 25.0 if number == 2 else 0.2
        verdict = propose(
            store, number, tuple(ratios), share.world, pause_s=pause_s, stop=over.is_set
        )
        if number == 2 and verdict.at is not None:
            time.sleep(0.2)
            store.set(resumed(verdict.at), "1")
        while not over.is_set() and not store.check([f"reached/{verdict.at}"]):
            time.sleep(0.01)


def attached(job):
    if job.share.rank == 0:
        thread = threading.Thread(target=carry_out, args=(job.share,), daemon=True)
        thread.start()
        # A thread that comes back from C++ while the interpreter ends takes the process down.
        atexit.register(thread.join)
        atexit.register(over.set)


job = ElasticJob(
    guard=Fence,
    may_idle=True,
    release=True,
    attached=attached,
    say=lambda text: print(f"kilter: {text}", file=sys.stderr),
)
find_in_script(job)
runpy.run_path(sys.argv[0], run_name="__main__")
if job.share is not None:
    print("changes", json.dumps(job.share.schedule._changes), file=sys.stderr)
