"""How `h2` is set up for one connection, and the one frame that it cannot say in time."""

from __future__ import annotations

import struct
from typing import Final

import h2.config
import h2.connection
import h2.errors
import h2.settings

STREAMS_MAX: Final = 128
_GOAWAY: Final = 7


class _Connection(h2.connection.H2Connection):
    # What is remembered of each stream that has ended; by itself it would be 65,536.
    MAX_CLOSED_STREAMS = 1024


def encode_goaway(last_stream_id: int, code: h2.errors.ErrorCodes) -> bytes:
    """GOAWAY; `h2` can say it only as its last word, and answers may have to follow."""
    return struct.pack(">I5xII", 8 << 8 | _GOAWAY, last_stream_id, code)


def open_h2(header_bytes_max: int) -> h2.connection.H2Connection:
    """A server's connection with the bounds it tells its client."""
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
    return opened
