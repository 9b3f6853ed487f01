"""The rows of `transfer_faults.py` for a router that has `tcp` behind the backend at fault."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import attrs
import msgspec

from tests.transports.memory_owner import open_backend
from tests.transports.owner_process import (
    BLOCK_BYTES,
    COUNT,
    ORDER,
    Owner,
    act_between_chunks,
    count_wrong,
    running_owner,
)
from tests.transports.transfer_scenes import DEADLINE_S, GONE, PATIENCE_S, Outcome, outcome
from trinamo.runtime.config.planes import TransferConfig
from trinamo.runtime.kv.transfer.metrics import TransferMetrics
from trinamo.runtime.kv.transfer.router import TransferRouter, open_transfer_router
from trinamo.runtime.kv.transfer.routes import RoutedMemory, RoutedPeer
from trinamo.runtime.metrics.tallies import Registry
from trinamo.runtime.planes import TransferPlane, TransferReport
from trinamo.runtime.protocol.transfer.description import (
    Direction,
    decode_description,
    encode_description,
    encode_descriptions,
)

READ: Final = Direction.READ
SETTLE_S: Final = 0.5
CARRY_ON_S: Final = 10.0
"""Of rows whose blocks another backend is to move: the peer may stall before it settles the first attempt."""
Change = Callable[[bytes], bytes]


@attrs.frozen
class _Ends:
    router: TransferRouter
    memory: bytearray
    local: RoutedMemory
    peer: RoutedPeer
    owner: Owner

    async def move(self, here: Sequence[int], there: Sequence[int], deadline_s: float) -> Outcome:
        """What comes of one read; its text says who carried on, from which block."""
        reports: list[TransferReport] = []

        async def move() -> None:
            reports.extend(
                await self.router.move(
                    READ, self.local, here, self.peer, there, deadline_s=deadline_s
                )
            )

        found = await outcome(move)
        if not reports:
            return found
        last = reports[-1]
        return attrs.evolve(
            found,
            wrong_count=count_wrong(self.memory, self.owner.memory, READ, COUNT),
            text=f"{last.backend} from block {len(here) - last.block_count}",
        )

    async def move_all(self, deadline_s: float = PATIENCE_S) -> Outcome:
        return await self.move(ORDER, ORDER, deadline_s)


@attrs.frozen
class RoutedScene:
    """A one-sided backend and, behind it, `tcp`; both open."""

    name: str
    chain: list[TransferPlane]
    standing: Owner
    """A peer for the rows that do it no harm."""

    @property
    def backend(self) -> str:
        """The first of the chain, as regions know it."""
        return self.chain[0].backend

    @asynccontextmanager
    async def ends(
        self,
        change: Change = lambda it: it,
        owner: Owner | None = None,
        *,
        settle_s: float = SETTLE_S,
    ) -> AsyncIterator[_Ends]:
        """A router and a peer whose description of the backend went through `change`."""
        owner = self.standing if owner is None else owner
        async with open_transfer_router(
            self.chain,
            metrics=TransferMetrics(Registry()),
            section=TransferConfig(
                attempt_timeout_s=PATIENCE_S,
                settle_timeout_s=settle_s,
                probe_interval_s=600,
                probe_timeout_s=80,
            ),
        ) as router:
            memory = bytearray(COUNT * BLOCK_BYTES)
            local = await router.register(memory, block_bytes=BLOCK_BYTES)
            first, second = owner.descriptions
            peer = await router.connect(encode_descriptions([change(first), second]))
            yield _Ends(router, memory, local, peer, owner)
            await router.forget(peer)
            await router.deregister(local)


@asynccontextmanager
async def open_routed_scene(name: str) -> AsyncIterator[RoutedScene]:
    """Open the backend and `tcp`, and start the peer that stands by."""
    async with open_backend(name) as plane, open_backend("tcp") as tcp:
        with running_owner(name, "tcp") as owner:
            yield RoutedScene(name, [plane, tcp], owner)


@attrs.frozen
class RoutedFault:
    """One row: what the router makes of a fault that one backend alone would report."""

    name: str
    """As in `FAULTS` where it is the same fault."""
    run: Callable[[RoutedScene], Awaitable[Outcome]]
    allowed: frozenset[str]
    carried_on: str = ""
    """Who carries on from where; empty: nobody does, or the backend itself is not at fault."""
    exceptions: dict[str, frozenset[str]] = attrs.field(factory=dict)

    def allows(self, backend: str) -> frozenset[str]:
        """The kinds of outcome that this row may have."""
        return self.exceptions.get(backend, self.allowed)


def _signalled(number: signal.Signals) -> Callable[[RoutedScene], Awaitable[Outcome]]:
    async def run(scene: RoutedScene) -> Outcome:
        with running_owner(scene.name, "tcp") as owner:
            async with scene.ends(owner=owner) as ends:
                struck_at = 0.0

                def strike() -> None:
                    nonlocal struck_at
                    struck_at = time.perf_counter()
                    owner.send(number)

                act_between_chunks(ends.local.regions[scene.backend], 0.5, strike)
                is_stop = number is signal.SIGSTOP
                found = await ends.move_all(DEADLINE_S if is_stop else PATIENCE_S)
                duration_s = time.perf_counter() - struck_at
                if is_stop:
                    owner.send(signal.SIGCONT)
                return attrs.evolve(found, duration_s=duration_s)

    return run


async def _breaks(scene: RoutedScene) -> Outcome:
    """The backend's own failure in the middle: what is confirmed is not moved again."""

    def fail() -> None:
        raise OSError("the device is gone")

    async with scene.ends(settle_s=CARRY_ON_S) as ends:
        act_between_chunks(ends.local.regions[scene.backend], 0.5, fail)
        return await ends.move_all()


async def _stale(scene: RoutedScene) -> Outcome:
    with running_owner(scene.name, "tcp") as owner:
        async with scene.ends(owner=owner) as ends:
            owner.ask("renew")
            return await ends.move_all()


async def _locked(scene: RoutedScene) -> Outcome:
    with running_owner(scene.name, "tcp", has_locked_memory=False) as owner:
        async with scene.ends(owner=owner, settle_s=CARRY_ON_S) as ends:
            return await ends.move_all()


def _described(change: Change) -> Callable[[RoutedScene], Awaitable[Outcome]]:
    async def run(scene: RoutedScene) -> Outcome:
        async with scene.ends(change, settle_s=CARRY_ON_S) as ends:
            return await ends.move_all()

    return run


def _damaged(description: bytes) -> bytes:
    described = decode_description(description)
    address = bytearray(described.address)
    address[len(address) // 2] ^= 1
    return encode_description(msgspec.structs.replace(described, address=bytes(address)))


def _elsewhere(description: bytes) -> bytes:
    described = decode_description(description)
    return encode_description(
        msgspec.structs.replace(described, bases=(described.bases[0] + described.length,))
    )


def _refused(
    here: Sequence[int], there: Sequence[int]
) -> Callable[[RoutedScene], Awaitable[Outcome]]:
    async def run(scene: RoutedScene) -> Outcome:
        async with scene.ends() as ends:
            return await ends.move(here, there, PATIENCE_S)

    return run


_DONE: Final = frozenset({"done"})
_REQUEST: Final = frozenset({"RequestError"})
ROUTED_FAULTS: Final = (
    RoutedFault("peer killed at 50% of a read", _signalled(signal.SIGKILL), GONE),
    RoutedFault(
        "peer stopped at 50% of a read",
        _signalled(signal.SIGSTOP),
        # What a peer that hangs may still write is not overwritten by another attempt.
        frozenset({"DeadlineError", "StalledError", "TransferError"}),
        exceptions={"nixl cma": _DONE},
    ),
    # Before the refused reads: Mooncake's next calls over the same connection may fail for them.
    RoutedFault("the backend fails at 50% of a read", _breaks, _DONE, "tcp from block 120"),
    RoutedFault("lists of different lengths", _refused(ORDER, ORDER[:-1]), _REQUEST),
    RoutedFault("a block out of range here", _refused([COUNT], [0]), _REQUEST),
    RoutedFault("a block out of range there", _refused([0], [COUNT]), _REQUEST),
    RoutedFault("stale generation", _stale, frozenset({"StaleMemoryError"})),
    RoutedFault("descriptions that are garbage", _described(_damaged), _DONE, "tcp from block 0"),
    RoutedFault(
        "memory that was not registered", _described(_elsewhere), _DONE, "tcp from block 0"
    ),
    RoutedFault("no memory may be locked", _locked, _DONE),
)
