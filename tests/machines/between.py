"""A machine on the way between two others: all that they say to each other passes through its hands.

The kernel forwards nothing there. A packet socket takes every frame that is for somebody else, and what this
process makes of it goes on: the same, something else, or nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import subprocess
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from tests.machines.machines import FRAME_BYTES, Machine, ip

ETH_P_IP: Final = 0x0800
TCP: Final = 6
CLONE_NEWNET: Final = 0x40000000
ETHERNET: Final = 14
Port = tuple[str, int]


@attrs.frozen
class Segment:
    """A piece of TCP on its way."""

    source: Port
    to: Port
    payload: bytes

    def is_of(self, *ports: int) -> bool:
        """Whether it goes to or comes from one of these."""
        return self.source[1] in ports or self.to[1] in ports


@attrs.define
class Between:
    """Hands on what two machines say to each other, and keeps it."""

    machine: Machine
    change: Callable[[Segment], bytes | None] = lambda each: each.payload
    """What goes on in the place of a payload, as long as that; None: nothing does."""
    heard: dict[tuple[Port, Port], bytearray] = attrs.field(factory=dict)
    """What was said, by who said it to whom."""
    counts: Counter[str] = attrs.field(factory=Counter)

    def has_heard(self, word: bytes) -> bool:
        """Whether it can be read in what was said, as it was said."""
        return any(word in said for said in self.heard.values())

    def pass_on(self, frame: bytes) -> bytes | None:
        """What is to be sent on for this frame, from the network's header on."""
        packet = bytearray(frame[ETHERNET:])
        length, protocol = struct.unpack_from("!2xH5xB", packet)
        del packet[length:]
        if protocol != TCP:
            return bytes(packet)
        at = (packet[0] & 15) * 4
        start = at + (packet[at + 12] >> 4) * 4
        source, to = struct.unpack_from("!HH", packet, at)
        ends = socket.inet_ntoa(packet[12:16]), socket.inet_ntoa(packet[16:20])
        segment = Segment((ends[0], source), (ends[1], to), bytes(packet[start:]))
        self.heard.setdefault((segment.source, segment.to), bytearray()).extend(segment.payload)
        payload = self.change(segment)
        if payload is None:
            self.counts["lost"] += 1
            return None
        self.counts["changed"] += payload != segment.payload
        packet[start:] = payload
        # A sender on the same kernel leaves the sum to hardware that is not there.
        struct.pack_into("!H", packet, at + 16, 0)
        struct.pack_into("!H", packet, at + 16, _sum(packet, at))
        return bytes(packet)

    async def run(self, ear: trio.socket.SocketType, macs: dict[bytes, bytes]) -> None:
        own = ear.getsockname()[4]
        while True:
            frame, where = await ear.recvfrom(FRAME_BYTES)
            mac = macs.get(frame[30:34])
            if where[2] == socket.PACKET_HOST and mac and (packet := self.pass_on(frame)):
                with suppress(OSError):
                    await ear.send(mac + own + frame[12:ETHERNET] + packet)


def _sum(packet: bytes | bytearray, at: int) -> int:
    """TCP's checksum."""
    body = bytes(packet[12:20]) + struct.pack("!BBH", 0, TCP, len(packet) - at) + packet[at:]
    body += b"\0" * (len(body) % 2)
    total: int = sum(struct.unpack(f"!{len(body) // 2}H", body))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def socket_in(machine: Machine, make: Callable[[], socket.socket]) -> socket.socket:
    """A socket that this process has on another machine: a thread goes there, and makes it."""
    made: list[Any] = []

    def go() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        place = os.open(Path("/run/netns", machine.namespace), os.O_RDONLY)
        try:
            status = libc.setns(place, CLONE_NEWNET)
            made.append(make() if status == 0 else OSError(ctypes.get_errno(), "setns"))
        except OSError as error:
            made.append(error)
        finally:
            os.close(place)

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]  # type: ignore[no-any-return]


def _mac(machine: Machine) -> bytes:
    command = ["ip", "-n", machine.namespace, "-j", "link", "show", "eth0"]
    (link,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return bytes.fromhex(link["address"].replace(":", ""))


@asynccontextmanager
async def open_between(machine: Machine, one: Machine, two: Machine) -> AsyncIterator[Between]:
    """Lead what `one` and `two` say to each other through `machine`, which hands it on while inside."""
    await machine.run("sysctl -qw net.ipv4.ip_forward=0")
    for here, there in ((one, two), (two, one)):
        # One packet for each segment: nobody cuts what this process sends.
        ip("-n", here.namespace, "link", "set", "eth0", "gso_max_segs", "1")
        ip("-n", here.namespace, "route", "add", there.address, "via", machine.address)
    made = socket_in(machine, _packets)
    between = Between(machine)
    with trio.socket.from_stdlib_socket(made) as ear:
        async with trio.open_nursery() as nursery:
            macs = {socket.inet_aton(each.address): _mac(each) for each in (one, two)}
            nursery.start_soon(between.run, ear, macs)
            yield between
            nursery.cancel_scope.cancel()


def _packets() -> socket.socket:
    ear = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_IP))
    ear.bind(("eth0", ETH_P_IP))
    return ear
