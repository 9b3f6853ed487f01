"""A DNS server of this process: answers with addresses, or is silent as one that is away."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio

from tests.machines.machines import Machine

PORT: Final = 53
HEAD: Final = 12
ADDRESS, TTL_S = 1, 1


@attrs.define
class Names:
    """What is asked of it, and whether it answers."""

    addresses: Mapping[str, str]
    is_mute: bool = False
    asked: int = 0

    def answer(self, query: bytes) -> bytes | None:
        """The answer to one question: the address, or that there is none."""
        self.asked += 1
        if self.is_mute:
            return None
        at, labels = HEAD, []
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode())
            at += 1 + query[at]
        question = query[HEAD : at + 5]
        address = self.addresses.get(".".join(labels).lower())
        record = b""
        if address and struct.unpack("!H", query[at + 1 : at + 3]) == (ADDRESS,):
            record = struct.pack("!HHHIH", 0xC00C, ADDRESS, 1, TTL_S, 4) + socket.inet_aton(address)
        flags = 0x8180 if address else 0x8183
        return query[:2] + struct.pack("!5H", flags, 1, bool(record), 0, 0) + question + record


@asynccontextmanager
async def open_names(
    host: str, addresses: Mapping[str, str], *users: Machine
) -> AsyncIterator[Names]:
    """Serve on `host`; the machines of `users` know no name of these any more but from here."""
    names = Names(addresses)
    for machine in users:
        hosts = machine.etc / "hosts"
        lines = hosts.read_text().splitlines(keepends=True)
        hosts.write_text("".join(each for each in lines if each.split()[1] not in addresses))
        (machine.etc / "resolv.conf").unlink(missing_ok=True)
        (machine.etc / "resolv.conf").write_text(f"nameserver {host}\n")
        (machine.etc / "nsswitch.conf").write_text("hosts: files dns\n")
    with trio.socket.socket(type=socket.SOCK_DGRAM) as server:
        await server.bind((host, PORT))

        async def serve() -> None:
            while True:
                query, where = await server.recvfrom(512)
                if (answer := names.answer(query)) is not None:
                    await server.sendto(answer, where)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            yield names
            nursery.cancel_scope.cancel()
