"""Simulated TCP/IP between the hosts of a world, behind trio's own hooks.

During the run `socket.socket` and all of trio's sockets are those of a `Network` (`stand_ins.py`): host names are the
world's, each host has one IPv4 address, and 127.0.0.1 is the host itself. Faults are methods: `cut`,
`heal`, `reset`, `finish`, `answer_syn`; their host names may be patterns (`worker*`). A machine whose
power is off answers nothing, and its peers learn of it by their own timeouts, or by the RST of its
next life.

What this module does not do: the links (`links.py`), setting up connections (`handshake.py`), what happens on
an established connection (`connection.py`), datagrams (`datagrams.py`), the sockets a process holds
(`std_sockets.py`). IPv6 is not simulated; asking for it raises EAFNOSUPPORT, as on a machine without it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import trio

from ..core.host import Host, HostState
from ..core.world import World
from .connection import Connection, Endpoint
from .links import Link, Links
from .names import Names
from .stand_ins import sockets_in_place


class Network(Names):
    """All links, listeners and connections of a world.

    `tear_one_in` and `short_one_in` say how often a read or a write takes only a part of what it
    could (0: never), as TCP may at any time: who takes one read for one message learns of it.
    `window_bytes` bounds what one direction of a connection holds.
    """

    def __init__(
        self,
        world: World,
        *,
        latency_s: float = 0.0005,
        jitter_s: float = 0.0002,
        tear_one_in: int = 4,
        short_one_in: int = 0,
        window_bytes: int = 65536,
        connect_timeout_s: float = 127.0,
        retransmit_s: float = 0.2,
    ) -> None:
        super().__init__(
            world,
            Links(world, Link(latency_s=latency_s, jitter_s=jitter_s)),
            tear_one_in=tear_one_in,
            short_one_in=short_one_in,
            window_bytes=window_bytes,
            connect_timeout_s=connect_timeout_s,
            retransmit_s=retransmit_s,
        )
        world.on_start.append(self._install)
        world.on_end.append(self._process_ended)
        world.on_power.append(self._power_returned)
        world.advisers.append(self._unheard)

    def _install(self) -> None:
        trio.socket.set_custom_hostname_resolver(self)
        self.world.until_end.enter_context(sockets_in_place(self))

    # --- faults ----------------------------------------------------------------------------------

    def cut(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Nothing passes from `a` to `b`, nor back unless `one_way`, until `heal`."""
        self.world.add_row("cut", source=a, target=b, one_way=one_way)
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
        return self._end("reset", a, b, lambda half: half.fail(errno.ECONNRESET))

    def finish(self, a: str, b: str) -> int:
        """End every connection between the two hosts with FIN both ways, as a proxy that goes away.

        What was on the way is lost; both ends read EOF and can write no more. How many there were.
        """
        return self._end("finish", a, b, Endpoint.end)

    def swallow(self, a: str, b: str) -> int:
        """Let no more data through every open connection between the two hosts; how many there were.

        As a proxy that hangs does: no end sees an error, and connections made later work.
        """
        hit = self._between(a, b)
        for connection in hit:
            self.world.add_row("swallow", connection=connection.id)
            connection.client.is_swallowed = connection.server.is_swallowed = True
        return len(hit)

    def _end(self, how: str, a: str, b: str, end: Callable[[Endpoint], None]) -> int:
        hit = self._between(a, b)
        for connection in hit:
            self.world.add_row(how, connection=connection.id)
            for half in (connection.client, connection.server):
                half.vanish()
                end(half)
        return len(hit)

    def _pairs(self, a: str, b: str) -> list[tuple[str, str]]:
        return [(x, y) for x in self._named(a) for y in self._named(b) if x != y or a == b == x]

    def _named(self, pattern: str) -> list[str]:
        if "*" not in pattern and "?" not in pattern:
            self.world.aim("cut", pattern)
            return [pattern]
        return [name for name in self.world.host_names if fnmatchcase(name, pattern)]

    def _halves(self, a: str, b: str) -> list[Endpoint]:
        return [half for connection in self._between(a, b) for half in connection[1:]]

    def _between(self, a: str, b: str) -> list[Connection]:
        """The living connections whose two hosts match the two patterns, either way round."""
        names = self.world.host_names
        xs, ys = ({name for name in names if fnmatchcase(name, each)} for each in (a, b))
        found = []
        for connection in self.connections:
            client, server = connection.client.host.name, connection.server.host.name
            if (client in xs and server in ys) or (client in ys and server in xs):
                found.append(connection)
        return [each for each in found if each.client.is_connected and not each.is_over]

    def _unheard(self) -> Iterator[str]:
        for what, source in self.unanswered.items():
            yield (
                f"{source} asked a simulated socket for {what!r}, which it has not: what a library may"
                " call, and what happens, is in docs/simulator.md"
            )
        for name, source in self.unknown_names.items():
            if not self.world.knows(name):
                yield (
                    f"{source} asked for {name!r}, and no host of that name was ever booted; there"
                    f" were {', '.join(self.world.host_names) or 'none'}"
                )
        for (target, port), source in self.refused.items():
            if (target, port) not in self.heard:
                yield (
                    f"{source} connected to {target}, port {port}, and nothing ever listened there:"
                    " its main function must serve that port, and be booted before"
                )

    def open_sockets(self, name: str) -> int:
        """How many sockets the processes of host `name` hold, listeners included."""
        held = sum(e.is_open and e.host.name == name for e in self._endpoints)
        return held + sum(host == name for host, *_ in self._listeners)

    def _process_ended(self, host: Host) -> None:
        """The kernel closes what the process held, whether it was killed or returned."""
        tables: list[dict[Any, Any]] = [self.sockets, self.datagram_sockets]
        for held in tables:
            for key in [key for key, socket in held.items() if socket.host is host]:
                del held[key]
        for key in [key for key in self._listeners if key[0] == host.name]:
            self.unlisten(self._listeners[key])
        own = [endpoint for endpoint in self._endpoints if endpoint.host is host]
        if host.state is not HostState.OFF:
            for endpoint in own:
                endpoint.close()
            return
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
