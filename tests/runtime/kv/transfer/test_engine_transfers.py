"""Two engines find each other by id and move blocks with a ticket; the process goes on without."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from tests.runtime.kv.ranges import memory_of
from tests.runtime.kv.transfer.engines import (
    SHAPE,
    block,
    cache,
    eventually,
    open_pair,
    transfers_of,
)
from tests.runtime.one_process import OneProcess, open_process
from trinamo.runtime.config.config import Config
from trinamo.runtime.context import Context
from trinamo.runtime.engines.exact.engine import open_exact_engine
from trinamo.runtime.engines.loop.host import open_engine_host
from trinamo.runtime.engines.mocker.engine import MockerEngine
from trinamo.runtime.env import Env
from trinamo.runtime.errors import (
    ConfigError,
    ControlPlaneError,
    IncompatibleKvError,
    RequestError,
    StaleMemoryError,
    UnavailableError,
)
from trinamo.runtime.kv.memory import KvLayout
from trinamo.runtime.kv.regions import RegionSet
from trinamo.runtime.kv.tensors import kv_cache
from trinamo.runtime.planes import ControlPlane, PutOutcome
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.transports.memory.control import MemoryControlPlane


@pytest.mark.parametrize("layout", KvLayout)
async def test_granted_blocks_of_another_engine_are_read_by_its_id(layout: KvLayout) -> None:
    async with open_pair(OneProcess(), layout) as pair, pair.there.grant([6, 1]) as grant:
        assert pair.owned.pool.in_flight_count == 2
        untouched = block(pair.read, 2)
        reports = await pair.here.read(
            pair.there.engine_id, [0, 4], [6, 1], ticket=grant.ticket, notify=b"read"
        )
        # However many pieces a block lies in.
        assert [(report.backend, report.block_count) for report in reports] == [("tcp", 2)]
        assert block(pair.read, 0) == block(pair.owned, 6)
        assert block(pair.read, 4) == block(pair.owned, 1)
        assert block(pair.read, 2) == untouched
        assert await grant.completed() == b"read"
        page = pair.reader.metrics.render().decode()
        assert 'nixl_transfer_latency_count{backend="tcp"} 1.0' in page
        assert 'nixl_bandwidth_gbps{backend="tcp"} ' in page
        assert 'nixl_error_rate{backend="tcp"} 0.0' in page
        assert 'trinamo_transfer_duration_seconds_count{backend="tcp"} 1.0' in page
        assert 'trinamo_transfer_bandwidth_bytes_per_second{backend="tcp"} ' in page
        await pair.there.leases.drain()
        await pair.here.leases.drain()
        assert pair.owned.pool.in_flight_count == pair.read.pool.in_flight_count == 0


@pytest.mark.parametrize("layout", KvLayout)
async def test_blocks_are_written_to_where_they_were_granted(layout: KvLayout) -> None:
    async with (
        open_pair(OneProcess(), layout) as pair,
        pair.there.grant([7], may_write=True) as grant,
    ):
        await pair.here.write(pair.there.engine_id, [3], [7], ticket=grant.ticket)
        assert block(pair.owned, 7) == block(pair.read, 3)


@pytest.mark.parametrize("layout", [KvLayout.LAYER_FIRST, KvLayout.PER_LAYER])
async def test_a_layer_travels_before_the_next_one_is_there(layout: KvLayout) -> None:
    """The grant is completed by the word that comes with the last layer, and by no earlier one."""
    async with (
        open_pair(OneProcess(), layout) as pair,
        pair.there.grant([7, 2], may_write=True) as grant,
    ):
        ours, theirs = memory_of(pair.read).view, memory_of(pair.owned).view
        before = theirs[:, :, [7, 2]].copy()
        for layer in range(3):
            ours[layer][:, [3, 0]] = layer + 1000  # Computed only now.
            await pair.here.write(
                *(pair.there.engine_id, [3, 0], [7, 2]),
                ticket=grant.ticket,
                layers=range(layer, layer + 1),
                notify=b"all" if layer == 2 else None,
            )
            assert (theirs[: layer + 1, :, [7, 2]] == ours[: layer + 1, :, [3, 0]]).all()
            assert (theirs[layer + 1 :, :, [7, 2]] == before[layer + 1 :]).all()
        assert await grant.completed() == b"all"


async def test_blocks_that_lie_in_one_part_do_not_move_layer_by_layer() -> None:
    async with open_pair(OneProcess()) as pair, pair.there.grant([7]) as grant:
        with pytest.raises(RequestError, match="move whole"):
            await pair.here.read(
                pair.there.engine_id, [3], [7], ticket=grant.ticket, layers=range(1)
            )


async def test_a_revoked_ticket_moves_no_layer_more() -> None:
    async with open_pair(OneProcess(), KvLayout.PER_LAYER) as pair:
        async with pair.there.grant([7], may_write=True) as grant:
            await pair.here.write(
                pair.there.engine_id, [3], [7], ticket=grant.ticket, layers=range(1)
            )
        before = block(pair.owned, 7)
        with pytest.raises(StaleMemoryError):
            await pair.here.write(
                pair.there.engine_id, [3], [7], ticket=grant.ticket, layers=range(1, 3)
            )
        assert block(pair.owned, 7) == before


async def test_without_the_right_ticket_nothing_moves() -> None:
    async with open_pair(OneProcess()) as pair:
        async with pair.there.grant([6]) as grant:
            before = block(pair.read, 0)
            for ticket, wanted in ((0, 6), (grant.ticket + 1, 6), (grant.ticket, 5)):
                with pytest.raises(StaleMemoryError):
                    await pair.here.read(pair.there.engine_id, [0], [wanted], ticket=ticket)
        with pytest.raises(StaleMemoryError):
            await pair.here.read(pair.there.engine_id, [0], [6], ticket=grant.ticket)
        assert block(pair.read, 0) == before


async def test_blocks_that_are_not_there_are_refused_before_anything_moves() -> None:
    """In a layer-first buffer they would be parts of other blocks."""
    async with (
        open_pair(OneProcess(), KvLayout.LAYER_FIRST) as pair,
        pair.there.grant([0]) as grant,
    ):
        for here, there in (([5], [0]), ([0], [8]), ([-1], [0])):
            with pytest.raises(RequestError):
                await pair.here.read(pair.there.engine_id, here, there, ticket=grant.ticket)
        with pytest.raises(RequestError):
            await pair.there.grant([8]).__aenter__()
        with pytest.raises(RequestError, match="itself"):
            await pair.here.connect(pair.here.engine_id)


async def test_engines_whose_bytes_mean_something_else_do_not_exchange_them() -> None:
    transports = OneProcess()
    async with (
        open_process(transports, serving=True, kv=cache(1)) as owner,
        open_process(transports, serving=True, kv=cache(2, model="other")) as reader,
        transfers_of(owner).grant([0]) as grant,
    ):
        with pytest.raises(IncompatibleKvError, match="model other here, model there"):
            await transfers_of(reader).read(
                transfers_of(owner).engine_id, [0], [0], ticket=grant.ticket
            )
        assert transfers_of(reader).statistics().peers == 0


async def test_the_statistics_show_the_chain_the_peers_and_what_is_missing() -> None:
    async with open_pair(OneProcess()) as pair:
        await pair.here.connect(pair.there.engine_id)
        found = pair.here.statistics()
        nixl, tcp = found.chain
        assert (nixl.backend, nixl.is_open, nixl.problem) == ("nixl", False, "not here")
        assert (tcp.backend, tcp.is_open, tcp.peers, tcp.usable_peers) == ("tcp", True, 1, 1)
        assert (found.peers, found.fallbacks, found.quarantined_blocks) == (1, 0, 0)
        async with pair.there.grant([1, 2]):
            assert pair.there.statistics().blocks_in_flight == 2
        assert pair.there.statistics().blocks_in_flight == 0
        page = pair.reader.metrics.render().decode()
        assert 'trinamo_transfer_backend_open{backend="nixl"} 0.0' in page
        assert 'trinamo_transfer_backend_open{backend="tcp"} 1.0' in page


async def test_shutdown_waits_for_transfers_and_takes_no_new_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "trinamo.runtime")
    transports = OneProcess()
    async with (
        open_pair(transports, shutdown__transfer_timeout_s=60.0) as pair,
        trio.open_nursery() as nursery,
        pair.there.grant([1]) as grant,
    ):
        nursery.start_soon(pair.owner.shutdown)
        await eventually(lambda: "drain took" in caplog.text)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(UnavailableError):
            await pair.there.grant([2]).__aenter__()
        with pytest.raises(UnavailableError):
            await pair.there.read(pair.here.engine_id, [0], [0], ticket=1)
        # It is still found, and its blocks still move: the lease is revoked after this step.
        await pair.here.read(pair.there.engine_id, [0], [1], ticket=grant.ticket)
        assert not any("revoke" in each.message for each in caplog.records)
    steps = [each.message.split(" took")[0] for each in caplog.records if " took " in each.message]
    assert [step.removeprefix("shutdown: ") for step in steps[:4]] == [
        "leave discovery",
        "drain",
        "drain transfers",
        "revoke the lease",
    ]


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
        async with runtime.transfers.grant([1]):
            pass
    assert "peers cannot find this engine's memory yet" in caplog.text
    assert "peers' memory is not watched: permission denied" in caplog.text


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
            memory_of(one.kv).view[:, :, theirs] = 77
            async with transfers_of(owner).grant(theirs) as grant:
                await transfers_of(reader).read(
                    transfers_of(owner).engine_id, ours, theirs, ticket=grant.ticket
                )
                assert (memory_of(two.kv).view[:, :, ours] == 77).all()
                # Given back while they are granted: nobody else gets them before the grant ends.
                one.kv.pool.give_back(theirs)
                assert one.statistics().blocks_free == 125
            await transfers_of(owner).leases.drain()
            assert one.statistics().blocks_free == 128


async def test_an_engine_without_bytes_of_its_own_has_nothing_to_move() -> None:
    engine = MockerEngine()
    del engine.memory
    async with open_engine_host(engine) as host:
        assert host.kv is None


async def test_memory_that_no_backend_takes_ends_the_start_with_what_to_do() -> None:
    """As a GPU's without NIXL: nobody could move it."""
    kv = cache(1)
    on_gpu = kv_cache(ArrayOfGpu(kv.memory), SHAPE, synchronize=lambda: None)
    with pytest.raises(ConfigError, match=r"tcp moves memory of the process.*\(nixl and mooncake"):
        async with open_process(OneProcess(), serving=True, kv=on_gpu):
            pass


class ArrayOfGpu:
    """What says that it is on one; nobody looks at it."""

    def __init__(self, memory: RegionSet) -> None:
        size = memory.block_count * memory.range_bytes * memory.parts
        data = (0x7000_0000, False)
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": data}

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)
