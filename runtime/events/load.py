"""What workers say about themselves, numbered like all events (`source.py`): load and state.

Their load they say once a second, and that they are ready, or draining, when it changes. Discovery says
that, too, but only while the store is there: a worker that begins to drain while it is away is passed over
by who hears this.

A router keeps the last report with the instance (`caller/instances.py`). While the broker is away
that report stays; of an instance that has sent none, the router counts its own requests.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from typing import Annotated, Final

import attrs
import msgspec
import trio

from ..logs.notices import LogNotices
from ..nurseries import is_failure, open_nursery
from ..planes import EventPlane
from ..protocol.discovery.instances import EndpointName
from .source import EventSource, topic_of

_log = logging.getLogger("trinamo.events")
LOAD_INTERVAL_S: Final = 1.0
LOAD_TOPIC: Final = "load"


Count = Annotated[int, msgspec.Meta(ge=0)]


class LoadReport(msgspec.Struct, frozen=True, array_like=True):
    """How busy an instance is, as it says itself."""

    active: Count
    """Requests being served."""
    blocks_used: Count = 0
    """KV blocks that running sequences hold or transfers may touch; 0 where the engine keeps none."""
    blocks_total: Count = 0
    """KV blocks that the engine has."""
    waiting_tokens: Count = 0
    """Prompt tokens that are still to be computed."""


_encode = msgspec.msgpack.Encoder().encode


class LoadSource:
    """Publishes what `read` returns, for one instance of one endpoint.

    What raises instead is `skipped`, with a line in the log.
    """

    def __init__(
        self,
        events: EventPlane,
        endpoint: EndpointName,
        *,
        instance_id: str,
        incarnation: int,
        read: Callable[[], LoadReport],
        skipped: Callable[[], None] = lambda: None,
        interval_s: float = LOAD_INTERVAL_S,
    ) -> None:
        self._read, self._skipped = read, skipped
        self._last = _encode(LoadReport(0))
        """The last report that could be read."""
        self._interval_s = interval_s
        self._notices = LogNotices(_log)
        self._source = EventSource(
            events,
            topic_of(LOAD_TOPIC, endpoint),
            publisher=instance_id,
            incarnation=incarnation,
            snapshot=lambda _part, _parts: self._report() or self._last,
            # The reports come often enough to show that one was lost.
            beat_s=60.0,
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with open_nursery() as nursery:
            await nursery.start(self._source.run)
            task_status.started()
            while True:
                report = self._report()
                if report is not None:
                    await self._source.publish(report)
                await trio.sleep(self._interval_s)

    def _report(self) -> bytes | None:
        """The report of now; None if it cannot be read: engines are user code."""
        try:
            self._last = _encode(self._read())
        except BaseException as error:
            if not is_failure(error):
                raise
            self._skipped()
            self._notices.warn("a load report is skipped", repr(error))
            return None
        return self._last


REPORT_AGE_MAX_S: Final = 5 * LOAD_INTERVAL_S
"""Older reports say nothing: while the broker is away, nobody is busy for ever."""


@attrs.frozen
class BusyLimits:
    """Bounds on what a worker reports; None is none."""

    blocks: float | None = None
    """The used fraction of its KV blocks."""
    waiting_tokens: int | None = None

    bytes_per_token: int = 4
    """Of what is sent, about."""
    block_tokens: int = 16

    def is_busy(self, report: LoadReport, sent: int = 0, uncomputed: int = 0) -> bool:
        """Whether either bound is reached.

        `sent` are the bytes of the requests that the worker got since it reported, `uncomputed` of
        those whose answers have not begun.
        """
        blocks = report.blocks_used + sent // (self.bytes_per_token * self.block_tokens)
        tokens = report.waiting_tokens + uncomputed // self.bytes_per_token
        return (
            self.blocks is not None
            and report.blocks_total > 0
            and blocks >= self.blocks * report.blocks_total
        ) or (self.waiting_tokens is not None and tokens >= self.waiting_tokens)


STATUS_TOPIC: Final = "status"
_BEAT_S = 10.0


class WorkerState(enum.StrEnum):
    """Whether an instance takes requests, as it says itself."""

    READY = "ready"
    DRAINING = "draining"


class StatusSource:
    """Publishes the state of one instance of one endpoint."""

    def __init__(
        self,
        events: EventPlane,
        endpoint: EndpointName,
        *,
        instance_id: str,
        incarnation: int,
    ) -> None:
        self._state = WorkerState.READY
        self._is_draining = trio.Event()
        self._source = EventSource(
            events,
            topic_of(STATUS_TOPIC, endpoint),
            publisher=instance_id,
            incarnation=incarnation,
            snapshot=lambda _part, _parts: _encode(self._state),
            beat_s=_BEAT_S,
        )

    def drain(self) -> None:
        """It drains from now on. Never waits."""
        self._is_draining.set()

    async def run(self) -> None:
        async with open_nursery() as nursery:
            await nursery.start(self._source.run)
            await self._source.publish(_encode(self._state))
            await self._is_draining.wait()
            self._state = WorkerState.DRAINING
            await self._source.publish(_encode(self._state))
            await trio.sleep_forever()
