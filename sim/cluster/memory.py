"""KV memory between the workers of a cluster: the chain of backends of each host, and books of blocks.

A host's chain is one-sided memory that lands late, on adapters that may stall or break
(`services/memory.py`), and the tcp plane on simulated sockets. Whatever an engine's
pool lends and a transfer may touch is watched beside the pool's own counts (`audit.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import attrs

from trinamo.runtime.config.config import Config
from trinamo.runtime.env import Env
from trinamo.runtime.kv.regions import KvCache
from trinamo.runtime.planes import TransferPlane
from trinamo.runtime.planes.transports import TransferChain
from trinamo.transports.memory.transfer import open_memory_transfer_plane
from trinamo.transports.security.sealing import Sealer
from trinamo.transports.tcp import TcpOptions, TransferOptions, open_transfer_plane

from ..core.world import World
from ..net.network import Network
from ..services.memory import MemoryFabric
from .audit import BlockAudit, Landings, WatchedPlane

if TYPE_CHECKING:
    from trinamo.transports.security.fleet import Fleet

PORT: Final = 7000
"""Of every life of a host, so that the next one answers where the last one did."""
SLICE_BYTES: Final = 4096
SECRET: Final = b"the secret of a simulated cluster"
"""Of all its hosts. Their links are sealed where the configuration names a file for it, which none reads."""
VALID_S: Final = 90 * 86400.0
FLEET: Final = b"the authority of a simulated fleet, which no host has"


@attrs.frozen(kw_only=True)
class MemoryPlan:
    """How KV blocks move between the workers of a cluster: the keys of `[memory]`."""

    backends: tuple[Literal["simulated", "tcp"], ...] = ("simulated", "tcp")
    """The chain, in order."""
    is_fenced: bool = True
    """Whether one-sided memory checks tickets when a block lands; RDMA does not."""
    is_copied: bool = False
    """Whether a process moves the bytes itself, so that what it had begun lands after its pause."""
    window: int = 4
    """Blocks of one transfer on the way at once, by one-sided memory."""
    give_up_s: float = 1.0
    """When an adapter gives up what is not answered."""

    def __attrs_post_init__(self) -> None:
        if not self.backends:
            raise ValueError("backends must name at least one")
        if self.window < 1:
            raise ValueError("window is at least 1")


def fleet_of(config: Config, name: str, env: Env) -> Fleet | None:
    """What the process on host `name` shows where the configuration names a fleet's authority.

    Where the cluster changes over, workers are at the step that it names, and all others one behind.
    """
    if config.security.tls.certificate_file is None:
        return None
    # Brings `cryptography` along, which most runs never need.
    from trinamo.transports.security.fleet import Fleet, fleet_certificate  # noqa: PLC0415
    from trinamo.transports.security.identity import Authority  # noqa: PLC0415
    from trinamo.transports.security.roles import Role  # noqa: PLC0415

    serves = name.startswith(("worker", "prefill"))
    roles = (Role.WORKER, Role.PREFILL) if serves else (Role.FRONTEND,)
    authority = Authority.derived(FLEET)
    issued, key = authority.issue([role.uri for role in roles], env, after_s=VALID_S)
    now = env.clock.wall()
    change = config.security.tls.change
    if change is not None and not name.startswith("worker"):
        change = "admit"
    held = fleet_certificate(
        issued.decode(),
        key.decode(),
        authority.certificate,
        now=now,
        admitted=() if change is None else (SECRET,),
    )
    return Fleet(lambda: held, env, change=change)


def tcp_options_of(config: Config, name: str, env: Env, port: int = 0) -> TcpOptions:
    """Of the planes on host `name`: no host is loopback to another."""
    return TcpOptions.of(
        config.data_plane.tcp,
        host="0.0.0.0",  # noqa: S104 -- simulated
        port=port,
        advertise_host=name,
        secret=SECRET if config.security.secret_file else b"",
        fleet=fleet_of(config, name, env),
        is_clear_allowed=True,
    )


def sealer_of(config: Config, env: Env) -> Sealer:
    """What a process on a host says by the broker."""
    return Sealer([SECRET if config.security.secret_file else b""], env.rng)


class ClusterMemory:
    """The adapters of all hosts, and the books of all engines' pools."""

    def __init__(self, world: World, network: Network, plan: MemoryPlan) -> None:
        self.world, self.plan = world, plan
        self.fabric = MemoryFabric(
            world,
            network,
            window=plan.window,
            give_up_s=plan.give_up_s,
            is_fenced=plan.is_fenced,
            is_copied=plan.is_copied,
        )
        self.landings = Landings()
        self.audits: dict[str, BlockAudit] = {}
        """Of the present life of every host whose engine has KV memory."""
        self.broken: list[str] = []
        """What was wrong with the life of any block, in sentences."""

    def audit(self, name: str, kv: KvCache, note: Callable[..., None]) -> None:
        """Keep books of this pool; called on its host before a chain is opened there."""
        host = self.world.host(name)
        generation = host.generation

        def is_alive() -> bool:
            return host.is_running and host.generation == generation

        def moved(_: str, backend: str, blocks: int) -> None:
            note("kv.move", backend=backend, blocks=blocks)

        audit = self.audits[name] = BlockAudit(
            name,
            kv.pool,
            block_of=kv.memory.block_of,
            on_move=moved,
            landings=self.landings,
            is_alive=is_alive,
            on_broken=self.broken.append,
        )
        audit.follow()

    def count(self) -> None:
        """Look whether the counts of all living pools make sense now."""
        for audit in self._living():
            audit.count()

    def _living(self) -> Iterator[BlockAudit]:
        for audit in self.audits.values():
            if audit.is_alive():
                yield audit

    @asynccontextmanager
    async def open_chain(self, name: str, config: Config, env: Env) -> AsyncIterator[TransferChain]:
        """The backends of the process on host `name`."""
        tcp_options = tcp_options_of(config, name, env, PORT)
        # One checksum on every machine, and no way through the real kernel.
        options = TransferOptions(tcp=tcp_options, checksum="crc32", slice_bytes=SLICE_BYTES)
        async with AsyncExitStack() as stack:
            # Opened first, closed last: a refused port means a dead process.
            tcp = await stack.enter_async_context(open_transfer_plane(options, env))
            planes: list[TransferPlane] = []
            for backend in self.plan.backends:
                opened: Any = tcp
                if backend == "simulated":
                    opened = await stack.enter_async_context(
                        open_memory_transfer_plane(self.fabric, env, incarnation=tcp.incarnation)
                    )
                audit = self.audits.get(name)
                if audit is not None:
                    opened = WatchedPlane(opened, audit)
                planes.append(cast("TransferPlane", opened))
            yield TransferChain(planes=planes, order=self.plan.backends, settlement=tcp.mover)
