"""The broker's work queues: the model, the takers that wait, and answers that can be repeated.

The model is `runtime/protocol/queue/work_queue.py`. A call whose answer was lost is asked again, so
the shelf remembers by which call each lease was settled: a repetition of that call gets its answer
again, any other call `STALE`. Time is the broker's own clock.

What this module does not do: speak to clients (`server.py`).
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Final, Protocol, Self

import attrs
import msgspec

from trinamo.runtime.errors import RequestError
from trinamo.runtime.planes import JobOrigin, LeasedJob, QueueLimits, Settlement
from trinamo.runtime.protocol.queue.work_queue import WorkQueueModel
from trinamo.transports.memory.queue import MemoryQueues

from ..machine import MachineClock
from ..wire import Call, Reply, arguments, decode

SETTLED_MAX: Final = 10_000
"""How many settled leases are remembered."""
TAKES_MAX: Final = 10_000
_ARGUMENTS: Final = arguments(
    open=tuple[str, QueueLimits | None],
    names=tuple[()],
    put=tuple[str, str, bytes, JobOrigin],
    extend=tuple[str, str],
    ack=tuple[str, str, str],
    nak=tuple[str, str, str, float, str],
    statistics=tuple[str],
    dead_letters=tuple[str, int],
    dead_letter=tuple[str, str],
    requeue=tuple[str, str],
    purge_dead=tuple[str, str | None],
)
CALLS: Final = frozenset({*_ARGUMENTS, "take"})
_TAKE: msgspec.msgpack.Decoder[tuple[str, float]] = msgspec.msgpack.Decoder(tuple[str, float])


class Asker(Protocol):
    """Who gets the answer to a call."""

    def reply(self, op: str, reply: Reply, data: bytes = b"") -> None:
        """Send it."""
        ...


@attrs.frozen(eq=False)
class Take:
    """One taker that waits: for a job of `queue`, for `wait_s` from `since`."""

    id: int
    op: str
    queue: str
    wait_s: float
    asker: Asker

    @classmethod
    def decode(cls, call: Call, data: bytes, asker: Asker) -> Self:
        """The call as it came; `RemoteProtocolError` for arguments that make no sense."""
        queue, wait_s = decode(_TAKE, data)
        return cls(call.id, call.op, queue, wait_s, asker)


class QueueShelf:
    """All queues of one disk."""

    def __init__(self, clock: MachineClock) -> None:
        self._clock = clock
        self._queues = MemoryQueues()
        self._settled: dict[tuple[str, str], tuple[str, Settlement]] = {}
        self._takes: deque[tuple[float, Take]] = deque()

    def model(self, name: str) -> WorkQueueModel:
        """The queue itself; `UnavailableError` if there is none."""
        return self._queues.open(name, None)

    # --- calls that are answered at once -----------------------------------------------------------

    def do(self, op: str, data: bytes) -> Any:
        """Do the call and return its result; raises what the model raises."""
        decoder = _ARGUMENTS.get(op)
        if decoder is None:
            raise RequestError(f"queues have no {op!r}")
        given = decode(decoder, data)
        now = self._clock.now()
        if op == "names":
            return self._queues.names
        if op == "open":
            return self._queues.open(*given).limits
        name, *rest = given
        if op in ("extend", "ack", "nak"):
            return self._settle(op, name, rest, now)
        return getattr(self.model(name), op)(*rest, now=now)

    def _settle(self, op: str, name: str, given: list[Any], now: float) -> Settlement:
        """`given` begins with the token; ack and nak go on with the id of the call, all tries alike."""
        model = self.model(name)
        token, *rest = given
        if op == "extend":
            return model.extend(token, now=now)
        call_id, *more = rest
        earlier_id, earlier = self._settled.get((name, token), ("", Settlement.STALE))
        if call_id == earlier_id:
            return earlier
        settled: Settlement = getattr(model, op)(token, *more, now=now)
        if settled is not Settlement.STALE:
            self._settled[name, token] = call_id, settled
            if len(self._settled) > SETTLED_MAX:
                del self._settled[next(iter(self._settled))]
        return settled

    # --- takers that wait --------------------------------------------------------------------------

    def ask(self, take: Take) -> None:
        """Let a taker wait for its job; `UnavailableError` if there is no such queue."""
        self.model(take.queue)
        if len(self._takes) < TAKES_MAX:
            self._takes.append((self._clock.now() + take.wait_s, take))

    def feed(self) -> list[tuple[Take, LeasedJob | None]]:
        """Those who get their answer now: a job, or None because their time is up."""
        now = self._clock.now()
        fed: list[tuple[Take, LeasedJob | None]] = []
        waiting, self._takes = self._takes, deque()
        for give_up_at, take in waiting:
            job = self.model(take.queue).take(self._queues.fresh_token(), now=now)
            if job is not None or give_up_at <= now:
                fed.append((take, job))
            else:
                self._takes.append((give_up_at, take))
        return fed

    def next_due(self) -> float:
        """When `feed` may have something to say without a call before it, on the broker's clock."""
        times = [give_up_at for give_up_at, _ in self._takes]
        times += [
            due
            for name in {take.queue: None for _, take in self._takes}
            if (due := self.model(name).next_due()) is not None
        ]
        # A clock's rounding must not make a moment that is due appear to be just ahead, for ever.
        return min(times, default=math.inf) + (1e-6 if times else 0.0)

    def drop_takes(self, asker: Asker, call_id: int | None = None) -> None:
        """A taker has left, or all those of one connection."""
        self._takes = deque(
            (give_up_at, take)
            for give_up_at, take in self._takes
            if take.asker is not asker or call_id not in (None, take.id)
        )

    def forget_takes(self) -> None:
        """The process died; what is on the disk stays."""
        self._takes.clear()
