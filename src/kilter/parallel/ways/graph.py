"""`graph`: the loop captured as one CUDA graph, in training two: forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

from kilter.parallel.candidates import Built, CandidateBuilder, Site
from kilter.parallel.program import BranchProgram
from kilter.parallel.ways.way import GraphWay


class LoopGraph(GraphWay):
    name = "graph"
    about = "one CUDA graph of the loop"
    works_on = ("cuda",)
    tried_on = ("cuda",)
    differentiable = True
    same_kernels = True

    def program(self, builder: CandidateBuilder) -> BranchProgram:
        """The trace, whose gradients are captured; in inference the loop itself is captured, and
        the trace is the proof that it may be."""
        return builder.trace().program

    def build(self, program: BranchProgram, site: Site) -> Built:
        if site.request.gradients:
            return super().build(program, site)
        return site.capture(site.request.run_loop)

    def stream_counts(self, builder: CandidateBuilder) -> Sequence[int]:
        return (1,)

    def searches(self, builder: CandidateBuilder) -> bool:
        return False
