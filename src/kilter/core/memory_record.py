"""What a memory budget came to in one process: the engine counts, the controller adds what it
measured and decided, the event file stores the record and the report reads it."""

from __future__ import annotations

import msgspec


class PlanFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulator says about a memory plan, as planners and events have it."""

    planner: str
    budget_bytes: int
    feasible: bool
    """The peak is within the budget and no use finds its datum evicted."""
    peak_before_bytes: int
    peak_bytes: int
    compute_s: float
    """Forward and backward take this with everything kept."""
    iteration_s: float
    """Forward and backward take this under the plan."""
    stall_s: float
    recompute_s: float
    out_bytes: int
    in_bytes: int
    host_bytes: int
    """Offloaded data occupy at most this much host memory at the same time."""


class MemoryCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine did since the start."""

    passes: int
    planned: int
    """So many passes ran under a plan to their end."""
    deviations: int
    """So many passes departed from their plan and were finished without it."""
    late: int
    """So many uses found their datum evicted and fetched it then and there."""
    spilled: int
    """So many data left without a plan because the budget was reached."""
    recomputed: int = msgspec.field(name="remade")
    """So many tensors were recomputed, over all passes."""
    out_bytes: int
    in_bytes: int
    """Both are over all passes. The engine counts activations; a whole record, optimizer state and
    weights as well."""
    host_bytes: int
    """So much host memory is reserved now."""
    most_bytes: int = 0
    """The largest measured peak since the budget is in force, before there were plans as well; 0:
    not measured."""
    highest_bytes: int = 0
    """The largest measured peak of passes as they run now; 0: not measured."""
    waited_s: float | None = None
    """The device stood still for copies so long in a pass under a plan, when that was timed last;
    None: never, or the backend cannot tell."""
    hastened: int = 0
    """So many loads start earlier than planned, since the device had waited for them."""


class MemoryRecord(MemoryCounts, frozen=True, kw_only=True):
    """With the budget, what the job takes with it and without, and the least that is possible. It
    has many attributes because it is all that the report reads of a memory budget."""

    backend: str
    """It is `cuda`, or `stand-in`: then only what autograd keeps is counted, in the memory of the
    CPU."""
    budget_bytes: int | None
    """It is None while it is not known."""
    budget: str
    """Where the budget comes from, in words."""
    applied: bool
    """It is False if memory was only observed (`--dry-run`)."""
    plain_peak_bytes: int | None
    """The peak with everything kept was this, as observed before there was a plan."""
    plain_peak_seen: bool
    """The program really reached it; False: something was offloaded, and is counted in."""
    peak_bytes: int | None
    """It is the largest measured one of passes of all kinds, each as it runs now, and of what comes
    between them."""
    least_bytes: int | None
    """It is the smallest peak that any plan reaches."""
    plain_iteration_s: float | None
    """Iterations with everything kept and without us took this in the median; None: there were
    none."""
    iteration_s: float | None
    """The iterations under the plan took this in the median."""
    iteration_passes: float = 1.0
    """An iteration has so many passes in the mean."""
    planned_iterations: int = 0
    """Since the first of them so many iterations have ended with a pass under a plan."""
    other_iterations: int = 0
    """So many have ended with a pass that had none."""
    other_iteration_s: float | None = None
    """Those took this in the median."""
    consumed: int = 0
    """So many buckets of gradients were used up in backward, over all passes."""
    in_force: tuple[int, ...] = ()
    """Which of this rank's plans (`Fitted`) rule now: one for each kind of pass that has one."""
    state: str = ""
    """What became of gradients and optimizer state, where they had to move as well."""
    step_wait_s: float = 0.0
    """Simulated: the optimizer's step waits so long for its state, where gradients are kept."""
    recompute_choice: str = ""
    """How tensors are recomputed, and what was measured for that, where the job was to choose;
    empty: it was not, or has not come so far."""
    own_checkpointing: bool = False
    """The model's own checkpointing is on: what plans call everything kept is kept beside that."""
    at_peak: str = ""
    """It tells the saved tensors of the largest pass at its peak, by module, in words; empty: not
    known."""
    compiled: str = ""
    """What compiled regions were told to save, and what was measured for that; empty: nothing."""
    bound_s: float | None = None
    """No schedule makes forward and backward of the largest pass faster; None if not computed."""
