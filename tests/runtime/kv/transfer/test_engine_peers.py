"""Engines are found by id, kept while they answer, and forgotten once they are gone."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.runtime.kv.transfer.engines import (
    Village,
    block,
    cache,
    eventually,
    open_pair,
    transfers_of,
)
from tests.runtime.one_process import OneProcess, open_process, task_count, until_tasks
from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    MetadataNotFoundError,
    TransferError,
)
from trinamo.runtime.kv.transfer import engine as engine_peers
from trinamo.runtime.kv.transfer.engine import EngineTransfers
from trinamo.runtime.kv.transfer.metadata import NixlMetadata


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not in discovery is not waited for."""
    monkeypatch.setattr(engine_peers, "_PATIENCE_S", 0.0)


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


async def test_an_engine_that_restarted_under_its_name_is_connected_to_again() -> None:
    village, mine, theirs = Village(), cache(1), cache(2)
    async with village.live("decode", mine) as (here, _), trio.open_nursery() as nursery:
        nursery.start_soon(here.watch)
        async with village.live("prefill", theirs) as (there, _), there.grant([0]) as grant:
            await here.read("prefill", [0], [0], ticket=grant.ticket)
            first = await here.connect("prefill")
        second_life = cache(3)
        async with village.live("prefill", second_life) as (there, _):
            await eventually(lambda: not first.usable)
            async with there.grant([4]) as grant:
                await here.read("prefill", [0], [4], ticket=grant.ticket)
                assert block(mine, 0) == block(second_life, 4)
                assert here.statistics().peers == 1
        nursery.cancel_scope.cancel()


async def test_an_engine_that_restarted_is_connected_to_before_the_watch_reports_it() -> None:
    village, mine, theirs = Village(), cache(1), cache(2)
    async with village.live("decode", mine) as (here, _):
        async with village.live("prefill", theirs):
            first = await here.connect("prefill")
        second_life = cache(3)
        async with village.live("prefill", second_life) as (there, _), there.grant([4]) as grant:
            assert not await here.router.probe(first)
            await here.read("prefill", [0], [4], ticket=grant.ticket)
            assert block(mine, 0) == block(second_life, 4)
            assert here.statistics().peers == 1


async def test_an_engine_that_only_lost_its_lease_keeps_its_peers(
    autojump_clock: MockClock,
) -> None:
    """As after an outage of the store: it lives, answers, and is soon registered again."""
    village, mine, theirs = Village(), cache(1), cache(2)
    async with (
        village.live("decode", mine) as (here, _),
        village.live("prefill", theirs) as (there, _),
        there.grant([3]) as grant,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(here.watch)
        first = await here.connect("prefill")
        await village.control.delete(here.store.key("prefill"))
        await trio.sleep(2.5)
        await here.read("prefill", [0], [3], ticket=grant.ticket)
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


async def test_an_engine_that_is_missing_and_silent_is_forgotten_at_once(
    autojump_clock: MockClock,
) -> None:
    village = Village()
    async with village.live("decode", cache(1)) as (here, plane), trio.open_nursery() as nursery:
        nursery.start_soon(here.watch)
        async with village.live("prefill", cache(2)):
            first = await here.connect("prefill")
            plane.mover.faults.is_unreachable = True
            await village.control.delete(here.store.key("prefill"))
            await trio.testing.wait_all_tasks_blocked()
            assert not first.usable
            assert not here.statistics().peers
        nursery.cancel_scope.cancel()


async def test_an_engine_that_was_registered_again_is_forgotten_once_it_is_gone(
    autojump_clock: MockClock,
) -> None:
    """As after an outage of the store at whose end it was there before its peers looked."""
    village = Village()
    async with village.live("decode", cache(1)) as (here, plane), trio.open_nursery() as nursery:
        nursery.start_soon(here.watch)
        async with village.live("prefill", cache(2)) as (there, _):
            first = await here.connect("prefill")
            await village.control.put(there.store.key("prefill"), there.metadata())
            await trio.testing.wait_all_tasks_blocked()
            plane.mover.faults.is_unreachable = True
            await village.control.delete(here.store.key("prefill"))
            await trio.testing.wait_all_tasks_blocked()
            assert not first.usable
            assert not here.statistics().peers
        nursery.cancel_scope.cancel()


async def test_an_engine_that_goes_missing_while_the_store_is_asked_is_not_taken_for_back(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer says that it is there, but is older than the news that it is not."""
    village = Village()
    async with (
        village.live("decode", cache(1)) as (here, _),
        village.live("prefill", cache(2)) as (there, _),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(here.watch)
        first, key = await here.connect("prefill"), here.store.key("prefill")
        get, asked, go_on = here.store.get, trio.Event(), trio.Event()

        async def slow(engine_id: str) -> NixlMetadata:
            found = await get(engine_id)
            if not asked.is_set():
                asked.set()
                await go_on.wait()
            return found

        monkeypatch.setattr(here.store, "get", slow)
        await village.control.delete(key)
        await village.control.put(key, there.metadata())
        await asked.wait()
        await village.control.delete(key)
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()
        await trio.sleep(20)
        assert not first.usable
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
            async with there.grant([2]) as grant:
                await here.read("prefill", [1], [2], ticket=grant.ticket)
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
        there.grant([0]) as grant,
        trio.open_nursery() as nursery,
    ):
        peer = await here.connect("prefill")
        plane.mover.faults.stalls_after = 0
        nursery.start_soon(forget_when_blocked, here, peer.description.incarnation)
        with pytest.raises((DisconnectedError, ConnectError)):
            await here.read("prefill", [0], [0], ticket=grant.ticket)
        await here.leases.drain()
        assert here.statistics().leased == 0
        nursery.cancel_scope.cancel()


async def forget_when_blocked(here: EngineTransfers, incarnation: str) -> None:
    await trio.testing.wait_all_tasks_blocked()
    await here.forget(incarnation)
