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

from trinamo.runtime.kv import TransferRouter

from ..bus import Bus
from ..env import SimEnv
from ..host import HostState
from .adapters import TroubledFabric
from .mail import Mail, Word
from .process import KvProcess, open_process
from .pull import fetch_by_reading, serve_reader
from .push import fetch_by_being_written, serve_by_writing

if TYPE_CHECKING:
    from ..network import Network
    from ..scenario_faults import FaultPlan
    from ..world import World
    from .plan import TransferPlan

__all__ = ["KvRecord", "TransferStage"]

ASKS_MAX: Final = 256
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

    def __init__(self, world: World, network: Network, plan: TransferPlan) -> None:
        self.world, self.plan = world, plan
        self.bus = Bus(world, network)
        self.fabric = TroubledFabric(
            world,
            network,
            window=plan.window,
            give_up_s=plan.give_up_s,
            is_fenced=plan.is_fenced,
        )
        self.processes: dict[str, KvProcess] = {}
        """The present life of every host, once it is open."""
        self.records: list[KvRecord] = []
        self._begun: Counter[str] = Counter()
        """Requests that each slot of each decode host has begun, over all its lives."""

    # --- Stage -------------------------------------------------------------------------------------

    @property
    def hosts(self) -> list[str]:
        """See `Stage`."""
        return self.plan.hosts

    def boot(self, name: str) -> None:
        """See `Stage`."""
        self.world.boot(name, self._run, name)

    def strike(self, fault: FaultPlan, host: str) -> Callable[[], None] | None:
        """See `Stage`."""
        if fault.do == "stall_adapter":
            self.fabric.stalled.add(host)
            return lambda: self.fabric.go_on(host)
        if fault.do == "break_adapter":
            self.fabric.broken.add(host)
            return lambda: self.fabric.broken.discard(host)
        return None

    # --- asked by the driver -----------------------------------------------------------------------

    async def start(self) -> None:
        """Boot every prefill host, then the decode hosts, which begin at once."""
        for name in self.hosts:
            self.boot(name)
            while name.startswith("prefill") and name not in self.processes:  # noqa: ASYNC110
                await trio.sleep(0.01)

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
        for name, process in self.processes.items():
            if self._is_up(name):
                found |= process.leftovers()
        return found

    def lost(self) -> Iterator[str]:
        """Blocks of living processes that are neither free nor quarantined; none at quiescence."""
        for name, process in self.processes.items():
            pool = process.pool
            total = pool.free_count + pool.quarantined_count
            if self._is_up(name) and total != pool.block_count:
                yield f"{name}: {total} of {pool.block_count} blocks are free or quarantined"

    def _is_up(self, name: str) -> bool:
        return self.world.host(name).state is HostState.UP

    def _is_open(self, record: KvRecord) -> bool:
        host = self.world.host(record.host)
        return (
            not record.outcome and self._is_up(host.name) and host.generation == record.generation
        )

    # --- on a host ---------------------------------------------------------------------------------

    async def _run(self, name: str) -> None:
        env = SimEnv(self.world, f"{name}.{self.world.host(name).generation}")
        mail = Mail(self.bus, name)
        async with (
            open_process(name, env, self.plan, mail, self.fabric) as process,
            trio.open_nursery() as nursery,
        ):
            self.processes[name] = process
            nursery.start_soon(mail.run)
            nursery.start_soon(_tell_of_writes, process.router, mail)
            if name.startswith("prefill"):
                self._serve(process, nursery)
            else:
                mail.on_stray = _Stray(process).at_decode
                for number in range(self.plan.slots):
                    nursery.start_soon(self._ask, process, number)
            await trio.sleep_forever()

    def _serve(self, process: KvProcess, nursery: trio.Nursery) -> None:
        asks, asked = trio.open_memory_channel[Word](ASKS_MAX)
        stray = _Stray(process)

        def on_ask(word: Word) -> None:
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
                if process.audit.transfers_of(word.request):
                    stray.unsure[word.request] = None

        for _ in range(self.plan.slots * self.plan.decodes):
            nursery.start_soon(work)

    async def _ask(self, process: KvProcess, number: int) -> None:
        plan, key, choices = self.plan, f"{process.name}/{number}", self.world.choices
        fetch: Callable[..., Awaitable[str]] = (
            fetch_by_reading if plan.move == "read" else fetch_by_being_written
        )
        while self._begun[key] < plan.requests:
            name = f"{process.name}.{number}.{self._begun[key]}"
            self._begun[key] += 1
            record = KvRecord(
                name,
                process.name,
                trio.current_time(),
                generation=self.world.host(process.name).generation,
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
        """Requests that were aborted before they were begun: an abort that overtakes still wins."""
        self.unsure: dict[str, None] = {}
        """Requests whose transfers did not settle in time: nobody may be told they did."""

    def at_prefill(self, word: Word) -> None:
        """An abort of what is over, or not begun: nothing of it is under way."""
        if word.kind not in ("abort", "drop"):
            return
        self.told[word.request] = None
        if len(self.told) > TOLD_MAX:
            del self.told[next(iter(self.told))]
        if word.kind == "abort" and word.request not in self.unsure:
            self._process.mail.post(word.source, "settled", word.request)

    def at_decode(self, word: Word) -> None:
        """Blocks that were computed for a request that has given up."""
        if word.kind == "ready":
            self._process.mail.post(word.source, "drop", word.request)
            self._process.mail.post(word.source, "settled", word.request)


async def _tell_of_writes(router: TransferRouter, mail: Mail) -> None:
    while True:
        notice = await router.receive()
        mail.take(Word(kind="written", request=notice.message.decode(), source=mail.host))
