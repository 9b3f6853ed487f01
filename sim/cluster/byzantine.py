"""Strangers, and members that break a protocol on purpose, over plain sockets or through store and broker.

Each `ByzantineClient` is a host of its own that connects to where workers call home, or to where callers
send requests, does its act, and notes how it was answered; `expects` says what the protocol asks
for. Or it may write to the store, or speak at the broker, without the cluster's secret, and says what is not so.
What is around it must not notice: that is what the other invariants are for.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs
import msgspec
import trio

from trinamo.runtime.caller.record import InstanceStatus
from trinamo.runtime.caller.unary import UnaryAttempt
from trinamo.runtime.context import Context
from trinamo.runtime.errors import ConnectError, RemoteProtocolError
from trinamo.runtime.events.load import WorkerState
from trinamo.runtime.events.source import event_subject, topic_of
from trinamo.runtime.protocol.disaggregation.messages import Claim
from trinamo.runtime.protocol.discovery.instances import INSTANCE_PREFIX, EndpointName
from trinamo.runtime.protocol.events.sequence import SequencedEvent, encode_event
from trinamo.runtime.protocol.streams.codec import FrameDecoder, encode_frame
from trinamo.runtime.protocol.streams.control import Handshake
from trinamo.runtime.protocol.streams.link_frames import Kind, Opening, encode_item, encode_opening
from trinamo.runtime.protocol.streams.membership import Purpose, encode_hello
from trinamo.runtime.protocol.streams.request import (
    AckStatus,
    ConnectionInfo,
    Envelope,
    StreamType,
)
from trinamo.transports.security.signed import signed_control
from trinamo.transports.sockets.wire import open_wire, send_all
from trinamo.transports.tcp import TcpOptions, open_request_plane
from trinamo.transports.tcp.greeting import greet

from ..core.host import current_host_name
from ..core.world import World
from ..env import SimEnv
from .memory import SECRET, fleet_of, tcp_options_of

if TYPE_CHECKING:
    from .cluster import Cluster


ANOTHER: Final = b"the secret of some other simulated cluster"
UNKNOWN: Final = "0" * 32
QUICK_S: Final = 2.0
POLL_S: Final = 0.005
WAITED_S: Final = 1.0
"""For somebody to believe it."""


@attrs.frozen(kw_only=True)
class ByzantineClient:
    """One act against one host, `at_s` after the load began."""

    act: str
    to: str = "frontend0"
    at_s: float = 0.05
    expects: str = "closed"
    """`refused CODE`, or `closed` for an end without a word; `ignored` where all are told."""

    async def run(self, cluster: Cluster) -> None:
        """The byzantine host's main function."""
        await trio.sleep(self.at_s)
        if self.act in TOLD_TO_ALL:
            started_s = trio.current_time()
            answer = await TOLD_TO_ALL[self.act](cluster)
        else:
            payload = await self._payload(cluster)
            address = self._address(cluster)
            started_s = trio.current_time()
            theirs = cluster.processes[self.to].transports
            secret = (theirs.home or theirs.server).options.secret
            env = SimEnv(cluster.world, f"byzantine.{self.act}")
            options = TcpOptions(
                secret=ANOTHER if self.act == "stolen_subject" else secret,
                fleet=fleet_of(cluster.plan.config, current_host_name(), env),
            )
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
        # Short steps for seconds without end would be most of a run in which no request is sent.
        quick_until_s = trio.current_time() + QUICK_S
        while True:
            home = cluster.processes[self.to].transports.home
            for subject, registration in home._registrations.items() if home else ():  # noqa: SLF001
                if registration.is_taken is is_taken:
                    return str(subject)
            await trio.sleep(poll_s if trio.current_time() < quick_until_s else POLL_S)

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


async def _overwrite(act: str, secrets: list[bytes], cluster: Cluster) -> str:
    """Put an address of its own in the place of each worker's; says whether anybody comes."""
    name, env = current_host_name(), SimEnv(cluster.world, f"byzantine.{act}")
    (listener,) = await trio.open_tcp_listeners(0, host="0.0.0.0")  # noqa: S104 -- simulated
    address = f"{name}:{listener.socket.getsockname()[1]}"
    config = cluster.plan.config
    async with listener, cluster.services.open_control(config, env) as plane:
        control = signed_control(plane, env, secrets, fleet_of(config, name, env))
        for entry in (await control.range(INSTANCE_PREFIX)).entries:
            told = json.loads(entry.value.partition(b"\n")[0])
            told["transports"] = {"tcp": address}
            # As its owner would: under the lease that is there.
            await control.put(entry.key, json.dumps(told).encode(), lease_id=entry.lease_id)
        with trio.move_on_after(WAITED_S):
            await (await listener.accept()).aclose()
            return "dialled"
    return "ignored"


async def _claim(cluster: Cluster) -> str:
    """Ask each worker for a prompt as a prefill worker does; says whether one lets that be asked."""
    name, env = current_host_name(), SimEnv(cluster.world, "byzantine.frontend_s_claim")
    config, asked = cluster.plan.config, 0
    claim = msgspec.msgpack.encode(Claim(id=UNKNOWN, descriptor=None))
    nowhere = ConnectionInfo(f"{name}:1", UNKNOWN, StreamType.RESPONSE)
    async with (
        cluster.services.open_control(config, env) as control,
        open_request_plane(tcp_options_of(config, name, env), env) as plane,
    ):
        for entry in (await control.range(INSTANCE_PREFIX)).entries:
            told = json.loads(entry.value.partition(b"\n")[0])
            if told.get("metadata", {}).get("for") == "handoff":
                asked += 1
                request = Envelope(id=f"claim{asked}", endpoint=told["endpoint"], response=nowhere)
                attempt = UnaryAttempt(Context(request.id))
                answer, _ = await attempt.run(plane, told["transports"]["tcp"], request, claim)
                if answer.status is AckStatus.ACCEPTED:
                    return "let in"
    return "refused" if asked else "nobody to ask"


async def _forged_report(cluster: Cluster) -> str:
    """Say of each worker that it drains; says whether a frontend believes it."""
    env = SimEnv(cluster.world, "byzantine.forged_report")
    opening = cluster.services.open_events(cluster.plan.config, env)
    async with opening as events:
        for key in cluster.store.values(INSTANCE_PREFIX):
            endpoint, _, worker = key.removeprefix(INSTANCE_PREFIX).rpartition("/")
            event = SequencedEvent(worker, 1 << 50, 1, msgspec.msgpack.encode(WorkerState.DRAINING))
            topic = topic_of("status", EndpointName.parse(endpoint))
            await events.publish(event_subject(topic, worker), encode_event(event))
        await trio.sleep(WAITED_S)
    runtimes = [cluster.processes[name].runtime for name in cluster.frontends]
    told = [
        status
        for runtime in runtimes
        for client in (runtime.clients if runtime else ())
        for _, status, _ in client.router.statuses()
    ]
    return "believed" if InstanceStatus.DRAINING in told else "ignored"


async def _repeated_report(cluster: Cluster) -> str:
    """Say again what workers have told for a while; says whether it unsettles a frontend."""
    env = SimEnv(cluster.world, "byzantine.repeated_report")
    heard = []
    async with cluster.services.open_events(cluster.plan.config, env) as events:
        async with events.subscribe("trinamo.load.>") as messages:
            with trio.move_on_after(3 * WAITED_S):
                async for message in messages:
                    heard.append(message)  # noqa: PERF401 -- until the time is up
        for each in heard:
            if ".event." in each.subject:
                await events.publish(each.subject, each.payload)
        await trio.sleep(WAITED_S)
    runtimes = [cluster.processes[name].runtime for name in cluster.frontends]
    reports = [
        client.router.reports
        for runtime in runtimes
        for client in (runtime.clients if runtime else ())
    ]
    unsettled = any(each is not None and each.loads.follower.counts.backwards for each in reports)
    return "believed" if unsettled else "ignored"


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
TOLD_TO_ALL: Final[dict[str, Callable[[Cluster], Awaitable[str]]]] = {
    "unsigned_entry": partial(_overwrite, "unsigned_entry", []),
    "frontend_s_entry": partial(_overwrite, "frontend_s_entry", [SECRET]),
    "frontend_s_claim": _claim,
    "forged_report": _forged_report,
    "repeated_report": _repeated_report,
}
"""Acts at the store and at the broker, of one with the rights of a member there, and without the secret.

Or, with the secret, and a certificate that says another role."""
ACTS: Final = (*SAID, *TOLD_TO_ALL, "taken_subject", "stolen_subject")
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
