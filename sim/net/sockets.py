"""The socket a simulated process holds: trio's `SocketType` over a simulated connection.

Checkpoints fall where trio's own sockets have them: an operation that can be done at once is done
before the task yields, so a cancelled receive loses nothing; closing wakes those who wait with
`ClosedResourceError`. Reads and writes may take only a part, as the network's dice say.

What this module does not do: TCP (`connection.py`), finding peers (`network.py`). `fileno` is a
number no kernel knows, so handing it to anything real fails; ancillary data, `dup` and datagrams
are not simulated.
"""

from __future__ import annotations

import builtins
import errno
import itertools
import socket as stdlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self, TypeVar

import trio
from typing_extensions import override

from .connection import Address, Endpoint, os_error

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer

    from .handshake import Listener, Stack


T = TypeVar("T")

FIRST_FILENO = 1_000_000
FLAGS_UNSUPPORTED = stdlib.MSG_OOB | stdlib.MSG_PEEK | stdlib.MSG_WAITALL


class SimSocket(trio.socket.SocketType):
    """A TCP socket on the simulated network, made by `trio.socket.socket` during a run."""

    def __init__(self, stack: Stack, endpoint: Endpoint) -> None:
        super().__init__()
        self._stack = stack
        self._endpoint = endpoint
        self._listener: Listener | None = None
        self._bound: Address | None = endpoint.local
        self._is_closed = False
        self._has_shut_down = False
        self._fileno = FIRST_FILENO + next(_numbers)

    # --- what it is ----------------------------------------------------------------------------

    @property
    @override
    def family(self) -> stdlib.AddressFamily:
        return stdlib.AF_INET

    @property
    @override
    def type(self) -> stdlib.SocketKind:
        return stdlib.SOCK_STREAM

    @property
    @override
    def proto(self) -> int:
        return stdlib.IPPROTO_TCP

    @property
    @override
    def did_shutdown_SHUT_WR(self) -> bool:
        return self._has_shut_down

    @override
    def fileno(self) -> int:
        return -1 if self._is_closed else self._fileno

    @override
    def __repr__(self) -> str:
        return f"<SimSocket {self._fileno} of {self._endpoint!r}>"

    @override
    def __enter__(self) -> Self:
        return self

    @override
    def __exit__(
        self,
        exc_type: builtins.type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @override
    def getsockname(self) -> Address:
        self._check_open()
        return self._endpoint.local or self._bound or ("0.0.0.0", 0)  # noqa: S104 -- unbound

    @override
    def getpeername(self) -> Address:
        self._check_open()
        if self._endpoint.remote is None:
            raise os_error(errno.ENOTCONN)
        return self._endpoint.remote

    @override
    def setsockopt(self, level: int, optname: int, value: Any, optlen: int | None = None) -> None:
        """Remember the option; keep-alive, user timeout and linger have their effect."""
        self._check_open()
        self._endpoint.options[level, optname] = (
            int(value) if isinstance(value, int) else bytes(value or b"")
        )

    @override
    def getsockopt(self, level: int, optname: int, buflen: int | None = None) -> Any:
        self._check_open()
        if (level, optname) == (stdlib.SOL_SOCKET, stdlib.SO_ACCEPTCONN):
            return int(self._listener is not None)
        if (level, optname) == (stdlib.SOL_SOCKET, stdlib.SO_ERROR):
            number, self._endpoint.error = self._endpoint.error, 0
            return number
        value = self._endpoint.options.get((level, optname), 0)
        return value if buflen is None or isinstance(value, bytes) else value.to_bytes(4, "little")

    # --- waiting ---------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise os_error(errno.EBADF)

    def _check_unclosed_meanwhile(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError("another task closed this socket")

    async def _do(
        self,
        is_ready: Callable[[], bool],
        lot: trio.lowlevel.ParkingLot,
        act: Callable[[], T],
    ) -> T:
        """Act as soon as it is possible, with trio's checkpoints."""
        self._check_open()
        await trio.lowlevel.checkpoint_if_cancelled()
        if is_ready():
            try:
                return act()
            finally:
                await trio.lowlevel.cancel_shielded_checkpoint()
        while not is_ready():
            await lot.park()
            self._check_unclosed_meanwhile()
        return act()

    # --- connecting ------------------------------------------------------------------------------

    @override
    async def bind(self, address: Any) -> None:
        self._check_open()
        await trio.lowlevel.checkpoint()
        host, port = address[:2]
        own = self._stack.address_of(self._endpoint.host.name)
        if host not in ("", "0.0.0.0", "127.0.0.1", own):  # noqa: S104 -- compared with
            raise os_error(errno.EADDRNOTAVAIL)
        self._bound = (host or "0.0.0.0", port or self._stack.free_port())  # noqa: S104

    @override
    def listen(self, backlog: int = 128) -> None:
        self._check_open()
        if self._bound is None:
            self._bound = ("0.0.0.0", self._stack.free_port())  # noqa: S104 -- as Linux does
        self._listener = self._stack.listen(self._endpoint.host, self._bound, backlog)
        # From here on the listener is what the process holds.
        self._endpoint.is_open = False

    @override
    async def accept(self) -> tuple[SimSocket, Address]:
        self._check_open()
        listener = self._listener
        if listener is None:
            raise os_error(errno.EINVAL)
        if self._endpoint.host.name in self._stack.exhausted:
            await trio.lowlevel.checkpoint()
            self._stack.world.note("accept.failed")
            raise os_error(errno.EMFILE)
        endpoint = await self._do(
            lambda: bool(listener.ready), listener.accepters, listener.ready.popleft
        )
        accepted = SimSocket(self._stack, endpoint)
        assert endpoint.remote is not None
        return accepted, endpoint.remote

    @override
    async def connect(self, address: Any) -> None:
        self._check_open()
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._endpoint.is_connected:
            raise os_error(errno.EISCONN)
        if self._bound is not None:
            own = self._stack.address_of(self._endpoint.host.name)
            self._endpoint.local = (
                own if self._bound[0] == "0.0.0.0" else self._bound[0],  # noqa: S104
                self._bound[1],
            )
        dial = self._stack.dial(self._endpoint, (str(address[0]), int(address[1])))
        try:
            while not dial.is_done:
                await dial.waiters.park()
                self._check_unclosed_meanwhile()
        except BaseException:
            # As with trio's own sockets, a connect that was cut short leaves a closed socket.
            self.close()
            raise
        if dial.error:
            raise os_error(dial.error)

    # --- bytes -----------------------------------------------------------------------------------

    def _part(self, size: int, one_in: int, label: str) -> int:
        if size > 1 and self._stack.world.choices.chance(one_in, label):
            return 1 + self._stack.world.choices.below(size - 1, f"{label} size")
        return size

    @override
    async def recv(self, buflen: int, flags: int = 0, /) -> bytes:
        _refuse(flags)
        endpoint = self._endpoint
        self._require_connection()

        def take() -> bytes:
            size = min(buflen, len(endpoint.buffer))
            return endpoint.read(self._part(size, self._stack.tear_one_in, "tear"))

        return await self._do(lambda: endpoint.is_readable, endpoint.readers, take)

    async def recv_arrived(self, buflen: int) -> bytes:
        """As `recv`, but without a checkpoint if something has arrived already."""
        endpoint = self._endpoint
        self._check_open()
        self._require_connection()
        while not endpoint.is_readable:
            await endpoint.readers.park()
            self._check_unclosed_meanwhile()
        size = min(buflen, len(endpoint.buffer))
        return endpoint.read(self._part(size, self._stack.tear_one_in, "tear"))

    @override
    async def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        with memoryview(buffer).cast("B") as view:
            data = await self.recv(nbytes or len(view), flags)
            view[: len(data)] = data
            return len(data)

    @override
    async def send(self, bytes: Buffer, flags: int = 0, /) -> int:
        _refuse(flags)
        endpoint = self._endpoint
        self._require_connection(errno.EPIPE)
        with memoryview(bytes) as view:
            return await self._do(
                lambda: endpoint.is_writable, endpoint.writers, lambda: self._put(view)
            )

    def send_nowait(self, data: Buffer) -> int:
        """As `send`, without a checkpoint; 0 if there is no room."""
        self._check_open()
        self._require_connection(errno.EPIPE)
        if not self._endpoint.is_writable:
            return 0
        with memoryview(data) as view:
            return self._put(view)

    def _put(self, view: memoryview) -> int:
        size = min(view.nbytes, self._endpoint.room_bytes)
        size = self._part(size, self._stack.short_one_in, "short")
        # A broken connection has no room, but must raise all the same.
        return self._endpoint.write(view.cast("B")[:size].tobytes())

    @override
    async def sendmsg(
        self,
        buffers: Iterable[Buffer],
        ancdata: Iterable[tuple[int, int, Buffer]] = (),
        flags: int = 0,
        address: Any = None,
        /,
    ) -> int:
        if tuple(ancdata) or address is not None:
            raise os_error(errno.EOPNOTSUPP)
        return await self.send(b"".join(buffers), flags)

    def _require_connection(self, number: int = errno.ENOTCONN) -> None:
        self._check_open()
        if not self._endpoint.is_connected:
            raise os_error(number)

    @override
    def is_readable(self) -> bool:
        self._check_open()
        if self._listener is not None:
            return bool(self._listener.ready)
        return self._endpoint.is_readable

    @override
    async def wait_writable(self) -> None:
        endpoint = self._endpoint
        await self._do(lambda: endpoint.is_writable, endpoint.writers, lambda: None)

    # --- ending ----------------------------------------------------------------------------------

    @override
    def shutdown(self, flag: int) -> None:
        self._require_connection()
        if self._endpoint.is_forgotten:
            raise os_error(errno.ENOTCONN)
        if flag in (stdlib.SHUT_WR, stdlib.SHUT_RDWR):
            self._has_shut_down = True
            self._endpoint.shut_down()
        if flag in (stdlib.SHUT_RD, stdlib.SHUT_RDWR):
            self._endpoint.has_eof = True
            self._endpoint.readers.unpark_all()

    @override
    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._listener is not None:
            self._stack.unlisten(self._listener)
        self._endpoint.close()


_numbers = itertools.count()


def _refuse(flags: int) -> None:
    if flags & FLAGS_UNSUPPORTED:
        raise os_error(errno.EOPNOTSUPP)
