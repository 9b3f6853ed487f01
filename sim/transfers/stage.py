"""All hosts of one run of transfers: what they do from boot on, what became of each request.

A host that is killed and booted again is a new process with an empty pool; its slots go on with the
requests that the dead one had not begun. The hosts raise a `Violation` for what they see, the driver
(`driver.py`) asks for what is left.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Final

import attrs
import trio

from trinamo.runtime.kv.transfer.metadata import NIXL_METADATA_KEY

from ..cluster.services import STORE, Services
from ..core.env import SimEnv
from ..core.errors import Violation
from ..core.host import HostState
from ..net.bus import Bus
from .adapters import TroubledFabric
from .audit import Landings
from .mail import Mail, Word
from .process import KvProcess, open_process
from .pull import fetch_by_reading, serve_reader
from .push import fetch_by_being_written, serve_by_writing

if TYPE_CHECKING:
    from ..core.world import World
    from ..net.network import Network
    from ..scenario.plans import FaultPlan
    from .plan import TransferPlan

__all__ = ["KvRecord", "TransferStage"]

ASKS_MAX: Final = 256
READY_S: Final = 10.0
TOLD_MAX: Final = 1024
"""How many requests a prefill host remembers that were aborted before it began them."""


@attrs.define
class KvRecord:
    """One request as its decode host saw it."""

    name: str
    host: str
    started_s: float
    outcome: str = ""
    """Empty while there is none; else `complete`, `aborted`, or why not."""
    generation: int = 0

    @property
    def terminals(self) -> list[str]:
        """Every end; there is one at most."""
        return [self.outcome] if self.outcome else []


class TransferStage:
    """The hosts of `plan` in `world`. Implements `Stage`."""

    def __init__(
        self, world: World, network: Network, plan: TransferPlan, services: Services
    ) -> None:
        self.world, self.plan, self.services = world, plan, services
        self.bus = Bus(world, network)
        self.fabric = TroubledFabric(
            world,
            network,
            window=plan.window,
            give_up_s=plan.give_up_s,
            is_fenced=plan.is_fenced,
            is_copied=plan.is_copied,
        )
        self.landings = Landings()
        self.processes: dict[str, KvProcess] = {}
        """The present life of every host, once it is open."""
        self.records: list[KvRecord] = []
        self._has_begun = trio.Event()
        self._begun: Counter[str] = Counter()
        """Requests that each slot of each decode host has begun, over all its lives."""

    # --- Stage -------------------------------------------------------------------------------------

    @property
    def hosts(self) -> list[str]:
        """See `Stage`."""
        return self.plan.hosts

    def boot(self, name: str) -> None:
        """See `Stage`."""
        if name == STORE:
            self.services.boot(name)
        else:
            self.world.boot(name, self._run, name)

    def strike(self, fault: FaultPlan, host: str) -> Callable[[], None] | None:
        """See `Stage`."""
        match fault.do:
            case "stall_adapter":
                self.fabric.stalled.add(host)
                return lambda: self.fabric.go_on(host)
            case "break_adapter":
                self.fabric.broken.add(host)
                return lambda: self.fabric.broken.discard(host)
            case "stop":
                for name, process in self._living():
                    if name == host:
                        process.told.set()
            case "lose_replies":
                self.services.lose_replies(host, fault.count)
            case "compact":
                self.services.compact()
            case _:
                pass  # One of the link's.
        return None

    # --- asked by the driver -----------------------------------------------------------------------

    async def start(self) -> None:
        """Boot every host; returns once the store names them all. `begin` lets them begin."""
        for name in self.hosts:
            self.boot(name)
        with trio.move_on_after(READY_S):
            while len(self.processes) < len(self.plan.engines):  # noqa: ASYNC110
                await trio.sleep(0.01)
            return
        raise Violation("I15", f"only {sorted(self.processes)} are ready after {READY_S:g} s")

    def begin(self) -> None:
        """Let the decode hosts ask."""
        self._has_begun.set()

    @property
    def is_load_over(self) -> bool:
        """Whether every decode host that lives has seen the end of all its requests."""
        plan = self.plan
        return all(
            self._begun[f"{name}/{slot}"] == plan.requests
            and not any(r.host == name and self._is_open(r) for r in self.records)
            for name in self.hosts
            if name.startswith("decode") and self._is_up(name)
            for slot in range(plan.slots)
        )

    @property
    def open_requests(self) -> list[str]:
        """Names of requests of living processes that have no end yet."""
        return [record.name for record in self.records if self._is_open(record)]

    def count(self) -> None:
        """Raise `Violation` if any pool's counts make no sense now."""
        for process in self.processes.values():
            process.audit.count()

    def leftovers(self) -> dict[str, float]:
        """What living processes hold of any request; empty at quiescence."""
        found: dict[str, float] = {}
        for _, process in self._living():
            found |= process.leftovers()
        return found

    def lost(self) -> Iterator[str]:
        """Blocks of living processes that are neither free nor quarantined; none at quiescence."""
        for name, process in self._living():
            pool = process.pool
            total = pool.free_count + pool.quarantined_count
            if total != pool.block_count:
                yield f"{name}: {total} of {pool.block_count} blocks are free or quarantined"

    def quarantined(self) -> Iterator[str]:
        """Living processes that have blocks in quarantine; none once all can be asked."""
        for name, process in self._living():
            count = process.pool.quarantined_count
            if count:
                yield f"{name}: {count} blocks are still in quarantine"

    def unknown(self) -> Iterator[str]:
        """Living processes that the store does not name, or that do not know what it does."""
        prefix = f"{self.plan.config.worker.namespace}/{NIXL_METADATA_KEY}/"
        held = self.services.store.values(prefix)
        living = dict(self._living())
        for name in self.plan.engines:
            if not self._is_up(name) or not self.services.is_reachable(name):
                continue
            process = living.get(name)
            if process is None:
                yield f"{name} was booted and does not come up"
                continue
            if process.told.is_set():
                continue
            agent = process.transfers.memory.description.incarnation
            if agent.encode() not in held.get(prefix + name, (0, b""))[1]:
                yield f"{name} lives and is not in the store"
            yield from process.stale(held)

    def tell_to_leave(self) -> list[str]:
        """Ask all living processes for an orderly end; which they are."""
        living = [name for name, _ in self._living()]
        for name in living:
            self.processes[name].told.set()
        return living

    def _living(self) -> Iterator[tuple[str, KvProcess]]:
        """The present lives of hosts that may take a step now, once they are open."""
        for name, process in self.processes.items():
            if self._is_up(name) and process.generation == self.world.host(name).generation:
                yield name, process

    def _is_up(self, name: str) -> bool:
        return self.world.host(name).state is HostState.UP

    def _is_open(self, record: KvRecord) -> bool:
        host = self.world.host(record.host)
        return (
            not record.outcome and self._is_up(host.name) and host.generation == record.generation
        )

    # --- on a host ---------------------------------------------------------------------------------

    async def _run(self, name: str) -> None:
        host, mail = self.world.host(name), Mail(self.bus, name)
        env = SimEnv(self.world, f"{name}.{host.generation}")
        process = KvProcess(host, env, self.plan, mail, self.landings)
        async with (
            open_process(process, self.fabric, self.services),
            trio.open_nursery() as nursery,
        ):
            self.processes[name] = process
            nursery.start_soon(mail.run)
            if name.startswith("prefill"):
                self._serve(process, nursery)
            else:
                mail.on_stray = _Stray(process).at_decode
                for number in range(self.plan.slots):
                    nursery.start_soon(self._ask, process, number)
            await process.told.wait()
            await process.leave()
            nursery.cancel_scope.cancel()

    def _serve(self, process: KvProcess, nursery: trio.Nursery) -> None:
        asks, asked = trio.open_memory_channel[Word](ASKS_MAX)
        stray = _Stray(process)

        def on_ask(word: Word) -> None:
            if process.told.is_set():
                process.mail.post(word.source, "failed", word.request)
                return
            try:
                asks.send_nowait(word)
            except trio.WouldBlock:
                process.note("kv.overloaded", request=word.request)

        process.mail.on_ask, process.mail.on_stray = on_ask, stray.at_prefill
        serve = serve_reader if self.plan.move == "read" else serve_by_writing

        async def work() -> None:
            async for word in asked:
                if word.request in stray.told:
                    continue
                process.open_requests += 1
                await serve(process, word)
                process.open_requests -= 1

        for _ in range(self.plan.slots * self.plan.decodes):
            nursery.start_soon(work)

    async def _ask(self, process: KvProcess, number: int) -> None:
        plan, key, choices = self.plan, f"{process.name}/{number}", self.world.choices
        fetch: Callable[..., Awaitable[str]] = (
            fetch_by_reading if plan.move == "read" else fetch_by_being_written
        )
        await self._has_begun.wait()
        while self._begun[key] < plan.requests and not process.told.is_set():
            name = f"{process.name}.{number}.{self._begun[key]}"
            self._begun[key] += 1
            record = KvRecord(
                name,
                process.name,
                trio.current_time(),
                generation=process.generation,
            )
            self.records.append(record)
            prefill = f"prefill{choices.below(plan.prefills, 'prefill')}"
            abort_after_s = math.inf
            if plan.abort_one_in == 1 or choices.chance(plan.abort_one_in, "abort"):
                abort_after_s = process.drawn(plan.abort_after_s)
            process.note("kv.begin", request=name, prefill=prefill)
            process.open_requests += 1
            record.outcome = await fetch(process, name, prefill, abort_after_s)
            process.open_requests -= 1
            process.note("kv.end", request=name, outcome=record.outcome)


class _Stray:
    """Words about requests that nobody serves here, or not yet."""

    def __init__(self, process: KvProcess) -> None:
        self._process = process
        self.told: dict[str, None] = {}
        """Requests that were dropped before they were begun: a word that overtakes still wins."""

    def at_prefill(self, word: Word) -> None:
        """The end of what is over, or not begun."""
        if word.kind != "drop":
            return
        self.told[word.request] = None
        if len(self.told) > TOLD_MAX:
            del self.told[next(iter(self.told))]

    def at_decode(self, word: Word) -> None:
        """Blocks that were computed for a request that has given up."""
        if word.kind == "ready":
            self._process.mail.post(word.source, "drop", word.request)
