"""Options and non-blocking sends of accepted sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable

import trio


def configure_socket(
    sock: trio.socket.SocketType, *, peer_timeout_s: float, write_timeout_s: float
) -> None:
    """Make a peer that vanished without a FIN fail.

    Keep-alive finds it within about `peer_timeout_s` while nothing is under way to it,
    TCP_USER_TIMEOUT while data is; each is blind to the other's case. The second also ends a peer
    that is there and reads nothing, as `write_timeout_s` does: so it is as long.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    interval_s = max(1, int(peer_timeout_s / 4))
    for name, value in (
        ("TCP_KEEPIDLE", interval_s),
        ("TCP_KEEPINTVL", interval_s),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(write_timeout_s * 1000)),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def open_sender(
    stream: trio.SocketStream,
) -> tuple[trio.SocketStream, Callable[[bytes], int]]:
    """`stream` anew, and a function that sends on it at once, as far as there is room.

    trio's sockets send with a checkpoint only. So the socket is taken out of the one given and
    shared. A socket that is not the kernel's offers `send_nowait` itself, as the simulator's does.
    """
    given = stream.socket
    own: Callable[[bytes], int] | None = getattr(given, "send_nowait", None)
    if own is not None:
        return stream, own
    shared = socket.socket(given.family, given.type, given.proto, fileno=given.detach())
    return trio.SocketStream(trio.socket.from_stdlib_socket(shared)), shared.send
