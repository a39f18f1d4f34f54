"""Which rank takes which samples of which iteration: the same answer on every rank."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, islice

from kilter.sharing.plan.snapshot import Ratios, shards

Index = Hashable
"""What a sampler yields: for most data sets a number."""


class RatioSchedule:
    """The data ratios of a job by iteration. None stands for the shards of the script itself, as
    they would be without kilter."""

    def __init__(self) -> None:
        self._changes: list[tuple[int, Ratios | None]] = [(0, None)]
        self._pauses: dict[int, float] = {}

    def at(self, iteration: int) -> Ratios | None:
        """The ratio in force."""
        return next(r for begin, r in reversed(self._changes) if begin <= iteration)

    def ratios(self) -> list[Ratios]:
        """Those that were put in force, in order."""
        return [ratios for _, ratios in self._changes if ratios is not None]

    def change(self, iteration: int, ratios: Ratios | None, pause_s: float = 0.0) -> None:
        """Put a ratio in force from an iteration on that is not before the last change; the ranks
        stand still before it for at most `pause_s`. Twice is once."""
        if self._changes[-1] == (iteration, ratios):
            return
        if iteration < self._changes[-1][0]:
            raise ValueError(f"iteration {iteration} lies before the last change")
        self._pauses[iteration] = pause_s
        self._changes.append((iteration, ratios))

    def pause_s(self, iteration: int) -> float:
        """How long to stand still before an iteration; asked again, nothing."""
        return self._pauses.pop(iteration, 0.0)

    def changes_at(self, iteration: int) -> bool:
        """Whether another ratio than before begins with this iteration."""
        return any(begin == iteration > 0 for begin, _ in self._changes)

    def next_share_of(self, rank: int, after: int) -> int | None:
        """The first change after an iteration that gives the rank samples."""
        begins = (b for b, r in self._changes if b > after and (r is None or r[rank] > 0))
        return next(begins, None)


class GlobalBatches:
    """The batches of one pass: for each iteration, what every rank would take without kilter.

    Their union is the global batch. Ranks that all draw the same samples (a plain DataLoader and
    one seed) make a global batch of one copy.
    """

    def __init__(
        self, drawn: Sequence[Sequence[Sequence[Index]]], *, first: int = 0, may_idle: bool = True
    ) -> None:
        """`drawn[rank][i]` are the indices of iteration `first + i`. The shortest rank ends the
        pass. Unless ranks may be idle, a batch with fewer samples than ranks (the last one) is not
        divided: every rank takes what it would take without kilter."""
        self._drawn, self._may_idle, self._first = drawn, may_idle, first
        self.count = min(len(batches) for batches in drawn)
        self.end = first + self.count
        """It is the first iteration after the pass."""
        self.same = len(drawn) > 1 and all(list(batches) == list(drawn[0]) for batches in drawn[1:])

    def _parts(self, iteration: int) -> Iterator[Sequence[Index]]:
        """Of the global batch, in one order on all ranks."""
        i = iteration - self._first
        return (batches[i] for batches in (self._drawn[:1] if self.same else self._drawn))

    def size(self, iteration: int) -> int:
        """Samples of the global batch."""
        return sum(map(len, self._parts(iteration)))

    def drawn(self, iteration: int) -> int:
        """Samples that the ranks would have taken without kilter, together."""
        return sum(len(batches[iteration - self._first]) for batches in self._drawn)

    def counts(self, iteration: int, ratios: Ratios | None) -> tuple[int, ...]:
        if self._plain(iteration, ratios):
            return tuple(len(batches[iteration - self._first]) for batches in self._drawn)
        assert ratios is not None
        return shards(self.size(iteration), ratios)

    def _plain(self, iteration: int, ratios: Ratios | None) -> bool:
        if ratios is None:
            return True
        return not self._may_idle and self.size(iteration) < len(self._drawn)

    def mine(self, iteration: int, ratios: Ratios | None, rank: int) -> list[Index]:
        if self._plain(iteration, ratios):
            return list(self._drawn[rank][iteration - self._first])
        counts = self.counts(iteration, ratios)
        begin = sum(counts[:rank])
        whole = chain.from_iterable(self._parts(iteration))
        return list(islice(whole, begin, begin + counts[rank]))


def active(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank for rank, count in enumerate(counts) if count > 0)
