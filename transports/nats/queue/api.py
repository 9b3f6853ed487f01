"""JetStream as requests over the event plane: an answer, or a typed error, by a deadline.

JetStream is a set of subjects that answer JSON. Every request made here may be repeated, so each
is tried until the deadline: with no leader a stream has no responder for up to 8 s, and a server
that restarts loses the requests it had. Answers are decoded here and nowhere else: what is none is a
`RemoteProtocolError`. Not here: what a queue asks (`work_queue.py`).
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Annotated, Any, Final, Protocol, TypeVar

import attrs
import msgspec
import trio

from trinamo.runtime.errors import (
    DeadlineError,
    EventPlaneError,
    OverloadedError,
    RemoteProtocolError,
    UnavailableError,
    UnknownOutcomeError,
)
from trinamo.runtime.planes import Message
from trinamo.runtime.protocol.undecodable import UNDECODABLE, decoding_fault

TRY_TIMEOUT_S: Final = 1.0
BACKOFF_S: Final = (0.1, 0.25)
WRONG_LAST_SEQUENCE: Final = 10071
NOT_FOUND: Final = frozenset({10014, 10037, 10059})
"""No such consumer, message, stream."""
# Servers that have just met and do not yet count each other as peers; no leader, not the leader,
# resources or quorum missing, stream offline: all of them pass.
_PASSING: Final = frozenset({10005, 10008, 10009, 10023, 10118, 10124, 10202})


class QueuePlane(Protocol):
    """What a queue needs of the event plane beside `EventPlane`: a request that carries headers."""

    @property
    def is_connected(self) -> bool: ...

    @property
    def message_bytes_max(self) -> int: ...

    async def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] = ...
    ) -> None: ...

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Mapping[str, str] = ...
    ) -> Message: ...

    def subscribe(
        self, subject: str, *, group: str = "", pending_max: int = ...
    ) -> AbstractAsyncContextManager[AsyncIterator[Message]]: ...


class JetStreamError(EventPlaneError):
    """JetStream said no, and would say so again. `error_code` is its own number for why."""

    default_definite = True

    def __init__(self, message: str, *, error_code: int = 0, definite: bool | None = None) -> None:
        super().__init__(message, definite=definite)
        self.error_code = error_code


Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""What a stream counts. A broker's word may be longer than what fits in here, and is none then."""


Time = Annotated[datetime, msgspec.Meta(tz=True)]


class JetStreamReply(msgspec.Struct, frozen=True):
    """What JetStream answered; fields that nobody needs are not looked at."""


class StoredReply(JetStreamReply, frozen=True):
    """A message is in its stream."""

    seq: Number
    duplicate: bool = False


class Purged(JetStreamReply, frozen=True):
    """So many messages are not there any more."""

    purged: Number = 0


class StreamPage(JetStreamReply, frozen=True):
    """Some of all streams' names."""

    total: Number = 0
    streams: list[str] | None = None


class _Config(msgspec.Struct, frozen=True):
    description: str = ""


class _State(msgspec.Struct, frozen=True):
    messages: Number
    first_ts: Time | None = None


class StreamInfo(JetStreamReply, frozen=True):
    config: _Config
    state: _State

    def age_s(self, now_s: float) -> float:
        """How long its first message has been in it; 0 of a stream that is empty, or does not say."""
        first = self.state.first_ts
        return max(0.0, now_s - first.timestamp()) if self.state.messages and first else 0.0


class ConsumerInfo(JetStreamReply, frozen=True):
    num_ack_pending: Number = 0


class _Message(msgspec.Struct, frozen=True):
    subject: str
    seq: Number
    time: Time
    data: bytes = b""
    hdrs: bytes = b""


class _Found(JetStreamReply, frozen=True):
    message: _Message


class _Error(msgspec.Struct, frozen=True):
    description: str = "no reason given"
    err_code: Number = 0


class _Refusal(JetStreamReply, frozen=True):
    error: _Error | None = None


R = TypeVar("R", bound=JetStreamReply)


@attrs.frozen
class StoredMessage:
    """A message of a stream, looked up."""

    subject: str
    sequence: int
    payload: bytes = attrs.field(repr=False)
    headers: Mapping[str, str]
    stored_s: float
    """Seconds since the epoch, by the server's clock."""


@attrs.frozen
class JetStream:
    """The requests a queue needs. Every one is tried again until `deadline` on trio's clock."""

    _plane: QueuePlane
    _rng: random.Random

    async def ask(
        self,
        subject: str,
        payload: bytes,
        kind: type[R],
        *,
        deadline: float,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[R, bool]:
        """One request with all its tries; whether an earlier try may have been carried out.

        Raises `JetStreamError` for a refusal. After the last try `DeadlineError` if it certainly was
        not, `RemoteProtocolError` if that was answered by junk, else `UnknownOutcomeError`.
        """
        is_repeated = junk = False
        why = "no time was given"
        while (left_s := deadline - trio.current_time()) > 0:
            junk = False
            try:
                reply = await self._plane.request(
                    subject, payload, timeout_s=min(TRY_TIMEOUT_S, left_s), headers=headers or {}
                )
                error = _decode(reply.payload, _Refusal).error
                if error is None:
                    return _decode(reply.payload, kind), is_repeated
            except (UnavailableError, OverloadedError, RemoteProtocolError) as away:
                why = away.message
                # Whoever has the broker's token can answer in its place: it may have done it.
                junk = isinstance(away, RemoteProtocolError)
                is_repeated = is_repeated or junk
            except DeadlineError as late:
                is_repeated = is_repeated or not late.definite
                why = late.message
                if not late.definite:
                    continue  # It has waited long enough already.
            else:
                if error.err_code not in _PASSING:
                    text, code = f"{subject}: {error.description}", error.err_code
                    raise JetStreamError(text, error_code=code, definite=not is_repeated)
                why = error.description
            await trio.sleep(min(self._rng.uniform(*BACKOFF_S), max(0.0, left_s)))
        if junk:
            raise RemoteProtocolError(why)
        if is_repeated:
            raise UnknownOutcomeError(f"JetStream did not answer in time: {why}")
        raise DeadlineError(f"JetStream did not take it in time: {why}", definite=True)

    async def call(
        self, operation: str, body: dict[str, Any], kind: type[R], *, deadline: float
    ) -> R:
        """One operation of the API, such as `STREAM.INFO.orders`."""
        question = json.dumps(body).encode() if body else b""
        return (await self.ask(f"$JS.API.{operation}", question, kind, deadline=deadline))[0]

    async def find(
        self, operation: str, body: dict[str, Any], kind: type[R], *, deadline: float
    ) -> R | None:
        """As `call`, but None for what is not there."""
        try:
            return await self.call(operation, body, kind, deadline=deadline)
        except JetStreamError as error:
            if error.error_code in NOT_FOUND:
                return None
            raise

    async def store(
        self, subject: str, payload: bytes, headers: Mapping[str, str], *, deadline: float
    ) -> tuple[StoredReply, bool]:
        """Publish into whatever stream takes `subject`; whether an earlier try may have done it."""
        return await self.ask(subject, payload, StoredReply, deadline=deadline, headers=headers)

    async def message(
        self, stream: str, query: dict[str, Any], *, deadline: float
    ) -> StoredMessage | None:
        """One message, by `{"last_by_subj": …}` or `{"seq": …}`; None if there is none."""
        answer = await self.find(f"STREAM.MSG.GET.{stream}", query, _Found, deadline=deadline)
        if answer is None:
            return None
        found = answer.message
        lines = found.hdrs.decode("utf-8", "replace").split("\r\n")[1:]
        pairs = (line.partition(":") for line in lines if ":" in line)
        headers = {name: value.strip() for name, _, value in pairs}
        stored_s = found.time.timestamp()
        return StoredMessage(found.subject, found.seq, found.data, headers, stored_s)

    async def remove(self, stream: str, sequence: int, *, deadline: float) -> None:
        """Delete one message; none is no error."""
        what, query = f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True}
        try:
            await self.call(what, query, JetStreamReply, deadline=deadline)
        except JetStreamError as error:
            # Whatever fails here has the same number.
            if not error.message.endswith("no message found"):
                raise


def _decode(payload: bytes, kind: type[R]) -> R:
    try:
        # An acknowledgement is answered by nothing.
        return msgspec.json.decode(payload or b"{}", type=kind)
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"not an answer of JetStream: {decoding_fault(error)}") from error
