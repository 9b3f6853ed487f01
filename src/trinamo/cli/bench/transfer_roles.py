"""The two processes of `trinamo bench transfer`, run as `python -m trinamo.cli.bench.transfer_roles`.

The benchmarks of transfers start them too. Each opens one transfer plane, says what it has as a
line of JSON, and then answers one line per command until its input ends. The *owner* only has
memory and checks it; the *mover* starts the transfers. Every figure is of blocks whose bytes were
compared afterwards.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import numpy.typing as npt
import trio

from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.planes import MemoryRegion, RemoteMemory, TransferPlane
from trinamo.runtime.protocol.transfer.description import Direction

from ..failures import guarded

if TYPE_CHECKING:
    from trinamo.transports.tcp.transfer.memory import ChecksumChoice

Opened = AbstractAsyncContextManager[TransferPlane]
_DEADLINE_S: Final = 120.0


def _tcp(checksum: ChecksumChoice, secret: bytes = b"") -> Opened:
    from trinamo.transports.tcp.sockets import TcpOptions
    from trinamo.transports.tcp.transfer.plane import TransferOptions, open_transfer_plane

    return open_transfer_plane(TransferOptions(tcp=TcpOptions(secret=secret), checksum=checksum))


def _nixl(*, same_host: bool) -> Opened:
    from trinamo.transports.nixl.options import NixlOptions
    from trinamo.transports.nixl.plane import open_nixl_plane

    return open_nixl_plane(NixlOptions(same_host=same_host))


def _mooncake() -> Opened:
    from trinamo.transports.mooncake.plane import open_mooncake_plane

    return open_mooncake_plane()


_BACKENDS: Final[dict[str, Callable[[], Opened]]] = {
    "tcp": lambda: _tcp("auto"),
    "tcp sealed": lambda: _tcp("auto", bytes(range(32))),
    "tcp crc32": lambda: _tcp("crc32"),
    "tcp plain": lambda: _tcp("none"),
    "nixl tcp": lambda: _nixl(same_host=False),
    "nixl cma": lambda: _nixl(same_host=True),
    "mooncake tcp": _mooncake,
}
"""Those of `transfer.BENCH_BACKENDS`, and two that only the benchmark compares."""


@attrs.frozen
class _Memory:
    """`count` blocks of noise, and as much again to receive in."""

    array: npt.NDArray[np.uint8]
    count: int
    block_bytes: int

    @classmethod
    def of(cls, seed: int, count: int, block_bytes: int) -> _Memory:
        array = np.zeros(2 * count * block_bytes, dtype=np.uint8)
        array[: count * block_bytes] = np.random.default_rng(seed).integers(
            0, 256, count * block_bytes, dtype=np.uint8
        )
        return cls(array, count, block_bytes)

    @property
    def blocks(self) -> npt.NDArray[np.uint8]:
        return self.array.reshape(2 * self.count, self.block_bytes)

    def clear(self) -> None:
        self.blocks[self.count :] = 0


def _lists(count: int, used: int) -> tuple[list[int], list[int]]:
    """Scattered blocks to take from, and scattered ones to put them to."""
    dice = np.random.default_rng(7)
    sources = dice.permutation(count)[:used]
    targets = dice.permutation(count)[:used] + count
    return [int(each) for each in sources], [int(each) for each in targets]


def _is_as_sent(memory: _Memory, seed: int, used: int) -> bool:
    """Whether the blocks that were received are those of the peer with `seed`."""
    sent = _Memory.of(seed, memory.count, memory.block_bytes)
    sources, targets = _lists(memory.count, used)
    return bool(np.array_equal(memory.blocks[targets], sent.blocks[sources]))


async def _say(answer: dict[str, Any]) -> None:
    line = json.dumps(answer) + "\n"

    def write() -> None:
        sys.stdout.write(line)
        sys.stdout.flush()

    await trio.to_thread.run_sync(write)


async def _heard() -> dict[str, Any] | None:
    line = await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
    return json.loads(line) if line else None


async def _own(name: str, count: int, block_bytes: int) -> None:
    memory = _Memory.of(2, count, block_bytes)
    lag = _Lag()
    async with _BACKENDS[name]() as plane, open_nursery() as nursery:
        region = await plane.register(memory.array.data, block_bytes=block_bytes)
        await _say({"description": region.describe().hex()})
        while (asked := await _heard()) is not None:
            if asked["do"] == "cpu":
                await _say({"cpu_s": time.process_time()})
            elif asked["do"] == "watch":
                nursery.start_soon(lag.watch)
                await _say({})
            elif asked["do"] == "lag":
                await _say({"lag_p99_ms": lag.p99_ms})
                lag.late_s.clear()
            else:
                good = _is_as_sent(memory, 1, asked["blocks"])
                memory.clear()
                await _say({"good": good})
        nursery.cancel_scope.cancel()


@attrs.define
class _Lag:
    """How late the event loop comes to a task that wants to run every millisecond."""

    late_s: list[float] = attrs.field(factory=list)

    async def watch(self) -> None:
        while True:
            due = trio.current_time() + 0.001
            await trio.sleep_until(due)
            self.late_s.append(trio.current_time() - due)

    @property
    def p99_ms(self) -> float:
        return float(np.quantile(self.late_s, 0.99)) * 1e3 if self.late_s else 0.0


async def _move(name: str, count: int, block_bytes: int, description: str) -> None:
    memory = _Memory.of(1, count, block_bytes)
    async with _BACKENDS[name]() as plane:
        region = await plane.register(memory.array.data, block_bytes=block_bytes)
        remote = await plane.connect(bytes.fromhex(description))
        await _say({"count": count, "block_bytes": block_bytes})
        while (asked := await _heard()) is not None:
            if asked["do"] == "cpu":
                await _say({"cpu_s": time.process_time()})
            else:
                await _say(await _measure(plane, region, remote, memory, asked))


async def _measure(
    plane: TransferPlane,
    region: MemoryRegion,
    remote: RemoteMemory,
    memory: _Memory,
    asked: dict[str, Any],
) -> dict[str, Any]:
    direction = Direction(asked["direction"])
    used, rounds = asked["blocks"], asked["rounds"]
    sources, targets = _lists(memory.count, used)
    is_read = direction is Direction.READ
    here, there = (targets, sources) if is_read else (sources, targets)
    took_s: list[float] = []
    lag = _Lag()
    good, cpu_s = True, 0.0
    async with open_nursery() as nursery:
        if asked["lag"]:
            nursery.start_soon(lag.watch)
        for _ in range(rounds):
            if asked.get("check", True):
                memory.clear()
            cpu = time.process_time()
            began = time.perf_counter()
            transfer = plane.start(direction, region, here, remote, there, deadline_s=_DEADLINE_S)
            await transfer.wait()
            took_s.append(time.perf_counter() - began)
            cpu_s += time.process_time() - cpu
        if is_read and asked.get("check", True):
            good = _is_as_sent(memory, 2, used)
        nursery.cancel_scope.cancel()
    return {"took_s": took_s, "cpu_s": cpu_s, "lag_p99_ms": lag.p99_ms, "good": good}


def _main() -> None:
    role, name, count, block_bytes, *rest = sys.argv[1:]
    if role == "owner":
        trio.run(_own, name, int(count), int(block_bytes))
    else:
        trio.run(_move, name, int(count), int(block_bytes), rest[0])


if __name__ == "__main__":
    sys.exit(guarded(_main))
