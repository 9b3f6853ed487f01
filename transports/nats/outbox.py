"""What waits to go to the server: a bounded queue in front of the connection. Sans-IO.

Messages and subscription changes share one queue, so that a plane that subscribes and then
publishes is seen to do so in that order. Messages are bounded in number and bytes; changes are
not, because their number is bounded by that of the subscriptions themselves. Nothing here knows
trio, asyncio or NATS; `island.py` empties the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from trinamo.runtime.errors import OverloadedError
from trinamo.runtime.planes import Message

WITHOUT_JETSTREAM: Final = "without JetStream"
COMPACT_AT = 64
"""So many withdrawn messages may stand in the queue before it is looked through."""


@attrs.define(eq=False)
class Publication:
    """One message on its way out."""

    subject: str
    payload: bytes
    reply: str
    headers: Mapping[str, str]
    size: int
    is_waiting: bool = False
    """Whether it is in the outbox now."""
    is_wanted: bool = True
    """False once it was withdrawn."""


@attrs.define(eq=False)
class Interest:
    """One subscription as the server should know it, whatever connection there is.

    `deliver` is called synchronously for each message; `confirmed` once the server has confirmed
    the subscription, or when it cannot because it is away: then it takes effect on its return.
    """

    pattern: str
    group: str
    deliver: Callable[[Message], None]
    confirmed: Callable[[], None]
    is_wanted: bool = True
    handle: Any = None
    """The current connection's subscription, None while there is none."""


class Outbox:
    """Publications and interests in the order they must reach the server."""

    def __init__(self, *, messages_max: int, bytes_max: int) -> None:
        self.message_count = 0
        self.message_bytes = 0
        self.dropped = 0
        self._withdrawn = 0
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._items: deque[Publication | Interest] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, publication: Publication) -> None:
        """Queue a message; raises `OverloadedError` and counts it if a bound is reached."""
        if self.message_count >= self._messages_max:
            self._refuse("outgoing_messages_max", self._messages_max)
        if self.message_bytes + publication.size > self._bytes_max:
            self._refuse("outgoing_bytes_max", self._bytes_max)
        self._count(publication)
        self._items.append(publication)

    def put_change(self, interest: Interest) -> None:
        """Queue a look at `interest`: subscribe if it is wanted by then, else unsubscribe."""
        self._items.append(interest)

    def take(self) -> Publication | Interest | None:
        """Remove and return what must go next, or None. Withdrawn messages are skipped."""
        while self._items:
            item = self._items.popleft()
            if isinstance(item, Interest):
                return item
            if item.is_waiting:
                self._uncount(item)
                return item
            self._withdrawn -= 1
        return None

    def put_back(self, item: Publication | Interest) -> None:
        """What was taken could not go: it is next again, even if that exceeds a bound by one."""
        if isinstance(item, Publication):
            if not item.is_wanted:
                return
            self._count(item)
        self._items.appendleft(item)

    def withdraw(self, publication: Publication) -> bool:
        """Nobody waits for this message any more; whether it was still here and will not go."""
        publication.is_wanted = False
        if not publication.is_waiting:
            return False
        self._uncount(publication)
        self._withdrawn += 1
        if self._withdrawn >= COMPACT_AT and self._withdrawn * 2 > len(self._items):
            kept = [item for item in self._items if isinstance(item, Interest) or item.is_waiting]
            self._items = deque(kept)
            self._withdrawn = 0
        return True

    def clear(self) -> int:
        """Drop everything and return how many messages that were."""
        count = self.message_count
        while self.take() is not None:
            pass
        self.dropped += count
        return count

    def _count(self, publication: Publication) -> None:
        publication.is_waiting = True
        self.message_count += 1
        self.message_bytes += publication.size

    def _uncount(self, publication: Publication) -> None:
        publication.is_waiting = False
        self.message_count -= 1
        self.message_bytes -= publication.size

    def _refuse(self, bound: str, value: int) -> None:
        self.dropped += 1
        raise OverloadedError(
            f"{self.message_count} messages ({self.message_bytes} bytes) wait for the NATS server",
            bound=bound,
            value=value,
        )
