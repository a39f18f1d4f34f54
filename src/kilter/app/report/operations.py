"""Where the energy of an iteration goes: its operations, with shares that no sensor can see."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kilter.core.setting import DeviceInfo
from kilter.core.trace import IterationTrace, Kind, Operation
from kilter.device.sim.cards import profile_of
from kilter.device.sim.profile import Profile, load_profile
from kilter.device.sim.work import default_cost, work_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationEnergy:
    """Energy of one iteration attributed to the operations of one kind and one name, or of the
    same place in every layer."""

    name: str
    """It is `blocks.*.mlp.0` for that of several layers."""
    names: int
    """How many that are."""
    kind: str
    energy_j: float
    share: float
    duration_s: float
    """It takes this long on the trace's timeline."""
    flops: float | None
    bytes_moved: float | None
    intensity_flop_per_byte: float | None


_LAYER = re.compile(r"(?!\d)((?:[^.\W\d]\w*\.)*?(?:[^.\W\d]\w*_)?)\d+(\..*|)")
"""It matches a module's path with a number (`blocks.3`, `encoder_layer_3`): what holds the layers,
the number, the place in the layer."""


def _places(names: Iterable[str]) -> dict[str, str]:
    """By name of an operation, its place in every layer. A number at the end is a layer only where
    others have something inside; else it is a step of a sequence, which are all different."""
    paths = {name: match for name in names if (match := _LAYER.fullmatch(name))}
    layered = {match[1] for match in paths.values() if match[2]}
    return {
        name: f"{paths[name][1]}*{paths[name][2]}"
        if name in paths and paths[name][1] in layered
        else name
        for name in names
    }


def attribute(
    trace: IterationTrace | None, energy_j: float | None, device: DeviceInfo
) -> tuple[tuple[OperationEnergy, ...], str | None]:
    """Operations by energy, the largest first, and the rule by which it was attributed; the parts
    add up to `energy_j`.

    No sensor sees a single operation. On a real device power is taken as constant within the
    iteration, so each operation has the share of the energy that it has of the time. A simulated
    device has a model of each operation, which gives the shares.
    """
    if trace is None or energy_j is None or not trace.operations:
        return (), None
    rest_s = trace.iteration_s - math.fsum(op.duration_s for op in trace.operations)
    operations = list(trace.operations)
    profile = profile_of(device.name) if device.backend == "sim" else None
    if profile is not None:
        weights = _modelled_j(operations, trace, load_profile(profile))
        method = f"attributed by the model of each operation in sim:{profile}"
    else:
        if rest_s > 1e-3 * trace.iteration_s:
            operations.append(
                Operation(name="between operations", kind=Kind.GAP, start_s=0.0, duration_s=rest_s)
            )
        weights = [op.duration_s for op in operations]
        method = (
            f"attributed by share of time on the timeline of the {trace.timeline}, with the "
            "iteration's mean power throughout: no sensor sees a single operation"
        )
    total = math.fsum(weights)
    if total <= 0.0:
        return (), None
    places = _places({operation.name for operation in operations})
    groups: dict[tuple[str, Kind], list[tuple[Operation, float]]] = {}
    for operation, weight in zip(operations, weights, strict=True):
        place = (places[operation.name], operation.kind)
        groups.setdefault(place, []).append((operation, weight / total))
    result = [_operation(place, group, energy_j) for (place, _), group in groups.items()]
    return tuple(sorted(result, key=lambda op: -op.energy_j)), method


def _modelled_j(
    operations: Sequence[Operation], trace: IterationTrace, profile: Profile
) -> list[float]:
    """Energy of each operation alone on a simulated device at its default clocks."""
    energies = []
    for operation in operations:
        if not (operation.duration_s or operation.flops or operation.bytes_moved):
            energies.append(0.0)
            continue
        work = work_of(replace(trace, operations=(operation,)), profile)
        energies.append(default_cost(work, profile).energy_j)
    return energies


def _operation(
    place: str, group: Sequence[tuple[Operation, float]], energy_j: float
) -> OperationEnergy:
    """Operations of one place and kind as one."""
    operations = [operation for operation, _ in group]
    names = {operation.name for operation in operations}
    share = math.fsum(share for _, share in group)
    flops = _sum(op.flops for op in operations)
    bytes_moved = _sum(op.bytes_moved for op in operations)
    return OperationEnergy(
        name=place if len(names) > 1 else operations[0].name,
        names=len(names),
        kind=operations[0].kind.value,
        energy_j=energy_j * share,
        share=share,
        duration_s=math.fsum(op.duration_s for op in operations),
        flops=flops,
        bytes_moved=bytes_moved,
        intensity_flop_per_byte=flops / bytes_moved if flops and bytes_moved else None,
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if known else None
