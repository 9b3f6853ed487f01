"""The faults that a transfer must survive, as rows: what is done, and what may come of it.

Each row runs on every backend between two processes, by one backend alone and by a router that
could fall back to `tcp`. `test_transfer_faults.py` holds the rows to `allowed`,
`bench/bench_transfer_faults.py` prints them as a table. Blocks that are called confirmed are
compared with what was sent, in both processes.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import attrs
import msgspec
import trio

from tests.transports.memory_owner import open_backend
from tests.transports.owner_process import (
    BLOCK_BYTES,
    COUNT,
    ORDER,
    Mover,
    Owner,
    act_between_chunks,
    running_owner,
    strike_at,
)
from tests.transports.transfer_scenes import (
    DEADLINE_S,
    DONE,
    GONE,
    NOT_HERE,
    PATIENCE_S,
    READ,
    Fault,
    Outcome,
    Scene,
    open_scene,
    outcome,
    peer_of,
)
from trinamo.runtime.errors import RemoteProtocolError, TransferError
from trinamo.runtime.protocol.transfer.description import (
    Direction,
    decode_description,
    encode_description,
)
from trinamo.transports.tcp.sockets import TcpOptions

__all__ = [
    "DEADLINE_S",
    "FAULTS",
    "GONE",
    "NOT_HERE",
    "PATIENCE_S",
    "Fault",
    "Outcome",
    "Scene",
    "open_scene",
    "outcome",
]


def _signalled(direction: Direction, share: float, number: signal.Signals) -> Fault:
    async def run(scene: Scene) -> Outcome:
        if number is signal.SIGSTOP:
            # The backend is not spoiled: the peer that goes on is used again by the next row.
            mover, owner = scene.standing
            return await struck(mover, owner, DEADLINE_S)
        async with peer_of(scene.name, scene.plane) as (mover, owner):
            return await struck(mover, owner, PATIENCE_S)

    async def struck(mover: Mover, owner: Owner, deadline_s: float) -> Outcome:
        strike = await strike_at(mover, owner, direction, share, number, deadline_s=deadline_s)
        transfer = strike.transfer
        found = await outcome(transfer.wait)
        if not strike.at and found.kind == "DeadlineError" and deadline_s < PATIENCE_S:
            # The machine was so busy that the time was up before the fault: there was none yet.
            await transfer.wait_settled()
            return await struck(mover, owner, 4 * deadline_s)
        assert strike.at, f"the peer was not struck: {found}"
        if found.kind == "done":
            found = attrs.evolve(found, text=f"struck at {strike.confirmed_count} blocks")
        found = attrs.evolve(found, duration_s=strike.age_s, is_settled=transfer.is_settled)
        if number is signal.SIGSTOP:
            owner.send(signal.SIGCONT)
        with trio.fail_after(PATIENCE_S):
            await transfer.wait_settled()
        wrong = mover.wrong_count(transfer, direction, owner)
        if number is signal.SIGSTOP:
            await mover.plane.probe(mover.remote)
        return attrs.evolve(found, wrong_count=wrong)

    what = "killed" if number is signal.SIGKILL else "stopped"
    allowed = GONE if number is signal.SIGKILL else frozenset({"DeadlineError", "StalledError"})
    # The kernel copies from a process that stands still, too.
    exceptions = {} if number is signal.SIGKILL else {"nixl cma": DONE}
    return Fault(f"peer {what} at {share:.0%} of a {direction}", run, allowed, exceptions)


async def _breaks(scene: Scene) -> Outcome:
    if scene.name.startswith("tcp"):
        return Outcome(NOT_HERE, 0.0, text="a stream has no device of its own")

    def fail() -> None:
        raise OSError("the device is gone")

    mover, owner = scene.standing
    mover.prepare(READ, owner)
    act_between_chunks(mover.region, 0.5, fail)
    transfer = mover.start(READ, deadline_s=PATIENCE_S)
    found = await outcome(transfer.wait)
    return attrs.evolve(found, wrong_count=mover.wrong_count(transfer, READ, owner))


def _refused(name: str, here: Sequence[int], there: Sequence[int]) -> Fault:
    async def run(scene: Scene) -> Outcome:
        mover, _ = scene.standing

        async def start() -> None:
            await scene.plane.start(
                READ, mover.region, here, mover.remote, there, deadline_s=PATIENCE_S
            ).wait()

        return await outcome(start)

    return Fault(name, run, frozenset({"RequestError"}))


async def _stale(scene: Scene) -> Outcome:
    async with peer_of(scene.name, scene.plane) as (mover, owner):
        owner.ask("renew")
        mover.prepare(READ, owner)
        transfer = mover.start(READ, deadline_s=PATIENCE_S)
        found = await outcome(transfer.wait)
        return attrs.evolve(found, wrong_count=transfer.confirmed_count + any(mover.memory))


@asynccontextmanager
async def _flipping(target: str, place: int) -> AsyncIterator[str]:
    """A port in front of another that flips one bit, `place` bytes into what the server says."""
    host, _, port = target.rpartition(":")

    async def serve(client: trio.SocketStream) -> None:
        server = await trio.open_tcp_stream(host, int(port))
        async with client, server, trio.open_nursery() as nursery:

            async def forward() -> None:
                async for data in client:
                    await server.send_all(data)
                nursery.cancel_scope.cancel()

            nursery.start_soon(forward)
            seen = 0
            async for read in server:
                data = bytearray(read)
                if seen <= place < seen + len(data):
                    data[place - seen] ^= 0x10
                seen += len(data)
                await client.send_all(data)
            nursery.cancel_scope.cancel()

    async def guarded(client: trio.SocketStream) -> None:
        try:
            await serve(client)
        except* (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass  # One end hung up, which is what the row looks at.

    async with trio.open_nursery() as nursery:
        serve_tcp = partial(trio.serve_tcp, host="127.0.0.1")
        listeners = await nursery.start(serve_tcp, guarded, 0)
        yield "127.0.0.1:{1}".format(*listeners[0].socket.getsockname())
        nursery.cancel_scope.cancel()


async def _corrupted(scene: Scene) -> Outcome:
    if scene.name != "tcp":
        return Outcome(NOT_HERE, 0.0, text="no stream of ours, so no checksum: is_verified=False")
    with running_owner(scene.name) as owner:
        described = decode_description(owner.description)
        async with _flipping(described.address.decode(), COUNT * BLOCK_BYTES // 2) as address:
            memory = bytearray(COUNT * BLOCK_BYTES)
            region = await scene.plane.register(memory, block_bytes=BLOCK_BYTES)
            damaged = msgspec.structs.replace(described, address=address.encode())
            remote = await scene.plane.connect(encode_description(damaged))
            mover = Mover(scene.plane, region, remote, memory)
            transfer = mover.start(READ, deadline_s=PATIENCE_S)
            found = await outcome(transfer.wait)
            wrong = mover.wrong_count(transfer, READ, owner)
            await scene.plane.forget(described.incarnation)
        await scene.plane.deregister(region)
    return attrs.evolve(found, wrong_count=wrong)


def _damaged(description: bytes, *, is_one_sided: bool) -> list[bytes]:
    """Descriptions that are none: noise, cut off, and with flipped bits where a sum covers them."""
    dice = random.Random(4)
    found = [dice.randbytes(dice.randrange(400)) for _ in range(50)]
    found += [description[: dice.randrange(len(description))] for _ in range(50)]
    if is_one_sided:
        described = decode_description(description)
        for _ in range(100):
            address = bytearray(described.address)
            address[dice.randrange(len(address))] ^= 1 << dice.randrange(8)
            found.append(
                encode_description(msgspec.structs.replace(described, address=bytes(address)))
            )
    return found


async def _garbage(scene: Scene) -> Outcome:
    mover, owner = scene.standing
    garbage = _damaged(owner.description, is_one_sided=not scene.name.startswith("tcp"))
    began_at = time.perf_counter()
    for each in garbage:
        try:
            await scene.plane.connect(each)
        except RemoteProtocolError:
            continue
        return Outcome("taken", time.perf_counter() - began_at, text=repr(each[:40]))
    found = Outcome("RemoteProtocolError", time.perf_counter() - began_at)
    # The peer and the plane are as they were.
    mover.prepare(READ, owner)
    transfer = mover.start(READ, deadline_s=PATIENCE_S)
    await transfer.wait()
    return attrs.evolve(found, wrong_count=mover.wrong_count(transfer, READ, owner))


async def _unregistered(scene: Scene) -> Outcome:
    mover, owner = scene.standing
    mover.prepare(READ, owner)
    described = decode_description(owner.description)
    if scene.name.startswith("tcp"):
        wrong = msgspec.structs.replace(described, region=described.region + 1)
    else:
        wrong = msgspec.structs.replace(described, bases=(described.bases[0] + described.length,))

    async def move() -> None:
        remote = await scene.plane.connect(encode_description(wrong))
        await scene.plane.start(READ, mover.region, [0], remote, [0], deadline_s=PATIENCE_S).wait()

    found = await outcome(move)
    return attrs.evolve(found, wrong_count=int(any(mover.memory)))


async def _no_device(scene: Scene) -> Outcome:
    options: dict[str, Any] = {"rdma_interface": "mlx5_9"}
    if scene.name.startswith("tcp"):
        options = {"tcp": TcpOptions(interface="mlx5_9")}
    elif scene.name.startswith("mooncake"):
        options = {"protocol": "rdma", "device": "mlx5_9"}

    async def open_it() -> None:
        async with open_backend(scene.name, **options):
            pass

    # The engine that is open has set this for the whole process; it would hide the device.
    forced = os.environ.pop("MC_FORCE_TCP", None)
    try:
        return await outcome(open_it)
    finally:
        if forced is not None:
            os.environ["MC_FORCE_TCP"] = forced


async def _no_locked_memory(scene: Scene) -> Outcome:
    peer = peer_of(scene.name, scene.plane, has_locked_memory=False)
    async with peer as (mover, owner):
        if owner.said["can_lock"]:
            raise TransferError("the owner locks memory in spite of its limit")
        wrong = 0

        async def move_both_ways() -> None:
            nonlocal wrong
            for direction in Direction:
                mover.prepare(direction, owner)
                transfer = mover.start(direction, deadline_s=PATIENCE_S)
                await transfer.wait()
                wrong += mover.wrong_count(transfer, direction, owner)

        return attrs.evolve(await outcome(move_both_ways), wrong_count=wrong)


FAULTS: Final = (
    *(
        _signalled(direction, share, number)
        for number in (signal.SIGKILL, signal.SIGSTOP)
        for direction in Direction
        for share in (0.1, 0.5, 0.9)
    ),
    Fault(
        "the backend fails at 50% of a read",
        _breaks,
        frozenset({"TransferError"}),
        {"tcp": frozenset({NOT_HERE})},
    ),
    _refused("lists of different lengths", ORDER, ORDER[:-1]),
    _refused("a block out of range here", [COUNT], [0]),
    _refused("a block out of range there", [0], [COUNT]),
    Fault("stale generation", _stale, frozenset({"StaleMemoryError"})),
    Fault(
        "payload damaged on the way",
        _corrupted,
        frozenset({NOT_HERE}),
        {"tcp": frozenset({"CorruptedError"})},
    ),
    Fault("descriptions that are garbage", _garbage, frozenset({"RemoteProtocolError"})),
    Fault(
        "memory that was not registered",
        _unregistered,
        frozenset({"RemoteProtocolError"}),
        {
            "tcp": frozenset({"StaleMemoryError"}),
            "mooncake tcp": frozenset({"TransferError"}),
        },
    ),
    # Without tcp nothing is left to fall back to.
    Fault(
        "a device that does not exist",
        _no_device,
        frozenset({"BackendMissingError"}),
        {"tcp": frozenset({"ConfigError"})},
    ),
    Fault("no memory may be locked", _no_locked_memory, DONE),
)
