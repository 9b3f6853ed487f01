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
from typing import TYPE_CHECKING, Any, Literal

import trio

from .connection import Address, Connection, Endpoint, Port, SocketOptions, os_error
from .links import Links, Wires

if TYPE_CHECKING:
    from ..core.host import Host
    from ..core.world import World


SynAnswer = Literal["accept", "refuse", "ignore"]

FIRST_NUMBER = 1_000_000
"""No kernel gives out such a descriptor."""
FIRST_RETRY_S = 1.0
HALF_OPEN_S = 63.0
"""How long a server waits for the last ACK: Linux repeats its SYN-ACK five times."""
LOOPBACK = "127.0.0.1"
SWEEP_MIN = 64
"""How many endpoints may pile up before those that are over are dropped."""
ANYWHERE = "0.0.0.0"  # noqa: S104 -- what a socket is bound to that nobody bound
PORTS = range(40_000, 65_536)
"""Those that kernels give out."""


class Listener:
    """A listening socket as its kernel keeps it."""

    def __init__(self, host: Host, address: Address, backlog: int, options: SocketOptions) -> None:
        self.host, self.address, self.backlog, self.options = host, address, backlog, options
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


class Stack(Wires):
    """The kernels of all hosts, up to established connections: addresses, ports, listeners, dials.

    A SYN that is not answered is repeated and given up after `connect_timeout_s`.
    """

    def __init__(self, world: World, links: Links, **tcp: Any) -> None:
        super().__init__(world, links, **tcp)
        self.connections: list[Connection] = []
        """Those that are not over, oldest first; some that are, until they are swept."""
        self.exhausted: set[str] = set()
        """Hosts without a free file descriptor: there accept fails, and connections wait in the backlog."""
        self._answers: dict[tuple[str, Port], SynAnswer] = {}
        """By host and port (0: any); who is not here accepts."""
        self._names: dict[str, str] = {}
        self._listeners: dict[tuple[str, Port, str], Listener] = {}
        """By host, port and address."""
        self.heard: set[tuple[str, Port]] = set()
        """The hosts and ports that something has ever listened on."""
        self.refused: dict[tuple[str, Port], str] = {}
        """The hosts and ports where nothing listened when the first SYN came, and who sent it."""
        self._endpoints: list[Endpoint] = []
        self._sweep_at = SWEEP_MIN
        self._ports = itertools.cycle(PORTS)
        self._ids = itertools.count(1)
        self.numbers = itertools.count(FIRST_NUMBER)
        self.sockets: dict[int, Any] = {}
        """Those that processes hold (`std_sockets.py`), by what they say their descriptor is."""
        self.datagram_sockets: dict[tuple[str, Port], Any] = {}
        """Those that take datagrams (`datagrams.py`), by host and port."""
        self.datagram_numbers = itertools.count(1)
        self.unanswered: dict[str, str] = {}
        """What simulated sockets were asked for and have not, and who asked first."""
        self.unknown_names: dict[str, str] = {}
        """Names that no host had when they were asked for, and who asked first."""

    # --- who is where ------------------------------------------------------------------------

    def address_of(self, name: str) -> str:
        """The IPv4 address of the host called `name`, given out in the order of first use."""
        for address, owner in self._names.items():
            if owner == name:
                return address
        number = len(self._names) + 1
        address = f"10.0.{number >> 8}.{number & 255}"
        self._names[address] = name
        return address

    def name_of(self, address: str) -> str | None:
        """The host that has this IPv4 address."""
        return self._names.get(address)

    def free_port(self) -> int:
        """A port to which no socket is bound, and that was not given out lately."""
        bound = {held.bound[1] for held in self.sockets.values()}
        return next(port for port in self._ports if port not in bound)

    def open_endpoint(self, host: Host, local: Address | None = None) -> Endpoint:
        """An unconnected half of a connection on `host`."""
        endpoint = Endpoint(self, host, local)
        self._endpoints.append(endpoint)
        if len(self._endpoints) > self._sweep_at:
            self.connections = [c for c in self.connections if not c.is_over]
            self._endpoints = [
                e for e in self._endpoints if e.is_open or (e.is_connected and not e.is_over)
            ]
            self._sweep_at = max(SWEEP_MIN, 2 * len(self._endpoints))
        return endpoint

    # --- descriptors ---------------------------------------------------------------------------

    def numbered(self, number: int) -> Any:
        """The open socket that has this number; `OSError` EBADF if there is none."""
        if number not in self.sockets:
            raise os_error(errno.EBADF)
        return self.sockets[number]

    # --- connecting ----------------------------------------------------------------------------

    def join(self, left: Endpoint, right: Endpoint) -> None:
        """Connect two halves at once, as `socketpair` does."""
        connection_id = next(self._ids)
        left.pair(right, connection_id, (LOOPBACK, 0))
        right.pair(left, connection_id, (LOOPBACK, 0))
        self.connections.append(Connection(connection_id, left, right))

    def listen(self, listener: Listener) -> None:
        """Start listening at an address that is bound and has no other listener."""
        name, (place, port) = listener.host.name, listener.address
        self.heard.add((name, port))
        self._listeners[name, port, place] = listener

    def unlisten(self, listener: Listener) -> None:
        """Stop listening; connections nobody accepted are reset."""
        if listener.is_open:
            place, port = listener.address
            del self._listeners[listener.host.name, port, place]
            listener.close()

    def dial(self, client: Endpoint, remote: Address) -> Dial:
        """Start connecting; wait on the result's `waiters` until `is_done`."""
        self.world.dials += 1
        now_s = self.world.current_time()
        dial = Dial(client, remote, now_s + self.connect_timeout_s)
        if client.local is None:
            own = self.address_of(client.host.name)
            client.local = (LOOPBACK if remote[0] == LOOPBACK else own, self.free_port())
        self._send_syn(dial, FIRST_RETRY_S)
        return dial

    def answer_syn(self, host: str, answer: SynAnswer, *, port: int = 0) -> None:
        """How host `host` meets new connections to `port` (0: any): accept, refuse or ignore.

        Ignored ones are repeated and end as ETIMEDOUT. Connections that exist are not touched.
        """
        self.world.add_row("answer_syn", host=host, answer=answer, port=port)
        self._answers[host, port] = answer

    def _target(self, dial: Dial) -> str | None:
        if dial.remote[0] == LOOPBACK:
            return dial.client.host.name
        return self.name_of(dial.remote[0])

    def _send_syn(self, dial: Dial, retry_s: float) -> None:
        if dial.is_done or not dial.client.is_open:
            return
        if dial.client.is_forgotten:
            # Only an RST came of all that the server answered.
            dial.settle(errno.ECONNREFUSED)
            return
        remaining_s = dial.give_up_s - self.world.current_time()
        if remaining_s <= 0:
            dial.settle(errno.ETIMEDOUT)
            return
        source, target = dial.client.host.name, self._target(dial)
        links, now_s = self.links, self.world.current_time()
        if target is not None:
            link = links.link(source, target)
            if links.passes(source, target) and not links.loses(link):
                self.world.after(links.delay_s(link), self._syn_arrives, dial, target, now_s)
        self.world.after(min(retry_s, remaining_s), self._send_syn, dial, retry_s * 2)

    def _syn_arrives(self, dial: Dial, target: str, sent_s: float) -> None:
        source, port = dial.client.host.name, dial.remote[1]
        if dial.is_done or not self.links.passes(source, target):
            return
        if dial.server is not None:
            # Its SYN-ACK, or this SYN's predecessor, was slow or lost.
            if not dial.server.is_forgotten:
                self._answer(dial, target, 0)
            return
        answer = self._answers.get((target, port), self._answers.get((target, 0), "accept"))
        if answer == "ignore":
            # Without an answer the client repeats its SYN.
            return
        places = (dial.remote[0], ANYWHERE)
        found = (self._listeners.get((target, port, place)) for place in places)
        listener = next(filter(None, found), None)
        if listener is None:
            self.refused.setdefault((target, port), source)
        if listener is None or answer == "refuse":
            # The path of a Unix socket is a file, which is there while somebody listens.
            is_path = isinstance(port, str) and listener is None
            self._answer(dial, target, errno.ENOENT if is_path else errno.ECONNREFUSED)
        elif not listener.is_full(self.world.current_time()):
            self._open_half(dial, listener, sent_s)
            self._answer(dial, target, 0)

    def _open_half(self, dial: Dial, listener: Listener, sent_s: float) -> None:
        client = dial.client
        dial.server = server = self.open_endpoint(listener.host, dial.remote)
        server.options.update(listener.options)
        connection_id = next(self._ids)
        assert client.local is not None
        server.pair(client, connection_id, client.local)
        server.on_established = listener.take
        server.is_open = False
        listener.half_open[server] = self.world.current_time() + HALF_OPEN_S
        source, target = client.host.name, listener.host.name
        self.world.add_row(
            "connect", connection=connection_id, source=source, target=target, sent_s=sent_s
        )
        self.connections.append(Connection(connection_id, client, server))

    def _answer(self, dial: Dial, target: str, error: int) -> None:
        """Send a SYN-ACK back, or the RST that says `error`; the client asks again for what is lost."""
        source, links = dial.client.host.name, self.links
        link = links.link(target, source)
        if links.passes(target, source) and not links.loses(link):
            back_s = links.delay_s(link)
            if dial.server is not None:
                # An RST of a server that closes meanwhile must not overtake it.
                dial.server.hold_until(self.world.current_time() + back_s)
            self.world.after(back_s, self._answer_arrives, dial, target, error)

    def _answer_arrives(self, dial: Dial, target: str, error: int) -> None:
        client, server = dial.client, dial.server
        if dial.is_done or not self.links.passes(target, client.host.name):
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
