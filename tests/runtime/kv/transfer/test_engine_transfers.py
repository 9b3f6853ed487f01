"""Two engines find each other by id and move blocks with a ticket; what is gone is forgotten."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
import trio
import trio.testing
from prometheus_client import CollectorRegistry
from trio.testing import MockClock

from tests.runtime.one_process import OneProcess, config, open_process, task_count, until_tasks
from trinamo.runtime.config.config import Config
from trinamo.runtime.context import Context
from trinamo.runtime.engines.exact.engine import open_exact_engine
from trinamo.runtime.engines.mocker.engine import open_mocker_engine
from trinamo.runtime.env import Env, RealEnv
from trinamo.runtime.errors import (
    ConnectError,
    ControlPlaneError,
    DisconnectedError,
    MetadataNotFoundError,
    RemoteProtocolError,
    RequestError,
    StaleMemoryError,
    TransferError,
    UnavailableError,
)
from trinamo.runtime.kv.cache import KvCache
from trinamo.runtime.kv.memory import KvLayout, KvMemory, KvShape, fingerprint
from trinamo.runtime.kv.pool import BlockPool
from trinamo.runtime.kv.transfer import peers as engine_peers
from trinamo.runtime.kv.transfer.engine import EngineTransfers, open_engine_transfers
from trinamo.runtime.metrics.transfers import TransferMetrics
from trinamo.runtime.planes import ControlPlane, PutOutcome
from trinamo.runtime.planes.transports import TransferChain
from trinamo.runtime.process.runtime import Runtime
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.transfer.settlement import decode_card
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.memory.transfer import (
    MemoryTransferPlane,
    TransferFabric,
    open_memory_transfer_plane,
)

SHAPE = KvShape(layers=3, heads=1, channels=4, block_tokens=2, dtype="<i2")


def cache(
    seed: int,
    block_count: int = 8,
    layout: KvLayout = KvLayout.BLOCK_FIRST,
    model: str = "model",
) -> KvCache:
    """Memory of noise, all of whose blocks have an owner."""
    memory = KvMemory(SHAPE, block_count, layout)
    memory.view[:] = np.random.default_rng(seed).integers(-999, 999, memory.view.shape)
    pool = BlockPool(block_count)
    pool.take(block_count)
    return KvCache(memory=memory, pool=pool, fingerprint=fingerprint("test", model, SHAPE, layout))


def block(kv: KvCache, number: int) -> list[int]:
    """Everything in a block, whatever the layout."""
    return [int(each) for each in kv.memory.view[:, :, number].reshape(-1)]


def transfers_of(runtime: Runtime) -> EngineTransfers:
    assert runtime.transfers is not None
    return runtime.transfers


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not in discovery is not waited for."""
    monkeypatch.setattr(engine_peers, "_PATIENCE_S", 0.0)


async def eventually(is_true: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not is_true():
            await trio.sleep(0.005)


@attrs.define
class Pair:
    """Two workers of one process, over real TCP."""

    owner: Runtime
    reader: Runtime
    owned: KvCache
    read: KvCache

    @property
    def there(self) -> EngineTransfers:
        return transfers_of(self.owner)

    @property
    def here(self) -> EngineTransfers:
        return transfers_of(self.reader)


@asynccontextmanager
async def open_pair(
    transports: OneProcess, layout: KvLayout = KvLayout.BLOCK_FIRST, **overrides: Any
) -> AsyncIterator[Pair]:
    owned, read = cache(1, layout=layout), cache(2, 5, layout)
    async with (
        open_process(transports, serving=True, kv=owned, **overrides) as owner,
        open_process(transports, serving=True, kv=read, **overrides) as reader,
    ):
        yield Pair(owner, reader, owned, read)


@pytest.mark.parametrize("layout", KvLayout)
async def test_granted_blocks_of_another_engine_are_read_by_its_id(layout: KvLayout) -> None:
    async with open_pair(OneProcess(), layout) as pair:
        grant = pair.there.grant([6, 1])
        assert pair.owned.pool.in_flight_count == 2
        untouched = block(pair.read, 2)
        reports = await pair.here.read(
            pair.there.engine_id, [0, 4], [6, 1], ticket=grant.ticket, notify=b"read"
        )
        assert [report.backend for report in reports] == ["tcp"]
        assert block(pair.read, 0) == block(pair.owned, 6)
        assert block(pair.read, 4) == block(pair.owned, 1)
        assert block(pair.read, 2) == untouched
        assert await grant.completed() == b"read"
        page = pair.reader.metrics.render().decode()
        assert 'nixl_transfer_latency_count{backend="tcp"} 1.0' in page
        assert 'nixl_bandwidth_gbps{backend="tcp"} ' in page
        assert 'nixl_error_rate{backend="tcp"} 0.0' in page
        await pair.there.leases.drain()
        await pair.here.leases.drain()
        assert pair.owned.pool.in_flight_count == pair.read.pool.in_flight_count == 0


@pytest.mark.parametrize("layout", KvLayout)
async def test_blocks_are_written_to_where_they_were_granted(layout: KvLayout) -> None:
    async with open_pair(OneProcess(), layout) as pair:
        grant = pair.there.grant([7])
        await pair.here.write(pair.there.engine_id, [3], [7], ticket=grant.ticket)
        assert block(pair.owned, 7) == block(pair.read, 3)
        grant.complete()


async def test_a_grant_is_completed_by_nobody_but_whom_it_was_given_to() -> None:
    """A peer with a grant of its own says that it is done: the others' go on."""
    async with open_pair(OneProcess()) as pair:
        ours, other = pair.there.grant([6]), pair.there.grant([7])
        read = pair.here.read
        await read(pair.there.engine_id, [0], [7], ticket=other.ticket, notify=b"mine")
        assert await other.completed() == b"mine"
        for ticket in (0, other.ticket, ours.ticket + 1):
            with pytest.raises((StaleMemoryError, RequestError)):
                await read(pair.there.engine_id, [0], [6], ticket=ticket, notify=b"forged")
        with trio.move_on_after(0.01) as scope:
            await ours.completed()
        assert scope.cancelled_caught
        assert pair.owned.pool.in_flight_count == 1
        await read(pair.there.engine_id, [0], [6], ticket=ours.ticket, notify=b"true")
        assert await ours.completed() == await ours.completed() == b"true"
        assert pair.owned.pool.in_flight_count == 0


async def test_a_grant_that_is_withdrawn_is_never_completed() -> None:
    async with open_pair(OneProcess()) as pair:
        grant = pair.there.grant([6])
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(StaleMemoryError, match="before the peer was done"):
                    await grant.completed()

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            grant.withdraw()


async def test_without_the_right_ticket_nothing_moves() -> None:
    async with open_pair(OneProcess()) as pair:
        grant = pair.there.grant([6])
        before = block(pair.read, 0)
        for ticket, wanted in ((0, 6), (grant.ticket + 1, 6), (grant.ticket, 5)):
            with pytest.raises(StaleMemoryError):
                await pair.here.read(pair.there.engine_id, [0], [wanted], ticket=ticket)
        grant.withdraw()
        with pytest.raises(StaleMemoryError):
            await pair.here.read(pair.there.engine_id, [0], [6], ticket=grant.ticket)
        assert block(pair.read, 0) == before


async def test_blocks_that_are_not_there_are_refused_before_anything_moves() -> None:
    """In a layer-first buffer they would be parts of other blocks."""
    async with open_pair(OneProcess(), KvLayout.LAYER_FIRST) as pair:
        grant = pair.there.grant([0])
        for here, there in (([5], [0]), ([0], [8]), ([-1], [0])):
            with pytest.raises(RequestError):
                await pair.here.read(pair.there.engine_id, here, there, ticket=grant.ticket)
        with pytest.raises(RequestError):
            pair.there.grant([8])
        with pytest.raises(RequestError, match="itself"):
            await pair.here.connect(pair.here.engine_id)
        grant.complete()


async def test_engines_whose_bytes_mean_something_else_do_not_exchange_them() -> None:
    transports = OneProcess()
    async with (
        open_process(transports, serving=True, kv=cache(1)) as owner,
        open_process(transports, serving=True, kv=cache(2, model="other")) as reader,
    ):
        grant = transfers_of(owner).grant([0])
        with pytest.raises(StaleMemoryError, match="laid out"):
            await transfers_of(reader).read(
                transfers_of(owner).engine_id, [0], [0], ticket=grant.ticket
            )
        grant.complete()


async def test_the_statistics_show_the_chain_the_peers_and_what_is_missing() -> None:
    async with open_pair(OneProcess()) as pair:
        await pair.here.connect(pair.there.engine_id)
        found = pair.here.statistics()
        nixl, tcp = found.chain
        assert (nixl.backend, nixl.is_open, nixl.problem) == ("nixl", False, "not here")
        assert (tcp.backend, tcp.is_open, tcp.peers, tcp.usable_peers) == ("tcp", True, 1, 1)
        assert (found.peers, found.fallbacks, found.quarantined_blocks) == (1, 0, 0)
        grant = pair.there.grant([1, 2])
        assert pair.there.statistics().blocks_in_flight == 2
        grant.complete()
        assert pair.there.statistics().blocks_in_flight == 0
        page = pair.reader.metrics.render().decode()
        assert 'trinamo_transfer_backend_open{backend="nixl"} 0.0' in page
        assert 'trinamo_transfer_backend_open{backend="tcp"} 1.0' in page


async def test_many_askers_share_one_connection() -> None:
    async with open_pair(OneProcess()) as pair:
        found: list[object] = []

        async def connect() -> None:
            found.append(await pair.here.connect(pair.there.engine_id))

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(connect)
        assert len(set(map(id, found))) == 1
        assert pair.here.statistics().peers == 1


async def test_an_engine_that_is_not_there_is_a_typed_error_and_leaves_nothing(
    impatient: None,
) -> None:
    async with open_pair(OneProcess()) as pair:
        for _ in range(3):
            with pytest.raises(MetadataNotFoundError):
                await pair.here.connect("nobody")
        assert pair.here.statistics().peers == 0


async def test_an_engine_that_leaves_is_forgotten_and_its_transfers_end(impatient: None) -> None:
    transports = OneProcess()
    async with open_process(transports, serving=True, kv=cache(2)) as reader:
        tasks = task_count()
        async with open_process(transports, serving=True, kv=cache(1)) as owner:
            engine_id = transfers_of(owner).engine_id
            peer = await transfers_of(reader).connect(engine_id)
            assert peer.usable == ["tcp"]
        await eventually(lambda: not transfers_of(reader).statistics().peers)
        assert peer.usable == []
        with pytest.raises(MetadataNotFoundError):
            await transfers_of(reader).connect(engine_id)
        await until_tasks(tasks)


async def test_shutdown_waits_for_transfers_and_takes_no_new_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "trinamo.runtime")
    transports = OneProcess()
    async with open_pair(transports) as pair:
        grant = pair.there.grant([1])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.owner.shutdown)
            await eventually(lambda: "drain took" in caplog.text)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(UnavailableError):
                pair.there.grant([2])
            with pytest.raises(UnavailableError):
                await pair.there.read(pair.here.engine_id, [0], [0], ticket=1)
            # It is still found, and its blocks still move: the lease is revoked after this step.
            await pair.here.read(pair.there.engine_id, [0], [1], ticket=grant.ticket)
            assert not any("revoke" in each.message for each in caplog.records)
            grant.complete()
    steps = [each.message.split(" took")[0] for each in caplog.records if " took " in each.message]
    assert [step.removeprefix("shutdown: ") for step in steps[:4]] == [
        "leave discovery",
        "drain",
        "drain transfers",
        "revoke the lease",
    ]


async def test_blocks_that_a_peer_never_lets_go_of_are_quarantined_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transports = OneProcess()
    async with open_pair(transports, shutdown__transfer_timeout_s=0.05) as pair:
        unfenced: Any = Unfenced(pair.there.memory.regions["tcp"])
        pair.there.memory.regions["tcp"] = unfenced
        pair.there.grant([1, 2]).withdraw()
        await pair.owner.shutdown()
        assert "drain transfers did not finish within 0.05 s" in caplog.text
        owned, metrics = pair.owned, pair.owner.metrics
    assert owned.pool.quarantined_count == 2
    assert metrics.registry.get_sample_value("trinamo_quarantined_blocks") == 2


class Unfenced:
    """A region whose owner cannot stop a peer, as with RDMA."""

    is_fenced = False

    def __init__(self, region: Any) -> None:
        self._region = region

    def __getattr__(self, name: str) -> Any:
        return getattr(self._region, name)


async def test_a_peer_that_is_gone_gives_back_what_it_was_granted_by_its_card() -> None:
    transports = OneProcess()
    async with open_process(transports, serving=True, kv=cache(1)) as owner:
        there = transfers_of(owner)
        unfenced: Any = Unfenced(there.memory.regions["tcp"])
        there.memory.regions["tcp"] = unfenced
        async with open_process(transports, serving=True, kv=cache(2)) as reader:
            # Nor is its connection kept.
            await there.connect(transfers_of(reader).engine_id)
            settled, gone = (there.grant([n], transfers_of(reader).card()) for n in (1, 2))
            # The questions come back for the settled one at once.
            settled.withdraw()
            await eventually(lambda: settled.is_settled)
        gone.withdraw()
        await eventually(lambda: gone.is_settled)
        # The task that keeps the blocks hears of it in the next turn.
        await eventually(lambda: not there.kv.pool.in_flight_count)
        assert there.kv.pool.quarantined_count == 0
        metric = "trinamo_transfer_inquiries_total"
        counted = [
            owner.metrics.registry.get_sample_value(metric, {"standing": each}) or 0
            for each in ("settled", "gone")
        ]
        assert counted[0] >= 1
        assert counted[1] >= 1


async def test_a_life_that_is_proven_dead_is_not_transferred_with_any_more() -> None:
    async with open_pair(OneProcess()) as pair:
        card = pair.here.card()
        assert card is not None
        peer = await pair.there.connect(pair.here.engine_id)
        told = decode_card(card)
        await pair.there.bury(msgspec.structs.replace(told, life="00"))
        assert peer.usable == ["tcp"], "another life of it"
        await pair.there.bury(told)
        assert peer.usable == []
        assert pair.there.statistics().peers == 0


@pytest.mark.parametrize("is_fenced", [True, False])
async def test_who_has_died_since_it_asked_can_be_refused(is_fenced: bool) -> None:
    """Where nobody fences: elsewhere its death costs nothing."""
    transports = OneProcess()
    async with open_process(transports, serving=True, kv=cache(1)) as owner:
        there = transfers_of(owner)
        if not is_fenced:
            unfenced: Any = Unfenced(there.memory.regions["tcp"])
            there.memory.regions["tcp"] = unfenced
        async with open_process(transports, serving=True, kv=cache(2)) as reader:
            unmet = transfers_of(reader).card()
        async with open_process(transports, serving=True, kv=cache(2)) as reader:
            met = transfers_of(reader).card()
            assert met is not None
            assert await there.meet(met)
        assert unmet is not None
        assert await there.meet(unmet) is is_fenced
        assert await there.meet(met), "it was met before it died"
        with pytest.raises(RemoteProtocolError):
            await there.meet(b"not a card")


async def test_a_card_that_is_none_grants_nothing() -> None:
    async with open_pair(OneProcess()) as pair:
        with pytest.raises(RemoteProtocolError):
            pair.there.grant([1], b"not a card")
        assert pair.owned.pool.in_flight_count == 0


async def test_where_nobody_could_be_asked_there_is_no_card() -> None:
    async with Village().live("decode", cache(1)) as (here, _):
        assert here.card() is None
        here.grant([1], None).complete()


async def test_transfers_can_be_switched_off() -> None:
    transports = OneProcess()
    off = {"data_plane__transfer__enabled": False}
    async with open_process(transports, serving=True, kv=cache(1), **off) as runtime:
        assert runtime.transfers is None
        assert not transports.store.range("trinamo/", now=trio.current_time()).entries


class Forbidding(MemoryControlPlane):
    """A store that does not let this user see or write what is below `nixl_metadata`."""

    async def compare_and_put(self, key: str, *args: Any, **more: Any) -> PutOutcome:
        if "nixl_metadata" in key:
            raise ControlPlaneError("permission denied", definite=True)
        return await super().compare_and_put(key, *args, **more)

    def watch(self, prefix: str) -> Any:
        if "nixl_metadata" in prefix:
            raise ControlPlaneError("permission denied", definite=True)
        return super().watch(prefix)


async def test_a_worker_whose_offer_the_store_refuses_serves_all_the_same(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Strict(OneProcess):
        @asynccontextmanager
        async def open_control(self, config: Config, env: Env) -> AsyncIterator[ControlPlane]:
            yield Forbidding(self.store)

    async def answer(request: int, context: Context) -> AsyncGenerator[int, None]:
        yield request

    transports = Strict()
    async with open_process(transports, serving=True, kv=cache(1)) as runtime:
        await runtime.serve(EndpointName("a", "b", "c"), answer)
        await trio.sleep(20)
        entries = transports.store.range("", now=trio.current_time()).entries
        assert [entry.key.split("/")[0] for entry in entries] == ["instances"]
        assert runtime.transfers is not None
        runtime.transfers.grant([1]).complete()
    assert "peers cannot find this engine's memory yet" in caplog.text
    assert "peers' memory is not watched: permission denied" in caplog.text


# --- one engine that restarts under its own name -------------------------------------------------


@attrs.define
class Village:
    """Engines by name, over memory planes that can be hurt."""

    control: MemoryControlPlane = attrs.field(factory=MemoryControlPlane)
    fabric: TransferFabric = attrs.field(factory=TransferFabric)

    @asynccontextmanager
    async def live(
        self, engine_id: str, kv: KvCache
    ) -> AsyncIterator[tuple[EngineTransfers, MemoryTransferPlane]]:
        async with (
            open_memory_transfer_plane(self.fabric) as plane,
            open_engine_transfers(
                TransferChain(planes=[plane], order=[plane.backend]),
                kv,
                config(),
                RealEnv(),
                self.control,
                engine_id=engine_id,
                metrics=TransferMetrics(CollectorRegistry()),
            ) as transfers,
        ):
            await self.control.put(transfers.store.key(engine_id), transfers.metadata())
            yield transfers, plane


async def test_an_engine_that_restarted_under_its_name_is_connected_to_again() -> None:
    village, mine, theirs = Village(), cache(1), cache(2)
    async with village.live("decode", mine) as (here, _), trio.open_nursery() as nursery:
        nursery.start_soon(here.watch)
        async with village.live("prefill", theirs) as (there, _):
            grant = there.grant([0])
            await here.read("prefill", [0], [0], ticket=grant.ticket)
            first = await here.connect("prefill")
        second_life = cache(3)
        async with village.live("prefill", second_life) as (there, _):
            await eventually(lambda: not first.usable)
            grant = there.grant([4])
            await here.read("prefill", [0], [4], ticket=grant.ticket)
            assert block(mine, 0) == block(second_life, 4)
            assert here.statistics().peers == 1
        nursery.cancel_scope.cancel()


async def test_an_engine_that_only_lost_its_lease_keeps_its_peers(
    autojump_clock: MockClock,
) -> None:
    """As after an outage of the store: it lives, answers, and is soon registered again."""
    village, mine, theirs = Village(), cache(1), cache(2)
    async with (
        village.live("decode", mine) as (here, _),
        village.live("prefill", theirs) as (there, _),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(here.watch)
        ticket = there.grant([3]).ticket
        first = await here.connect("prefill")
        await village.control.delete(here.store.key("prefill"))
        await trio.sleep(2.5)
        await here.read("prefill", [0], [3], ticket=ticket)
        assert block(mine, 0) == block(theirs, 3)
        await village.control.put(there.store.key("prefill"), there.metadata())
        await trio.sleep(60)
        assert await here.connect("prefill") is first
        assert first.usable
        nursery.cancel_scope.cancel()


async def test_an_engine_that_is_not_registered_again_in_time_is_given_up(
    autojump_clock: MockClock,
) -> None:
    """It answers for ever, but nobody would hear of its next life."""
    village = Village()
    async with (
        village.live("decode", cache(1)) as (here, _),
        village.live("prefill", cache(2)) as (there, _),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(here.watch)
        first = await here.connect("prefill")
        await village.control.delete(here.store.key("prefill"))
        await trio.sleep(14)
        assert first.usable
        await trio.sleep(4)
        assert not first.usable
        with pytest.raises(MetadataNotFoundError):
            await here.connect("prefill")
        # And found again, should it come back after all.
        await village.control.put(there.store.key("prefill"), there.metadata())
        assert (await here.connect("prefill")).usable
        nursery.cancel_scope.cancel()


async def test_stale_metadata_in_the_cache_is_looked_up_again() -> None:
    """No watch runs, as when the store is away: the first connection finds nobody and asks."""
    village, mine = Village(), cache(1)
    async with village.live("decode", mine) as (here, _):
        async with village.live("prefill", cache(2)):
            await here.store.get("prefill")
        with pytest.raises(ConnectError):
            await here.connect("prefill")
        second_life = cache(3)
        async with village.live("prefill", second_life) as (there, _):
            await here.read("prefill", [1], [2], ticket=there.grant([2]).ticket)
            assert block(mine, 1) == block(second_life, 2)


async def test_a_peer_that_goes_while_it_is_connected_to_is_not_kept(impatient: None) -> None:
    village = Village()
    async with village.live("decode", cache(1)) as (here, plane), trio.open_nursery() as nursery:
        nursery.start_soon(here.watch)
        async with village.live("prefill", cache(2)):
            await trio.testing.wait_all_tasks_blocked()
            probe, reached, go_on = plane.probe, trio.Event(), trio.Event()

            async def slow_probe(remote: Any) -> None:
                await probe(remote)
                reached.set()
                await go_on.wait()

            plane.probe = slow_probe  # type: ignore[method-assign]
            outcome: list[Exception] = []

            async def connect() -> None:
                try:
                    await here.connect("prefill")
                except TransferError as error:
                    outcome.append(error)

            nursery.start_soon(connect)
            await reached.wait()
            await village.control.delete(here.store.key("prefill"))
            await trio.testing.wait_all_tasks_blocked()
            go_on.set()
            await eventually(lambda: bool(outcome))
        assert isinstance(outcome[0], MetadataNotFoundError)
        assert here.statistics().peers == 0
        nursery.cancel_scope.cancel()


async def test_a_transfer_with_an_engine_that_is_forgotten_fails_at_once() -> None:
    village = Village()
    async with (
        village.live("decode", cache(1)) as (here, plane),
        village.live("prefill", cache(2)) as (there, _),
        trio.open_nursery() as nursery,
    ):
        ticket = there.grant([0]).ticket
        peer = await here.connect("prefill")
        plane.faults.stalls_after = 0
        nursery.start_soon(forget_when_blocked, here, peer.description.incarnation)
        with pytest.raises((DisconnectedError, ConnectError)):
            await here.read("prefill", [0], [0], ticket=ticket)
        await here.leases.drain()
        assert here.statistics().leased == 0
        nursery.cancel_scope.cancel()


async def forget_when_blocked(here: EngineTransfers, agent_name: str) -> None:
    await trio.testing.wait_all_tasks_blocked()
    await here.forget(agent_name)


# --- engines -------------------------------------------------------------------------------------


async def test_the_blocks_of_exact_engines_move_between_their_workers() -> None:
    transports = OneProcess()
    async with (
        open_exact_engine(block_count=128) as one,
        open_exact_engine(block_count=160) as two,
    ):
        assert one.kv is not None
        assert two.kv is not None
        async with (
            open_process(transports, serving=True, kv=one.kv) as owner,
            open_process(transports, serving=True, kv=two.kv) as reader,
        ):
            theirs, ours = one.kv.pool.take(3), two.kv.pool.take(3)
            assert theirs is not None
            assert ours is not None
            one.kv.memory.view[:, :, theirs] = 77
            grant = transfers_of(owner).grant(theirs)
            await transfers_of(reader).read(
                transfers_of(owner).engine_id, ours, theirs, ticket=grant.ticket
            )
            assert (two.kv.memory.view[:, :, ours] == 77).all()
            # Given back while they are granted: nobody else gets them before the grant ends.
            one.kv.pool.give_back(theirs)
            assert one.statistics().blocks_free == 125
            grant.complete()
            await transfers_of(owner).leases.drain()
            assert one.statistics().blocks_free == 128


async def test_an_engine_without_bytes_of_its_own_has_nothing_to_move() -> None:
    async with open_mocker_engine() as mocker:
        assert mocker.kv is None
