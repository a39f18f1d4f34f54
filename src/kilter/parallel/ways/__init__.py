"""The ways of running a set of branches, in the order in which `auto` tries them.

A new way is one file with a `Way` in it and one line here. `auto` first tries the ways that may
make others needless, while there is time to compile.
"""

from kilter.parallel.ways.compiled import Compiled
from kilter.parallel.ways.convolved import Convolved
from kilter.parallel.ways.cpp_threads import CppThreads
from kilter.parallel.ways.folded import Folded
from kilter.parallel.ways.fused import Fused
from kilter.parallel.ways.graph import LoopGraph
from kilter.parallel.ways.graph_streams import GraphStreams
from kilter.parallel.ways.streams import Streams
from kilter.parallel.ways.threads import Threads
from kilter.parallel.ways.way import Way

__all__ = ["WAYS", "Way"]

WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        Fused(),
        LoopGraph(),
        GraphStreams(),
        Convolved(),
        Compiled(),
        Threads(),
        Folded(),
        CppThreads(),
        Streams(),
    )
}
