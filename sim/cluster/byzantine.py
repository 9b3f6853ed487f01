"""Strangers, and members that break the stream protocol on purpose, over plain sockets.

Each `ByzantineClient` is a host of its own that connects to where workers call home, or to where callers
send requests, does its act, and notes how it was answered; `expects` says what the protocol asks
for. What is around it must not notice: that is what the other invariants are for.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import attrs
import trio

from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.streams.codec import FrameDecoder, encode_frame
from trinamo.runtime.protocol.streams.membership import Purpose, call_home_proof
from trinamo.transports.tcp import TcpOptions
from trinamo.transports.tcp.greeting import greet

from ..core.env import SimEnv
from ..core.world import World
from .memory import SECRET

if TYPE_CHECKING:
    from .cluster import Cluster


UNKNOWN: Final = "0" * 32
POLL_S: Final = 0.005


@attrs.frozen(kw_only=True)
class ByzantineClient:
    """One act against one host, `at_s` after the load began."""

    act: str
    to: str = "frontend0"
    at_s: float = 0.05
    expects: str = "closed"
    """`refused CODE`, or `closed` for an end without a word."""

    async def run(self, cluster: Cluster) -> None:
        """The byzantine host's main function."""
        await trio.sleep(self.at_s)
        payload = await ACTS[self.act](self, cluster)
        address = self._address(cluster)
        started_s = trio.current_time()
        answer = await self._converse(address, payload, cluster.world)
        took_s = round(trio.current_time() - started_s, 3)
        cluster.world.note(
            "byzantine.end", act=self.act, answer=answer, expects=self.expects, took_s=took_s
        )

    def _address(self, cluster: Cluster) -> tuple[str, int]:
        transports = cluster.processes[self.to].transports
        server = transports.server if self.act in REQUEST_ACTS else transports.home
        host, _, port = server.address.rpartition(":")
        return host, int(port)

    async def _converse(self, address: tuple[str, int], payload: bytes, world: World) -> str:
        decoder, frames = FrameDecoder(), []
        try:
            async with await trio.open_tcp_stream(*address) as stream:
                if self.act in MEMBER_ACTS:
                    options, env = TcpOptions(secret=SECRET), SimEnv(world, f"byzantine.{self.act}")
                    await greet(stream, self.to, options, env, Purpose.REQUESTS)
                await stream.send_all(payload)
                async for data in stream:
                    frames += decoder.feed(bytes(data))
        except trio.BrokenResourceError:
            pass  # Closed all the same, with words of ours unread.
        except (OSError, RemoteProtocolError):
            return "broken"
        for header, _ in frames:
            said = json.loads(header) if header else None
            if isinstance(said, dict) and "refused" in said:
                return f"refused {said['refused']['code']}"
        return "closed"


def _handshake(subject: str, proof: str = "") -> bytes:
    words = {"subject": subject, "stream_type": "Response", "proof": proof}
    return encode_frame(json.dumps(words).encode())


def _proven(subject: str) -> bytes:
    return _handshake(subject, call_home_proof(SECRET, subject, "Response"))


async def _unknown_subject(_: ByzantineClient, __: Cluster) -> bytes:
    return _proven(UNKNOWN)


async def _stolen_subject(byzantine: ByzantineClient, cluster: Cluster) -> bytes:
    """One that the worker has not called for yet, by somebody who knows all but the secret."""
    while True:
        home = cluster.processes[byzantine.to].transports.home
        for subject, registration in home._registrations.items() if home else ():  # noqa: SLF001
            if not registration.is_taken:
                return _handshake(subject, call_home_proof(b"", subject, "Response"))
        await trio.sleep(POLL_S / 50)


async def _taken_subject(byzantine: ByzantineClient, cluster: Cluster) -> bytes:
    home = cluster.processes[byzantine.to].transports.home
    while True:
        # Guessing one is impossible by design, so it is looked up.
        for subject, registration in home._registrations.items():  # noqa: SLF001
            if registration.is_taken:
                return _proven(subject)
        await trio.sleep(POLL_S)


async def _malformed_handshake(_: ByzantineClient, __: Cluster) -> bytes:
    return encode_frame(b'{"subject": 1')


async def _data_first(_: ByzantineClient, __: Cluster) -> bytes:
    return encode_frame(b"", b"an item before the handshake")


async def _silence(_: ByzantineClient, __: Cluster) -> bytes:
    return b""


async def _half_a_handshake(_: ByzantineClient, __: Cluster) -> bytes:
    return _handshake(UNKNOWN)[:-5]


async def _oversize(_: ByzantineClient, __: Cluster) -> bytes:
    return b"\xff" * 8 + b"no such frame"


async def _garbage_request(_: ByzantineClient, __: Cluster) -> bytes:
    return b"GET / HTTP/1.1\r\nhost: worker\r\n\r\n"


async def _oversize_request(_: ByzantineClient, __: Cluster) -> bytes:
    return b"\xff" * 8 + b"no such frame"


ACTS: Final[dict[str, Callable[[ByzantineClient, Cluster], Awaitable[bytes]]]] = {
    "unknown_subject": _unknown_subject,
    "taken_subject": _taken_subject,
    "malformed_handshake": _malformed_handshake,
    "data_first": _data_first,
    "silence": _silence,
    "half_a_handshake": _half_a_handshake,
    "oversize": _oversize,
    "stolen_subject": _stolen_subject,
    "garbage_request": _garbage_request,
    "silent_request": _silence,
    "oversize_request": _oversize_request,
}
REQUEST_ACTS: Final = ("garbage_request", "silent_request", "oversize_request")
"""Acts against the request listener of a worker."""
MEMBER_ACTS: Final = ("oversize_request",)
"""Acts of one who knows the secret, and greets."""
