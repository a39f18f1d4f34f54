"""`convolved`: as `compiled`, with convolutions by our kernel wherever it is the faster when timed.

The kernel takes batch norm, residual and ReLU along. In float32 its products are three TF32
products, and so are those of linear layers of few rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress

from kilter.core.reasons import Reason
from kilter.parallel import kernels
from kilter.parallel.candidates import CandidateBuilder
from kilter.parallel.compilation import warm
from kilter.parallel.convolutions import Convolution, is_faster, with_convolutions
from kilter.parallel.linear_layers import join_layers
from kilter.parallel.plan import Trial, choose
from kilter.parallel.program import BranchProgram
from kilter.parallel.trace import WayRefused
from kilter.parallel.ways.compiled import Compiled
from kilter.parallel.ways.way import CompilingWay, Way


class Convolved(CompilingWay):
    name = "convolved"
    about = "ours: as compiled, convolutions of small maps by a kernel where it is faster"
    works_on = ("cuda",)

    def rewritten(self, builder: CandidateBuilder) -> BranchProgram:
        if not kernels.has_triton():
            raise WayRefused("no_triton", "needs Triton", self.name)
        made = with_faster_convolutions(join_layers(builder.forked_program(), triton=True), builder)
        plain = Compiled().uncompiled(builder)
        if [u.key for u in made.units()] == [u.key for u in plain.units()]:
            raise WayRefused("same_as_compiled", "nothing is faster by the kernels", self.name)
        return made

    def searches(self, builder: CandidateBuilder) -> bool:
        return super().searches(builder) and not builder.all_by_kernel

    def makes_needless(
        self, other: Way, trials: Sequence[Trial], builder: CandidateBuilder
    ) -> Reason | None:
        if other.compiles and builder.all_by_kernel and choose(trials)[0].mode == self.name:
            text = "convolved leads, and each convolution is faster by the kernel"
            return Reason("needless", self.name, text)
        return None


def with_faster_convolutions(program: BranchProgram, builder: CandidateBuilder) -> BranchProgram:
    """The program with each convolution by our kernel where that is faster than the library."""
    cache, device = builder.cache, builder.request.device
    known, asked = cache.faster, set[Hashable]()
    new = with_convolutions(program, lambda found: found.key not in known)
    with suppress(WayRefused):  # a kernel that cannot be compiled is found again below
        warm(new, {}, {unit.key for unit in program.units()}, device)

    def better(found: Convolution) -> bool:
        if found.key not in known:
            known[found.key] = is_faster(found, device)
        asked.add(found.key)
        return known[found.key]

    made = with_convolutions(program, better)
    builder.all_by_kernel = bool(asked) and all(known[key] for key in asked)
    return made
