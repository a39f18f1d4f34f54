"""`folded`: the traced operations in order on one thread, without the tables and the data movement
that folding takes out of the step."""

from __future__ import annotations

from kilter.parallel.candidates import Built, CandidateBuilder, Site
from kilter.parallel.program import BranchProgram, run_in_order
from kilter.parallel.ways.way import Way


class Folded(Way):
    name = "folded"
    about = "ours: the folded operations in order, on one thread"
    works_on = ("cpu",)
    tried_on = ("cpu",)
    differentiable = True

    def program(self, builder: CandidateBuilder) -> BranchProgram:
        return builder.trace().program

    def build(self, program: BranchProgram, site: Site) -> Built:
        return Built(site.laid(program, run_in_order))
