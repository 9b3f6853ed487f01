"""Small pieces of one HTTP exchange on raw ASGI: request id, body with a limit, answers.

Raw, because a limit must hold while the body is being read, and because there is nothing between
us and the socket then. What this file does not do: streams (`streaming.py`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

import trio

from ..errors import RequestError
from ..protocol.request import REQUEST_ID_CHARS_MAX
from .status import BodyTimeoutError, BodyTooLargeError, ErrorAnswer

__all__ = [
    "SEND_NOW",
    "ClientGoneError",
    "Headers",
    "Receive",
    "Scope",
    "Send",
    "SendNow",
    "find_header",
    "find_send_now",
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

SEND_NOW: Final = "trinamo.send_now"
"""The ASGI extension of our server by which a piece of a body goes out without a checkpoint.

Its `send_now(body)` is for an answer under way whose length was not announced, between two calls
of `send`, never during one. False, and nothing is sent, if it must go by `send`, which is always
allowed. A server without the extension is only slower.
"""
JSON_TYPE: Final = b"application/json"
_SUFFIX_CHARS: Final = 17
_UNSAFE = re.compile(r"[^A-Za-z0-9._:\-]")


class ClientGoneError(Exception):
    """The client left before its request was read. Nobody is there to be answered."""


def find_header(scope: Scope, name: bytes) -> bytes | None:
    """The first header called `name` (lower case), or None."""
    return next((value for key, value in scope["headers"] if key == name), None)


def find_send_now(scope: Scope) -> SendNow | None:
    """What the server offers as `SEND_NOW`, if it does."""
    extension = scope.get("extensions", {}).get(SEND_NOW)
    return None if extension is None else extension["send_now"]


def make_ids(scope: Scope, rng: random.Random) -> tuple[str, str]:
    """The request's id as the client knows it, and its id inside the cluster.

    The client's is its `x-request-id`, without characters unsafe in headers and logs, or a new
    one. Inside, ids are unique even if a client repeats its own: a worker remembers cancelled ids
    for a while, and a repeated id would be cancelled with the first.
    """
    given = (find_header(scope, b"x-request-id") or b"").decode("latin-1")
    suffix = f"{rng.getrandbits(64):016x}"
    public = _UNSAFE.sub("", given)[: REQUEST_ID_CHARS_MAX - _SUFFIX_CHARS]
    if not public:
        public = f"{rng.getrandbits(64):016x}{suffix}"
        return public, public
    return public, f"{public}-{suffix}"


async def read_body(scope: Scope, receive: Receive, *, bytes_max: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises `BodyTooLargeError` as soon as the limit is passed (before reading, if the length is
    announced), `BodyTimeoutError` if it is not complete in time, `ClientGoneError`.
    """
    length = find_header(scope, b"content-length")
    if length is not None and length.isdigit() and int(length) > bytes_max:
        raise _too_large(bytes_max)
    body = bytearray()
    with trio.move_on_after(timeout_s):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            body += message.get("body", b"")
            if len(body) > bytes_max:
                raise _too_large(bytes_max)
            if not message.get("more_body", False):
                return bytes(body)
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
