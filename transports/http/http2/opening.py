"""How `h2` is set up for one connection, and the one frame that it cannot say in time."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, Final

import h2.config
import h2.connection
import h2.errors
import h2.exceptions
import h2.settings

from trinamo.runtime.protocol.openai.http_head import HEADERS_MAX, TOO_MANY

STREAMS_MAX: Final = 128
REASON_BYTES_MAX: Final = 256
_PSEUDO_FIELDS: Final = 3
"""What HTTP/1 says in its first line."""
_GOAWAY: Final = 7


class _Connection(h2.connection.H2Connection):
    # What is remembered of each stream that has ended; by itself it would be 65,536.
    MAX_CLOSED_STREAMS = 1024


def encode_goaway(last_stream_id: int, code: h2.errors.ErrorCodes, reason: str = "") -> bytes:
    """GOAWAY; `h2` can say it only as its last word and without a reason, and answers may follow."""
    text = reason.encode()[:REASON_BYTES_MAX]
    return struct.pack(">I5xII", (8 + len(text)) << 8 | _GOAWAY, last_stream_id, code) + text


def open_h2(header_bytes_max: int, count: Callable[[int], None]) -> h2.connection.H2Connection:
    """A server's connection with the bounds it tells its client.

    `count` is told of the fields of each block, whatever stream it is for.
    """
    settings = h2.settings.SettingCodes
    opened = _Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
    opened.local_settings = h2.settings.Settings(
        client=False,
        initial_values={
            settings.MAX_CONCURRENT_STREAMS: STREAMS_MAX,
            settings.MAX_HEADER_LIST_SIZE: header_bytes_max,
        },
    )
    # Until the client has confirmed the settings `h2` would take twice the default.
    opened.decoder.max_header_list_size = header_bytes_max
    decode = opened.decoder.decode

    def decode_counted(data: bytes, raw: bool = False) -> Iterable[Any]:  # noqa: FBT001, FBT002 -- hpack's
        fields = list(decode(data, raw=raw))
        count(len(fields))
        if len(fields) > HEADERS_MAX + _PSEUDO_FIELDS:
            raise h2.exceptions.DenialOfServiceError(TOO_MANY.reason)
        return fields

    opened.decoder.decode = decode_counted  # type: ignore[method-assign]
    return opened
