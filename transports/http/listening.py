"""Listening sockets of the HTTP server, a sentence for each way to fail, options of accepted ones."""

from __future__ import annotations

import errno
import socket
from typing import Final

import trio

from trinamo.runtime.config.keys import url_of
from trinamo.runtime.errors import ConfigError

BACKLOG: Final = 1024


async def open_listeners(
    host: str, port: int, *, reuse_port: bool = False
) -> list[trio.SocketListener]:
    """Listen on every address of `host`, on one port; port 0 is chosen by the system. `::` is those of both families.

    With `reuse_port` other processes of this user may do the same. Raises `ConfigError` with a
    sentence that says what to do.
    """
    listeners: list[trio.SocketListener] = []
    try:
        found = await trio.socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        addresses = dict.fromkeys(str(info[4][0]) for info in found)
        if "::" in addresses:
            # trio's sockets of IPv6 take IPv6 alone, whatever the machine is set to; nginx and uvicorn mean both by it.
            addresses["0.0.0.0"] = None  # noqa: S104 -- as asked
        for address in addresses:
            if reuse_port:
                listeners.append(await _listen_beside_others(address, port))
            else:
                listeners += await trio.open_tcp_listeners(port, host=address, backlog=BACKLOG)
            port = listeners[0].socket.getsockname()[1]
    except OSError as error:
        for listener in listeners:
            listener.socket.close()
        raise _explain(error, host, port) from error
    return listeners


async def _listen_beside_others(address: str, port: int) -> trio.SocketListener:
    """As trio's own listeners are, but for the one option that has to come before `bind`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    opened = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        await opened.bind((address, port))
        opened.listen(BACKLOG)
    except BaseException:
        opened.close()
        raise
    return trio.SocketListener(opened)


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


def _explain(error: OSError, host: str, port: int) -> ConfigError:
    where = url_of(host, port)
    if isinstance(error, socket.gaierror):
        return ConfigError(f"cannot listen on {where}: the host '{host}' is not known here")
    match error.errno:
        case errno.EADDRINUSE:
            advice = (
                f"port {port} is in use; stop the program that has it, "
                "or choose another port (0 takes any free one)"
            )
        case errno.EACCES:
            advice = f"port {port} needs privileges; choose one above 1023"
        case errno.EADDRNOTAVAIL:
            advice = f"'{host}' is no address of this machine; try 127.0.0.1 or 0.0.0.0"
        case _:
            advice = error.strerror or str(error)
    return ConfigError(f"cannot listen on {where}: {advice}")
