"""JetStream as requests over the event plane: an answer, or a typed error, by a deadline.

JetStream is a set of subjects that answer JSON. Every request made here may be repeated, so each
is tried until the deadline: with no leader a stream has no responder for up to 8 s, and a server
that restarts loses the requests it had. Not here: what a queue asks (`work_queue.py`).
"""

from __future__ import annotations

import base64
import binascii
import json
import random
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Protocol

import attrs
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

TRY_TIMEOUT_S: Final = 1.0
BACKOFF_S: Final = (0.1, 0.25)
WRONG_LAST_SEQUENCE: Final = 10071
NOT_FOUND: Final = frozenset({10014, 10037, 10059})
"""No such consumer, message, stream."""
# Servers that have just met and do not yet count each other as peers; no leader, not the leader,
# resources or quorum missing, stream offline: all of them pass.
_PASSING: Final = frozenset({10005, 10008, 10009, 10023, 10118, 10124, 10202})


class Requester(Protocol):
    """What is needed of the event plane: a request that may carry headers."""

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Mapping[str, str] = ...
    ) -> Message: ...


class JetStreamError(EventPlaneError):
    """JetStream said no, and would say so again. `error_code` is its own number for why."""

    default_definite = True

    def __init__(self, message: str, *, error_code: int = 0, definite: bool | None = None) -> None:
        super().__init__(message, definite=definite)
        self.error_code = error_code


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
class ApiReply:
    """What JetStream answered, and whether an earlier try may have been carried out."""

    body: dict[str, Any]
    is_repeated: bool


class JetStream:
    """The requests a queue needs. Every one is tried again until `deadline` on trio's clock."""

    def __init__(self, plane: Requester, *, rng: random.Random) -> None:
        self._plane = plane
        self._rng = rng

    async def ask(
        self,
        subject: str,
        payload: bytes,
        *,
        deadline: float,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[Message, bool]:
        """One request with all its tries; whether an earlier try may have been carried out.

        Raises `DeadlineError` if it certainly was not, else `UnknownOutcomeError`.
        """
        is_repeated = False
        why = "no time was given"
        while (left_s := deadline - trio.current_time()) > 0:
            try:
                reply = await self._plane.request(
                    subject, payload, timeout_s=min(TRY_TIMEOUT_S, left_s), headers=headers or {}
                )
            except (UnavailableError, OverloadedError) as error:
                why = error.message
            except DeadlineError as error:
                is_repeated = is_repeated or not error.definite
                why = error.message
                if not error.definite:
                    continue  # It has waited long enough already.
            else:
                passing = _passing_error(reply.payload)
                if passing is None:
                    return reply, is_repeated
                why = passing
            await trio.sleep(min(self._rng.uniform(*BACKOFF_S), max(0.0, left_s)))
        if is_repeated:
            raise UnknownOutcomeError(f"JetStream did not answer in time: {why}")
        raise DeadlineError(f"JetStream did not take it in time: {why}", definite=True)

    async def call(self, operation: str, body: dict[str, Any], *, deadline: float) -> ApiReply:
        """One operation of the API, such as `STREAM.INFO.orders`."""
        return await self._json(f"$JS.API.{operation}", _encode(body), deadline, {})

    async def find(
        self, operation: str, body: dict[str, Any], *, deadline: float
    ) -> ApiReply | None:
        """As `call`, but None for what is not there."""
        try:
            return await self.call(operation, body, deadline=deadline)
        except JetStreamError as error:
            if error.error_code in NOT_FOUND:
                return None
            raise

    async def store(
        self, subject: str, payload: bytes, headers: Mapping[str, str], *, deadline: float
    ) -> ApiReply:
        """Publish into whatever stream takes `subject`; the answer has `seq`."""
        return await self._json(subject, payload, deadline, headers)

    async def message(
        self, stream: str, query: dict[str, Any], *, deadline: float
    ) -> StoredMessage | None:
        """One message, by `{"last_by_subj": …}` or `{"seq": …}`; None if there is none."""
        answer = await self.find(f"STREAM.MSG.GET.{stream}", query, deadline=deadline)
        if answer is None:
            return None
        try:
            found = answer.body["message"]
            return StoredMessage(
                found["subject"],
                int(found["seq"]),
                base64.b64decode(found.get("data", "")),
                _parse_headers(base64.b64decode(found.get("hdrs", ""))),
                parse_time(found["time"]),
            )
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise RemoteProtocolError(f"not a message of JetStream: {error!r}") from error

    async def _json(
        self, subject: str, payload: bytes, deadline: float, headers: Mapping[str, str]
    ) -> ApiReply:
        reply, is_repeated = await self.ask(subject, payload, deadline=deadline, headers=headers)
        body = _decode(reply.payload)
        error = body.get("error")
        if isinstance(error, dict):
            text = str(error.get("description", "no reason given"))
            raise JetStreamError(
                f"{subject}: {text}",
                error_code=int(error.get("err_code", 0)),
                definite=not is_repeated,
            )
        return ApiReply(body, is_repeated)


def parse_time(text: str) -> float:
    """Seconds since the epoch of an RFC 3339 time with nanoseconds; `ValueError` if it is none."""
    whole, _, rest = text.partition(".")
    if not rest:
        return datetime.fromisoformat(text).timestamp()
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    zone = rest[len(digits) :]
    return datetime.fromisoformat(whole + zone).timestamp() + float(f"0.{digits or 0}")


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode() if body else b""


def _decode(payload: bytes) -> dict[str, Any]:
    try:
        body = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"not an answer of JetStream: {error}") from error
    if not isinstance(body, dict):
        raise RemoteProtocolError("not an answer of JetStream: no object")
    return body


def _passing_error(payload: bytes) -> str | None:
    """Why to ask again, if the answer is an error that passes."""
    if b'"err_code"' not in payload:
        return None
    error = _decode(payload).get("error")
    if isinstance(error, dict) and error.get("err_code") in _PASSING:
        return str(error.get("description"))
    return None


def _parse_headers(block: bytes) -> dict[str, str]:
    lines = block.decode("utf-8", "replace").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name: value.strip() for name, _, value in pairs}
