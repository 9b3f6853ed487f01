"""Strangers, and members that break the stream protocol on purpose, over plain sockets.

Each `ByzantineClient` is a host of its own that connects to where workers call home, or to where callers
send requests, does its act, and notes how it was answered; `expects` says what the protocol asks
for. What is around it must not notice: that is what the other invariants are for.
"""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Final

import attrs
import trio

from trinamo.runtime.errors import ConnectError, RemoteProtocolError
from trinamo.runtime.protocol.streams.codec import FrameDecoder, encode_frame
from trinamo.runtime.protocol.streams.control import Handshake
from trinamo.runtime.protocol.streams.link_frames import Kind, Opening, encode_item, encode_opening
from trinamo.runtime.protocol.streams.membership import Purpose, encode_hello
from trinamo.runtime.protocol.streams.request import StreamType
from trinamo.transports.sockets.wire import open_wire, send_all
from trinamo.transports.tcp import TcpOptions
from trinamo.transports.tcp.greeting import greet

from ..core.world import World
from ..env import SimEnv

if TYPE_CHECKING:
    from .cluster import Cluster


ANOTHER: Final = b"the secret of some other simulated cluster"
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
        payload = await self._payload(cluster)
        address = self._address(cluster)
        started_s = trio.current_time()
        theirs = cluster.processes[self.to].transports
        secret = (theirs.home or theirs.server).options.secret
        options = TcpOptions(secret=ANOTHER if self.act == "stolen_subject" else secret)
        answer = await self._converse(address, payload, options, cluster.world)
        took_s = round(trio.current_time() - started_s, 3)
        cluster.world.note(
            "byzantine.end", act=self.act, answer=answer, expects=self.expects, took_s=took_s
        )

    async def _payload(self, cluster: Cluster) -> bytes:
        if self.act == "taken_subject":
            return _opening(await self._subject(cluster, is_taken=True, poll_s=POLL_S))
        if self.act == "stolen_subject":
            # One that the worker has not called for yet, by somebody who knows all but the secret.
            return _opening(await self._subject(cluster, is_taken=False, poll_s=POLL_S / 50))
        return SAID[self.act]

    async def _subject(self, cluster: Cluster, *, is_taken: bool, poll_s: float) -> str:
        """Guessing one is impossible by design, so it is looked up."""
        while True:
            home = cluster.processes[self.to].transports.home
            for subject, registration in home._registrations.items() if home else ():  # noqa: SLF001
                if registration.is_taken is is_taken:
                    return str(subject)
            await trio.sleep(poll_s)

    def _address(self, cluster: Cluster) -> tuple[str, int]:
        transports = cluster.processes[self.to].transports
        server = transports.server if self.act in REQUEST_ACTS else transports.home
        host, _, port = server.address.rpartition(":")
        return host, int(port)

    async def _converse(
        self, address: tuple[str, int], payload: bytes, options: TcpOptions, world: World
    ) -> str:
        decoder = FrameDecoder()
        wire = open_wire(await trio.open_tcp_stream(*address))
        try:
            with closing(wire.socket):
                if self.act in GREETING_ACTS:
                    env = SimEnv(world, f"byzantine.{self.act}")
                    purpose = Purpose.REQUESTS if self.act in REQUEST_ACTS else Purpose.STREAMS
                    wire, _ = await greet(wire, self.to, options, env, purpose)
                await send_all(wire, payload if wire.seal is None else wire.seal(payload))
                while data := await wire.receive(65536):
                    for header, said in decoder.feed(data):
                        if header[4:5] == bytes([Kind.REFUSED]):
                            # A link stays for its other streams, unless it is itself refused.
                            return f"refused {json.loads(said)['code']}"
        except (OSError, ConnectError):
            pass  # Closed all the same, with words of ours unread.
        except RemoteProtocolError:
            return "broken"
        return "closed"


def _opening(subject: str) -> bytes:
    return encode_opening(1, Opening(Handshake(subject, StreamType.RESPONSE), 1 << 16))


NO_FRAME: Final = b"\xff" * 8 + b"no such frame"
HELLO: Final = encode_hello(Purpose.STREAMS, sealed=False)
SAID: Final = {
    "unknown_subject": _opening(UNKNOWN),
    "malformed_opening": encode_frame(b"\0\0\0\1" + bytes([Kind.OPEN]), UNKNOWN.encode()),
    "data_first": encode_item(1, b"an item before the greeting"),
    "silence": b"",
    "half_a_greeting": HELLO[:-5],
    "oversize": NO_FRAME,
    "garbage_request": b"GET / HTTP/1.1\r\nhost: worker\r\n\r\n",
    "silent_request": b"",
    "oversize_request": NO_FRAME,
}
"""What is sent by each act that needs to know nothing of the cluster."""
ACTS: Final = (*SAID, "taken_subject", "stolen_subject")
REQUEST_ACTS: Final = ("garbage_request", "silent_request", "oversize_request")
"""Acts against the request listener of a worker."""
GREETING_ACTS: Final = (
    "unknown_subject",
    "malformed_opening",
    "taken_subject",
    "stolen_subject",
    "oversize_request",
)
"""Acts of one who greets before; all but one know the secret."""
