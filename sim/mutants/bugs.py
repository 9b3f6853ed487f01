"""Mistakes of other systems, and possible ones of ours, to be put back into a run on purpose.

A simulator that finds nothing may be blind. So each scenario has mutants: the same play with one of
these mistakes planted (`planting.py`), which some seed must show. Those of the control and event planes are in
`plane_bugs.py`, those of transfers in `transfer_bugs.py`.
"""

from __future__ import annotations

import math
from functools import wraps
from typing import Any

import trio

from trinamo.runtime.caller import attempts, liveness
from trinamo.runtime.caller.client import Client
from trinamo.runtime.caller.instances import Instances
from trinamo.runtime.caller.liveness import Monitor
from trinamo.runtime.context import Context, Reason, State
from trinamo.runtime.errors import RemoteProtocolError
from trinamo.runtime.protocol.discovery.presence import Liveness, Presence, Sign
from trinamo.runtime.protocol.streams.codec import FrameDecoder
from trinamo.runtime.protocol.streams.control import Kill, Refused, Stop, encode_control
from trinamo.runtime.protocol.streams.credit import ReceiveCredit, SendCredit
from trinamo.runtime.protocol.streams.machine import Role
from trinamo.runtime.protocol.streams.response_stream import WorkerState
from trinamo.runtime.worker.endpoint import DecodedInput
from trinamo.runtime.worker.worker import Worker
from trinamo.transports.http import server
from trinamo.transports.tcp import accepting, sockets
from trinamo.transports.tcp.streams import server as stream_server
from trinamo.transports.tcp.streams.channel import Channel
from trinamo.transports.tcp.streams.dedicated.worker import _Conversation
from trinamo.transports.tcp.streams.input_receiver import InputReceiver
from trinamo.transports.tcp.streams.multiplexed.lane import LinkLane
from trinamo.transports.tcp.streams.response_registration import ResponseRegistration
from trinamo.transports.tcp.streams.response_sender import TcpResponseSender
from trinamo.transports.tcp.streams.server import TcpStreamServer

from . import (
    disaggregation_bugs,
    edge_bugs,
    link_bugs,
    migration_bugs,
    plane_bugs,
    transfer_bugs,
)
from .planting import BUGS, Patch, bug, planted

__all__ = [
    "BUGS",
    "disaggregation_bugs",
    "edge_bugs",
    "link_bugs",
    "migration_bugs",
    "plane_bugs",
    "planted",
    "transfer_bugs",
]

# --- the response stream --------------------------------------------------------------------------


@bug
def eof_is_complete() -> list[Patch]:
    """A connection that ends without an end mark passes for a complete answer."""

    def disconnected(self: Any, why: str) -> None:  # noqa: ARG001 -- the method's parameter
        self.channel.complete()

    return [(ResponseRegistration, "_disconnected", disconnected)]


@bug
def eof_ignored() -> list[Patch]:
    """The worker takes the caller's FIN or RST for nothing, and works on."""
    return [(TcpResponseSender, "_closed", lambda _: None)]


@bug
def error_becomes_sentinel() -> list[Patch]:
    """A handler's failure is told as the end of its answer."""

    def fail(self: Any, error: object) -> None:  # noqa: ARG001 -- the method's parameter
        if self._machine.states[Role.WORKER] is WorkerState.OPENING:
            self.open()
        self.finish()

    return [(TcpResponseSender, "fail", fail)]


@bug
def close_drops_the_queue() -> list[Patch]:
    """Closing a stream does not wait for what is queued."""

    async def hang_up(self: Any) -> None:
        self._outbox.discard()
        await self._sent.wait()

    leave = LinkLane.hang_up

    def forget(self: Any) -> None:
        del self._link._mux._frames[-1:]  # noqa: SLF001 -- its own last word
        leave(self)

    return [(_Conversation, "hang_up", hang_up), (LinkLane, "hang_up", forget)]


@bug
def stop_unheard() -> list[Patch]:
    """The worker reads Stop and does nothing."""
    receive = TcpResponseSender.receive

    def deaf(self: Any, event: Any) -> None:
        if not isinstance(event, Stop):
            receive(self, event)

    return [(TcpResponseSender, "receive", deaf)]


@bug
def kill_unheard() -> list[Patch]:
    """The worker reads Kill, and the end of the connection, and does nothing."""
    receive = TcpResponseSender.receive

    def deaf(self: Any, event: Any) -> None:
        if not isinstance(event, Kill):
            receive(self, event)

    return [(TcpResponseSender, "receive", deaf), (TcpResponseSender, "_closed", lambda _: None)]


@bug
def stop_downgrades_kill() -> list[Patch]:
    """`stop()` sets the state without looking, so that a killed context is only stopped."""

    def stop(self: Any, reason: Reason = Reason.STOP_REQUESTED) -> None:
        for child in tuple(self._children or ()):
            child.stop(reason)
        self.stop_reason = reason
        self._advance(State.STOPPED)

    return [(Context, "stop", stop)]


@bug
def reasons_unsaid() -> list[Patch]:
    """Whatever ended a request, its worker is told that the consumer dropped it."""
    return [(Context, "why_left", lambda _: Reason.CONSUMER_DROPPED)]


@bug
def drop_leaves_the_stream() -> list[Patch]:
    """A consumer that leaves its iterator forgets the subject and tells nobody."""

    def close(self: Any) -> None:
        self._forget(self)
        self._context.off_change(self._on_context)

    return [(ResponseRegistration, "close", close)]


@bug
def kill_delivers_the_queue() -> list[Patch]:
    """What was queued when the caller said Kill is still handed out."""
    return [(Channel, "abandon", Channel.fail)]


@bug
def input_cut_is_complete() -> list[Patch]:
    """The worker takes the end of an input that was cut off for the end of the input."""

    def end(self: Any, _: Reason) -> None:
        self.channel.complete()
        self.close()

    return [(InputReceiver, "_kill", end)]


@bug
def input_never_ends() -> list[Patch]:
    """A handler is not told that its input is complete, or stopped."""
    step = DecodedInput.__anext__

    async def endless(self: Any) -> Any:
        try:
            return await step(self)
        except StopAsyncIteration:
            await trio.sleep_forever()

    return [(DecodedInput, "__anext__", endless)]


@bug
def reader_has_no_bound() -> list[Patch]:
    """The caller's reader goes on reading for a consumer that does not."""
    arrive = ReceiveCredit.arrive

    def lenient(self: Any, items: list[bytes]) -> bool:
        arrive(self, items)
        return True

    return [
        (ReceiveCredit, "arrive", lenient),
        (Channel, "is_paused", False),
        (SendCredit, "spend", lambda *_: True),
        (SendCredit, "grant", lambda *_: None),
    ]


@bug
def items_out_of_order() -> list[Patch]:
    """A batch that arrives in one read is queued in the wrong order."""
    extend = Channel.extend

    def reversed_extend(self: Any, items: list[bytes]) -> bool:
        return extend(self, items[::-1])

    return [(Channel, "extend", reversed_extend)]


# --- connections ------------------------------------------------------------------------------------


@bug
def no_keep_alive() -> list[Patch]:
    """No keep-alive and no user timeout: a silent peer is waited for as long as TCP does."""

    def untuned(stream: object, options: object) -> None:
        pass

    return [(module, "tune", untuned) for module in (sockets, accepting)]


@bug
def http_without_keep_alive() -> list[Patch]:
    """The frontend does not set its clients' sockets up to notice a silent peer."""

    def untuned(socket: object, **_bounds: float) -> None:
        pass

    return [(server, "configure_socket", untuned)]


@bug
def refusal_unsaid() -> list[Patch]:
    """Whoever calls home wrongly is cut off without a word."""

    async def refuse(self: Any, _stream: object, _refusal: object) -> None:
        self._turned_away_count += 1

    return [(TcpStreamServer, "_refuse", refuse)]


@bug
def subject_taken_twice() -> list[Patch]:
    """A second connection for a subject replaces the first."""
    take = TcpStreamServer._take  # noqa: SLF001 -- what is replaced

    def careless(self: Any, handshake: Any) -> Any:
        registration = self._registrations.get(handshake.subject)
        if registration is None:
            return take(self, handshake)
        return registration

    return [(TcpStreamServer, "_take", careless)]


@bug
def proof_unchecked() -> list[Patch]:
    """Who knows a subject is taken for the worker, with whatever proof."""
    return [(stream_server, "compare_digest", lambda *_: True)]


@bug
def strangers_are_told() -> list[Patch]:
    """Who is no member hears why."""
    greet = TcpStreamServer._greet  # noqa: SLF001 -- what is replaced

    async def talkative(self: Any, stream: Any) -> Any:
        try:
            return await greet(self, stream)
        except RemoteProtocolError as error:
            await stream.send_all(encode_control(Refused("bad_handshake", error.message)))
            raise

    return [(TcpStreamServer, "_greet", talkative)]


@bug
def no_handshake_timeout() -> list[Patch]:
    """Whoever connects and says nothing may stay."""
    greet = TcpStreamServer._greet  # noqa: SLF001 -- what is replaced

    async def patient(self: Any, stream: Any) -> Any:
        with trio.CancelScope(shield=True):
            return await greet(self, stream)

    return [(TcpStreamServer, "_greet", patient)]


@bug
def frames_without_bound() -> list[Patch]:
    """The decoder believes any length and waits for the rest."""
    start = FrameDecoder.__init__

    def unbounded(self: Any, **_: int) -> None:
        start(self, header_bytes_max=1 << 40, data_bytes_max=1 << 40)

    return [(FrameDecoder, "__init__", unbounded)]


@bug
def accept_gives_up() -> list[Patch]:
    """A failing accept ends the listener, and the process with it."""
    return [(accepting, "_EXHAUSTED", set())]


# --- requests ---------------------------------------------------------------------------------------


@bug
def served_requests_stay() -> list[Patch]:
    """A worker's task of a request stays when the request is over, and counted no more."""
    serve = Worker._serve_stream  # noqa: SLF001 -- what is replaced

    @wraps(serve)
    async def lingering(self: Any, *request: Any) -> None:
        await serve(self, *request)
        await trio.sleep_forever()

    return [(Worker, "_serve_stream", lingering)]


@bug
def nack_is_success() -> list[Patch]:
    """Any answer to an envelope passes for its acceptance, and the call home is waited for."""
    return [(attempts, "raise_for_nack", lambda _: None), *waits_are_unwatched()]


@bug
def waits_are_unwatched() -> list[Patch]:
    """While a caller waits for a worker it looks neither at discovery nor at the clock."""
    start, leave = Client.__init__, Instances._leave  # noqa: SLF001 -- what is replaced

    def patient(self: Any, *args: Any, **options: Any) -> None:
        start(self, *args, **{**options, "call_home_timeout_s": math.inf})

    def unheard(self: Any, record: Any, *more: Any) -> None:
        for request in record.requests:
            request.is_waiting = False
        leave(self, record, *more)

    return [(Client, "__init__", patient), (Instances, "_leave", unheard)]


@bug
def silence_unheard() -> list[Patch]:
    """From its first item on a stream trusts its connection alone, which a stopped process keeps."""
    # Either would end it: it is deleted, and it does not answer.
    return [(Liveness, "_lose", lambda *_, **__: [])]


@bug
def silent_unprobed() -> list[Patch]:
    """As long as discovery names a worker, or cannot be asked, its silence is waited out."""
    ask = Monitor._probe  # noqa: SLF001 -- what is replaced

    async def incurious(self: Any, record: Any, scope: Any) -> None:
        if record.presence is Presence.STALE:
            await ask(self, record, scope)

    return [(Monitor, "_probe", incurious)]


@bug
def silence_is_death() -> list[Patch]:
    """A silent request is given up whatever its worker answers."""
    take = Liveness.take

    def hasty(self: Any, reply: Sign, asked_at: float, now: float) -> Any:
        is_stale = self.presence is Presence.STALE
        return take(self, reply if is_stale else Sign.REPLACED, asked_at, now)

    return [(Liveness, "take", hasty)]


@bug
def answers_unheard() -> list[Patch]:
    """Workers are probed, and what they answer is not heard."""

    async def ask(*_: object) -> Sign:
        await trio.lowlevel.checkpoint()
        return Sign.UNANSWERED

    return [(liveness, "probe", ask)]
