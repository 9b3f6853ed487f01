"""A small Redis for scenarios to boot as a host: strings, in memory, over RESP 2 or 3."""

from __future__ import annotations

from typing import Any, Final

import trio

PORT: Final = 6379


class Redis:
    """What a server keeps; a new one for each incarnation, as nothing is written to a disk."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    async def serve(self) -> None:
        """Answer clients on the usual port, for ever."""
        await trio.serve_tcp(self.answer, PORT)

    async def answer(self, stream: trio.SocketStream) -> None:
        """Answer the commands of one connection, in their order, until it ends."""
        try:
            received = bytearray()
            while chunk := await stream.receive_some():
                received += chunk
                while (command := _taken(received)) is not None:
                    await stream.send_all(self.result(*command))
        except trio.BrokenResourceError:
            pass

    def result(self, name: bytes, *arguments: bytes) -> bytes:
        """What is answered to one command."""
        match name.upper(), arguments:
            case b"PING", ():
                return b"+PONG\r\n"
            case b"GET", (key,):
                return _bulk(self.values.get(key))
            case b"SET", (key, value, *_):
                self.values[key] = value
                return b"+OK\r\n"
            case b"INCR", (key,):
                self.values[key] = b"%d" % (int(self.values.get(key, b"0")) + 1)
                return b":%s\r\n" % self.values[key]
            case b"CLIENT", (b"TRACKING", *_):
                return b"-ERR there is no tracking here\r\n"
            case b"HELLO", (version, *_):
                kept = {b"server": b"redis", b"version": b"7.2.0"}
                fields = b"".join(_bulk(each) for pair in kept.items() for each in pair)
                fields += _bulk(b"proto") + b":%s\r\n" % version + _bulk(b"id") + b":1\r\n"
                return (b"%4\r\n" if version == b"3" else b"*8\r\n") + fields
            case ((b"CLIENT" | b"SELECT" | b"AUTH"), _):
                return b"+OK\r\n"
            case _:
                return b"-ERR unknown command '%s'\r\n" % name


def _bulk(value: bytes | None) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)


def _taken(received: bytearray) -> list[Any] | None:
    """The first whole command of what came, which is taken away from it."""
    lines, at = [], 0

    def line() -> bytes:
        nonlocal at
        end = received.index(b"\r\n", at)
        text, at = bytes(received[at:end]), end + 2
        return text

    try:
        for _ in range(int(line()[1:])):
            size = int(line()[1:])
            if len(received) < at + size + 2:
                return None
            lines.append(bytes(received[at : at + size]))
            at += size + 2
    except ValueError:
        return None
    del received[:at]
    return lines
