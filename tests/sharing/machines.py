"""Random snapshots for the tests of sharing, and an event simulation as an oracle."""

from hypothesis import strategies as st

from kilter.sharing.model import JobCost, alone_s
from kilter.sharing.plan.snapshot import (
    JobMemory,
    Progress,
    SharedGpu,
    SharedJob,
    Snapshot,
    compositions,
    even_ratios,
    shards,
)

costs = st.builds(
    JobCost,
    sample_s=st.floats(1e-4, 3e-3),
    fixed_s=st.floats(0, 0.02),
    host_s=st.floats(0, 0.02),
    comm_s=st.floats(0, 0.02),
)


@st.composite
def snapshots(draw, most_gpus=4, most_jobs=4):
    """Machines with jobs in any state: dead GPUs, memory limits, jobs without a cost."""
    count = draw(st.integers(1, most_gpus))
    gpus = tuple(
        SharedGpu(
            utilisation=draw(st.floats(0, 1)),
            free_bytes=draw(st.none() | st.integers(0, 4000)),
            alive=draw(st.integers(0, 5)) > 0,
        )
        for _ in range(count)
    )
    jobs = []
    for i in range(draw(st.integers(1, most_jobs))):
        cost = draw(costs)
        batch = draw(st.integers(count, 256))
        job = SharedJob(
            name=f"job{i}",
            global_batch=batch,
            ratios=draw(st.sampled_from(compositions(count))),
            cost=draw(st.sampled_from([cost, cost, None])),
            alone_s=alone_s(cost, even_shards(count, batch)),
            progress=draw(
                st.builds(
                    Progress, st.floats(0, 50), st.floats(0, 90), st.sampled_from([None, 100])
                )
            ),
            busy=tuple(draw(st.floats(0, 1)) for _ in range(count)),
            memory=draw(st.none() | st.builds(JobMemory, st.integers(0, 300), st.integers(0, 20))),
            min_samples=draw(st.integers(1, 8)),
            may_idle=draw(st.booleans()),
            periods_since_move=draw(st.none() | st.integers(0, 4)),
            slowdown=draw(st.floats(0.5, 8)),
        )
        jobs.append(job)
    return Snapshot(gpus, tuple(jobs))


def even_shards(gpus, batch):
    return shards(batch, even_ratios(Snapshot((SharedGpu(),) * gpus, ()), SharedJob("x", batch)))


def event_simulation(costs, samples, until_s=60.0):
    """Step times by simulating every event: each GPU serves those on it at equal speeds. An oracle
    for the fixed point of `model.predict`; nothing of it is shared with the model."""
    gpus = len(samples[0])
    left = [{} for _ in costs]  # job -> {GPU or "host": service left}
    phase, steps, begun, now = ["rest"] * len(costs), [0] * len(costs), [None] * len(costs), 0.0
    for i, cost in enumerate(costs):
        left[i] = {"host": cost.host_s + 1e-6 * (i + 1)}

    def rates():
        crowd = [sum(g in todo for todo in left) for g in range(gpus)]
        return lambda place: 1.0 if place == "host" else 1.0 / crowd[place]

    def next_phase(i):
        cost, active = costs[i], [g for g in range(gpus) if samples[i][g]]
        if phase[i] == "rest":
            phase[i] = "work"
            left[i] = {g: cost.fixed_s + cost.sample_s * samples[i][g] for g in active}
        else:
            phase[i] = "rest"
            steps[i] += 1
            if begun[i] is None and now > until_s * 0.1:
                begun[i] = (now, steps[i])
            left[i] = {"host": cost.host_s + (cost.comm_s if len(active) > 1 else 0.0) + 1e-9}

    while now < until_s:
        rate = rates()
        soonest = min(t / rate(place) for todo in left for place, t in todo.items())
        now += soonest
        for i, todo in enumerate(left):
            left[i] = {p: t - soonest * rate(p) for p, t in todo.items()}
            left[i] = {p: t for p, t in left[i].items() if t > 1e-12}
            if not left[i]:
                next_phase(i)
    return [(now - b[0]) / max(steps[i] - b[1], 1) for i, b in enumerate(begun)]
