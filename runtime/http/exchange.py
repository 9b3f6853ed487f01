"""Small pieces of one HTTP exchange on raw ASGI: request id, body with a limit, answers.

Raw, because a limit must hold while the body is being read, and because there is nothing between
us and the socket then. What this file does not do: streams (`streaming.py`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias, TypedDict

import trio

from ..errors import RequestError
from ..protocol.streams.request import CONTEXT_ID_CHARS_MAX
from .bodies import Body
from .status import BodyTimeoutError, BodyTooLargeError, ErrorAnswer, MediaTypeError

__all__ = [
    "CONNECTION",
    "UNKNOWN_CONNECTION",
    "ClientGoneError",
    "ConnectionExtension",
    "Headers",
    "Receive",
    "Scope",
    "Send",
    "check_json",
    "find_connection",
    "find_header",
    "make_ids",
    "read_body",
    "send_error",
    "send_whole",
]

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]

SendNow: TypeAlias = Callable[[bytes], bool]


class ConnectionExtension(TypedDict):
    """What `CONNECTION` offers."""

    send_now: SendNow | None
    is_cut: Callable[[], bool]


CONNECTION: Final = "trinamo.connection"
"""The ASGI extension by which our server lets an answer know its connection.

`send_now(body)` sends a piece of a body without a checkpoint; None where the server cannot. It is
for an answer under way whose length was not announced, between two calls of `send`, never during
one. False, and nothing is sent, if it must go by `send`, which is always allowed. `is_cut()` says
whether a write failed or timed out, which `send` does not tell. A server without the extension is
slower, and such an answer counts as taken.
"""
UNKNOWN_CONNECTION: Final[ConnectionExtension] = {"send_now": None, "is_cut": lambda: False}
"""What an answer goes by on a server without the extension."""
JSON_TYPE: Final = b"application/json"
_SUFFIX_CHARS: Final = 17
_UNSAFE = re.compile(r"[^A-Za-z0-9._:\-]")


class ClientGoneError(Exception):
    """The client left before its request was read. Nobody is there to be answered."""


def find_header(scope: Scope, name: bytes) -> bytes | None:
    """The first header called `name` (lower case), or None."""
    return next((value for key, value in scope["headers"] if key == name), None)


def find_connection(scope: Scope) -> ConnectionExtension:
    """What the server offers as `CONNECTION`, or what that comes to if it offers nothing."""
    found: ConnectionExtension = scope.get("extensions", {}).get(CONNECTION, UNKNOWN_CONNECTION)
    return found


def make_ids(scope: Scope, rng: random.Random) -> tuple[str, str]:
    """The request's id as the client knows it, and its id inside the cluster.

    The client's is its `x-request-id`, without characters unsafe in headers and logs, or a new
    one. Inside, ids are unique even if a client repeats its own: a worker remembers cancelled ids
    for a while, and a repeated id would be cancelled with the first.
    """
    given = (find_header(scope, b"x-request-id") or b"").decode("latin-1")
    suffix = f"{rng.getrandbits(64):016x}"
    public = _UNSAFE.sub("", given)[: CONTEXT_ID_CHARS_MAX - _SUFFIX_CHARS]
    if not public:
        public = f"{rng.getrandbits(64):016x}{suffix}"
        return public, public
    return public, f"{public}-{suffix}"


def check_json(scope: Scope) -> None:
    """Raise `MediaTypeError` unless the body says that it is JSON.

    A page of another origin may send plain text without asking, and a body without a type; JSON it
    may not, and our answer to the question (a preflight) is no.
    """
    given = (find_header(scope, b"content-type") or b"").partition(b";")[0].strip().lower()
    if given != JSON_TYPE:
        said = given[:80].decode("latin-1") or "missing"
        raise MediaTypeError(f"the content-type is {said}; it must be application/json")


async def read_body(
    scope: Scope, receive: Receive, body: Body, *, bytes_max: int, timeout_s: float
) -> bytearray:
    """The whole body, counted in `body` as it arrives.

    Raises `BodyTooLargeError` as soon as the limit is passed and `OverloadedError` as soon as all
    bodies together are too many (before reading, if the length is announced), `BodyTimeoutError` if
    it is not complete in time, `ClientGoneError`.
    """
    length = find_header(scope, b"content-length")
    if length is not None and length.isdigit():
        if int(length) > bytes_max:
            raise _too_large(bytes_max)
        body.check(int(length))
    data = bytearray()
    with trio.move_on_after(timeout_s):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            piece = message.get("body", b"")
            if len(data) + len(piece) > bytes_max:
                raise _too_large(bytes_max)
            body.hold(len(data) + len(piece))
            data += piece
            if not message.get("more_body", False):
                return data
    raise BodyTimeoutError(f"the body was not complete within {timeout_s:g} s")


def _too_large(bytes_max: int) -> RequestError:
    return BodyTooLargeError(f"the body is larger than {bytes_max} bytes, which is the limit")


async def send_whole(
    send: Send, status: int, body: bytes, headers: Headers, *, content_type: bytes = JSON_TYPE
) -> None:
    """Send one complete answer."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", content_type),
                (b"content-length", str(len(body)).encode()),
                *headers,
            ],
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(send: Send, answer: ErrorAnswer, headers: Headers) -> None:
    """Send an error as the whole answer, with its status."""
    if answer.retry_after_s is not None:
        headers = [*headers, (b"retry-after", str(answer.retry_after_s).encode())]
    await send_whole(send, answer.status, answer.to_body(), headers)
