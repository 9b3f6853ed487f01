"""One life of a host that moves KV blocks: its memory, its pool, its backends.

Blocks hold a pattern of the request they belong to, so that a byte that is not right shows at once.
Who asks whom for blocks is in `pull.py` and `push.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import trio
from typing_extensions import override

from trinamo.runtime.kv import BlockLeases, TransferRouter, open_block_leases, open_transfer_router
from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.kv.transfer_router import RouterOptions
from trinamo.runtime.kv.transfer_routes import RoutedMemory, RoutedPeer
from trinamo.runtime.metrics import WorkerMetrics
from trinamo.runtime.planes import TransferPlane
from trinamo.runtime.transfer_metrics import TransferMetrics
from trinamo.transports.tcp import TcpOptions, TransferOptions, open_transfer_plane

from ..env import SimEnv
from ..errors import Violation
from ..services import open_simulated_memory
from .audit import BlockAudit, WatchedPlane
from .mail import Mail

if TYPE_CHECKING:
    from .adapters import TroubledFabric
    from .plan import TransferPlan

__all__ = ["KvProcess", "open_process"]

POLL_S: Final = 0.005
"""How often a request that waits for blocks looks for them, as an engine does every step."""
TIME_STEPS: Final = 16


class _NotedMetrics(TransferMetrics):
    """Metrics that note when a transfer goes on over another backend."""

    def __init__(self, env: SimEnv) -> None:
        super().__init__(WorkerMetrics(env).registry)
        self._env = env

    @override
    def fell_back(self, failed: str, to: str) -> None:
        super().fell_back(failed, to)
        self._env.note("kv.fallback", failed=failed, backend=to)


class KvProcess:
    """Made by `open_process`, which fills in what must be opened."""

    def __init__(self, name: str, env: SimEnv, plan: TransferPlan, mail: Mail) -> None:
        self.name, self.env, self.plan, self.mail = name, env, plan, mail
        self.pool = BlockPool(plan.pool_blocks)
        self.audit = BlockAudit(name, self.pool)
        self.memory = bytearray(plan.pool_blocks * plan.block_bytes)
        self.open_requests = 0
        self.region: RoutedMemory
        self.leases: BlockLeases
        self.router: TransferRouter
        self._peers: dict[bytes, RoutedPeer] = {}

    def note(self, kind: str, **fields: Any) -> None:
        self.env.note(kind, **fields)

    def drawn(self, span: tuple[float, float]) -> float:
        """A time of the span, in seconds."""
        low, high = span
        return low + (high - low) * self.env.rng.randrange(TIME_STEPS) / (TIME_STEPS - 1)

    # --- transfers ---------------------------------------------------------------------------------

    async def peer(self, offer: bytes) -> RoutedPeer:
        """The owner of what `offer` describes; raises as `TransferRouter.connect`."""
        if offer not in self._peers:
            self._peers[offer] = await self.router.connect(offer)
        return self._peers[offer]

    async def settle(self, request: str) -> bool:
        """Wait until no transfer of the request touches our blocks; whether that is certain."""
        transfers = self.audit.transfers_of(request)
        with trio.move_on_after(self.plan.drain_s):
            for transfer in transfers:
                await transfer.wait_settled()
        return all(transfer.is_settled for transfer in transfers)

    # --- blocks ------------------------------------------------------------------------------------

    async def take(self, request: str, count: int) -> list[int] | None:
        """So many blocks for the request; None if there are not enough within its deadline."""
        with trio.move_on_after(self.plan.deadline_s):
            while (blocks := self.pool.take(count)) is None:  # noqa: ASYNC110 -- on the virtual clock
                await trio.sleep(POLL_S)
            self.audit.taken(blocks, request)
            return blocks
        return None

    def give_back(self, blocks: Sequence[int]) -> None:
        """The request needs them no more; a transfer may, which is the leases' business."""
        self.pool.give_back(blocks)
        self.audit.returned(blocks)

    def fill(self, blocks: Sequence[int], what: str) -> None:
        """Write the pattern of `what` into the blocks, in their order."""
        size = self.plan.block_bytes
        for number, block in enumerate(blocks):
            self.memory[block * size : (block + 1) * size] = _pattern(what, number, size)

    def check(self, blocks: Sequence[int], request: str, when: str) -> None:
        """Every byte is the request's, or `Violation`."""
        size = self.plan.block_bytes
        for number, block in enumerate(blocks):
            found = self.memory[block * size : (block + 1) * size]
            if found != _pattern(request, number, size):
                raise Violation(
                    "I9",
                    f"{self.name}: block {block}, number {number} of {request}, is not what was"
                    f" computed {when}",
                )

    def leftovers(self) -> dict[str, float]:
        """What this process holds of any request, by name; empty at quiescence."""
        counts = {
            "used blocks": self.pool.used_count,
            "blocks in flight": self.pool.in_flight_count,
            "leases": self.leases.in_flight_count,
            "requests": self.open_requests,
        }
        return {f"{self.name} {what}": count for what, count in counts.items() if count}


def _pattern(what: str, number: int, size: int) -> bytes:
    digest = hashlib.blake2b(f"{what}/{number}".encode()).digest()
    return (digest * (size // len(digest) + 1))[:size]


@asynccontextmanager
async def open_process(
    name: str, env: SimEnv, plan: TransferPlan, mail: Mail, fabric: TroubledFabric
) -> AsyncIterator[KvProcess]:
    """Open everything that a host needs, on the running task's host."""
    process = KvProcess(name, env, plan, mail)
    metrics = _NotedMetrics(env)
    options = RouterOptions(attempt_s=plan.attempt_s, drain_s=plan.drain_s, probe_interval_s=1.0)

    def quarantined(count: int) -> None:
        process.note("kv.quarantine", blocks=count)

    async with AsyncExitStack() as stack:
        planes: list[TransferPlane] = []
        for backend in plan.backends:
            plane = await stack.enter_async_context(_backend(backend, name, env, fabric))
            planes.append(cast("TransferPlane", WatchedPlane(plane, process.audit)))
        process.leases = await stack.enter_async_context(
            open_block_leases(
                process.pool, drain_s=plan.drain_s, on_quarantine=quarantined, dice=env.rng
            )
        )
        process.router = await stack.enter_async_context(
            open_transfer_router(planes, metrics=metrics, leases=process.leases, options=options)
        )
        process.region = await process.router.register(
            process.memory, block_bytes=plan.block_bytes, needs_ticket=True
        )
        yield process


def _backend(backend: str, name: str, env: SimEnv, fabric: TroubledFabric) -> Any:
    if backend == "simulated":
        return open_simulated_memory(fabric, env)
    tcp = TcpOptions(host="0.0.0.0", port=0, advertise_host=name)  # noqa: S104 -- simulated
    # One checksum on every machine, and no way through the real kernel.
    options = TransferOptions(tcp=tcp, checksum="crc32", same_host=False, slice_bytes=4096)
    return open_transfer_plane(options, env)
