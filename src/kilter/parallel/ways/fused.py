"""`fused`: layers of attention heads over row tables by two chains of Triton launches.

All heads of a layer run together. Linear layers of few rows take their ReLU, residual and layer
norm along; in float32 their products are three TF32 products with the errors added back. Masks and
biases are made ahead of time on a stream of their own. The rest is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kilter.core.reasons import Reason
from kilter.parallel import kernels
from kilter.parallel.candidates import CandidateBuilder
from kilter.parallel.checks import tf32_allowed
from kilter.parallel.compilation import merge_single
from kilter.parallel.find_heads import fuse
from kilter.parallel.folding import fold
from kilter.parallel.linear_layers import join_layers
from kilter.parallel.plan import Trial, choose
from kilter.parallel.program import BranchProgram
from kilter.parallel.regions import from_graph
from kilter.parallel.ways.convolved import with_faster_convolutions
from kilter.parallel.ways.way import CompilingWay, Way

FAR = 3.0
"""Where `fused` is this many times faster than the loop's own graph, the other ways are not tried:
forking a graph of window heads gains 2.0 to 2.6 times on an H200."""


class Fused(CompilingWay):
    name = "fused"
    about = "ours: Triton launches for all heads of a layer at once, joined linear layers"

    def program(self, builder: CandidateBuilder) -> BranchProgram:
        """On a CPU the heads run by their definition, and nothing is compiled."""
        return super().program(builder) if builder.request.on_gpu else _fused_heads(builder)

    def rewritten(self, builder: CandidateBuilder) -> BranchProgram:
        triton = kernels.has_triton()
        made = join_layers(_fused_heads(builder), triton=triton)
        if triton:
            made = with_faster_convolutions(made, builder)
        # In larger pieces the compiler chooses other layouts for convolutions; in float32 that
        # gave up to twice the difference to float64.
        wide = any(t.dtype == torch.float32 for _, t in made.constants)
        return made if wide and not all(tf32_allowed()) else merge_single(made)

    def stream_counts(self, builder: CandidateBuilder) -> Sequence[int]:
        return (1,)

    def makes_needless(
        self, other: Way, trials: Sequence[Trial], builder: CandidateBuilder
    ) -> Reason | None:
        if other.compiles and choose(trials)[0].mode == self.name:
            text = "fused is right and leads: it compiles the same with fewer launches"
            return Reason("needless", self.name, text)
        seconds = {t.mode: t.seconds for t in trials if t.seconds is not None}
        plain = seconds.get("graph")
        if plain is not None and FAR * seconds[self.name] < plain:
            text = f"fused is right and more than {FAR:.0f} times faster than the loop's own graph"
            return Reason("needless", self.name, text)
        return None


def _fused_heads(builder: CandidateBuilder) -> BranchProgram:
    """The program with all heads of a layer as one unit."""
    unfolded = builder.trace().unfolded
    fold(unfolded, builder.request.device, products=True)
    return fuse(from_graph(unfolded).with_weights(Tensor.detach))
