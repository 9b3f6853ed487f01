"""The configuration of TCP: requests, response streams, KV blocks where nothing else carries them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .keys import Bytes, Count, FrameBytes, Port, Seconds, Section, Text, about

KeepaliveSeconds = Annotated[int, Meta(ge=1, le=32_767, extra={"unit": "s"})]
"""What the kernel takes for its probes."""


class TcpConfig(Section, frozen=True, kw_only=True):
    """The TCP request plane and the call-home response streams."""

    streams: Annotated[
        Literal["multiplexed", "dedicated"],
        about(
            "What answers and input travel on: the connection that their requests came by, or one for"
            " each stream, which the worker dials. Whoever asks decides."
        ),
    ] = "multiplexed"
    host: Annotated[Text, about("Address to bind; IPv6 without brackets.")] = "127.0.0.1"
    port: Annotated[Port, about("Port to bind; 0: the system chooses.")] = 0
    interface: Annotated[
        Text | None, about("Bind to this network interface's address instead of `host`.")
    ] = None
    advertise_host: Annotated[
        Text | None,
        about(
            "Address told to peers; null: the one we are bound to, or, bound to every address, the one from"
            " which we reach the control plane."
        ),
    ] = None
    connect_timeout_s: Annotated[
        Seconds, about("For a connection to a peer, and as long again for its greeting.")
    ] = 5.0
    ack_timeout_s: Annotated[
        Seconds, about("For a worker that has a request to open its stream, or to refuse it.")
    ] = 5.0
    handshake_timeout_s: Annotated[
        Seconds, about("A connection to us that has not greeted by then is closed.")
    ] = 10.0
    linger_s: Annotated[
        Seconds, about("How long a closing side waits for the peer to read its last word.")
    ] = 1.0
    keepalive_idle_s: Annotated[
        KeepaliveSeconds, about("Silence before the first keep-alive probe.")
    ] = 5
    keepalive_interval_s: Annotated[KeepaliveSeconds, about("Between two probes.")] = 2
    keepalive_count: Annotated[
        Annotated[int, Meta(ge=1, le=127)], about("Unanswered probes that end a connection.")
    ] = 3
    user_timeout_s: Annotated[
        Seconds, about("Unacknowledged data this old ends a connection (TCP_USER_TIMEOUT).")
    ] = 10.0
    send_timeout_s: Annotated[
        Seconds, about("A connection of streams whose peer takes nothing for so long is ended.")
    ] = 10.0
    idle_s: Annotated[
        Seconds,
        about("A connection on which workers call home is closed after this without a stream."),
    ] = 60.0
    window_bytes: Annotated[
        FrameBytes,
        about(
            "Unread bytes of one stream before its writer waits; an item"
            " that has begun goes out whole."
        ),
    ] = 65_536
    buffer_bytes: Annotated[
        FrameBytes, about("Most bytes of one read; socket buffers are the kernel's.")
    ] = 65_536
    queue_bytes_max: Annotated[
        FrameBytes, about("Unsent bytes of all streams of a link before their writers wait.")
    ] = 262_144
    header_bytes_max: Annotated[
        Annotated[int, Meta(ge=4096, le=1 << 30, extra={"unit": "bytes"})],
        about("Largest frame header; an envelope must fit."),
    ] = 131_072
    data_bytes_max: Annotated[FrameBytes, about("Largest frame payload.")] = 33_554_432
    connections_max: Annotated[Count, about("Open connections per listener.")] = 4096
    links_max: Annotated[
        Count,
        about(
            "Standing connections to workers, which tell of a death at once. For one more the one that is"
            " idle longest is closed, and made again for a request."
        ),
    ] = 1024
    ungreeted_max: Annotated[
        Count,
        about(
            "Connections per listener that have not greeted; one more takes the place of the oldest"
            " of the address that has most of them."
        ),
    ] = 512
    unfinished_bytes_max: Annotated[
        Bytes,
        about(
            "Bytes of large frames that are not whole that all connections of a process hold together;"
            " over it they stop reading. And of large unary requests that run at once; one more is"
            " refused as overloaded."
        ),
    ] = 256 << 20
    frame_timeout_s: Annotated[
        Seconds, about("A connection on which a frame over 64 KiB takes longer to come is closed.")
    ] = 30.0
    subjects_max: Annotated[
        Count, about("Streams of a caller at once, those that wait for a worker's call included.")
    ] = 4096
    backlog: Annotated[
        Annotated[int, Meta(ge=1, le=65_535)], about("Length of the accept queue.")
    ] = 1024
