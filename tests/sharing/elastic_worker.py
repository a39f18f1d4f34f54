"""Runs a script with a plan of data ratios: `elastic_worker.py PLAN SCRIPT ARGS...`. PLAN is a JSON
list of ratios; rank 0 proposes each as soon as the one before is in force."""

import atexit
import faulthandler
import json
import runpy
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

from kilter.session.fence import Fence
from kilter.sharing.elastic.job import ElasticJob
from kilter.sharing.elastic.scripts import find_in_script
from kilter.sharing.elastic.share import resumed
from kilter.testing.ratio_plan import RatioPlan

faulthandler.dump_traceback_later(840, exit=True)  # a rank that hangs says where
ratios = [tuple(each) for each in json.loads(sys.argv[1])]
sys.argv = sys.argv[2:]


def agreed(store, number, verdict):
    if number == 2 and verdict.at is not None:
        store.set(resumed(verdict.at), "1")


# With every change all ranks pause: for a moment, or until somebody ends the pause.
plan = RatioPlan(ratios, pause_s=lambda number: 25.0 if number == 2 else 0.02, agreed=agreed)
job = ElasticJob(
    guard=Fence,
    may_idle=True,
    release=True,
    attached=plan.attached,
    say=lambda text: print(f"kilter: {text}", file=sys.stderr),
)
# A thread that comes back from C++ while the interpreter ends takes the process down.
atexit.register(plan.end)
find_in_script(job)
register_optimizer_step_post_hook(lambda *_: plan.keep_pace(job))
runpy.run_path(sys.argv[0], run_name="__main__")
if job.share is not None:
    print("changes", json.dumps(job.share.schedule._changes), file=sys.stderr)
