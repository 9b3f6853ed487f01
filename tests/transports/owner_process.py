"""A process of its own that owns memory, and signals that strike it at an exact place.

Its memory is shared with us, so what arrived in it is seen without asking it, also after its death.
`Strike` kills or stops it when a share of the blocks is confirmed and before the rest can be:
how depends on who moves the bytes.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import trio
import trio.lowlevel

from tests.transports.memory_owner import BLOCK_BYTES, CHUNK_BLOCKS, COUNT
from trinamo.runtime.errors import DeadlineError
from trinamo.runtime.planes import MemoryRegion, RemoteMemory, Transfer, TransferPlane
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.transports.one_sided.memory import OneSidedRegion
from trinamo.transports.tcp import TcpMover

__all__ = [
    "BLOCK_BYTES",
    "COUNT",
    "ORDER",
    "Mover",
    "Owner",
    "Struck",
    "act_between_chunks",
    "connect",
    "count_wrong",
    "noise",
    "ours",
    "running_owner",
    "strike_at",
]

ROOT = Path(__file__).parents[2]
ORDER = [int(each) for each in np.random.default_rng(3).permutation(COUNT)]
"""The blocks of a transfer, on both sides, in the order they are moved in."""


@cache
def noise() -> bytes:
    """What the owner's blocks hold at the start."""
    return np.random.default_rng(2).bytes(COUNT * BLOCK_BYTES)


@cache
def ours() -> bytes:
    """What we write to them."""
    return np.random.default_rng(1).bytes(COUNT * BLOCK_BYTES)


@attrs.frozen
class Owner:
    """The process, and the descriptions of its `COUNT` blocks."""

    process: subprocess.Popen[str]
    memory: mmap.mmap
    said: dict[str, Any]

    @property
    def descriptions(self) -> list[bytes]:
        """One for each backend it was started with."""
        return [bytes.fromhex(each) for each in self.said["descriptions"]]

    @property
    def description(self) -> bytes:
        """That of the first."""
        return self.descriptions[0]

    def ask(self, do: str, **fields: object) -> dict[str, Any]:
        """Its answer to one command of `memory_owner.py`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def send(self, number: signal.Signals) -> None:
        """Send it; returns when a kill or a stop has taken effect."""
        os.kill(self.process.pid, number)
        if number is signal.SIGKILL:
            self.process.wait()
        elif number is signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)


@contextmanager
def running_owner(*backends: str, has_locked_memory: bool = True) -> Iterator[Owner]:
    """Start one that serves the same memory by these backends; kill it in the end."""
    descriptor = os.memfd_create("blocks")
    os.ftruncate(descriptor, COUNT * BLOCK_BYTES)
    settings = {
        "backends": backends,
        "memory_fd": descriptor,
        "has_locked_memory": has_locked_memory,
    }
    with mmap.mmap(descriptor, COUNT * BLOCK_BYTES) as memory:
        memory[:] = noise()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.transports.memory_owner", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            pass_fds=(descriptor,),
        )
        os.close(descriptor)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdin, process.stdout:
                yield Owner(process, memory, json.loads(process.stdout.readline()))
                # A process that is gone takes no last words.
                process.kill()
        except BrokenPipeError:
            pass
        finally:
            process.kill()
            process.wait()


@attrs.frozen
class Mover:
    """Our end: memory that is registered, and the owner's, connected."""

    plane: TransferPlane
    region: MemoryRegion
    remote: RemoteMemory
    memory: bytearray

    def prepare(self, direction: Direction, owner: Owner) -> None:
        """Both memories as they are before a transfer."""
        self.memory[:] = ours() if direction is Direction.WRITE else bytes(len(self.memory))
        owner.memory[:] = noise()

    def start(
        self, direction: Direction, *, deadline_s: float, blocks: Sequence[int] = ORDER
    ) -> Transfer:
        """Move the blocks to the places of the same numbers."""
        return self.plane.start(
            direction, self.region, blocks, self.remote, blocks, deadline_s=deadline_s
        )

    def wrong_count(self, transfer: Transfer, direction: Direction, owner: Owner) -> int:
        """How many blocks are called confirmed and hold other bytes than were sent."""
        return count_wrong(self.memory, owner.memory, direction, transfer.confirmed_count)


def count_wrong(
    memory: bytearray, owned: mmap.mmap, direction: Direction, confirmed_count: int
) -> int:
    """Of the first blocks of `ORDER`, those that did not arrive as they were sent."""
    sent, arrived = (noise(), memory) if direction is Direction.READ else (ours(), owned)
    places = [slice(b * BLOCK_BYTES, (b + 1) * BLOCK_BYTES) for b in ORDER[:confirmed_count]]
    return sum(arrived[place] != sent[place] for place in places)


async def connect(plane: TransferPlane, owner: Owner) -> Mover:
    """Register memory of our own and connect to the owner's."""
    memory = bytearray(COUNT * BLOCK_BYTES)
    region = await plane.register(memory, block_bytes=BLOCK_BYTES)
    return Mover(plane, region, await plane.connect(owner.description), memory)


# --- signals -------------------------------------------------------------------------------------


@attrs.define
class Struck:
    """A transfer in the middle of which its owner is struck."""

    transfer: Transfer
    at: float = 0.0
    """By `time.perf_counter`: when the signal was sent, or, if the owner did that, was seen."""
    confirmed_count: int = 0
    """How many blocks were confirmed then, where a stream carried them."""

    @property
    def age_s(self) -> float:
        """How long ago that was."""
        return time.perf_counter() - self.at


def act_between_chunks(region: MemoryRegion, share: float, act: Callable[[], None]) -> None:
    """Do something in the thread of a one-sided backend once `share` of all blocks has moved."""
    assert isinstance(region, OneSidedRegion)
    turns = itertools.count()

    def between_chunks() -> None:
        if next(turns) == math.ceil(share * COUNT / CHUNK_BLOCKS):
            region.synchronize = None
            act()

    region.synchronize = between_chunks


async def strike_at(
    mover: Mover,
    owner: Owner,
    direction: Direction,
    share: float,
    number: signal.Signals,
    *,
    deadline_s: float,
) -> Struck:
    """Start a transfer of all blocks and signal the owner when `share` of them has been moved.

    Exact, whatever else the machine does: the rest cannot move between the look and the signal.
    * One-sided backends move chunk by chunk in a thread, which sends the signal between two.
    * Over a stream the event loop that takes the blocks, or their confirmations, sends it; sockets
      hold little (`open_backend`).
    """
    mover.prepare(direction, owner)
    if not isinstance(mover.plane.mover, TcpMover):

        def strike() -> None:
            assert is_started.wait(20)
            struck.at = time.perf_counter()
            owner.send(number)

        # The backend's thread may be there before the transfer is ours to be named.
        is_started = threading.Event()
        act_between_chunks(mover.region, share, strike)
        struck = Struck(mover.start(direction, deadline_s=deadline_s))
        is_started.set()
        return struck
    struck = Struck(mover.start(direction, deadline_s=deadline_s))
    with trio.fail_after(120):
        while struck.transfer.confirmed_count < share * COUNT:
            if struck.transfer.is_settled:
                # The machine was so busy that the time was up before the fault: there was none yet.
                with suppress(DeadlineError):
                    await struck.transfer.wait()
                return await strike_at(
                    mover, owner, direction, share, number, deadline_s=4 * deadline_s
                )
            await trio.lowlevel.checkpoint()
    assert struck.transfer.confirmed_count < COUNT, "it was over within one turn of the loop"
    struck.at = time.perf_counter()
    struck.confirmed_count = struck.transfer.confirmed_count
    owner.send(number)
    return struck
