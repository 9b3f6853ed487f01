"""What is counted for each request and each token, in plain numbers.

prometheus-client takes a lock per number, looks up labels, and walks a histogram's buckets: that is
as dear as everything else that is done for a token, and a page of a hundred models takes it a tenth of
a second. So what is counted often is tallied here, who asks pays for the form, and the form of each
line is kept. For one thread, as all of the runtime. Everything else is in `metrics.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Final, Generic, TypeVar

import attrs
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_LARGE: Final = 1e6
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


@attrs.define(eq=False)
class Count:
    """A number: of what has happened, or of what there is."""

    value: float = 0

    def numbers(self) -> Iterator[float]:
        yield self.value


class Histogram:
    """How often something took how long."""

    __slots__ = ("_bounds_s", "_counts", "_sum_s")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """It took `seconds` once more."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def numbers(self) -> Iterator[float]:
        """How often it took at most each bound, how often at all, and how long altogether."""
        total = 0
        for count in self._counts:
            total += count
            yield total
        yield total
        yield self._sum_s

    def buckets(self) -> list[tuple[str, float]]:
        """How often it took at most so long, by each bucket's name."""
        return list(zip(_bucket_names(self._bounds_s), accumulate(self._counts), strict=True))

    @property
    def sum_s(self) -> float:
        """All of it."""
        return self._sum_s


def _bucket_names(bounds_s: Sequence[float]) -> list[str]:
    return [_text(bound) for bound in (*bounds_s, math.inf)]


def _text(number: float) -> str:
    # The library's own way is for those that are large.
    return repr(float(number)) if number < _LARGE else str(floatToGoString(number))  # type: ignore[no-untyped-call]


T = TypeVar("T", bound="Count | Histogram")


class _Family(Collector, Generic[T]):
    """The tallies of one name, by the values of its labels; register it like any other metric."""

    kind: str

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        make: Callable[[], T],
        suffixes: list[str],
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._make = make
        self._suffixes = suffixes
        """Of the lines of one tally; one that ends with a comma has room for more labels."""
        self._tallies: dict[tuple[str, ...], tuple[T, list[str]]] = {}

    def tally(self, *values: str) -> T:
        """The one tally of these values of the labels."""
        found = self._tallies.get(values)
        if found is None:
            found = self._tallies[values] = (self._make(), self._starts(values))
        return found[0]

    def items(self) -> Iterator[tuple[tuple[str, ...], T]]:
        """The values of the labels of each tally, and the tally."""
        for values, (tally, _) in self._tallies.items():
            yield values, tally

    def remove(self, label: str, value: str) -> None:
        """Forget the tallies with this value of a label; whoever holds one counts for nobody."""
        place = self._labels.index(label)
        self._tallies = {
            values: found for values, found in self._tallies.items() if values[place] != value
        }

    def _starts(self, values: tuple[str, ...]) -> list[str]:
        own = [
            f'{label}="{value.translate(_ESCAPES)}"'
            for label, value in zip(self._labels, values, strict=True)
        ]
        starts = []
        for suffix in self._suffixes:
            name, _, more = suffix.partition(" ")
            inside = ",".join(sorted([*own, more] if more else own))
            starts.append(f"{self._name}{name}{{{inside}}} " if inside else f"{self._name}{name} ")
        return starts

    def lines(self) -> Iterator[str]:
        """As in Prometheus' text format."""
        yield f"# HELP {self._name}{self._suffix} {self._text}\n"
        yield f"# TYPE {self._name}{self._suffix} {self.kind}\n"
        for tally, starts in self._tallies.values():
            for start, number in zip(starts, tally.numbers(), strict=True):
                yield f"{start}{_text(number)}\n"

    @property
    def _suffix(self) -> str:
        return ""


class Counts(_Family[Count]):
    """Numbers: a counter, or a gauge if they may also fall."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str] = (), *, may_fall: bool = False
    ) -> None:
        self.kind = "gauge" if may_fall else "counter"
        super().__init__(name, text, labels, Count, [self._suffix])

    @property
    def _suffix(self) -> str:
        return "_total" if self.kind == "counter" else ""

    def collect(self) -> Iterator[Metric]:
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        found = make(self._name, self._text, labels=self._labels)
        for values, (tally, _) in self._tallies.items():
            found.add_metric(values, tally.value)
        yield found


class Histograms(_Family[Histogram]):
    """Histograms of seconds."""

    kind = "histogram"

    def __init__(
        self, name: str, text: str, bounds_s: Sequence[float], labels: Sequence[str] = ()
    ) -> None:
        suffixes = [f'_bucket le="{each}"' for each in _bucket_names(bounds_s)]
        suffixes += ["_count", "_sum"]
        super().__init__(name, text, labels, lambda: Histogram(bounds_s), suffixes)

    def collect(self) -> Iterator[Metric]:
        found = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, (tally, _) in self._tallies.items():
            found.add_metric(values, tally.buckets(), tally.sum_s)
        yield found


class Registry(CollectorRegistry):
    """A registry whose page is quick where it has tallies."""

    def __init__(self) -> None:
        super().__init__(auto_describe=False)
        self._families: list[_Family[Count] | _Family[Histogram]] = []
        self._others: list[Collector] = []

    def register(self, collector: Collector) -> None:
        """Show what `collector` collects."""
        super().register(collector)
        if isinstance(collector, _Family):
            self._families.append(collector)
        else:
            self._others.append(collector)

    def page(self) -> bytes:
        """All of it in Prometheus' text format, as of now."""
        lines = "".join(line for family in self._families for line in family.lines())
        return generate_latest(_Samples(self._others)) + lines.encode()


@attrs.frozen
class _Samples:
    """What collectors collect, without the `_created` series, which double the text for nobody."""

    collectors: Sequence[Collector]

    def collect(self) -> Iterator[Metric]:
        for collector in self.collectors:
            for metric in collector.collect():
                metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
                yield metric
