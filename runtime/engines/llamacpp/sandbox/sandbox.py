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

from ....errors import ConfigError, ContextLengthError, EngineError, RequestError

CPU_S: Final = 0.5
"""Of one call; of 40 schemas none that an answer may have took a tenth of it."""
MEMORY_BYTES: Final = 256 << 20
"""Beyond what the child has when it begins."""
BOUNDS: Final = f"{CPU_S:g} s of processor time or {MEMORY_BYTES >> 20} MiB of memory"
_WALL_S: Final = 60.0
"""For a call, and for the start before it: a child may be stopped, or the machine be busy."""
_LENGTH_BYTES: Final = 4

Answer = tuple[str, Any, str]
"""What became of a call, what it returned or why it did not, and the parameter at fault."""


class ExceededError(Exception):
    """The child was ended at a bound."""


class Sandbox:
    """Calls of one function, one after the other; `kind` names it, and `setup` is what it is made of.

    The child starts with the first call. `close` ends it.
    """

    def __init__(self, kind: str, setup: Any) -> None:
        self._kind, self._setup = kind, setup
        self._lock = trio.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    async def call(self, *arguments: Any) -> Any:
        """What the function returns; without arguments nothing, once it is made.

        Raises `ExceededError` at a bound, and what the function raises: `RequestError`, `EngineError`,
        or `ConfigError` where it cannot be made. A call that has begun is waited for.
        """
        async with self._lock:
            outcome, value, param = await trio.to_thread.run_sync(self._exchange, arguments)
        match outcome:
            case "returned":
                return value
            case "exceeded":
                raise ExceededError(BOUNDS)
            case "too_long":
                raise ContextLengthError(value, param=param or None)
            case "request":
                raise RequestError(value, param=param or None)
            case "config":
                raise ConfigError(value)
            case _:
                raise EngineError(value)

    def close(self) -> None:
        """End the child. Idempotent; another call starts another one."""
        child, self._child, channel, self._channel = self._child, None, self._channel, None
        if child is not None and channel is not None:
            child.kill()
            child.wait()  # A killed process is gone within a moment; this is no I/O.
            channel.close()

    def _exchange(self, arguments: tuple[Any, ...]) -> Answer:
        try:
            channel = self._channel or self._spawn()
            send(channel, arguments)
            outcome, value, param = receive(channel)
            return outcome, value, param
        except TimeoutError:
            self.close()
            return "engine", f"the child for {self._kind}s does not answer", ""
        except (OSError, EOFError):
            if self._child is None:
                return "engine", "the engine is closing", ""
            status = self._child.wait()  # It has closed its end, which it does by ending.
            self._spawn()
            ended = f"the child for {self._kind}s ended with status {status}"
            return "exceeded" if status < 0 else "engine", ended, ""

    def _spawn(self) -> socket.socket:
        self.close()
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(_WALL_S)
        module = f"{__package__}.child"
        command = [sys.executable, "-P", "-m", module, self._kind, str(theirs.fileno())]
        quiet = subprocess.DEVNULL
        with theirs:
            self._child = subprocess.Popen(  # noqa: S603 -- the command is ours
                command, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=(theirs.fileno(),)
            )
        send(self._channel, self._setup)
        return self._channel


def send(channel: socket.socket, message: Any) -> None:
    """Send one message, as MessagePack behind its length; blocks."""
    data = msgspec.msgpack.encode(message)
    channel.sendall(len(data).to_bytes(_LENGTH_BYTES) + data)


def receive(channel: socket.socket) -> Any:
    """The next message; blocks. `EOFError` if the other end has closed."""
    return msgspec.msgpack.decode(_read(channel, int.from_bytes(_read(channel, _LENGTH_BYTES))))


def _read(channel: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = channel.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
