"""What is counted, in plain numbers, and the page that shows it.

prometheus-client takes a lock per number, looks up labels, and walks a histogram's buckets: that is
as dear as everything else that is done for a token, and a page of a hundred models takes it a tenth
of a second. So every number of ours is tallied here, who asks pays for the form, and the form of
each line is kept. For one thread, as all of the runtime. `/metrics` of a whole process is in
`metrics.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, Generic, Protocol, TypeVar

import attrs
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

_PREFIX: Final = "trinamo_"
_LARGE: Final = 1e6
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_NOTHING: Final[Mapping[str, str]] = {}
Row = tuple[tuple[str, ...], Mapping[str, float]]
"""The values of the labels, and numbers by the names of their series."""


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
        return list(zip(_bucket_names(self._bounds_s), accumulate(self._counts), strict=True))


def _bucket_names(bounds_s: Sequence[float]) -> list[str]:
    return [_text(bound) for bound in (*bounds_s, math.inf)]


def _text(number: float) -> str:
    # The library's own way is for those that are large.
    if number < _LARGE:
        return repr(float(number))
    return str(floatToGoString(number))  # type: ignore[no-untyped-call]


def _head(name: str, kind: str, text: str) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def _start(name: str, labels: Iterable[str], values: Iterable[str], more: str = "") -> str:
    """The line of one number, up to the number; `more` is a label of its own."""
    own = [
        f'{label}="{value.translate(_ESCAPES)}"'
        for label, value in zip(labels, values, strict=True)
    ]
    inside = ",".join(sorted([*own, more] if more else own))
    return f"{name}{{{inside}}} " if inside else f"{name} "


class Shown(Protocol):
    """Some series of a page."""

    def lines(self) -> Iterator[str]:
        """In Prometheus' text format, as of now."""
        ...


T = TypeVar("T", bound="Count | Histogram")


class _Family(Generic[T]):
    """The tallies of one name, by the values of its labels."""

    def __init__(
        self,
        head: str,
        labels: Sequence[str],
        make: Callable[[], T],
        series: Sequence[tuple[str, str]],
    ) -> None:
        self._head, self._labels, self._make = head, tuple(labels), make
        self._series = series
        """Of the lines of one tally: the name, and a label of the line's own."""
        self._tallies: dict[tuple[str, ...], tuple[T, list[str]]] = {}

    def tally(self, *values: str) -> T:
        found = self._tallies.get(values)
        if found is None:
            starts = [_start(name, self._labels, values, more) for name, more in self._series]
            found = self._tallies[values] = (self._make(), starts)
        return found[0]

    def items(self) -> Iterator[tuple[tuple[str, ...], T]]:
        for values, (tally, _) in self._tallies.items():
            yield values, tally

    def drop(self, *values: str) -> None:
        """Forget the tally of these values of the labels, if there is one."""
        self._tallies.pop(values, None)

    def remove(self, label: str, value: str) -> None:
        """Forget the tallies with this value of a label; whoever holds one counts for nobody."""
        place = self._labels.index(label)
        self._tallies = {
            values: found for values, found in self._tallies.items() if values[place] != value
        }

    def lines(self) -> Iterator[str]:
        yield self._head
        for tally, starts in self._tallies.values():
            for start, number in zip(starts, tally.numbers(), strict=True):
                yield f"{start}{_text(number)}\n"


class Counts(_Family[Count]):
    """Numbers: a counter, whose name gets `_total`, or a gauge if they `may_fall`."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str] = (), *, may_fall: bool = False
    ) -> None:
        full = name if may_fall else f"{name}_total"
        head = _head(full, "gauge" if may_fall else "counter", text)
        super().__init__(head, labels, Count, [(full, "")])


class Histograms(_Family[Histogram]):
    def __init__(
        self, name: str, text: str, bounds_s: Sequence[float], labels: Sequence[str] = ()
    ) -> None:
        series = [(f"{name}_bucket", f'le="{each}"') for each in _bucket_names(bounds_s)]
        series += [(f"{name}_count", ""), (f"{name}_sum", "")]
        make = lambda: Histogram(bounds_s)  # noqa: E731
        super().__init__(_head(name, "histogram", text), labels, make, series)


@attrs.define(eq=False)
class Readings:
    """Numbers that others keep, read when the page is asked for: some series of the same labels.

    `rows` is given `shown`, whatever is to be read by a name of the caller's choice, and yields the
    numbers. `series` are their names, the same as on the page, kinds, and texts.
    """

    _labels: Sequence[str]
    _rows: Callable[[dict[str, Any]], Iterable[Row]]
    _series: Sequence[tuple[str, str, str, str]]
    shown: dict[str, Any] = attrs.field(factory=dict)

    def lines(self) -> Iterator[str]:
        rows = list(self._rows(self.shown))
        for name, full, kind, text in self._series:
            yield _head(full, kind, text)
            for values, numbers in rows:
                if name in numbers:
                    yield f"{_start(full, self._labels, values)}{_text(numbers[name])}\n"


S = TypeVar("S", bound=Shown)


class Registry(CollectorRegistry):
    """Where the parts of a process declare what they count, and the page of all of it.

    Names get the prefix `trinamo_`. What is declared already is the same once more: a process may
    have several of a part. Collectors of others, made for prometheus-client, are registered as with
    its own registry.
    """

    def __init__(self) -> None:
        super().__init__(auto_describe=False)
        self._shown: dict[str, Shown] = {}

    def counts(self, name: str, text: str, *labels: str, may_fall: bool = False) -> Counts:
        """Numbers by the values of labels: they rise, and with `may_fall` they fall as well."""
        return self._declared(name, lambda full: Counts(full, text, labels, may_fall=may_fall))

    def count(self, name: str, text: str, *, may_fall: bool = False) -> Count:
        return self.counts(name, text, may_fall=may_fall).tally()

    def histograms(
        self, name: str, text: str, bounds_s: Sequence[float], *labels: str
    ) -> Histograms:
        return self._declared(name, lambda full: Histograms(full, text, bounds_s, labels))

    def readings(
        self,
        prefix: str,
        labels: Sequence[str],
        rows: Callable[[dict[str, Any]], Iterable[Row]],
        *,
        gauges: Mapping[str, str] = _NOTHING,
        counters: Mapping[str, str] = _NOTHING,
    ) -> Readings:
        """Numbers that are read when they are asked for: see `Readings`.

        `gauges` and `counters` have the series' names, behind `prefix`, and texts.
        """
        series = [(name, f"{_PREFIX}{prefix}{name}", "gauge", gauges[name]) for name in gauges]
        series += [
            (name, f"{_PREFIX}{prefix}{name}_total", "counter", counters[name]) for name in counters
        ]
        return self._declared(prefix + series[0][0], lambda _: Readings(labels, rows, series))

    def _declared(self, name: str, make: Callable[[str], S]) -> S:
        found: Any = self._shown.get(name)
        if found is None:
            found = self._shown[name] = make(_PREFIX + name)
        declared: S = found
        return declared

    def show(self, name: str, shown: Shown) -> None:
        """Have series of another form on the page; once a name."""
        self._shown[name] = shown

    def collect(self) -> Iterator[Metric]:
        """What they collect, without the `_created` series, which double the text for nobody."""
        for metric in super().collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric

    def page(self) -> bytes:
        """All of it in Prometheus' text format, as of now."""
        return generate_latest(self) + "".join(self._lines()).encode()

    def _lines(self) -> Iterator[str]:
        for shown in tuple(self._shown.values()):
            yield from shown.lines()

    def samples(self) -> Iterator[tuple[str, float]]:
        for line in self._lines():
            if not line.startswith("#"):
                name, _, number = line.rpartition(" ")
                yield name.partition("{")[0], float(number)

    def get_sample_value(self, name: str, labels: dict[str, str] | None = None) -> float | None:
        """The sample of exactly this name and these labels, as of now; None if there is none."""
        labels = labels or {}
        start = _start(name, labels, labels.values())
        for line in self._lines():
            if line.startswith(start):
                return float(line[len(start) :])
        return super().get_sample_value(name, labels)
