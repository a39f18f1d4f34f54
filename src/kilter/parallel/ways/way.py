"""What a way is, and the two kinds that most ways are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from kilter.core.reasons import Reason
from kilter.parallel.candidates import Built, CandidateBuilder, Site
from kilter.parallel.compilation import compile_units, to_compile
from kilter.parallel.plan import Trial, lane_counts
from kilter.parallel.program import BranchProgram, RunStep, run_in_order
from kilter.parallel.streams import CudaStreams, ForkJoin
from kilter.parallel.trace import WayRefused

MOST_STREAMS = 8


class Way:
    """One method to run a set of branches. A way has no state: all that it needs is passed in."""

    name: ClassVar[str]
    about: ClassVar[str]
    """What it does, in one line."""
    works_on: ClassVar[tuple[str, ...]]
    """It works on devices of these types."""
    tried_on: ClassVar[tuple[str, ...]] = ()
    """On devices of these types `auto` tries it."""
    differentiable: ClassVar[bool] = False
    """Whether autograd can record its calls."""
    compiles: ClassVar[bool] = False
    """Whether it needs a compiler, which takes seconds."""
    captures: ClassVar[bool] = False
    """It becomes a CUDA graph on a GPU."""
    same_kernels: ClassVar[bool] = False
    """Whether it runs the serial loop's own kernels on a GPU, so that every bit has to be equal."""
    calls_branches: ClassVar[bool] = False
    """Whether it calls the branches of a list as they are, so that it works without a trace."""

    def program(self, builder: CandidateBuilder) -> BranchProgram:
        """The program that it runs; `WayRefused` if it has none."""
        raise NotImplementedError

    def build(self, program: BranchProgram, site: Site) -> Built:
        """The program, ready to run."""
        raise NotImplementedError

    def stream_counts(self, builder: CandidateBuilder) -> Sequence[int]:
        """Numbers of streams that are worth trying, ascending."""
        return (1,)

    def searches(self, builder: CandidateBuilder) -> bool:
        """Whether it may be faster once the library has tried all algorithms of a convolution."""
        return False

    def why_not(self, builder: CandidateBuilder) -> Reason | None:
        """Why `auto` does not try it now."""
        return None

    def makes_needless(
        self, other: Way, trials: Sequence[Trial], builder: CandidateBuilder
    ) -> Reason | None:
        """Why another way need not be tried any more. Asked if this way was found right."""
        return None


def widest(make: Callable[[], BranchProgram]) -> int:
    """The largest number of units of a program that can run together; 1 if there is no program."""
    try:
        return max((len(step) for step in make().steps), default=1)
    except WayRefused:
        return 1


class ThreadedWay(Way):
    """One thread or stream for each branch, launching the branch's own kernels."""

    def program(self, builder: CandidateBuilder) -> BranchProgram:
        """The branches themselves, where the loop lists them; otherwise their trace."""
        return builder.callables() if builder.request.loop.is_list else builder.forked_program()

    def stream_counts(self, builder: CandidateBuilder) -> Sequence[int]:
        return (widest(lambda: builder.program(self)),)


class GraphWay(Way):
    """A traced program whose branches run on forked streams inside one CUDA graph. On a CPU its
    units run in order."""

    captures = True

    def program(self, builder: CandidateBuilder) -> BranchProgram:
        return builder.forked_program()

    def build(self, program: BranchProgram, site: Site) -> Built:
        request = site.request
        run_step: RunStep = run_in_order
        if not request.on_gpu or (site.streams == 1 and not program.ahead):
            program = program.in_line()
        else:
            backend = CudaStreams(request.device, capturing=True)
            run_step = ForkJoin(backend, site.builder.lanes(self, site.streams))
        if not request.on_gpu:
            return Built(site.laid(program, run_step))
        if request.gradients:
            return site.capture_training(program, run_step)
        return site.capture(site.laid(program, run_step))

    def stream_counts(self, builder: CandidateBuilder) -> Sequence[int]:
        if not builder.request.on_gpu:
            return (1,)
        # Of the uncompiled program: counting needs no compiler.
        counts = lane_counts(widest(lambda: self.uncompiled(builder)))
        return [count for count in counts if count <= MOST_STREAMS] or (1,)

    def uncompiled(self, builder: CandidateBuilder) -> BranchProgram:
        """The program before its pieces are compiled, if they are."""
        return builder.program(self)

    def searches(self, builder: CandidateBuilder) -> bool:
        return builder.has_convolutions()


class CompilingWay(GraphWay):
    """A program whose distinct pieces are compiled, each once."""

    works_on: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    tried_on = ("cuda",)
    compiles = True

    def rewritten(self, builder: CandidateBuilder) -> BranchProgram:
        """The program before its pieces are compiled."""
        raise NotImplementedError

    def uncompiled(self, builder: CandidateBuilder) -> BranchProgram:
        """`rewritten`, made once."""
        return builder.once((self.name, "uncompiled"), lambda: self.rewritten(builder))

    def program(self, builder: CandidateBuilder) -> BranchProgram:
        program = self.uncompiled(builder)
        return compile_units(program, builder.cache.compiled, builder.affordable())

    def why_not(self, builder: CandidateBuilder) -> Reason | None:
        """Whether the time that is left is enough to compile any piece."""
        try:
            program = self.uncompiled(builder)
        except WayRefused as refused:
            return refused.reason
        new = len(to_compile(program, builder.cache.compiled))
        if new and builder.affordable() == 0:
            request = builder.request
            budget_s = request.options.prepare_budget_s
            text = f"{new} pieces to compile; {request.spent_s():.0f} of {budget_s:.0f} s are spent"
            return Reason("no_time_to_compile", self.name, text)
        return None
