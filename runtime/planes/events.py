"""The event plane: many small messages, at most once; request/reply; work queues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol, Self

import attrs

from ..protocol.queue.jobs import QueueLimits
from .queue import WorkQueue


@attrs.frozen
class Message:
    """One message as received. `reply` is the subject to answer on, or empty."""

    subject: str
    payload: bytes
    reply: str = ""
    headers: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def says_nobody(self) -> bool:
        """Whether it is the broker's reply to a request on a subject that nobody is subscribed to."""
        return self.headers.get("Status") == "503" and not self.payload


class Subscription(Protocol):
    """Messages of one subscription, in arrival order; bounded, oldest kept, newest dropped."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Message:
        """The next message. A receive that is cancelled loses none."""
        ...

    @property
    def dropped(self) -> int:
        """How many messages were dropped because `pending_max` were waiting."""
        ...


class EventPlane(Protocol):
    """Many small messages, at most once: KV events, load, status; and request/reply.

    Subjects are `.`-separated tokens; in subscriptions `*` stands for one token and a final `>`
    for one or more.
    """

    async def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] = {}
    ) -> None:
        """Send and forget. While the broker is away messages wait in a bounded buffer.

        Raises `OverloadedError` if that buffer is full: the message is dropped and counted.
        """
        ...

    def subscribe(
        self, subject: str, *, group: str = "", pending_max: int = 4096
    ) -> AbstractAsyncContextManager[Subscription]:
        """Receive what is published from now on; one member per message within a `group`."""
        ...

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        accept: Callable[[Message], bool] | None = None,
    ) -> Message:
        """Publish and await one reply: the first, or the first that `accept` says yes to.

        Raises `UnavailableError` at once if nobody is subscribed, `DeadlineError` when the time
        is up (the request may have been received). That nobody is subscribed comes as a reply, too,
        of which `Message.says_nobody`; whoever does not accept it waits on.
        """
        ...

    def work_queue(
        self, name: str, *, limits: QueueLimits | None = None
    ) -> AbstractAsyncContextManager[WorkQueue]:
        """Open the queue called `name` (1 to 64 letters, digits, `_` and `-`).

        With `limits` it is made if it is not there, and they are in force from now on; without,
        it is opened as it is, and `UnavailableError` means that there is none. Leaving gives
        nothing back that was taken: settle it first, or its lease expires.
        """
        ...

    async def work_queue_names(self) -> list[str]:
        """The work queues there are, sorted."""
        ...

    async def check_health(self) -> str:
        """One line about the broker; raises `ConnectError` if it is not connected."""
        ...

    @property
    def message_bytes_max(self) -> int:
        """The largest payload the broker takes."""
        ...
