"""Runs a script with a plan of data ratios: `elastic_worker.py PLAN SCRIPT ARGS...`. PLAN is JSON:
[[iteration, ratios], ...]; rank 0 proposes each when it begins that iteration."""

import json
import runpy
import sys

from kilter.sharing.elastic.job import Job
from kilter.sharing.elastic.scripts import find_in_script

plan = json.loads(sys.argv[1])
sys.argv = sys.argv[2:]


def attached(job):
    share = job.share
    begin = share._meter.begin

    def begun(samples):
        while plan and plan[0][0] <= share.iteration and share.rank == 0:
            share.change(tuple(plan.pop(0)[1])).join(0)
        begin(samples)

    share._meter.begin = begun


job = Job(
    may_idle=True,
    release=True,
    attached=attached,
    say=lambda text: print(f"kilter: {text}", file=sys.stderr),
)
find_in_script(job)
runpy.run_path(sys.argv[0], run_name="__main__")
if job.share is not None:
    print("changes", json.dumps(job.share.schedule._changes), file=sys.stderr)
