"""What `socket.socket` is during a run: a socket of the running task's host, with the standard library's methods.

Whatever is asked of it is done at once or refused with `BlockingIOError`; whoever waits does so with
`trio.lowlevel.wait_readable` and its kin, which know these sockets by their numbers
(`stand_ins.py`). A call that would block the process is an `Escape`. A Unix socket is a TCP socket of the host's own
loopback whose port is a path.

Reads and writes may take only a part, as the network's dice say. What a real socket has and this one
has not is a hint of the run, however the error was handled. What this module does not do: TCP
(`connection.py`), datagrams (`datagrams.py`), trio's methods (`sockets.py`).
"""

from __future__ import annotations

import builtins
import errno
import os
import socket as stdlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import trio
from typing_extensions import override

from ..core.host import current_host_name
from ..isolation.guard import escape
from .connection import Address, Endpoint, os_error
from .handshake import ANYWHERE, LOOPBACK, Listener
from .names import KINDS

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from .handshake import Dial
    from .names import Names

# The parameters are the standard library's.
# ruff: noqa: A002, ARG002, ARG004, FBT001
FLAGS_UNSUPPORTED = int(stdlib.MSG_OOB | stdlib.MSG_WAITALL | stdlib.MSG_ERRQUEUE)
DONTWAIT, PEEK = int(stdlib.MSG_DONTWAIT), int(stdlib.MSG_PEEK)
"""As numbers: an operation on two flags is a call of the class of flags, and every read asks for some."""
PROTOCOLS = dict(KINDS)
KIND_FLAGS = stdlib.SOCK_NONBLOCK | stdlib.SOCK_CLOEXEC


class StdSocket:
    """What all kinds of sockets share; making one gives a `StreamSocket` or a `DatagramSocket`."""

    network: Names
    """That of the run; see `stand_ins.py`."""
    kinds: ClassVar[dict[int, builtins.type[StdSocket]]] = {}
    """Which class makes sockets of which type; see `stand_ins.py`."""

    def __new__(  # noqa: PYI034 -- of one of the kinds
        cls, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None, **_: Any
    ) -> StdSocket:
        if fileno is not None:
            held: StdSocket = cls.network.numbered(fileno)
            return held
        if family not in (-1, stdlib.AF_INET, stdlib.AF_UNIX):
            raise OSError(
                errno.EAFNOSUPPORT, "the simulated network is IPv4 only, but for Unix sockets"
            )
        kind = stdlib.SOCK_STREAM if type == -1 else type & ~KIND_FLAGS
        if kind not in cls.kinds:
            raise OSError(
                errno.EPROTONOSUPPORT, "a simulated socket is a stream or takes datagrams"
            )
        return object.__new__(cls.kinds[kind])

    def __init__(
        self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None
    ) -> None:
        if fileno is not None:
            # `__new__` found the one that has this number.
            return
        # Some are closed when the run is over, and the class has no network any more.
        self.network = network = StdSocket.network
        self.family = stdlib.AF_UNIX if family == stdlib.AF_UNIX else stdlib.AF_INET
        self.host = network.world.host(current_host_name())
        is_blocking = type == -1 or not type & stdlib.SOCK_NONBLOCK
        self.timeout: float | None = None if is_blocking else 0.0
        self._bound: Address | None = None
        self.is_closed = False
        self._closings = 0
        """How often trio was told that it is about to be closed."""
        self._waiting: set[bool] = set()
        """Whether a task waits to read (False) and whether one waits to write (True)."""
        self._number = next(network.numbers)
        network.sockets[self._number] = self

    # --- what it is ----------------------------------------------------------------------------

    type: stdlib.SocketKind

    @property
    def proto(self) -> int:
        """The protocol's number: none but that of its kind."""
        is_inet = self.family == stdlib.AF_INET
        return PROTOCOLS[self.type] if is_inet else 0

    def fileno(self) -> int:
        """A number that no kernel gives out; -1 once it is closed."""
        return -1 if self.is_closed else self._number

    def detach(self) -> int:
        """The number, for `socket.socket(fileno=…)`, which gives this very socket."""
        return self.fileno()

    def __repr__(self) -> str:
        return f"<simulated socket {self._number} of {self.host.name}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        unanswered(name)
        raise AttributeError(f"a simulated socket has no {name!r} (see docs/simulator.md)")

    def setblocking(self, flag: bool) -> None:
        """Whether calls that cannot be done at once are an `Escape` (True) or `BlockingIOError`."""
        self.timeout = None if flag else 0.0

    def settimeout(self, value: float | None) -> None:
        """As `setblocking`: nobody can wait here, for however short a time."""
        self.timeout = value

    def gettimeout(self) -> float | None:
        return self.timeout

    def getblocking(self) -> bool:
        return self.timeout != 0

    def set_inheritable(self, inheritable: bool) -> None:
        """Nothing: no process inherits it."""

    def get_inheritable(self) -> bool:
        return False

    def setsockopt(self, level: int, optname: int, value: Any, optlen: int | None = None) -> None:
        """Remember the option; keep-alive, user timeout and linger have their effect."""
        self._check_open()
        packed = b"" if isinstance(value, int) else bytes(value or b"")
        if len(packed) == 4:
            value = int.from_bytes(packed, "little")
        self.options[level, optname] = int(value) if isinstance(value, int) else packed

    def getsockopt(self, level: int, optname: int, buflen: int | None = None) -> Any:
        """What was set; the error that is pending; what the socket is; 0 for all else."""
        self._check_open()
        value: int | bytes
        match level, optname:
            case stdlib.SOL_SOCKET, stdlib.SO_ERROR:
                value = self._take_error()
            case stdlib.SOL_SOCKET, stdlib.SO_TYPE:
                value = self.type
            case stdlib.SOL_SOCKET, stdlib.SO_DOMAIN:
                value = self.family
            case stdlib.SOL_SOCKET, stdlib.SO_PROTOCOL:
                value = self.proto
            case stdlib.SOL_SOCKET, stdlib.SO_ACCEPTCONN:
                value = int(self.is_listening)
            case _:
                value = self.options.get((level, optname), 0)
        return (
            value
            if buflen is None or isinstance(value, bytes)
            else value.to_bytes(buflen, "little")
        )

    # --- addresses -------------------------------------------------------------------------------

    def inward(self, address: Any) -> Address:
        """An address as the process gives it, as the kernel keeps it."""
        if self.family == stdlib.AF_UNIX:
            return LOOPBACK, os.fsdecode(address)
        host, port = address[:2]
        # Linux takes no address at all for its own.
        return LOOPBACK if host in ("", ANYWHERE) else self.network.find(host), int(port)

    def outward(self, address: Address | None) -> Any:
        """The other way round; a Unix socket that has no path has an empty one."""
        if self.family == stdlib.AF_UNIX:
            return address[1] if address and isinstance(address[1], str) else ""
        return address or (ANYWHERE, 0)

    def bind(self, address: Any) -> None:
        """Take this address."""
        self._check_open()
        if self._bound is not None:
            raise os_error(errno.EINVAL)
        if self.family == stdlib.AF_UNIX:
            self._bound = self.inward(address)
            return
        host, port = address[:2]
        place = ANYWHERE if host in ("", ANYWHERE) else self.network.find(host)
        if place not in (ANYWHERE, LOOPBACK, self.network.address_of(self.host.name)):
            raise os_error(errno.EADDRNOTAVAIL)
        self._bound = place, port or self.network.free_port()

    @property
    def bound(self) -> Address | tuple[None, None]:
        """The address and the port that it was given."""
        return self._bound or (None, None)

    def _from_where(self, remote: Address) -> Address:
        """The address that a peer at `remote` sees, made up of what was bound."""
        own = LOOPBACK if remote[0] == LOOPBACK else self.network.address_of(self.host.name)
        place, port = self._bound or (ANYWHERE, self.network.free_port())
        return own if place == ANYWHERE else place, port

    def connect_ex(self, address: Any) -> int:
        try:
            self.connect(address)
        except OSError as error:
            return error.errno or 0
        return 0

    # --- waiting ---------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.is_closed:
            raise os_error(errno.EBADF)

    def _refusal(self, number: int = errno.EAGAIN, flags: int = 0) -> OSError:
        """What a call raises that cannot be done at once."""
        if self.timeout == 0 or flags & DONTWAIT:
            return os_error(number)
        return escape(
            "a call of a blocking socket that has to wait, which would stop the whole simulation; use"
            " trio's sockets, or setblocking(False) and trio.lowlevel.wait_readable"
        )

    async def wait(self, *, writes: bool) -> None:
        """Return once it is ready, which it is not now.

        As with epoll, who waits for a socket that is closed without a word to trio waits for ever.
        """
        if writes in self._waiting:
            raise trio.BusyResourceError("another task is already reading / writing this fd")
        self._waiting.add(writes)
        closings = self._closings
        try:
            while True:
                await self.lot(writes=writes).park()
                if self._closings != closings:
                    raise trio.ClosedResourceError("another task closed this fd")
                if self.is_closed:
                    await trio.sleep_forever()
                if self.is_ready(writes=writes):
                    return
        finally:
            self._waiting.discard(writes)

    def notify_closing(self) -> None:
        """As `trio.lowlevel.notify_closing`: wake those who wait, with `ClosedResourceError`."""
        self._closings += 1
        for writes in sorted(self._waiting):
            self.lot(writes=writes).unpark_all()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.network.sockets.pop(self._number, None)
            self._let_go()

    # --- what only some kinds do ------------------------------------------------------------------

    def listen(self, backlog: int = 128) -> None:
        raise os_error(errno.EOPNOTSUPP)

    def accept(self) -> tuple[StdSocket, Any]:
        raise os_error(errno.EOPNOTSUPP)

    def sendto(self, data: Buffer, *where: Any) -> int:
        raise os_error(errno.EOPNOTSUPP)

    # --- in terms of the others ------------------------------------------------------------------

    def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        count: int = self.recvfrom_into(buffer, nbytes, flags)[0]
        return count

    def recvfrom_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> tuple[int, Any]:
        with memoryview(buffer).cast("B") as view:
            data: bytes
            data, address = self.recvfrom(nbytes or len(view), flags)
            view[: len(data)] = data
            return len(data), address

    def recvmsg(
        self, bufsize: int, ancbufsize: int = 0, flags: int = 0
    ) -> tuple[bytes, list[Any], int, Any]:
        """As `recvfrom`: no ancillary data ever comes."""
        data, address = self.recvfrom(bufsize, flags)
        return data, [], 0, address

    def recvmsg_into(
        self, buffers: Iterable[Buffer], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[Any], int, Any]:
        """Fill the buffers one after the other, as far as it goes."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        data, address = self.recvfrom(sum(view.nbytes for view in views), flags)
        rest = memoryview(data)
        for view in views:
            part = rest[: view.nbytes]
            view[: part.nbytes], rest = part, rest[part.nbytes :]
        return len(data), [], 0, address

    def sendmsg(
        self,
        buffers: Iterable[Buffer],
        ancdata: Iterable[Any] = (),
        flags: int = 0,
        address: Any = None,
    ) -> int:
        if tuple(ancdata):
            self._refuse("sendmsg with ancillary data")
        data = b"".join(buffers)
        is_addressed = address is not None
        count: int = self.sendto(data, flags, address) if is_addressed else self.send(data, flags)
        return count

    def sendall(self, data: Buffer, flags: int = 0) -> None:
        with memoryview(data).cast("B") as view:
            sent = 0
            while sent < len(view):
                sent += self.send(view[sent:], flags)

    def _refuse(self, what: str) -> NoReturn:
        unanswered(what)
        raise OSError(
            errno.EOPNOTSUPP, f"a simulated socket does no {what} (see docs/simulator.md)"
        )

    def _check_flags(self, flags: int) -> None:
        if flags & FLAGS_UNSUPPORTED:
            self._refuse(f"{stdlib.MsgFlag(flags & FLAGS_UNSUPPORTED)!r}")


def unanswered(what: str) -> None:
    """Tell the author of the scenario that a simulated socket was asked for something it has not."""
    if not what.startswith("__"):
        StdSocket.network.unanswered.setdefault(what, current_host_name())


class StreamSocket(StdSocket):
    """A TCP socket, or a Unix socket of streams: unconnected, listening or connected."""

    type = stdlib.SOCK_STREAM

    def __init__(self, *args: Any, endpoint: Endpoint | None = None, **how: Any) -> None:
        super().__init__(*args, **how)
        if "endpoint" in vars(self):
            return
        self.endpoint = endpoint or self.network.open_endpoint(self.host)
        self.options = self.endpoint.options
        self._bound = self.endpoint.local
        self._listener: Listener | None = None
        self._dial: Dial | None = None

    @property
    def is_listening(self) -> bool:
        """Whether it takes connections."""
        return self._listener is not None

    def getsockname(self) -> Any:
        self._check_open()
        return self.outward(self.endpoint.local or self._bound)

    def getpeername(self) -> Any:
        return self.outward(self._require_living().remote)

    def _take_error(self) -> int:
        number, self.endpoint.error = self.endpoint.error, 0
        if self._dial is not None and self._dial.is_done:
            number, self._dial = number or self._dial.error, None
        return number

    def _at_the_same_address(self) -> Iterator[StreamSocket]:
        assert self._bound is not None
        place, port = self._bound
        for each in self.network.sockets.values():
            other, taken = each.bound
            is_there = taken == port and (place == other or ANYWHERE in (place, other))
            if (
                is_there
                and isinstance(each, StreamSocket)
                and each.host is self.host
                and each is not self
            ):
                yield each

    # --- connecting ------------------------------------------------------------------------------

    @override
    def bind(self, address: Any) -> None:
        super().bind(address)
        reuse = stdlib.SOL_SOCKET, stdlib.SO_REUSEADDR
        for each in self._at_the_same_address():
            if each.is_listening or not (self.options.get(reuse) and each.options.get(reuse)):
                self._bound = None
                raise os_error(errno.EADDRINUSE)

    @override
    def listen(self, backlog: int = 128) -> None:
        self._check_open()
        if self._listener is not None:
            self._listener.backlog = max(1, backlog)
            return
        if self._bound is None:
            self.bind(("", 0))
        assert self._bound is not None
        if any(each.is_listening for each in self._at_the_same_address()):
            raise os_error(errno.EADDRINUSE)
        self._listener = Listener(self.host, self._bound, max(1, backlog), self.options)
        self.network.listen(self._listener)
        # From here on the listener is what the process holds.
        self.endpoint.is_open = False

    @override
    def accept(self) -> tuple[StdSocket, Any]:
        self._check_open()
        if self._listener is None:
            raise os_error(errno.EINVAL)
        if self.host.name in self.network.exhausted:
            self.network.world.note("accept.failed")
            raise os_error(errno.EMFILE)
        if not self._listener.ready:
            raise self._refusal()
        endpoint = self._listener.ready.popleft()
        accepted = StreamSocket(self.family, self.type, endpoint=endpoint)
        return accepted, self.outward(endpoint.remote)

    def connect(self, address: Any) -> None:
        """Begin to; always `BlockingIOError` (EINPROGRESS) then, and writable once it is decided."""
        self._check_open()
        if self.endpoint.is_connected:
            raise os_error(errno.EISCONN)
        if self._dial is not None and not self._dial.is_done:
            raise os_error(errno.EALREADY)
        if number := self._take_error():
            raise os_error(number)
        remote = self.inward(address)
        if self._bound is not None:
            self.endpoint.local = self._from_where(remote)
        self._dial = self.network.dial(self.endpoint, remote)
        raise self._refusal(errno.EINPROGRESS)

    def is_ready(self, *, writes: bool) -> bool:
        """Whether epoll would report it readable, or writable."""
        if not writes and self.endpoint.is_readable:
            return True
        if self._listener is not None:
            return not writes and bool(self._listener.ready)
        if not self.endpoint.is_connected:
            return self._dial is None or self._dial.is_done
        return self.endpoint.is_writable if writes else self.endpoint.is_readable

    def lot(self, *, writes: bool) -> trio.lowlevel.ParkingLot:
        """Where to wait until it may be ready."""
        if self._listener is not None:
            return self._listener.accepters
        if self._dial is not None and not self._dial.is_done:
            return self._dial.waiters
        return self.endpoint.writers if writes else self.endpoint.readers

    def _require_connection(self, number: int = errno.ENOTCONN) -> Endpoint:
        self._check_open()
        if self.endpoint.is_connected:
            return self.endpoint
        if self._dial is not None and not self._dial.is_done:
            raise self._refusal()
        raise os_error(self._take_error() or number)

    def _require_living(self) -> Endpoint:
        endpoint = self._require_connection()
        if endpoint.has_ended and self.family == stdlib.AF_INET:
            raise os_error(errno.ENOTCONN)
        return endpoint

    # --- bytes -----------------------------------------------------------------------------------

    def _part(self, size: int, one_in: int, label: str) -> int:
        choices = self.network.world.choices
        if size > 1 and choices.chance(one_in, label):
            return 1 + choices.below(size - 1, f"{label} size")
        return size

    def recv(self, buflen: int, flags: int = 0) -> bytes:
        if flags:
            self._check_flags(flags)
        endpoint = self._require_connection()
        if not endpoint.is_readable:
            raise self._refusal(flags=flags)
        size = min(buflen, len(endpoint.buffer))
        size = self._part(size, self.network.tear_one_in, "tear")
        if flags & PEEK and endpoint.buffer:
            return bytes(endpoint.buffer[:size])
        return endpoint.read(size)

    def recvfrom(self, bufsize: int, flags: int = 0) -> tuple[bytes, Any]:
        return self.recv(bufsize, flags), None

    def send(self, data: Buffer, flags: int = 0) -> int:
        if flags:
            self._check_flags(flags)
        endpoint = self._require_connection(errno.EPIPE)
        if not endpoint.is_writable:
            raise self._refusal(flags=flags)
        with memoryview(data) as view:
            size = min(view.nbytes, endpoint.room_bytes)
            size = self._part(size, self.network.short_one_in, "short")
            # A broken connection has no room, but must raise all the same.
            return endpoint.write(view.cast("B")[:size].tobytes())

    @override
    def sendto(self, data: Buffer, *where: Any) -> NoReturn:
        raise os_error(errno.EISCONN if self.endpoint.is_connected else errno.EPIPE)

    # --- ending ----------------------------------------------------------------------------------

    def shutdown(self, how: int) -> None:
        endpoint = self._require_living()
        if how in (stdlib.SHUT_WR, stdlib.SHUT_RDWR):
            endpoint.shut_down()
        if how in (stdlib.SHUT_RD, stdlib.SHUT_RDWR):
            endpoint.has_eof = True
            endpoint.readers.unpark_all()

    def _let_go(self) -> None:
        if self._listener is not None:
            self.network.unlisten(self._listener)
        self.endpoint.close()
