"""Mistakes in response streams, connections and requests."""

from __future__ import annotations

import math
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
from trinamo.runtime.protocol.streams.control import Closed, Kill, Refused, Sentinel, Stop
from trinamo.runtime.protocol.streams.credit import ReceiveCredit, SendCredit
from trinamo.runtime.protocol.streams.link_frames import encode_event
from trinamo.runtime.protocol.streams.machine import End, Ended, Machine, Role
from trinamo.runtime.protocol.streams.response_stream import WorkerHalf
from trinamo.runtime.worker.endpoint import DecodedInput
from trinamo.runtime.worker.worker import Worker
from trinamo.transports.http import server
from trinamo.transports.security import identity
from trinamo.transports.security.fleet import Fleet
from trinamo.transports.sockets.wire import send_all
from trinamo.transports.tcp import accepting, sockets
from trinamo.transports.tcp.streams import server as streams
from trinamo.transports.tcp.streams.channel import Channel
from trinamo.transports.tcp.streams.link import LinkLane
from trinamo.transports.tcp.streams.linked import InputReceiver, TcpResponseSender
from trinamo.transports.tcp.streams.registrations import ResponseRegistration
from trinamo.transports.tcp.streams.server import TcpStreamServer

from .planting import NOTHING, Patch, bug, instead_of, stands

# --- the response stream --------------------------------------------------------------------------


@instead_of(Machine, "_conclude")
def eof_is_complete(conclude: Any, self: Any, end: End, by: Role, word: object) -> None:
    """A stream that ends without an end mark passes for a complete answer."""
    if end is End.CUT and by is not self.our_role:
        end, word = End.COMPLETE, Sentinel()
    conclude(self, end, by, word)


# The worker takes the caller's FIN or RST for nothing, and works on.
stands("eof_ignored", (TcpResponseSender, "lost", NOTHING))


@instead_of(TcpResponseSender, "fail")
def error_becomes_sentinel(_: Any, self: Any, *_error: object) -> None:
    """A handler's failure is told as the end of its answer."""
    if self._machine.states[Role.WORKER] is WorkerHalf.OPENING:
        self.open()
    self.finish()


@instead_of(LinkLane, "hang_up")
def close_drops_the_queue(leave: Any, self: Any) -> None:
    """Closing a stream does not wait for what is queued."""
    del self._link._mux._frames[-1:]  # noqa: SLF001 -- its own last word
    leave(self)


@instead_of(TcpResponseSender, "receive")
def stop_unheard(receive: Any, self: Any, event: Any) -> None:
    """The worker reads Stop and does nothing."""
    if not isinstance(event, Stop):
        receive(self, event)


@bug
def kill_unheard() -> list[Patch]:
    """The worker reads Kill, and the end of the connection, and does nothing."""
    receive = TcpResponseSender.receive

    def deaf(self: Any, event: Any) -> None:
        if not isinstance(event, (Kill, Closed)):
            receive(self, event)

    return [(TcpResponseSender, "receive", deaf), (TcpResponseSender, "lost", lambda *_: None)]


@instead_of(Context, "stop")
def stop_downgrades_kill(_: Any, self: Any, reason: Reason = Reason.STOP_REQUESTED) -> None:
    """`stop()` sets the state without looking, so that a killed context is only stopped."""
    for child in tuple(self._children or ()):
        child.stop(reason)
    self.stop_reason = reason
    self._advance(State.STOPPED)


# Whatever ended a request, its worker is told that the consumer dropped it.
stands("reasons_unsaid", (Context, "why_left", lambda *_: Reason.CONSUMER_DROPPED))


@instead_of(ResponseRegistration, "close")
def drop_leaves_the_stream(_: Any, self: Any) -> None:
    """A consumer that leaves its iterator forgets the subject and tells nobody."""
    self._forget(self)
    self._context.off_change(self._on_context)


# What was queued when the caller said Kill is still handed out.
stands("kill_delivers_the_queue", (Channel, "abandon", Channel.fail))


@instead_of(InputReceiver, "_kill")
def input_cut_is_complete(_: Any, self: Any, *_reason: Reason) -> None:
    """The worker takes the end of an input that was cut off for the end of the input."""
    self._machine.ended = Ended(End.COMPLETE, Role.CALLER, Sentinel())
    self.channel.ended()
    self.close()


@instead_of(DecodedInput, "__anext__")
async def input_never_ends(step: Any, self: Any) -> Any:
    """A handler is not told that its input is complete, or stopped."""
    try:
        return await step(self)
    except StopAsyncIteration:
        await trio.sleep_forever()


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


@instead_of(Channel, "extend")
def items_out_of_order(extend: Any, self: Any, items: list[bytes]) -> Any:
    """A batch that arrives in one read is queued in the wrong order."""
    return extend(self, items[::-1])


# --- connections ------------------------------------------------------------------------------------

# No keep-alive and no user timeout: a silent peer is waited for as long as TCP does.
stands("no_keep_alive", *((module, "tune", NOTHING) for module in (sockets, accepting)))

# The frontend does not set its clients' sockets up to notice a silent peer.
stands("http_without_keep_alive", (server, "configure_socket", NOTHING))


@instead_of(TcpStreamServer, "_refuse")
def refusal_unsaid(_: Any, self: Any, link: Any, *_refused: object) -> None:
    """Whoever opens a stream wrongly is cut off without a word."""
    self._turned_away_count += 1
    link.cancel()


@instead_of(TcpStreamServer, "_take")
def subject_taken_twice(take: Any, self: Any, handshake: Any) -> Any:
    """A second stream for a subject replaces the first."""
    return self._registrations.get(handshake.subject) or take(self, handshake)


@bug
def proof_unchecked() -> list[Patch]:
    """Whatever the secret, it makes the same authority, so who greets is taken for a member."""
    same = identity.authority_of(b"")
    return [(identity, "authority_of", lambda _: same)]


# Whoever has a certificate of the fleet may ask for everything.
stands("diallers_role_unread", (Fleet, "check_dialler", NOTHING))


# What is for workers alone is for whoever may ask something.
stands("askers_role_unread", (Fleet, "is_worker", lambda *_: True))


@bug
def change_admits_nobody() -> list[Patch]:
    """While a cluster changes over, certificates count alone."""
    return [(Fleet, "admits_secret", property(lambda _: False))]


@instead_of(streams, "welcome")
async def strangers_are_told(greet: Any, wire: Any, *how: Any) -> Any:
    """Who is no member hears why."""
    try:
        return await greet(wire, *how)
    except RemoteProtocolError as error:
        await send_all(wire, encode_event(0, Refused("bad_link", error.message)))
        raise


@instead_of(streams, "welcome")
async def no_handshake_timeout(greet: Any, *how: Any) -> Any:
    """Whoever connects and says nothing may stay."""
    with trio.CancelScope(shield=True):
        return await greet(*how)


@instead_of(FrameDecoder, "__init__")
def frames_without_bound(start: Any, self: Any, **_: int) -> None:
    """The decoder believes any length and waits for the rest."""
    start(self, header_bytes_max=1 << 40, data_bytes_max=1 << 40)


# A failing accept ends the listener, and the process with it.
stands("accept_gives_up", (accepting, "_EXHAUSTED", set()))


# --- requests ---------------------------------------------------------------------------------------


@instead_of(Worker, "_serve_stream")
async def served_requests_stay(serve: Any, *request: Any) -> None:
    """A worker's task of a request stays when the request is over, and counted no more."""
    await serve(*request)
    await trio.sleep_forever()


@bug
def nack_is_success() -> list[Patch]:
    """Any answer to an envelope passes for its acceptance, and the call home is waited for."""
    return [(attempts, "raise_for_nack", lambda _: None), *waits_are_unwatched()]


@bug
def waits_are_unwatched() -> list[Patch]:
    """While a caller waits for a worker it looks neither at discovery nor at the clock."""
    start, leave = Client.__init__, Instances._leave  # noqa: SLF001 -- what is replaced

    def patient(self: Any, *args: Any, **options: Any) -> None:
        start(self, *args, **{**options, "opening_timeout_s": math.inf})

    def unheard(self: Any, record: Any, *more: Any) -> None:
        for request in record.requests:
            request.is_waiting = False
        leave(self, record, *more)

    return [(Client, "__init__", patient), (Instances, "_leave", unheard)]


# From its first item on a stream trusts its connection alone, which a stopped process keeps.
# Either would end it: it is deleted, and it does not answer.
stands("silence_unheard", (Liveness, "_lose", lambda *_, **__: []))


@instead_of(Monitor, "_probe")
async def silent_unprobed(ask: Any, self: Any, record: Any, scope: Any) -> None:
    """As long as discovery names a worker, or cannot be asked, its silence is waited out."""
    if record.presence is Presence.STALE:
        await ask(self, record, scope)


@instead_of(Liveness, "take")
def silence_is_death(take: Any, self: Any, reply: Sign, *times: float) -> Any:
    """A silent request is given up whatever its worker answers."""
    return take(self, reply if self.presence is Presence.STALE else Sign.REPLACED, *times)


@instead_of(liveness, "probe")
async def answers_unheard(*_: object) -> Sign:
    """Workers are probed, and what they answer is not heard."""
    await trio.lowlevel.checkpoint()
    return Sign.UNANSWERED
