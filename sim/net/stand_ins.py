"""What is put in place of sockets, names and waiting for descriptors while a run with a network goes on.

From the start of the run, when trio's loop has the sockets that it needs for itself, to its end.
What this module does not do: the sockets (`std_sockets.py`), the names (`names.py`).
"""

from __future__ import annotations

import errno
import select
import selectors
import socket as stdlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NoReturn

import trio

from ..core.host import current_host_name
from ..isolation.ambient import Patch
from ..isolation.guard import escape, replaced, trio_seams
from .asyncio_loops import asyncio_in_place
from .datagrams import DatagramSocket
from .handshake import FIRST_NUMBER
from .names import Names, port_of_service
from .sockets import SimSocket
from .std_sockets import StdSocket, StreamSocket, unanswered

StdSocket.kinds.update({stdlib.SOCK_STREAM: StreamSocket, stdlib.SOCK_DGRAM: DatagramSocket})


@contextmanager
def sockets_in_place(network: Names) -> Iterator[None]:
    """Have `socket`, `select` and trio know the sockets of `network`, and no others."""

    def of(fd: Any) -> StdSocket:
        if isinstance(fd, StdSocket) and not fd.is_closed:
            return fd
        number = fd if isinstance(fd, int) else fd.fileno()
        if 0 <= number < FIRST_NUMBER:
            escape(
                f"waiting for descriptor {number}, which is none of the simulated network: only its"
                " sockets can be waited for in a run; give the code a stream of trio.testing instead"
            )
        held: StdSocket = network.numbered(number)
        return held

    def waiting(*, writes: bool) -> Callable[[object, Any], Awaitable[None]]:
        async def wait(_: object, fd: Any) -> None:
            sock = of(fd)
            if sock.is_ready(writes=writes):
                await trio.lowlevel.checkpoint()
            else:
                await sock.wait(writes=writes)

        return wait

    def notify_closing(_: object, fd: Any) -> None:
        of(fd).notify_closing()

    patches: list[Patch] = [
        (trio, "open_tcp_stream", _open_tcp_stream),
        (stdlib, "socket", StdSocket),
        (stdlib, "socketpair", _socketpair),
        (stdlib, "fromfd", lambda fd, *_: network.numbered(fd)),
        (stdlib, "getaddrinfo", network.look_up),
        (stdlib, "getnameinfo", network.name_and_port),
        (stdlib, "gethostbyname", network.find),
        (stdlib, "gethostbyname_ex", network.with_aliases),
        (stdlib, "gethostbyaddr", network.with_aliases),
        (stdlib, "getservbyname", port_of_service),
        (stdlib, "gethostname", current_host_name),
        *(
            (select, name, _waits_in_kernel(f"select.{name}"))
            for name in ("select", "poll", "epoll")
        ),
        (
            selectors,
            "DefaultSelector",
            _waits_in_kernel("an event loop, or a selector, of its own"),
        ),
        *trio_seams(SimSocket, waiting(writes=False), waiting(writes=True), notify_closing),
    ]
    with replaced(*patches), ExitStack() as stack:
        StdSocket.network = network
        stack.callback(delattr, StdSocket, "network")
        asyncio_in_place(network, stack)
        yield


_open_by_trio: Final = trio.open_tcp_stream


async def _open_tcp_stream(
    host: Any, port: Any, *, local_address: str | None = None, **options: Any
) -> trio.SocketStream:
    """As trio's, which takes a nursery and a task for each address, though a simulated name has one."""
    if local_address is not None or not isinstance(host, (str, bytes)) or not isinstance(port, int):
        return await _open_by_trio(host, port, local_address=local_address, **options)
    found = await trio.socket.getaddrinfo(host, port, type=stdlib.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    sock = trio.socket.socket(family, kind, protocol)
    try:
        await sock.connect(address)
        return trio.SocketStream(sock)
    except BaseException as error:
        sock.close()
        if not isinstance(error, OSError):
            raise
        name = host if isinstance(host, str) else host.decode()
        shown = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
        words = f"all attempts to connect to {shown} failed"
        raise OSError(words) from ExceptionGroup(words, [error])


def _socketpair(
    family: int | None = None,
    type: int = stdlib.SOCK_STREAM,  # noqa: A002 -- as the real one
    proto: int = 0,
) -> Any:
    left = StdSocket(stdlib.AF_UNIX if family is None else family, type, proto)
    right = StdSocket(left.family, type, proto)
    if not isinstance(left, StreamSocket) or not isinstance(right, StreamSocket):
        unanswered("socketpair of datagrams")
        raise OSError(errno.EOPNOTSUPP, "a simulated pair of sockets is one of streams")
    left.network.join(left.endpoint, right.endpoint)
    return left, right


def _waits_in_kernel(what: str) -> Callable[..., NoReturn]:
    def refused(*_args: Any, **_keywords: Any) -> NoReturn:
        escape(
            f"{what}, which would wait in the kernel and stop the simulation: wait with"
            " trio.lowlevel.wait_readable, and run asyncio through trio_asyncio.open_loop"
        )

    return refused
