"""Every sentence about what memory does not do, or does otherwise than planned, as a `Reason`.

The engine and the controller say which reason applies and give its values; programs compare codes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kilter.core.errors import KilterError
from kilter.core.label import Label
from kilter.core.reasons import Reason
from kilter.core.units import show_bytes, show_count

if TYPE_CHECKING:
    from kilter.memory.plan.choose import MemoryPlan


def of_error(error: KilterError, subject: str = "plan") -> Reason:
    """The text of an error of ours, under its own code."""
    return Reason(error.code, subject, str(error))


# Lines during the run


def in_force(plan: MemoryPlan, budget_bytes: int, *, gradients_stay: bool) -> str:
    """The plan of the largest pass was carried out. What it takes is by the simulator."""
    before, after = show_bytes(plan.peak_before_bytes), show_bytes(plan.peak_bytes)
    budget = show_bytes(budget_bytes)
    if not (plan.swapped or plan.recomputed or plan.peak_bytes > budget_bytes):
        return f"nothing has to move for {budget}: peak {before}"
    moved = f"{show_count(plan.swapped, 'tensor')} offloaded, {plan.recomputed} recomputed"
    planned = f"peak {before} -> {after}, {moved} in each pass [{Label.SIMULATED.value}]"
    if plan.peak_bytes <= budget_bytes:
        return f"the plan for {budget} is in force: {planned}"
    more = more_needed(plan.peak_bytes - budget_bytes, gradients_stay=gradients_stay)
    return f"{budget} cannot be met, the best plan is in force: {planned}; {more}"


def no_plan(reasons: Iterable[Reason]) -> str:
    """So many passes are over that there should be one. Reasons against a part of a plan are none
    against all of it."""
    against = (reason.text for reason in reasons if reason.subject in ("plan", "passes"))
    return f"no plan so far: {next(against, 'no pass of the job has come again yet')}"


def more_needed(size_bytes: int, *, gradients_stay: bool) -> str:
    """What a job can do about a budget that no plan keeps. `gradients_stay`: until the step, on a
    GPU whose memory they take."""
    gradients = "--gradients consume, " if gradients_stay else ""
    return (
        f"{show_bytes(size_bytes)} more are needed: try {gradients}kilter.divided(2) or a smaller "
        "batch (kilter size says which one fits)"
    )


# Plans of activations

CHANGING_SHAPES = Reason(
    "changing_shapes",
    "passes",
    "passes keep differing from those seen before: few of them are watched from here on, those that"
    " differ in size alone share plans, and where there is none, tensors are offloaded as soon as"
    " the budget is reached",
)


OLDER_GRAPH = Reason(
    "older_graph",
    "passes",
    "tensors of an older graph, which the program keeps, are on the host while the next passes "
    "run: these run without their plans, and tensors are offloaded as soon as the budget is "
    "reached (a loss or an output that is kept keeps its graph: detach it, or delete it)",
)
UNNEEDED = Reason(
    "unneeded",
    "passes",
    "passes save tensors that their own backward does not need (an evaluation outside of "
    "torch.no_grad(), or a graph that a later backward goes through), and exceed the budget by "
    "them: they run without a plan, and tensors are offloaded as soon as the budget is reached",
)


BUILDING_RECORDER = (
    "the recorder for calls of modules is built, once for this version of PyTorch: about a minute"
)


def tangents_stay(size_bytes: int) -> Reason:
    """Saved tensors of a pass had tangents of this size."""
    return Reason(
        "forward_mode",
        "tangents",
        f"{show_bytes(size_bytes)} of a pass are tangents of forward-mode derivatives, which "
        "autograd keeps beside the saved tensors: they stay on the device",
    )


def slower_link(out: float, back: float) -> Reason:
    """Copies take these times as long as the link's table says."""
    return Reason(
        "slower_link",
        "copies",
        f"copies to the host and back take at least {out:.2f} and {back:.2f} times the measured "
        "link time: planned again for the slower link",
    )


def recipe_of_sharded_weights(datum: str) -> Reason:
    return Reason(
        "recipe_reads_sharded_weights",
        datum,
        "is recomputed from sharded weights, whose memory is freed in between",
    )


def recipe_failed(datum: str, error: Exception) -> Reason:
    return Reason("recipe_failed", datum, str(error))


def recipe_differs(datum: str) -> Reason:
    return Reason("recipe_differs", datum, "recomputed, it differs")


def segment_failed(name: str, error: Exception) -> Reason:
    return Reason("segment_failed", name, str(error))


def segment_differs(name: str) -> Reason:
    return Reason("segment_differs", name, "recomputed, what the module saved differs")


# Compiled regions

LOOKS_FOR_FRACTION = (
    "the job is compiled: a few fractions of what its regions save are tried, each compiled anew, "
    "until the budget is met. Masks of dropout and other random numbers are not drawn again; what "
    "the compiler computes again may differ in the last bits"
)


def fraction_stays(why: str) -> Reason:
    return Reason(
        "fraction_stays",
        "compiled regions",
        f"compiled regions save what the compiler has them save: {why}",
    )


# Gradients: why they are not used up as they arrive


def gradients_kept(why: Reason) -> Reason:
    return Reason(why.code, "gradients", f"gradients are kept: {why.text}")


def _gradients(code: str, text: str) -> Reason:
    return Reason(code, "gradients", text)


LATER_ITERATIONS = _gradients(
    "later_iterations",
    "a later iteration may change them or skip its step; for a program that never does, "
    "--gradients consume uses them up as they arrive",
)
EARLIER_OPTIMIZERS = _gradients("earlier_optimizers", "those of all optimizers before had to be")
AS_ASKED = _gradients("as_asked", "as asked for")
ACCUMULATED = _gradients("accumulated", "gradients accumulate over several backwards")
PARAMETERS_CHANGED = _gradients(
    "parameters_changed", "parameters are changed between backward and step"
)
STEPPED_TWICE = _gradients("stepped_twice", "a gradient is used by two steps")
MODULES_RUN = _gradients(
    "modules_run", "modules run between backward and step (do gradients accumulate over several?)"
)
ZEROED_IN_PLACE = _gradients("zeroed_in_place", "gradients are zeroed in place")
SPARSE_OR_GRAPH = _gradients("sparse_or_graph", "a gradient is sparse or has a graph of its own")
GRADIENT_HOOKS = _gradients(
    "gradient_hooks", "a parameter has hooks of the program on its gradient"
)
OPTIONS_CHANGE = _gradients(
    "options_change", "the optimizer's options change between backward and step"
)
UNSCALED_BY_STEP = _gradients("unscaled_by_step", "gradients are unscaled by the step")
STEP_UNDER_AUTOCAST = _gradients("step_under_autocast", "the step runs under autocast")
SHARED_GRADIENTS = _gradients(
    "shared_with_processes", "other processes may have a share in the gradients"
)
GRADIENTS_CHANGED = _gradients(
    "gradients_changed", "gradients are changed between backward and step"
)
SHARDED_PARAMETERS = _gradients("sharded", "parameters are sharded over processes")
GRAPH_KEPT = _gradients(
    "graph_kept", "backward keeps its graph, for another one through the same weights"
)
OTHER_PARAMETERS = _gradients("other_parameters", "the optimizer's parameters changed")
NO_STEP_FOLLOWED = _gradients(
    "no_step_followed", "parameters were updated in backward, and no step followed"
)
CLOSURE = _gradients("closure", "optimizer.step is given a closure")


def touched(what: str, file: str, line: int) -> Reason:
    """The program reads, sets or zeroes a gradient where a training loop does not."""
    return _gradients("touched", f"{what} ({file}:{line})")


# Optimizer state, and optimizers that cannot be run bucket by bucket


def state_stays(why: Reason) -> Reason:
    return Reason(why.code, "optimizer state", f"optimizer state stays: {why.text}")


def _optimizer(code: str, text: str) -> Reason:
    return Reason(code, "optimizer", text)


DIFFERENTIABLE = _optimizer("differentiable", "the optimizer is differentiable")
CAPTURABLE = _optimizer(
    "capturable", "its step may be captured in a CUDA graph, which keeps addresses"
)
MIXED_GROUP = _optimizer("mixed_group", "a group has parameters of several types or devices")
TWO_OPTIMIZERS = _optimizer("two_optimizers", "a parameter belongs to two optimizers")
STATE_ADDRESS_HELD = Reason(
    "address_held",
    "optimizer state",
    "optimizer state stays where the program has the address of its bytes",
)
STATE_ON_HOST = Reason(
    "state_on_host",
    "optimizer state",
    "optimizer state did not fit the device and is on the host",
)


def unknown_optimizer(kind: str) -> Reason:
    return _optimizer(
        "unknown_optimizer", f"{kind} is not known to treat each parameter on its own"
    )


def step_replaced(kind: str) -> Reason:
    return _optimizer("step_replaced", f"{kind}.step was replaced")


def unusual_parameter(kind: str, dtype: str, layout: str) -> Reason:
    return _optimizer("unusual_parameter", f"a parameter is a {kind}, {dtype}, {layout}")


def parameters_elsewhere(device: str) -> Reason:
    return _optimizer("parameters_elsewhere", f"parameters are on {device}")


def little_room(least_bytes: int, room_bytes: int) -> Reason:
    return Reason(
        "little_room",
        "optimizer state",
        f"optimizer state streams through no less than {show_bytes(least_bytes)}; "
        f"{show_bytes(room_bytes)} of room were left for it",
    )


def streaming_slower(with_s: float, without_s: float) -> Reason:
    """Medians of iterations with streaming optimizer state and without."""
    return Reason(
        "streaming_slower",
        "optimizer state",
        "optimizer state does not stream: iterations took "
        f"{with_s * 1e3:.0f} ms with it and {without_s * 1e3:.0f} ms without",
    )


def step_exceeds(size_bytes: int) -> Reason:
    """So far above the budget memory is in use after backward."""
    return Reason(
        "step_exceeds",
        "optimizer state",
        f"after backward, as in the optimizer's step, {show_bytes(size_bytes)} more than the "
        "budget are in use; an optimizer made with fused=True or foreach=False takes less there",
    )


# Weights


def weights_stay(why: Reason) -> Reason:
    return Reason(why.code, "weights", f"weights stay: {why.text}")


def _weights(code: str, text: str) -> Reason:
    return Reason(code, "weights", text)


WEIGHTS_KEPT = _weights(
    "weights_kept",
    "weights stay on the device; --weights offload (experimental) lets them make room",
)
USES_FUNC = _weights("uses_func", "the program uses torch.func")
CAPTURES_GRAPHS = _weights("captures_graphs", "the program captures CUDA graphs")
GRAPHS_BEFORE = _weights("graphs_before", "CUDA graphs were captured before, which keep addresses")
REPLAYS_GRAPHS = _weights("replays_graphs", "the program replays CUDA graphs")
SEVERAL_STREAMS = _weights("several_streams", "the program computes on several streams")
OTHER_PROCESSES = _weights("shared_with_processes", "other processes may read them")
COMPILES = _weights("compiles", "the program compiles")
NO_USE_COUNT = _weights("no_use_count", "this PyTorch does not count who holds a tensor")
READ_LATER = _weights(
    "read_later", "weights stay that the program reads after their module has run"
)
HELD_ON_HOST = _weights(
    "held_on_host", "weights stay on the host where somebody has their address there"
)
RESIZED = _weights("resized", "weights stay whose size or device was changed")


# The job


NO_TORCH = Reason("no_torch", "job", "the script did not import torch")


def nothing_saved(size_bytes: int, *, on_gpu: bool) -> Reason:
    """No tensor of this size or more was met. Hooks that the program puts on saved tensors stand
    before kilter's, which then see none."""
    where = " on a GPU" if on_gpu else ""
    return Reason(
        "nothing_saved",
        "job",
        f"no tensor of {show_bytes(size_bytes)} or more was seen being saved for backward{where}: "
        "there was none, or saved-tensor hooks of the program itself (save_on_cpu, say) took them",
    )


def out_of_memory(*, planned: bool, allocator: str | None) -> Reason:
    """The program ended by that. `allocator` is the variable with which the framework's allocator
    leaves fewer fragments, unless it is set already."""
    when = "under its plan" if planned else "before there was a plan"
    fewer = "" if allocator is None else f", and {allocator} makes fewer"
    return Reason(
        "out_of_memory",
        "job",
        f"the program ran out of memory {when}; a smaller budget leaves more room for "
        f"fragments{fewer}; `kilter size` says how small it may be",
    )
