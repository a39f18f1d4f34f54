"""`graph_streams`: the folded branches on forked streams inside one CUDA graph, longest first. All
layers use one set of streams."""

from __future__ import annotations

from collections.abc import Sequence

from kilter.parallel.candidates import CandidateBuilder
from kilter.parallel.ways.way import GraphWay


class GraphStreams(GraphWay):
    name = "graph_streams"
    about = "one CUDA graph of the loop, a forked stream for each branch"
    works_on = ("cuda",)
    tried_on = ("cuda",)
    differentiable = True

    def stream_counts(self, builder: CandidateBuilder) -> Sequence[int]:
        """A stream for each branch, and a few: counts in between are seldom the best."""
        counts = super().stream_counts(builder)
        return [count for count in counts if count > 2] or counts[-1:]
