"""`compiled`: every distinct piece through `torch.compile` once, then forked inside one CUDA graph.

Linear layers of a single row are done by a kernel that reads every weight once, and a linear layer
takes its ReLU along.
"""

from __future__ import annotations

from kilter.parallel import kernels
from kilter.parallel.candidates import CandidateBuilder
from kilter.parallel.linear_layers import join_layers
from kilter.parallel.program import BranchProgram
from kilter.parallel.ways.way import CompilingWay


class Compiled(CompilingWay):
    name = "compiled"
    about = "ours: every branch compiled after folding, forked inside one graph"

    def rewritten(self, builder: CandidateBuilder) -> BranchProgram:
        plain = builder.forked_program()
        if builder.request.on_gpu and kernels.has_triton():
            return join_layers(plain, triton=True, split=False)
        return plain
