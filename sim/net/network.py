"""Simulated TCP/IP between the hosts of a world, behind trio's own hooks.

A `Network` is trio's socket factory and host name resolver during the run: host names are the
world's, each host has one IPv4 address, and 127.0.0.1 is the host itself. Faults are methods: `cut`,
`heal`, `reset`, `finish`, `answer_syn`; their host names may be patterns (`worker*`). A machine whose
power is off answers nothing, and its peers learn of it by their own timeouts, or by the RST of its
next life.

What this module does not do: the links (`links.py`), setting up connections (`handshake.py`), what happens on an established connection
(`connection.py`), the socket a process holds (`sockets.py`). IPv6, UDP and TLS are not simulated;
asking for another family raises EAFNOSUPPORT, as on a machine without it.
"""

from __future__ import annotations

import errno
import itertools
import socket as stdlib
from fnmatch import fnmatchcase
from typing import Any

import trio
from typing_extensions import override

from ..core.host import Host, HostState, current_host_name
from ..core.world import World
from .connection import Address, Connection, Endpoint
from .handshake import LOOPBACK, Dial, Handshakes, Listener, SynAnswer
from .links import Link, Links
from .sockets import SimSocket

__all__ = ["Network"]

SWEEP_MIN = 64
"""How many endpoints may pile up before those that are over are dropped."""


class Network(trio.abc.SocketFactory, trio.abc.HostnameResolver):
    """All links, listeners and connections of a world.

    `tear_one_in` and `short_one_in` say how often a read or a write takes only a part of what it
    could (0: never). `window_bytes` bounds what one direction of a connection holds. A SYN that is
    not answered is repeated and given up after `connect_timeout_s`.
    """

    def __init__(
        self,
        world: World,
        *,
        latency_s: float = 0.0005,
        jitter_s: float = 0.0002,
        tear_one_in: int = 0,
        short_one_in: int = 0,
        window_bytes: int = 65536,
        connect_timeout_s: float = 127.0,
        retransmit_s: float = 0.2,
    ) -> None:
        self.world = world
        self.tear_one_in, self.short_one_in = tear_one_in, short_one_in
        self.window_bytes = window_bytes
        self.connect_timeout_s, self.retransmit_s = connect_timeout_s, retransmit_s
        self.connections: list[Connection] = []
        """Those that are not over, oldest first; some that are, until they are swept."""
        self.cut_count = 0
        """How many cuts there have been; tells one silence from the next."""
        self.links = Links(world, Link(latency_s=latency_s, jitter_s=jitter_s))
        self._names: dict[str, str] = {}
        self._listeners: dict[tuple[str, int], Listener] = {}
        self._endpoints: list[Endpoint] = []
        self._sweep_at = SWEEP_MIN
        self._ports = itertools.count(40000)
        self._handshakes = Handshakes(self)
        world.on_start.append(self._install)
        world.on_end.append(self._process_ended)
        world.on_power.append(self._power_returned)

    def _install(self) -> None:
        trio.socket.set_custom_socket_factory(self)
        trio.socket.set_custom_hostname_resolver(self)

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

    def link(self, source: str, destination: str) -> Link:
        """The link in this direction; change its fields to change its behaviour."""
        return self.links.link(source, destination)

    def free_port(self) -> int:
        """A port nobody was given before."""
        return next(self._ports)

    # --- trio's hooks ------------------------------------------------------------------------

    @override
    def socket(
        self, family: int = stdlib.AF_INET, type: int = stdlib.SOCK_STREAM, proto: int = 0
    ) -> SimSocket:
        if family != stdlib.AF_INET:
            raise OSError(errno.EAFNOSUPPORT, "the simulated network is IPv4 only")
        if type != stdlib.SOCK_STREAM:
            raise OSError(errno.EPROTONOSUPPORT, "the simulated network is TCP only")
        return SimSocket(self, self.open_endpoint())

    def open_endpoint(self) -> Endpoint:
        """An unconnected half for the running task's host."""
        endpoint = Endpoint(self, self.world.host(current_host_name()), None)
        self._keep(endpoint)
        return endpoint

    def _keep(self, endpoint: Endpoint) -> None:
        self._endpoints.append(endpoint)
        if len(self._endpoints) > self._sweep_at:
            self.connections = [c for c in self.connections if not self._is_over(c)]
            self._endpoints = [
                e for e in self._endpoints if e.is_open or (e.is_connected and not e.is_over)
            ]
            self._sweep_at = max(SWEEP_MIN, 2 * len(self._endpoints))

    @staticmethod
    def _is_over(connection: Connection) -> bool:
        return connection.client.is_over and connection.server.is_over

    @override
    async def getaddrinfo(
        self,
        host: bytes | None,
        port: bytes | str | int | None,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> Any:
        await trio.lowlevel.checkpoint()
        name = "localhost" if host is None else host.decode()
        if name == "localhost":
            address = LOOPBACK
        elif family in (stdlib.AF_UNSPEC, stdlib.AF_INET) and self.world.knows(name):
            address = self.address_of(name)
        else:
            raise stdlib.gaierror(stdlib.EAI_NONAME, f"no simulated host is called {name!r}")
        number = int(port or 0)
        return [(stdlib.AF_INET, stdlib.SOCK_STREAM, stdlib.IPPROTO_TCP, "", (address, number))]

    @override
    async def getnameinfo(self, sockaddr: Any, flags: int) -> tuple[str, str]:
        await trio.lowlevel.checkpoint()
        address = str(sockaddr[0])
        return self._names.get(address, address), str(sockaddr[1])

    # --- connecting ----------------------------------------------------------------------------

    def listen(self, host: Host, address: Address, backlog: int) -> Listener:
        """Start listening; raises EADDRINUSE if the port is taken on this host."""
        key = (host.name, address[1])
        if key in self._listeners:
            raise OSError(errno.EADDRINUSE, f"{address} on {host.name} is in use")
        self._listeners[key] = listener = Listener(host, address, max(1, backlog))
        return listener

    def unlisten(self, listener: Listener) -> None:
        """Stop listening; connections nobody accepted are reset."""
        if listener.is_open:
            del self._listeners[listener.host.name, listener.address[1]]
            listener.close()

    def listener(self, host: str, port: int) -> Listener | None:
        """Who listens on this port of the host."""
        return self._listeners.get((host, port))

    def dial(self, client: Endpoint, remote: Address) -> Dial:
        """Start connecting; wait on the result's `waiters` until `is_done`."""
        now_s = self.world.current_time()
        dial = Dial(client, remote, now_s + self.connect_timeout_s)
        if client.local is None:
            own = self.address_of(client.host.name)
            client.local = (LOOPBACK if remote[0] == LOOPBACK else own, self.free_port())
        self._handshakes.begin(dial)
        return dial

    def open_server_half(self, listener: Listener, local: Address) -> Endpoint:
        """The server's half of a connection that begins."""
        endpoint = Endpoint(self, listener.host, local)
        self._keep(endpoint)
        return endpoint

    # --- faults ----------------------------------------------------------------------------------

    def cut(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Nothing passes from `a` to `b`, nor back unless `one_way`, until `heal`."""
        self.world.add_row("cut", source=a, target=b, one_way=one_way)
        self.cut_count += 1
        # Where a link was cut before, timeouts run already, and begin no second time.
        whole = [endpoint for endpoint in self._halves(a, b) if endpoint.link_is_whole]
        for source, target in self._pairs(a, b):
            self.links.cut(source, target, one_way=one_way)
        for endpoint in whole:
            endpoint.link_was_cut()

    def heal(self, a: str, b: str) -> None:
        """Undo `cut` in both directions; what was held back is sent again."""
        self.world.add_row("heal", source=a, target=b)
        for source, target in self._pairs(a, b):
            self.links.heal(source, target)
        for endpoint in self._halves(a, b):
            endpoint.heal()
            # A peer that gave up meanwhile has no such connection any more.
            endpoint.probe()

    def reset(self, a: str, b: str) -> int:
        """Reset every connection between the two hosts, as a middlebox would; how many."""
        hit = self._between(a, b)
        for connection in hit:
            self.world.add_row("reset", connection=connection.id)
            for endpoint in (connection.client, connection.server):
                endpoint.vanish()
                endpoint.fail(errno.ECONNRESET)
        return len(hit)

    def finish(self, a: str, b: str) -> int:
        """End every connection between the two hosts with FIN both ways, as a proxy that goes away.

        What was on the way is lost; both ends read EOF and can write no more. How many there were.
        """
        hit = self._between(a, b)
        for connection in hit:
            self.world.add_row("finish", connection=connection.id)
            for endpoint in (connection.client, connection.server):
                endpoint.vanish()
                endpoint.end()
        return len(hit)

    def answer_syn(self, host: str, answer: SynAnswer, *, port: int = 0) -> None:
        """How host `host` meets new connections to `port` (0: any): accept, refuse or ignore.

        Ignored ones are repeated and end as ETIMEDOUT. Connections that exist are not touched.
        """
        self.world.add_row("answer_syn", host=host, answer=answer, port=port)
        self._handshakes.answers[host, port] = answer

    def _pairs(self, a: str, b: str) -> list[tuple[str, str]]:
        return [(x, y) for x in self._named(a) for y in self._named(b) if x != y or a == b == x]

    def _named(self, pattern: str) -> list[str]:
        if "*" not in pattern and "?" not in pattern:
            return [pattern]
        return [name for name in self.world.host_names if fnmatchcase(name, pattern)]

    def _halves(self, a: str, b: str) -> list[Endpoint]:
        return [half for connection in self._between(a, b) for half in connection[1:]]

    def _between(self, a: str, b: str) -> list[Connection]:
        """The living connections whose two hosts match the two patterns, either way round."""
        return [
            connection
            for connection in self.connections
            if _matches(connection.client.host.name, connection.server.host.name, a, b)
            and connection.client.is_connected
            and not self._is_over(connection)
        ]

    def open_sockets(self, name: str) -> int:
        """How many sockets the processes of host `name` hold, listeners included."""
        held = sum(e.is_open and e.host.name == name for e in self._endpoints)
        return held + sum(host == name for host, _ in self._listeners)

    def _process_ended(self, host: Host) -> None:
        """The kernel closes what the process held, whether it was killed or returned."""
        for key in [key for key in self._listeners if key[0] == host.name]:
            self.unlisten(self._listeners[key])
        own = [endpoint for endpoint in self._endpoints if endpoint.host is host]
        if host.state is not HostState.OFF:
            for endpoint in own:
                endpoint.close()
            return
        self.cut_count += 1
        for endpoint in own:
            endpoint.lose_power()
        for half in self._halves(host.name, "*"):
            if half.host is not host:
                half.link_was_cut()

    def _power_returned(self, host: Host) -> None:
        """The new kernel knows no connection: what peers send again is answered with RST."""
        for half in self._halves(host.name, "*"):
            if half.host is not host:
                half.heal()
                half.probe()


def _matches(x: str, y: str, a: str, b: str) -> bool:
    """Whether the two hosts match the two patterns, either way round."""
    return (fnmatchcase(x, a) and fnmatchcase(y, b)) or (fnmatchcase(x, b) and fnmatchcase(y, a))
