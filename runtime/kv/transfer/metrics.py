"""What a process counts about KV transfers, per backend.

All are by `backend`; those that say how fast and how reliable one is are over its last 100
attempts. Three have a second name each, `nixl_…` (`ALIASES`), which dashboards of the field expect:
they cover every backend, too. All live in the registry of the process's `Metrics`.
"""

from __future__ import annotations

import collections
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import attrs

from ...metrics.tallies import Registry, Shown
from ...planes import TransferReport

_WINDOW: Final = 100
_GBPS: Final = 8e-9
"""Of a byte per second."""
ALIASES: Final = {
    "trinamo_transfer_duration_seconds": "nixl_transfer_latency",
    "trinamo_transfer_bandwidth_bytes_per_second": "nixl_bandwidth_gbps",
    "trinamo_transfer_failure_ratio": "nixl_error_rate",
}
"""Second names, which break the conventions of Prometheus."""
_LATENCY_BUCKETS_S: Final = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
PEER_SERIES_MAX: Final = 256


@attrs.define
class _Recent:
    """The last attempts of one backend: bytes and seconds of those that were done."""

    outcomes: deque[tuple[int, float, bool]] = attrs.field(factory=lambda: deque(maxlen=_WINDOW))

    @property
    def bytes_per_s(self) -> float:
        seconds = sum(each[1] for each in self.outcomes)
        return sum(each[0] for each in self.outcomes) / seconds if seconds else 0.0

    @property
    def failure_ratio(self) -> float:
        return sum(not each[2] for each in self.outcomes) / len(self.outcomes)


@attrs.frozen
class _Alias:
    """The same numbers once more, under their second name."""

    original: Shown
    name: str
    factor: float = 1.0

    def lines(self) -> Iterator[str]:
        other = ALIASES[self.name]
        lines = self.original.lines()
        _, kind = next(lines).splitlines()
        yield f"# HELP {other} Another name of {self.name}\n{kind.replace(self.name, other)}\n"
        for line in lines:
            start, _, number = line.replace(self.name, other, 1).rpartition(" ")
            yield f"{start} {float(number) * self.factor!r}\n"


class TransferMetrics:
    """One per process; methods are named after events.

    `note`, such as `Env.note`, hears of those that change who may touch a block.
    """

    def __init__(
        self, registry: Registry, note: Callable[..., None] = lambda *_, **__: None
    ) -> None:
        self._note = note
        self._registry = registry
        counts = registry.counts
        self._bytes = counts(
            "transfer_bytes", "KV bytes moved by transfers that are done", "backend", "direction"
        )
        self._attempts = counts(
            "transfer_attempts",
            "Transfers that ended on a backend",
            "backend",
            "direction",
            "outcome",
        )
        self._fallbacks = counts(
            "transfer_fallbacks", "Transfers that went on over another backend", "from", "to"
        )
        self._in_flight = counts(
            "transfers_in_flight", "Transfers under way", "backend", may_fall=True
        )
        self._usable = counts(
            "transfer_backend_usable",
            "1 if new transfers may use it",
            *("backend", "peer"),
            may_fall=True,
        )
        self._quarantined = registry.count(
            "quarantined_blocks",
            "Blocks that a transfer may touch which did not stop",
            may_fall=True,
        )
        self._readmitted = registry.count(
            "readmitted_blocks",
            "Blocks that left quarantine, since it was proven that nothing touches them",
        )
        self._inquiries = counts(
            "transfer_inquiries", "Questions to peers whether they let go of blocks", "status"
        )
        self._duration = registry.histograms(
            "transfer_duration_seconds",
            "Start to the last verified block",
            _LATENCY_BUCKETS_S,
            "backend",
        )
        self._bandwidth = counts(
            "transfer_bandwidth_bytes_per_second",
            "While moving, of recent transfers",
            "backend",
            may_fall=True,
        )
        self._failure_ratio = counts(
            "transfer_failure_ratio",
            "Part of recent transfers that failed",
            "backend",
            may_fall=True,
        )
        originals: tuple[Shown, ...] = (self._duration, self._bandwidth, self._failure_ratio)
        for original, name in zip(originals, ALIASES, strict=True):
            factor = _GBPS if ALIASES[name].endswith("_gbps") else 1.0
            registry.show(ALIASES[name], _Alias(original, name, factor))
        self._open = counts(
            "transfer_backend_open",
            "1 if the backend works on this machine",
            "backend",
            may_fall=True,
        )
        self._recent: dict[str, _Recent] = {}
        self.in_flight: dict[str, int] = {}
        """Transfers under way, by backend."""
        self.done_count: collections.Counter[str] = collections.Counter()
        """Transfers that are done, by backend."""
        self.done_bytes: collections.Counter[str] = collections.Counter()
        self.fallback_count = 0
        self.quarantined_count = 0

    def opened(self, backend: str, *, is_open: bool) -> None:
        """A backend of the chain was opened, or cannot be used on this machine."""
        self._open.tally(backend).value = is_open

    def started(self, backend: str) -> None:
        self._in_flight.tally(backend).value += 1
        self.in_flight[backend] = self.in_flight.get(backend, 0) + 1

    def done(self, report: TransferReport) -> None:
        self._ended(report.backend, report.direction, "success")
        self._bytes.tally(report.backend, report.direction).value += report.byte_count
        self.done_count[report.backend] += 1
        self.done_bytes[report.backend] += report.byte_count
        self._duration.tally(report.backend).observe(report.duration_s)
        self._remember(report.backend, (report.byte_count, report.duration_s, True))

    def failed(self, backend: str, direction: str, outcome: str) -> None:
        """One that was started failed; `outcome` is the code of its error, or `cancelled`."""
        self._ended(backend, direction, outcome)
        if outcome not in ("cancelled", "killed"):
            self._remember(backend, (0, 0.0, False))

    def _ended(self, backend: str, direction: str, outcome: str) -> None:
        self._in_flight.tally(backend).value -= 1
        self.in_flight[backend] -= 1
        self._attempts.tally(backend, direction, outcome).value += 1

    def _remember(self, backend: str, outcome: tuple[int, float, bool]) -> None:
        recent = self._recent.setdefault(backend, _Recent())
        recent.outcomes.append(outcome)
        self._bandwidth.tally(backend).value = recent.bytes_per_s
        self._failure_ratio.tally(backend).value = recent.failure_ratio

    def fell_back(self, failed: str, to: str) -> None:
        """A transfer goes on over `to`, because `failed` could not; the same means a new connection."""
        if failed == to:
            self._note("kv.reconnect", backend=to)
            return
        self._fallbacks.tally(failed, to).value += 1
        self.fallback_count += 1
        self._note("kv.fallback", failed=failed, backend=to)

    def usable(self, backend: str, peer: str, *, is_usable: bool) -> None:
        """Whether new transfers with `peer` may use `backend`.

        Of more than `PEER_SERIES_MAX` those are shown that may not: the workers of a fleet would have
        as many series as pairs otherwise.
        """
        shown = {place: bool(tally.value) for place, tally in self._usable.items()}
        if (backend, peer) not in shown and len(shown) >= PEER_SERIES_MAX:
            spared = next((place for place, usable in shown.items() if usable), None)
            if is_usable or spared is None:
                return
            self._usable.drop(*spared)
        self._usable.tally(backend, peer).value = is_usable

    def peer_gone(self, backend: str, peer: str) -> None:
        self._usable.drop(backend, peer)
        self._note("kv.forget", backend=backend, peer=peer)

    def quarantined(self, count: int) -> None:
        self._quarantined.value += count
        self.quarantined_count += count
        self._note("kv.quarantine", blocks=count)

    def readmitted(self, count: int) -> None:
        self._quarantined.value -= count
        self.quarantined_count -= count
        self._readmitted.value += count
        self._note("kv.readmit", blocks=count)

    def inquired(self, status: str) -> None:
        """A peer was asked what became of a ticket; what was learned is a `PeerStatus`."""
        self._inquiries.tally(status).value += 1
        self._note("kv.asked", status=status)

    def value(self, name: str, **labels: str) -> float:
        """The sample with exactly this name and these labels, as of now; 0 if there is none."""
        return self._registry.get_sample_value(name, labels) or 0.0
