"""How a connection is set up: SYN there, SYN-ACK back, and the ACK that lets the server accept it.

Three packets, as TCP has them, each of which a cut stops: a SYN is sent again until an answer comes
or the time is up, and each repetition is answered again. The last ACK goes first on the client's half of the
connection, so that it waits for the link to heal and no data overtakes it; with it
the server's process finds a whole connection, and may be the first to speak.

What this module does not do: established connections (`connection.py`), names and faults (`network.py`).
"""

from __future__ import annotations

import errno
import itertools
from collections import deque
from typing import TYPE_CHECKING, Literal

import trio

from .connection import Address, Connection, Endpoint

if TYPE_CHECKING:
    from ..core.host import Host
    from .network import Network

__all__ = ["LOOPBACK", "Dial", "Handshakes", "Listener", "SynAnswer"]

SynAnswer = Literal["accept", "refuse", "ignore"]

FIRST_RETRY_S = 1.0
HALF_OPEN_S = 63.0
"""How long a server waits for the last ACK: Linux repeats its SYN-ACK five times."""
LOOPBACK = "127.0.0.1"
WILDCARDS = ("", "0.0.0.0")  # noqa: S104 -- compared with, not bound to


class Listener:
    """A listening socket as its kernel keeps it."""

    def __init__(self, host: Host, address: Address, backlog: int) -> None:
        self.host, self.address, self.backlog = host, address, backlog
        self.is_open = True
        self.ready: deque[Endpoint] = deque()
        self.half_open: dict[Endpoint, float] = {}
        """Connections whose last ACK has not come, and when each is given up."""
        self.accepters = trio.lowlevel.ParkingLot()

    def take(self, endpoint: Endpoint) -> None:
        """The handshake of `endpoint` is done: the process may accept it."""
        self.half_open.pop(endpoint, None)
        if self.is_open:
            endpoint.is_open = True
            self.ready.append(endpoint)
            self.accepters.unpark_all()
        else:
            endpoint.refuse()

    def close(self) -> None:
        """Stop listening; connections nobody accepted are reset."""
        self.is_open = False
        for endpoint in (*self.ready, *self.half_open):
            endpoint.refuse()
        self.half_open.clear()
        self.accepters.unpark_all()

    def is_full(self, now_s: float) -> bool:
        """Whether no more connections are taken for now."""
        for endpoint, until_s in [*self.half_open.items()]:
            if until_s <= now_s or endpoint.is_forgotten:
                del self.half_open[endpoint]
                endpoint.refuse()
        return len(self.ready) + len(self.half_open) >= self.backlog

    def reaches(self, address: str) -> bool:
        """Whether it is bound to this address of its host."""
        return self.address[0] in WILDCARDS or self.address[0] == address


class Dial:
    """One connection attempt: SYN out, until SYN-ACK, RST or the timeout answers."""

    def __init__(self, client: Endpoint, remote: Address, give_up_s: float) -> None:
        self.client, self.remote, self.give_up_s = client, remote, give_up_s
        self.server: Endpoint | None = None
        self.is_done = False
        self.error = 0
        self.waiters = trio.lowlevel.ParkingLot()

    def settle(self, error: int) -> None:
        """Wake whoever waits, with `error` or 0."""
        if not self.is_done:
            self.is_done, self.error = True, error
            self.waiters.unpark_all()


class Handshakes:
    """The packets of all attempts on `network`, and how hosts answer them."""

    def __init__(self, network: Network) -> None:
        self.answers: dict[tuple[str, int], SynAnswer] = {}
        """By host and port (0: any); who is not here accepts."""
        self._network, self._world, self._links = network, network.world, network.links
        self._ids = itertools.count(1)

    def begin(self, dial: Dial) -> None:
        """Send the first SYN; wait on the dial's `waiters` until it `is_done`."""
        self._send_syn(dial, FIRST_RETRY_S)

    def _target(self, dial: Dial) -> str | None:
        if dial.remote[0] == LOOPBACK:
            return dial.client.host.name
        return self._network.name_of(dial.remote[0])

    def _send_syn(self, dial: Dial, retry_s: float) -> None:
        if dial.is_done or not dial.client.is_open:
            return
        if dial.client.is_forgotten:
            # Only an RST came of all that the server answered.
            dial.settle(errno.ECONNREFUSED)
            return
        remaining_s = dial.give_up_s - self._world.current_time()
        if remaining_s <= 0:
            dial.settle(errno.ETIMEDOUT)
            return
        source, target = dial.client.host.name, self._target(dial)
        links = self._links
        if target is not None and links.passes(source, target) and not links.loses(source, target):
            self._world.after(links.delay_s(source, target), self._syn_arrives, dial, target)
        self._world.after(min(retry_s, remaining_s), self._send_syn, dial, retry_s * 2)

    def _syn_arrives(self, dial: Dial, target: str) -> None:
        source, port = dial.client.host.name, dial.remote[1]
        if dial.is_done or not self._links.passes(source, target):
            return
        if dial.server is not None:
            # Its SYN-ACK, or this SYN's predecessor, was slow or lost.
            if not dial.server.is_forgotten:
                self._answer(dial, target, 0)
            return
        answer = self.answers.get((target, port), self.answers.get((target, 0), "accept"))
        if answer == "ignore":
            # Without an answer the client repeats its SYN.
            return
        listener = self._network.listener(target, port)
        if listener is None or answer == "refuse" or not listener.reaches(dial.remote[0]):
            self._answer(dial, target, errno.ECONNREFUSED)
        elif not listener.is_full(self._world.current_time()):
            self._open_half(dial, listener)
            self._answer(dial, target, 0)

    def _open_half(self, dial: Dial, listener: Listener) -> None:
        network, client = self._network, dial.client
        dial.server = server = network.open_server_half(listener, dial.remote)
        connection_id = next(self._ids)
        assert client.local is not None
        server.pair(client, connection_id, client.local)
        server.on_established = listener.take
        server.is_open = False
        listener.half_open[server] = self._world.current_time() + HALF_OPEN_S
        source, target = client.host.name, listener.host.name
        self._world.add_row("connect", connection=connection_id, source=source, target=target)
        network.connections.append(Connection(connection_id, client, server))

    def _answer(self, dial: Dial, target: str, error: int) -> None:
        """Send a SYN-ACK back, or the RST that says `error`; the client asks again for what is lost."""
        source, links = dial.client.host.name, self._links
        if links.passes(target, source) and not links.loses(target, source):
            back_s = links.delay_s(target, source)
            if dial.server is not None:
                # An RST of a server that closes meanwhile must not overtake it.
                dial.server.hold_until(self._world.current_time() + back_s)
            self._world.after(back_s, self._answer_arrives, dial, target, error)

    def _answer_arrives(self, dial: Dial, target: str, error: int) -> None:
        client, server = dial.client, dial.server
        if dial.is_done or not self._links.passes(target, client.host.name):
            return
        if error or server is None:
            dial.settle(error)
            return
        client.pair(server, server.id, dial.remote)
        if client.is_open:
            client.acknowledge()
            dial.settle(0)
        else:
            # The process gave up meanwhile; its kernel has no such connection.
            client.abort()
