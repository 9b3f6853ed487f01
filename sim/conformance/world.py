"""A world in real time and a network on loopback, under the same cluster: what the fake is held to.

Hosts are sets of tasks in this process. Their sockets are the kernel's, on 127.0.0.1; host names and
fixed ports are mapped to them by trio's resolver hook. A kill closes the host's sockets as its kernel
would, silences its notes, and only then cancels its tasks, so that none of their cleanup is heard.

What this module does not do: pauses, power cuts, cuts of the network, clock skew. A process cannot do
these to a part of itself; asking for one raises `ValueError`. Read next: `compare.py`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket as stdlib
import struct
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import trio
from typing_extensions import override

from ..core.choices import Choices
from ..core.host import CURRENT, DRIVER, WALL_EPOCH_S, Host, HostState
from ..core.world import World
from ..isolation.guard import TrioSocket
from ..net.network import Network

LOOPBACK = "127.0.0.1"
END_ROWS = {HostState.DOWN: "exit", HostState.DEAD: "kill"}


class LoopbackWorld(World):
    """As `World`, in real time; `run` ends with `trio.TooSlowError` after `timeout_s`."""

    def __init__(self, choices: Choices, *, timeout_s: float) -> None:
        super().__init__(choices)
        self._timeout_s = timeout_s
        self._started_s = 0.0
        self._is_running = False

    @override
    def run(self, main: Callable[[], Awaitable[None]]) -> str:
        trio.run(self._real_shell, main)
        if self.error is not None:
            raise self.error
        return self.trace.digest

    async def _real_shell(self, main: Callable[[], Awaitable[None]]) -> None:
        self._started_s, self._is_running = trio.current_time(), True
        try:
            async with trio.open_nursery() as self._nursery:
                with self._main_scope:
                    for start in self.on_start:
                        start()
                    try:
                        with trio.fail_after(self._timeout_s):
                            await main()
                    except Exception as error:  # noqa: BLE001 -- run() raises it
                        self._fail(error)
                self.ended_s = trio.current_time() - self._started_s
                self.is_unwinding = self.trace.is_muted = True
                self._nursery.cancel_scope.cancel()
        finally:
            self._time_s, self._is_running = trio.current_time(), False

    @override
    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        self._main_scope.cancel()

    # --- time ------------------------------------------------------------------------------

    @override
    def current_time(self) -> float:
        return trio.current_time() if self._is_running else self._time_s

    @override
    def wall(self) -> float:
        return WALL_EPOCH_S + self.current_time() - self._started_s

    @override
    def at(self, time_s: float, call: Callable[..., object], *args: Any) -> None:
        if self.is_unwinding or self._nursery is None:
            return
        # An event belongs to no host, whoever's note set it off.
        token = CURRENT.set(None)
        try:
            self._nursery.start_soon(self._call_at, time_s, call, args)
        finally:
            CURRENT.reset(token)

    async def _call_at(
        self, time_s: float, call: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        await trio.sleep_until(time_s)
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 -- run() raises it
            self._fail(error)

    # --- what happened ---------------------------------------------------------------------

    @override
    def add_row(self, kind: str, /, **fields: Any) -> None:
        incarnation = CURRENT.get()
        host = DRIVER if incarnation is None else incarnation.label
        self.trace.add(self.current_time() - self._started_s, host, kind, fields)

    @override
    def note(self, kind: str, /, **fields: Any) -> None:
        incarnation = CURRENT.get()
        if incarnation is None or not incarnation.is_buried:
            super().note(kind, **fields)

    @override
    def waiting(self) -> str:
        return "in real time"

    # --- hosts -----------------------------------------------------------------------------

    @override
    def _end(self, host: Host, state: HostState) -> None:
        host.state = state
        self.add_row(END_ROWS[state], host=host.name, generation=host.generation)
        host.ended.set()
        for call in self.on_end:
            call(host)

    @override
    def kill(self, name: str) -> None:
        host = self.host(name)
        if host.state is not HostState.UP:
            return
        self._end(host, HostState.DEAD)
        host.scope.cancel()

    @override
    def pause(self, name: str) -> NoReturn:
        raise ValueError(f"{name} cannot be paused in real time")

    @override
    def power_off(self, name: str) -> NoReturn:
        raise ValueError(f"{name} cannot lose its power in real time")


class LoopbackNetwork(Network, trio.abc.SocketFactory):
    """Names and fixed ports of hosts, and every socket they hold."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._held: list[LoopbackSocket] = []
        self._ports_bound: dict[tuple[str, int], int] = {}

    @override
    def _install(self) -> None:
        trio.socket.set_custom_socket_factory(self)
        trio.socket.set_custom_hostname_resolver(self)

    @override
    def socket(
        self, family: int = stdlib.AF_INET, type: int = stdlib.SOCK_STREAM, proto: int = 0
    ) -> Any:
        if family != stdlib.AF_INET:
            raise OSError(errno.EAFNOSUPPORT, "the cluster is on IPv4")
        return LoopbackSocket(self, stdlib.socket(family, type))

    def keep(self, socket: LoopbackSocket) -> None:
        """Know a socket of the running task's host; `OSError` if its process is dead."""
        if socket.incarnation is not None and socket.incarnation.is_buried:
            socket.close()
            raise OSError(errno.ENETDOWN, "a dead process opens no socket")
        self._held = [each for each in self._held if each.fileno() >= 0]
        self._held.append(socket)

    def bound(self, host: str, asked: int, port: int) -> None:
        """Host `host` asked for port `asked`, and has `port`."""
        self._ports_bound[host, asked] = port

    @override
    def name_and_port(self, sockaddr: Any, flags: int = 0) -> tuple[str, str]:
        owners = (
            each.host
            for each in self._held
            if each.fileno() >= 0 and each.getsockname() == sockaddr
        )
        return next(owners, str(sockaddr[0])), str(sockaddr[1])

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
        if name != "localhost" and not self.world.knows(name):
            raise stdlib.gaierror(stdlib.EAI_NONAME, f"no host is called {name!r}")
        number = self._ports_bound.get((name, int(port or 0)), int(port or 0))
        return [(stdlib.AF_INET, stdlib.SOCK_STREAM, stdlib.IPPROTO_TCP, "", (LOOPBACK, number))]

    @override
    def reset(self, a: str, b: str) -> int:
        """RST both ways on every connection between the two hosts, by the kernel's disconnect."""
        hit = 0
        for mine in list(self._held):
            for other in list(self._held):
                if mine.host == a and other.host == b and mine.is_peer_of(other):
                    self.world.add_row("reset", connection=hit)
                    mine.disconnect()
                    hit += 1
        return hit

    @override
    def _process_ended(self, host: Host) -> None:
        if host.state is HostState.DEAD:
            for socket in list(self._held):
                if socket.host == host.name:
                    socket.close()


class LoopbackSocket(TrioSocket):
    """A kernel socket on loopback that knows whose it is."""

    def __init__(self, network: LoopbackNetwork, sock: stdlib.socket) -> None:
        super().__init__(sock)
        self.network = network
        self.incarnation = CURRENT.get()
        self.host = DRIVER if self.incarnation is None else self.incarnation.host.name
        network.keep(self)

    @override
    async def bind(self, address: Any) -> None:
        # Two hosts may want one port, and somebody else may have it.
        await super().bind((LOOPBACK, 0))
        if address[1]:
            self.network.bound(self.host, address[1], self.getsockname()[1])

    @override
    async def accept(self) -> tuple[LoopbackSocket, Any]:
        accepted, address = await super().accept()
        return LoopbackSocket(self.network, stdlib.socket(fileno=accepted.detach())), address

    # As a simulated socket has them, so that a link leaves the socket here, where it can be cut.

    def send_nowait(self, data: bytes | memoryview) -> int:
        """Send what there is room for, now; how much that was."""
        try:
            return os.write(self.fileno(), data)
        except BlockingIOError:
            return 0

    async def recv_arrived(self, bytes_max: int) -> bytes:
        """What has come, so much at most; empty at the end."""
        return await self.recv(bytes_max)

    def is_peer_of(self, other: LoopbackSocket) -> bool:
        """Whether the two are the ends of one connection."""
        try:
            return bool(
                self.getsockname() == other.getpeername()
                and self.getpeername() == other.getsockname()
            )
        except OSError:
            return False

    def disconnect(self) -> None:
        """Have the kernel send RST and tell this end ECONNRESET too: connect to no address."""
        nowhere = struct.pack("=H14x", stdlib.AF_UNSPEC)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.connect(self.fileno(), nowhere, len(nowhere)) != 0:
            linger = struct.pack("ii", 1, 0)
            self.setsockopt(stdlib.SOL_SOCKET, stdlib.SO_LINGER, linger)
            self.close()
