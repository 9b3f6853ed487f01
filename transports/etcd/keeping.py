"""Keep-alives of all leases over one stream.

Each `keep_alive` is one question and one answer; who asks how often is not decided here (see
`runtime/protocol/discovery/lease.py`). A renewal may be repeated freely, so a lost stream costs the
callers nothing but time: what is unanswered is asked again on the next stream.

A stream is opened where the store has answered, and not while it is away: then it is asked for a sign
of life, which is no renewal, and which waits for the connection: it is there as soon as that is. So a
renewal that nobody was there to take was never sent, and that is certain however late gRPC says that
nobody was there.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import attrs
import trio

from trinamo.runtime.errors import ConnectError, DeadlineError, LeaseLostError, TrinamoError

from . import wire_pb2 as wire
from .client import EtcdClient
from .rpc import CallVerdict, StatusError, Stream, StreamLostError, final_error, judge

PAUSE_MIN_S: Final = 0.05
PAUSE_MAX_S: Final = 0.5


@attrs.define(eq=False)
class _Question:
    """A renewal on its way, and those who wait for it."""

    answered: trio.Event = attrs.field(factory=trio.Event)
    left_s: float = 0.0
    error: TrinamoError | None = None
    waiters: int = 0
    is_on_stream: bool = False
    """It was sent on the stream that is open."""
    was_sent: bool = False
    """It may have arrived by a stream that was lost."""


class LeaseKeeper:
    """Owns the LeaseKeepAlive stream; opens it on the first question and whenever it is lost."""

    def __init__(self, client: EtcdClient) -> None:
        self._client = client
        self._questions: dict[int, _Question] = {}
        self._stream: Stream | None = None
        self._scope = trio.CancelScope()
        self._wanted = trio.lowlevel.ParkingLot()
        self._opened_at = 0.0
        self._last_words = ""

    async def keep_alive(self, lease_id: int) -> float:
        """Renew once and return the seconds left; see `ControlPlane.keep_alive`."""
        question = self._questions.get(lease_id)
        if question is None:
            question = self._questions[lease_id] = _Question()
            self._wanted.unpark_all()
            self._ask(lease_id, question)
        question.waiters += 1
        try:
            give_up_at = trio.current_time() + self._client.timeout_s
            while not question.answered.is_set() and trio.current_time() < give_up_at:
                try_until = trio.current_time() + self._client.per_try_timeout_s
                with trio.move_on_at(min(try_until, give_up_at)) as attempt:
                    await question.answered.wait()
                if attempt.cancelled_caught:
                    self._client.missed("a lease was not renewed in time")
                    # A member that hangs: the next stream may reach another one. Each caller has its
                    # own time, and a young stream shall not pay for an old one's silence.
                    if trio.current_time() - self._opened_at >= self._client.per_try_timeout_s:
                        self._scope.cancel()
        finally:
            question.waiters -= 1
            if question.waiters == 0 and self._questions.get(lease_id) is question:
                del self._questions[lease_id]
        if question.error is not None:
            raise question.error
        if not question.answered.is_set():
            why = self._last_words or f"no answer within {self._client.timeout_s:g} s"
            words = f"lease {lease_id:x} not renewed: {why}"
            may_have_arrived = question.is_on_stream or question.was_sent
            error_type = DeadlineError if may_have_arrived else ConnectError
            raise error_type(f"etcd at {self._client.where}: {words}")
        return question.left_s

    async def run(self) -> None:
        pause_s = PAUSE_MIN_S
        while True:
            while not self._questions:
                await self._wanted.park()
            self._opened_at = trio.current_time()
            with trio.CancelScope() as self._scope:
                try:
                    await self._serve_stream()
                except StreamLostError as lost:
                    self._note(lost)
                except StatusError as error:
                    self._client.missed(error.text)
                    if error.code != "DEADLINE_EXCEEDED" or not self._last_words:
                        self._last_words = error.text
                except TrinamoError as error:
                    self._last_words = str(error)
            for question in self._questions.values():
                question.was_sent |= question.is_on_stream
                question.is_on_stream = False
            # A stream that has held for a while owes nothing to the pauses before it, and a look for
            # life that took its whole time has waited already.
            held_s = trio.current_time() - self._opened_at
            if held_s >= min(self._client.per_try_timeout_s, PAUSE_MAX_S):
                pause_s = PAUSE_MIN_S
            await trio.sleep(self._client.jittered(pause_s))
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def _serve_stream(self) -> None:
        metadata = await self._client.metadata()
        if not self._client.is_connected:
            # Return once the store has answered; raises `StatusError` if it does not in the time
            # of a try.
            look = partial(
                self._client.channel.call,
                "Status",
                wire.StatusRequest(),
                timeout_s=self._client.per_try_timeout_s,
                metadata=metadata,
            )
            try:
                await look()
            except StatusError as error:
                if judge(error) is not CallVerdict.UNSENT:
                    raise
                # Only who does not wait is told why there is no connection.
                self._last_words = error.text
                await look(waits=True)
            self._client.heard()
        try:
            async with self._client.channel.open_stream(
                "LeaseKeepAlive", metadata=metadata
            ) as stream:
                self._stream = stream
                try:
                    for lease_id, question in self._questions.items():
                        self._ask(lease_id, question)
                    while True:
                        for reply in await stream.receive():
                            self._answer(reply)
                finally:
                    self._stream = None
        except StreamLostError as lost:
            if lost.verdict is CallVerdict.DENIED and metadata:
                await self._client.authenticate(stale_token=metadata[0][1])
            raise

    def _ask(self, lease_id: int, question: _Question) -> None:
        if self._stream is None:
            return
        question.is_on_stream = True
        try:
            self._stream.send_nowait(wire.LeaseKeepAliveRequest(id=lease_id))
        except StreamLostError:
            self._stream.cancel()

    def _answer(self, reply: wire.LeaseKeepAliveResponse) -> None:
        self._client.heard()
        question = self._questions.pop(reply.id, None)
        # Nobody waits any more, or the answer is to the question before this one: a renewal is
        # a renewal.
        if question is None:
            return
        self._last_words = ""
        question.left_s = float(reply.ttl_s)
        if reply.ttl_s <= 0:
            question.error = LeaseLostError(f"etcd does not know lease {reply.id:x}")
        question.answered.set()

    def _note(self, lost: StreamLostError) -> None:
        self._client.lost_stream(str(lost))
        self._last_words = str(lost)
        if lost.verdict is CallVerdict.UNSENT:
            for question in self._questions.values():
                question.is_on_stream = False
        if lost.cause is None or lost.verdict is not CallVerdict.FINAL:
            return
        for question in self._questions.values():
            question.error = final_error(lost.cause)
            question.answered.set()
        self._questions.clear()
