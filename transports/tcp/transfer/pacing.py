"""Bulk between two ends of one host is sent as fast as it is taken, not by a timer.

BBR, the default congestion control of some machines, *paces*: it sends a packet, starts a timer,
and sends the next one when that goes off. That keeps queues in the network short. Between two
ends of one host there is no such queue, and a timer for every 64 KB cost two fifths of all CPU time
of a transfer (bench/README.md). So a loopback connection that would be paced uses Reno, which every
Linux has and every user may choose. A machine's choice that does not pace stays, and so does
every choice for connections that leave the host.
"""

from __future__ import annotations

import contextlib
import socket as stdlib_socket
from ipaddress import ip_address

import trio

_NAME_BYTES_MAX = 16  # TCP_CA_NAME_MAX


def is_loopback(ours: str, theirs: str) -> bool:
    """Whether a connection between these addresses never leaves the host."""
    try:
        return ours == theirs or ip_address(theirs.partition("%")[0]).is_loopback
    except ValueError:
        return False


def send_unpaced(stream: trio.SocketStream) -> None:
    """Let nothing but the receiver slow a loopback connection down; others stay as they are.

    A connection that is over already, or a kernel that does not know the option, changes nothing.
    """
    with contextlib.suppress(OSError):
        ours, theirs = stream.socket.getsockname()[0], stream.socket.getpeername()[0]
        if is_loopback(ours, theirs):
            option = (stdlib_socket.IPPROTO_TCP, stdlib_socket.TCP_CONGESTION)
            if stream.getsockopt(*option, _NAME_BYTES_MAX).startswith(b"bbr"):
                stream.setsockopt(*option, b"reno")
