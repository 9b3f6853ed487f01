"""One life of a host that moves KV blocks: its memory, its lease in the store, its transfers.

What a worker's process opens for its engine (`runtime/process/opening.py`): a control plane, a
chain of backends, `open_engine_transfers`, a `Registrar` that keeps the offer registered, and the
watch that forgets who is gone. The engine's id is the host's name, so a restarted host is a new
life under the same id. Blocks hold a pattern of the request they belong to, so that a byte that is
not right shows at once. Who asks whom for blocks is in `pull.py` and `push.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, cast

import trio

from trinamo.runtime.errors import FencedError, TrinamoError
from trinamo.runtime.kv.cache import KvCache
from trinamo.runtime.kv.memory import KvMemory, KvShape, fingerprint
from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.kv.transfer.engine import EngineTransfers, open_engine_transfers
from trinamo.runtime.metrics.transfers import TransferMetrics
from trinamo.runtime.metrics.worker import WorkerMetrics
from trinamo.runtime.planes import TransferPlane
from trinamo.runtime.planes.transports import TransferChain
from trinamo.runtime.worker.registration import Registrar
from trinamo.transports.tcp import TcpOptions, TransferOptions, open_transfer_plane

from ..cluster.membership import SECRET
from ..cluster.services import NotedControlPlane, Services
from ..core.env import SimEnv
from ..core.errors import Violation
from ..core.host import Host, HostState
from ..services import open_simulated_memory
from .audit import BlockAudit, Landings, WatchedPlane
from .mail import Mail

if TYPE_CHECKING:
    from .adapters import TroubledFabric
    from .plan import TransferPlan

__all__ = ["KvProcess", "open_process"]

POLL_S: Final = 0.005
"""How often a request that waits for blocks looks for them, as an engine does every step."""
TIME_STEPS: Final = 16
FENCED_S: Final = 0.5
"""Until a process that found its former life registered is started again."""
REVOKE_S: Final = 2.0
PORT: Final = 7000
"""Of every life of a host, so that the next one answers where the last one did."""


class KvProcess:
    """What it holds, for its requests and for the checkers; `open_process` opens the rest of it."""

    def __init__(
        self, host: Host, env: SimEnv, plan: TransferPlan, mail: Mail, landings: Landings
    ) -> None:
        self.name, self.env, self.plan, self.mail = host.name, env, plan, mail
        self.generation = host.generation
        """Which life of its host it is."""
        self.kv = _cache(plan)
        self.pool = self.kv.pool
        self.audit = BlockAudit(
            host.name,
            self.pool,
            block_of=self.kv.memory.block_of,
            on_move=self._moves,
            landings=landings,
            is_alive=lambda: _is_alive(host, self.generation),
        )
        self.told = trio.Event()
        """Set to ask for an orderly end, as SIGTERM does."""
        self.open_requests = 0
        self.control: NotedControlPlane
        self.registrar: Registrar
        self.transfers: EngineTransfers

    def note(self, kind: str, **fields: Any) -> None:
        self.env.note(kind, **fields)

    def _moves(self, owner: str, backend: str, count: int) -> None:
        self.note("kv.move", request=owner, backend=backend, blocks=count)

    def drawn(self, span: tuple[float, float]) -> float:
        """A time of the span, in seconds."""
        low, high = span
        return low + (high - low) * self.env.rng.randrange(TIME_STEPS) / (TIME_STEPS - 1)

    # --- its life ----------------------------------------------------------------------------------

    async def publish(self) -> None:
        """Return once peers can find us; while our former life is still registered, they cannot."""
        while True:
            try:
                await self.transfers.publish(self.registrar)
                break
            except FencedError:
                self.note("kv.fenced")
                await trio.sleep(FENCED_S)
        self.note("kv.ready")

    async def leave(self) -> None:
        """Refuse, let transfers and requests end, give the lease up; see `runtime/process/shutdown.py`."""
        self.note("kv.told")
        with trio.move_on_after(self.plan.leave_s) as scope:
            await self.transfers.drain()
        moving = self.pool.in_flight_count
        if moving and not scope.cancelled_caught:
            raise Violation("I9", f"{self.name} leaves while {moving} of its blocks are moved")
        with trio.move_on_after(self.plan.leave_s):
            while self.open_requests:  # noqa: ASYNC110 -- on the virtual clock
                await trio.sleep(POLL_S)
        with trio.move_on_after(REVOKE_S), suppress(TrinamoError):
            await self.registrar.revoke()
        self.note("kv.left")

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
        for number, block in enumerate(blocks):
            self._ranges(block, _pattern(what, number, self.plan.block_bytes))

    def check(self, blocks: Sequence[int], request: str, when: str) -> None:
        """Every byte is the request's, or `Violation`."""
        for number, block in enumerate(blocks):
            if self._ranges(block) != _pattern(request, number, self.plan.block_bytes):
                raise Violation(
                    "I9",
                    f"{self.name}: block {block}, number {number} of {request}, is not what was"
                    f" computed {when}",
                )

    def _ranges(self, block: int, data: bytes = b"") -> bytes:
        """The bytes of a block, wherever the layout has them; `data` in their place if given."""
        view = self.kv.memory.view[:, :, block]
        if data:
            view.flat[:] = list(data)
        return bytes(view.tobytes())

    # --- what is left ------------------------------------------------------------------------------

    def leftovers(self) -> dict[str, float]:
        """What this process holds of any request, by name; empty at quiescence."""
        counts = {
            "used blocks": self.pool.used_count,
            "blocks in flight": self.pool.in_flight_count,
            "leases": self.transfers.leases.in_flight_count,
            "requests": self.open_requests,
        }
        return {f"{self.name} {what}": count for what, count in counts.items() if count}

    def stale(self, held: dict[str, tuple[int, bytes]]) -> Iterator[str]:
        """What it believes of its peers, and is not what the store holds; nothing at quiescence."""
        store = self.transfers.store
        for view in self.control.views:
            # A process watches its own key, too, by itself.
            there = {key: entry for key, entry in held.items() if key.startswith(view.prefix)}
            if view.known != there:
                yield f"watch {view.name} knows {sorted(view.known)}, not {sorted(there)}"
        for engine_id, known in store._cached.items():  # noqa: SLF001 -- looks inside
            if held.get(store.key(engine_id), (0, b""))[0] != known.mod_revision:
                yield f"{self.name} has old metadata of {engine_id}"
        for engine_id, peer in self.transfers._peers.items():  # noqa: SLF001 -- as above
            _, value = held.get(store.key(engine_id), (0, b""))
            if peer.incarnation.encode() not in value:
                yield f"{self.name} has not forgotten {peer.incarnation} of {engine_id}"


def _is_alive(host: Host, generation: int) -> bool:
    return host.generation == generation and host.state in (HostState.UP, HostState.PAUSED)


def _cache(plan: TransferPlan) -> KvCache:
    shape = KvShape(layers=1, heads=1, channels=plan.block_bytes // 2, block_tokens=1, dtype="|u1")
    return KvCache(
        memory=KvMemory(shape, plan.pool_blocks, plan.layout),
        pool=BlockPool(plan.pool_blocks),
        fingerprint=fingerprint("pattern", "1", "0", shape, plan.layout),
    )


def _pattern(what: str, number: int, size: int) -> bytes:
    digest = hashlib.blake2b(f"{what}/{number}".encode()).digest()
    return (digest * (size // len(digest) + 1))[:size]


@asynccontextmanager
async def open_process(
    process: KvProcess, fabric: TroubledFabric, services: Services
) -> AsyncIterator[None]:
    """Open everything that a host needs, on the running task's host; peers can find it then."""
    name, env, plan = process.name, process.env, process.plan
    config = plan.config
    async with AsyncExitStack() as stack:
        plane = await stack.enter_async_context(services.open_control(name, config, env))
        process.control = NotedControlPlane(plane, env, name)
        # First and so closed last: who is refused at its port takes the process for dead.
        tcp = await stack.enter_async_context(open_transfer_plane(_tcp_options(name), env))
        planes: list[TransferPlane] = []
        for backend in plan.backends:
            opened: Any = tcp
            if backend == "simulated":
                opened = await stack.enter_async_context(
                    open_simulated_memory(fabric, env, incarnation=tcp.incarnation)
                )
            planes.append(cast("TransferPlane", WatchedPlane(opened, process.audit)))
        process.transfers = await stack.enter_async_context(
            open_engine_transfers(
                TransferChain(planes=planes, order=plan.backends, settlement=tcp),
                process.kv,
                config,
                env,
                process.control,
                engine_id=name,
                metrics=TransferMetrics(WorkerMetrics(env).registry, env.note),
            )
        )
        process.registrar = Registrar(
            process.control, env, ttl_s=config.control_plane.etcd.lease_ttl_s
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(process.registrar.run)
            nursery.start_soon(process.transfers.watch)
            await process.publish()
            yield
            nursery.cancel_scope.cancel()


def _tcp_options(name: str) -> TransferOptions:
    tcp = TcpOptions(host="0.0.0.0", port=PORT, advertise_host=name, secret=SECRET)  # noqa: S104 -- simulated
    # One checksum on every machine, and no way through the real kernel.
    return TransferOptions(tcp=tcp, checksum="crc32", slice_bytes=4096)
