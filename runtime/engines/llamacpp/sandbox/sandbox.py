"""Work on what a stranger wrote, in a child process with a bound of processor time and memory.

A grammar or a template may take minutes, or gigabytes, and what makes one of it is native code that
nobody can stop. So it runs in a child (`child.py`), which the kernel ends at the bound, and then
only its own request fails. The child is kept, and one that was ended replaced at once.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any, Final

import msgspec
import trio

from ....errors import ConfigError, EngineError, RequestError

CPU_S: Final = 0.5
"""Of one call; of 40 schemas at the bounds of `grammars.py` none took a tenth of it."""
MEMORY_BYTES: Final = 256 << 20
"""Beyond what the child has when it begins."""
BOUNDS: Final = f"{CPU_S:g} s of processor time or {MEMORY_BYTES >> 20} MiB of memory"
WALL_S: Final = 60.0
"""For a call, and for the start before it: a child may be stopped, or the machine be busy."""
LENGTH_BYTES: Final = 4
_READ_BYTES: Final = 1 << 16


class ExceededError(Exception):
    """The child was ended at a bound."""


class Sandbox:
    """Calls of one function, one after the other; `kind` names it, and `setup` is what it is made of.

    The child starts with the first call. `close` ends it.
    """

    def __init__(self, kind: str, setup: Any) -> None:
        self._kind = kind
        self._setup = msgspec.msgpack.encode(setup)
        self._lock = trio.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._channel: trio.SocketStream | None = None
        self._is_set_up = False
        self._received = bytearray()
        self._number = 0

    async def call(self, *arguments: Any) -> Any:
        """What the function returns; without arguments nothing, once it is made.

        Raises `ExceededError` at a bound, and what the function raises: `RequestError`, `EngineError`,
        or `ConfigError` where it cannot be made. Cancelled, the child finishes the call for nobody.
        """
        async with self._lock:
            try:
                with trio.fail_after(WALL_S):
                    answer = await self._exchange(arguments)
            except trio.TooSlowError:
                self.close()
                raise EngineError(f"the child for {self._kind}s does not answer") from None
            except (trio.BrokenResourceError, EOFError):
                assert self._child is not None, "nobody has ended it"
                status = self._child.wait()  # It has closed its end, which it does by ending.
                self._spawn()
                if status < 0:
                    raise ExceededError(BOUNDS) from None
                raise EngineError(
                    f"the child for {self._kind}s ended with status {status}"
                ) from None
        outcome, value, param = answer
        match outcome:
            case "returned":
                return value
            case "exceeded":
                raise ExceededError(BOUNDS)
            case "request":
                raise RequestError(value, param=param or None)
            case "config":
                raise ConfigError(value)
            case _:
                raise EngineError(value)

    async def _exchange(self, arguments: tuple[Any, ...]) -> tuple[str, Any, str]:
        channel = self._channel or self._spawn()
        if not self._is_set_up:
            await self._send(channel, self._setup)
            self._is_set_up = True
        self._number += 1
        await self._send(channel, msgspec.msgpack.encode((self._number, arguments)))
        while True:
            number, outcome, value, param = msgspec.msgpack.decode(await self._receive(channel))
            # A call before this one may have been cancelled.
            if number == self._number:
                return outcome, value, param

    def close(self) -> None:
        """End the child. Idempotent; another call starts another one."""
        if self._channel is not None:
            self._channel.socket.close()
            self._channel = None
        if self._child is not None:
            self._child.kill()
            self._child.wait()  # A killed process is gone within a moment; this is no I/O.
            self._child = None

    def _spawn(self) -> trio.SocketStream:
        """Start the child anew; it blocks for a fork and an exec, a few milliseconds."""
        self.close()
        ours, theirs = socket.socketpair()
        self._channel = channel = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        self._is_set_up = False
        self._received.clear()
        module = f"{__package__}.child"
        command = [sys.executable, "-P", "-m", module, self._kind, str(theirs.fileno())]
        quiet = subprocess.DEVNULL
        with theirs:
            self._child = subprocess.Popen(  # noqa: S603 -- the command is ours
                command, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=(theirs.fileno(),)
            )
        return channel

    async def _send(self, channel: trio.SocketStream, message: bytes) -> None:
        try:
            await channel.send_all(len(message).to_bytes(LENGTH_BYTES) + message)
        except trio.Cancelled:
            # The half of a message would be taken for the beginning of the next one.
            self.close()
            raise

    async def _receive(self, channel: trio.SocketStream) -> bytes:
        """The next answer; cancelled, what came of it stays."""
        length = int.from_bytes(await self._read(channel, 0, LENGTH_BYTES))
        message = await self._read(channel, LENGTH_BYTES, LENGTH_BYTES + length)
        del self._received[: LENGTH_BYTES + length]
        return message

    async def _read(self, channel: trio.SocketStream, start: int, end: int) -> bytes:
        while len(self._received) < end:
            data = await channel.receive_some(_READ_BYTES)
            if not data:
                raise EOFError
            self._received += data
        return bytes(self._received[start:end])
