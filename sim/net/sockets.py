"""trio's own socket over one of the run's: what `trio.socket` makes while a network is there.

All is as in trio (names are resolved, checkpoints fall, closing wakes) but for what its class does by the
kernel's functions: trying comes to `StdSocket`'s methods, and waiting to its lots.
"""

from __future__ import annotations

import socket as stdlib
from typing import TYPE_CHECKING, Any

import trio
from typing_extensions import override

from ..isolation.guard import TrioSocket
from .std_sockets import StdSocket, StreamSocket, unanswered

if TYPE_CHECKING:
    from typing_extensions import Buffer


class SimSocket(TrioSocket):
    """A socket on the simulated network, made by `trio.socket.socket` during a run."""

    def __init__(self, sock: Any) -> None:
        if not isinstance(sock, StdSocket):
            raise TypeError(f"expected object of type 'socket.socket', not {type(sock).__name__!r}")
        sock.setblocking(False)  # noqa: FBT003 -- the standard library's
        self._sock: Any = sock
        self._did_shutdown_SHUT_WR = False

    def __getattr__(self, name: str) -> Any:
        unanswered(name)
        raise AttributeError(f"a simulated socket has no {name!r} (see docs/simulator.md)")

    @override
    def __repr__(self) -> str:
        return f"<SimSocket over {self._sock!r}>"

    @override
    async def bind(self, address: Any) -> None:
        if self.family != stdlib.AF_UNIX:
            await super().bind(address)
            return
        # trio asks a thread, for the sake of the file system.
        await trio.lowlevel.checkpoint()
        self._sock.bind(address)

    @override
    async def _nonblocking_helper(self, wait_fn: Any, fn: Any, *args: Any, **keywords: Any) -> Any:
        """Act as soon as it is possible, with trio's checkpoints; without an exception if it has to wait."""
        sock: StdSocket = self._sock
        act, writes = getattr(sock, fn.__name__), wait_fn is trio.lowlevel.wait_writable
        await trio.lowlevel.checkpoint_if_cancelled()
        if sock.is_closed or sock.is_ready(writes=writes):
            try:
                return act(*args, **keywords)
            finally:
                await trio.lowlevel.cancel_shielded_checkpoint()
        await sock.wait(writes=writes)
        return act(*args, **keywords)

    @override
    def is_readable(self) -> bool:
        return bool(self._sock.is_ready(writes=False))

    async def recv_arrived(self, buflen: int) -> bytes:
        """As `recv`, but without a checkpoint if something has arrived already."""
        sock: StreamSocket = self._sock
        if not sock.is_closed and not sock.is_ready(writes=False):
            await sock.wait(writes=False)
        return sock.recv(buflen)

    def send_nowait(self, data: Buffer) -> int:
        """As `send`, without a checkpoint; 0 if there is no room."""
        sock: StreamSocket = self._sock
        try:
            return sock.send(data)
        except BlockingIOError:
            return 0
