"""`streams`: one Python thread launches the branches, each on a stream of its own."""

from __future__ import annotations

from kilter.parallel.candidates import Built, Site
from kilter.parallel.program import BranchProgram
from kilter.parallel.streams import CudaStreams, ForkJoin
from kilter.parallel.ways.way import ThreadedWay


class Streams(ThreadedWay):
    name = "streams"
    about = "one Python thread, a stream for each branch"
    works_on = ("cuda",)
    differentiable = True
    same_kernels = True
    calls_branches = True

    def build(self, program: BranchProgram, site: Site) -> Built:
        lanes = site.builder.lanes(self, site.streams)
        fork = ForkJoin(CudaStreams(site.request.device), lanes)
        return Built(site.eager(program, fork))
