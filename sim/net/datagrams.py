"""Sockets that take datagrams: UDP, which a link may lose, double and reorder; and Unix ones, which it does not.

Each datagram is a decision of its link: `loss`, `duplicate` and `reorder`, as often as the link's profile
says, and its own `jitter`, by which it may overtake another. 0 is always: it arrives once, after those before it.
A cut or a machine without power loses it; so does a receiver whose buffer is full.

What this module does not do: broadcast and multicast, fragments. A connected socket is told by
ECONNREFUSED that nobody is there, as by ICMP.
"""

from __future__ import annotations

import errno
import socket as stdlib
from collections import deque
from typing import TYPE_CHECKING, Any
from zlib import crc32

import trio
from typing_extensions import override

from .connection import Address, SocketOptions, os_error
from .handshake import ANYWHERE, LOOPBACK
from .std_sockets import StdSocket

if TYPE_CHECKING:
    from typing_extensions import Buffer

HEADER_BYTES = 42
"""Ethernet, IPv4 and UDP."""
PAYLOAD_BYTES_MAX = 65_507
RECEIVE_BYTES_MAX = 212_992
"""What a socket holds that nobody has read, as by Linux' default."""
REORDER_STEPS = 4


class DatagramSocket(StdSocket):
    """A UDP socket, or a Unix socket of datagrams."""

    type = stdlib.SOCK_DGRAM
    is_listening = False

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        if "options" in vars(self):
            # It was found by its number.
            return
        self.options = SocketOptions()
        self._peer: Address | None = None
        self._error = 0
        self._arrived: deque[tuple[bytes, Address]] = deque()
        self._arrived_bytes = 0
        self._readers, self._writers = trio.lowlevel.ParkingLot(), trio.lowlevel.ParkingLot()

    # --- addresses -------------------------------------------------------------------------------

    @override
    def bind(self, address: Any) -> None:
        super().bind(address)
        assert self._bound is not None
        key = (self.host.name, self._bound[1])
        if key in self.network.datagram_sockets:
            self._bound = None
            raise os_error(errno.EADDRINUSE)
        self.network.datagram_sockets[key] = self

    def connect(self, address: Any) -> None:
        """Send to this peer from now on, and hear nobody else; done at once."""
        self._check_open()
        self._peer = self.inward(address)
        self._bind_if_needed()

    def _bind_if_needed(self) -> None:
        if self._bound is None and self.family == stdlib.AF_INET:
            self.bind(("", 0))

    def getsockname(self) -> Any:
        self._check_open()
        return self.outward(self._bound if self._peer is None else self._from_where(self._peer))

    def getpeername(self) -> Any:
        self._check_open()
        if self._peer is None:
            raise os_error(errno.ENOTCONN)
        return self.outward(self._peer)

    # --- waiting ---------------------------------------------------------------------------------

    def is_ready(self, *, writes: bool) -> bool:
        """Whether epoll would report it readable; it is always writable."""
        return writes or bool(self._arrived) or self._error != 0

    def lot(self, *, writes: bool) -> trio.lowlevel.ParkingLot:
        """Where to wait until it may be ready."""
        return self._writers if writes else self._readers

    def _take_error(self) -> int:
        number, self._error = self._error, 0
        return number

    # --- bytes -----------------------------------------------------------------------------------

    def recvfrom(self, bufsize: int, flags: int = 0) -> tuple[bytes, Any]:
        """One datagram, of which what is beyond `bufsize` is lost, and its sender's address."""
        self._check_flags(flags)
        self._check_open()
        if number := self._take_error():
            raise os_error(number)
        if not self._arrived:
            raise self._refusal(flags=flags)
        data, source = self._arrived[0]
        if not flags & stdlib.MSG_PEEK:
            self._arrived.popleft()
            self._arrived_bytes -= len(data)
        return data[:bufsize], self.outward(source)

    def recv(self, buflen: int, flags: int = 0) -> bytes:
        return self.recvfrom(buflen, flags)[0]

    def send(self, data: Buffer, flags: int = 0) -> int:
        if self._peer is None:
            raise os_error(errno.EDESTADDRREQ)
        return self._send(data, flags, self._peer)

    @override
    def sendto(self, data: Buffer, *where: Any) -> int:
        """As the real one: the address last, flags before it."""
        *flags, address = where
        return self._send(data, flags[0] if flags else 0, self.inward(address))

    def _send(self, data: Buffer, flags: int, remote: Address) -> int:
        self._check_flags(flags)
        self._check_open()
        if number := self._take_error():
            raise os_error(number)
        self._bind_if_needed()
        payload = bytes(data)
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise os_error(errno.EMSGSIZE)
        if self.family == stdlib.AF_UNIX and (self.host.name, remote[1]) not in (
            self.network.datagram_sockets
        ):
            raise os_error(errno.ENOENT)
        self._post(payload, remote)
        return len(payload)

    # --- the wire --------------------------------------------------------------------------------

    def _post(self, payload: bytes, remote: Address) -> None:
        network, links, source = self.network, self.network.links, self.host.name
        target = source if remote[0] == LOOPBACK else network.name_of(remote[0])
        fields = {"number": next(network.datagram_numbers), "source": source, "target": target}
        network.world.add_row(
            "send",
            **fields,
            channel=f"datagram {remote[1]}",
            payload=(len(payload), crc32(payload)),
            **dict(network.labels(payload)),
        )
        if target is None:
            return
        link, choices = links.link(source, target), network.world.choices
        is_lossy = self.family == stdlib.AF_INET
        if not links.passes(source, target) or (is_lossy and links.loses(link)):
            network.world.add_row("drop", **fields)
            return
        copies = 1 + (is_lossy and choices.chance(link.duplicate_one_in, "duplicate"))
        for _ in range(copies):
            size = len(payload) + HEADER_BYTES
            delay_s = links.delay_s(link, size=size, has_jitter=is_lossy)
            if is_lossy and choices.chance(link.reorder_one_in, "reorder"):
                steps = 1 + choices.below(REORDER_STEPS, "reorder by")
                delay_s += steps * (link.latency_s + link.jitter_s)
            network.world.after(delay_s, self._arrive, payload, remote, fields)

    def _arrive(self, payload: bytes, remote: Address, fields: dict[str, Any]) -> None:
        network, source, target = self.network, fields["source"], fields["target"]
        receiver = network.datagram_sockets.get((target, remote[1]))
        own = self._from_where(remote)
        if not network.links.passes(source, target):
            network.world.add_row("drop", **fields)
        elif receiver is None or not receiver.hears(own, remote):
            network.world.add_row("drop", **fields)
            if receiver is None and self._peer == remote and network.links.passes(target, source):
                back_s = network.links.delay_s(network.links.link(target, source))
                network.world.after(back_s, self._fail, errno.ECONNREFUSED)
        elif not receiver.take(payload, own):
            network.world.add_row("drop", **fields)
        else:
            network.world.add_row("deliver", **fields)

    def hears(self, source: Address, target: Address) -> bool:
        """Whether it is bound to the address `target`, and may hear what comes from `source`."""
        place = ANYWHERE if self._bound is None else self._bound[0]
        return place in (ANYWHERE, target[0]) and self._peer in (None, source)

    def take(self, payload: bytes, source: Address) -> bool:
        """Keep it for the process, unless there is no room."""
        if self._arrived_bytes + len(payload) > RECEIVE_BYTES_MAX:
            return False
        self._arrived.append((payload, source))
        self._arrived_bytes += len(payload)
        self._readers.unpark_all()
        return True

    def _fail(self, number: int) -> None:
        self._error = number
        self._readers.unpark_all()

    # --- ending ----------------------------------------------------------------------------------

    def shutdown(self, how: int) -> None:  # noqa: ARG002 -- none of the ways changes anything
        if self._peer is None:
            raise os_error(errno.ENOTCONN)

    def _let_go(self) -> None:
        if self._bound is not None:
            self.network.datagram_sockets.pop((self.host.name, self._bound[1]), None)
