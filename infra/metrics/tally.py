"""Counters and histograms as plain numbers, changed under the lock of their owner, so that a scrape sees whole facts."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

Labels = tuple[str, ...]
Series = tuple[str, Labels]


class Histogram:
    """How many observations fell below each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation; a bound belongs to the bucket below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Yield each upper bound, infinity last, with the number of observations up to it."""
        seen = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            yield bound, seen

    def copy(self) -> "Histogram":
        """Return the same figures, detached."""
        other = Histogram(self.bounds)
        other.counts = list(self.counts)
        other.total = self.total
        return other


class Tally:
    """All counters and histograms. Not thread safe."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counters: dict[Series, int] = {}
        self.histograms: dict[Series, Histogram] = {}

    def count(self, name: str, labels: Labels = (), by: int = 1) -> None:
        """Add to a counter; 0 makes the series appear."""
        series = (name, labels)
        self.counters[series] = self.counters.get(series, 0) + by

    def histogram(self, name: str, labels: Labels) -> Histogram:
        """Return the histogram of this series, a new one if need be."""
        series = (name, labels)
        found = self.histograms.get(series)
        if found is None:
            found = self.histograms[series] = Histogram(self._bounds)
        return found
