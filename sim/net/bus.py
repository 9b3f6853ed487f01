"""A message channel between hosts, for services that need no bytes: drop, delay, duplicate, reorder.

`send` puts a message on the way over the links of a `Network`; `receive` waits, on the host it is
addressed to, for the next one of a channel. What happens to a message on its way is decided by
rules: each looks at it and returns a `Verdict` or None (pass), and the first verdict wins. Without
rules a message takes its link's latency, jitter and bandwidth, and is lost where the link is cut,
lossy, or ends at a machine that is off or runs nothing.

An ordered channel keeps first in, first out between two hosts, but for a verdict that says
otherwise; an unordered one lets jitter reorder. Neither repeats anything: who needs an answer asks
again. Each host's inbox is bounded; what does not fit is dropped, and the trace says so.

What this module does not do: connections and back-pressure (use TCP: `network.py`), copying. A
payload must not be changed once it is sent, since both hosts hold the same object.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from zlib import crc32

import attrs
import trio

from ..core.host import DRIVER, Host, current_host_name
from ..core.world import World
from .network import Network

INBOX_MAX = 10_000
"""How many messages may wait unread in one host's inbox of one channel."""
TRACED_BYTES_MAX = 200
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Where an object lies in memory, in its `repr`; another place in every run."""


class Message(NamedTuple):
    """One message on its way. `number` counts from 1 over the whole bus."""

    number: int
    source: str
    destination: str
    channel: str
    payload: Any
    size: int
    sent_s: float


@attrs.frozen
class Verdict:
    """What becomes of a message: how many copies arrive, and how much later than usual.

    `gap_s` parts the copies. `may_be_overtaken` lets later messages of an ordered channel pass.
    `is_held` keeps the message back until `Bus.release`.
    """

    copies: int = 1
    delay_s: float = 0.0
    gap_s: float = 0.0
    may_be_overtaken: bool = False
    is_held: bool = False


Rule = Callable[[Message], Verdict | None]
DROP = Verdict(copies=0)
HOLD = Verdict(is_held=True)


def delay(seconds: float, *, reorder: bool = False) -> Verdict:
    """Arrive `seconds` later; with `reorder` messages sent afterwards may arrive first."""
    return Verdict(delay_s=seconds, may_be_overtaken=reorder)


def duplicate(*, gap_s: float = 0.0) -> Verdict:
    """Arrive twice, `gap_s` apart."""
    return Verdict(copies=2, gap_s=gap_s)


def nth(number: int, verdict: Verdict, *, channel: str = "", destination: str = "") -> Rule:
    """The `number`-th message (from 1) of the channel and destination, if given, gets `verdict`."""
    seen = 0

    def rule(message: Message) -> Verdict | None:
        nonlocal seen
        if channel not in ("", message.channel) or destination not in ("", message.destination):
            return None
        seen += 1
        return verdict if seen == number else None

    return rule


def verdict_on(message: Message, rules: Iterable[Rule]) -> Verdict:
    """What becomes of a message by the first rule that says anything; it arrives if none does."""
    return next(filter(None, (rule(message) for rule in rules)), Verdict())


class _Inbox:
    """What arrived for one host on one channel and was not read."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.readers = trio.lowlevel.ParkingLot()


class Bus:
    """The messages of a world, over the links of `network`; `rules` are asked in order.

    `ordered` says whether a channel between two hosts is first in, first out.
    """

    def __init__(
        self, world: World, network: Network, *, ordered: bool = False, inbox_max: int = INBOX_MAX
    ) -> None:
        self.rules: list[Rule] = []
        self._world, self._links = world, network.links
        self._is_ordered, self._inbox_max = ordered, inbox_max
        self._inboxes: defaultdict[tuple[str, str], _Inbox] = defaultdict(_Inbox)
        self._last_arrival_s: dict[tuple[str, str, str], float] = {}
        self._held: list[Message] = []
        self._count = 0
        world.on_end.append(self._process_ended)

    def send(
        self, source: str, destination: str, channel: str, payload: Any, *, size: int = 0
    ) -> Message:
        """Put a message on its way; never waits. `size` bytes count against the bandwidth."""
        self._count += 1
        world = self._world
        message = Message(
            self._count, source, destination, channel, payload, size, world.current_time()
        )
        world.add_row(
            "send",
            number=message.number,
            source=source,
            target=destination,
            channel=channel,
            payload=_traced(payload),
        )
        verdict = verdict_on(message, self.rules)
        if verdict.is_held:
            self._held.append(message)
            self._tell("held", message)
        elif verdict.copies < 1:
            self._tell("drop", message)
        else:
            self._launch(message, verdict)
        return message

    async def receive(self, channel: str) -> Message:
        """The next message of `channel` for the running task's host. Cancelling loses none."""
        inbox = self._inboxes[current_host_name(), channel]
        await trio.lowlevel.checkpoint_if_cancelled()
        if inbox.messages:
            message = inbox.messages.popleft()
            await trio.lowlevel.cancel_shielded_checkpoint()
            return message
        while not inbox.messages:
            await inbox.readers.park()
        return inbox.messages.popleft()

    def receive_nowait(self, channel: str) -> Message:
        """As `receive`, or `trio.WouldBlock`."""
        inbox = self._inboxes[current_host_name(), channel]
        if not inbox.messages:
            raise trio.WouldBlock
        return inbox.messages.popleft()

    def unread(self, host: str, channel: str) -> int:
        """How many messages wait there."""
        return len(self._inboxes[host, channel].messages)

    def release(self) -> int:
        """Let the messages go that a rule held back, in the order they were sent; how many."""
        held, self._held = self._held, []
        for message in held:
            self._launch(message, Verdict())
        return len(held)

    def _launch(self, message: Message, verdict: Verdict) -> None:
        source, destination = message.source, message.destination
        link = self._links.link(source, destination)
        if not self._links.passes(source, destination) or self._links.loses(link):
            self._tell("lost", message)
            return
        now_s = self._world.current_time()
        arrival_s = now_s + self._links.delay_s(link, size=message.size)
        arrival_s += verdict.delay_s
        if self._is_ordered and not verdict.may_be_overtaken:
            key = (source, destination, message.channel)
            arrival_s = max(arrival_s, self._last_arrival_s.get(key, 0.0))
            self._last_arrival_s[key] = arrival_s
        for copy in range(verdict.copies):
            self._world.at(arrival_s + copy * verdict.gap_s, self._arrive, message)

    def _arrive(self, message: Message) -> None:
        host = self._world.host(message.destination)
        if not self._links.passes(message.source, message.destination) or not _is_running(host):
            self._tell("lost", message)
            return
        inbox = self._inboxes[message.destination, message.channel]
        if len(inbox.messages) >= self._inbox_max:
            self._tell("overflow", message)
            return
        self._tell("deliver", message)
        inbox.messages.append(message)
        inbox.readers.unpark()

    def _tell(self, kind: str, message: Message) -> None:
        self._world.add_row(
            kind, number=message.number, source=message.source, target=message.destination
        )

    def _process_ended(self, host: Host) -> None:
        for owner, channel in [key for key in self._inboxes if key[0] == host.name]:
            # A new one, since tasks of the dead process may be parked at the old one.
            self._inboxes[owner, channel] = _Inbox()


def _is_running(host: Host) -> bool:
    # Scenario code runs on the driver, which is never booted.
    return host.is_running or host.name == DRIVER


def _traced(payload: Any) -> str | int | float | bytes | None:
    """The payload as a row may hold it: plain and short, or a checksum of its text."""
    if payload is None or isinstance(payload, (int, float)):
        return payload
    if isinstance(payload, (str, bytes)) and len(payload) <= TRACED_BYTES_MAX:
        return payload
    is_bytes = isinstance(payload, (bytes, bytearray, memoryview))
    data = bytes(payload) if is_bytes else _ADDRESS.sub("", repr(payload)).encode()
    return f"{type(payload).__name__} {crc32(data):08x}"
