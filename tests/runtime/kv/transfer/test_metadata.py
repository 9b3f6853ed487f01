"""The metadata of engines in the control plane: stored with the lease, cached, forgotten."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import MetadataNotFoundError, RemoteProtocolError, RequestError
from trinamo.runtime.kv.transfer.metadata import (
    METADATA_BYTES_MAX,
    NixlMetadata,
    NixlMetadataStore,
)
from trinamo.runtime.planes import ControlPlane, Delete, Entry, Resync, WatchEvent
from trinamo.runtime.protocol.transfer.description import (
    MemoryDescription,
    encode_description,
    encode_descriptions,
)
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.security.signed import signed_control


def described(agent: str, length: int = 4096) -> bytes:
    """An offer by two backends, of which the first names the engine's life."""
    first = MemoryDescription(
        backend="nixl",
        incarnation=agent,
        region=1,
        generation=1,
        fingerprint="pages",
        bases=(4096,),
        length=length,
        block_bytes=length,
        address=b"how to reach it",
    )
    second = msgspec.structs.replace(first, backend="tcp")
    return encode_descriptions([encode_description(first), encode_description(second)])


def metadata(engine_id: str, agent: str) -> NixlMetadata:
    return NixlMetadata(
        engine_id=engine_id, agent_name=agent, memory_descriptors={"kv": described(agent)}
    )


@pytest.fixture
async def control() -> ControlPlane:
    return MemoryControlPlane()


@pytest.fixture
def store(control: ControlPlane) -> NixlMetadataStore:
    return NixlMetadataStore("dynamo", control)


async def test_what_was_put_is_found_under_the_key_of_the_seed(
    control: ControlPlane, store: NixlMetadataStore
) -> None:
    lease = await control.grant_lease(10)
    await store.put("decode-1", metadata("decode-1", "a1"), lease_id=lease.id)

    assert await NixlMetadataStore("dynamo", control).get("decode-1") == metadata("decode-1", "a1")
    entry = await control.get("dynamo/nixl_metadata/decode-1")
    assert entry is not None
    assert entry.lease_id == lease.id


async def test_an_engine_whose_name_begins_alike_is_another(
    control: ControlPlane, store: NixlMetadataStore
) -> None:
    await store.put("decode-10", metadata("decode-10", "a1"), lease_id=0)
    with pytest.raises(MetadataNotFoundError) as caught:
        await store.get("decode-1")
    assert caught.value.definite


async def test_the_end_of_the_lease_takes_the_metadata_along(
    control: ControlPlane, store: NixlMetadataStore
) -> None:
    lease = await control.grant_lease(10)
    await store.put("e", metadata("e", "a1"), lease_id=lease.id)
    await control.revoke_lease(lease.id)
    with pytest.raises(MetadataNotFoundError):
        await store.get("e")


async def test_an_engine_that_comes_in_time_is_found(
    store: NixlMetadataStore, autojump_clock: MockClock
) -> None:
    async def register() -> None:
        await trio.sleep(0.9)
        await store.put("e", metadata("e", "a1"), lease_id=0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(register)
        found = await store.find("e", patience_s=1.0)
    assert found.agent_name == "a1"
    assert autojump_clock.current_time() < 2


async def test_an_engine_that_does_not_come_is_waited_for_so_long_and_no_longer(
    store: NixlMetadataStore, autojump_clock: MockClock
) -> None:
    began_at = autojump_clock.current_time()
    with pytest.raises(MetadataNotFoundError):
        await store.find("e", patience_s=1.0)
    assert autojump_clock.current_time() == pytest.approx(began_at + 1.0)


async def test_patience_begins_when_the_store_has_answered(autojump_clock: MockClock) -> None:
    """While the store is away nobody can register; all that wait for it are answered first."""
    control = MemoryControlPlane()
    get = control.get

    async def slow(key: str) -> Entry | None:
        await trio.sleep(5)
        return await get(key)

    control.get = slow  # type: ignore[method-assign]
    store = NixlMetadataStore("dynamo", control)

    async def register() -> None:
        await trio.sleep(5.5)
        await store.put("e", metadata("e", "a1"), lease_id=0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(register)
        assert (await store.find("e", patience_s=1.0)).agent_name == "a1"
    assert autojump_clock.current_time() < 12


async def test_a_watch_forgets_who_is_gone_and_who_was_replaced(
    control: ControlPlane, store: NixlMetadataStore
) -> None:
    forgotten: list[str] = []

    def forget(agent: str) -> None:
        forgotten.append(agent)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.watch, forget)
        await store.put("e", metadata("e", "a1"), lease_id=0)
        await store.get("e")
        await trio.testing.wait_all_tasks_blocked()
        assert forgotten == []
        await store.put("e", metadata("e", "a2"), lease_id=0)
        await trio.testing.wait_all_tasks_blocked()
        assert forgotten == ["a1"]
        assert (await store.get("e")).agent_name == "a2"
        await control.delete("dynamo/nixl_metadata/e")
        await trio.testing.wait_all_tasks_blocked()
        assert forgotten == ["a1", "a2"]
        with pytest.raises(MetadataNotFoundError):
            await store.get("e")
        nursery.cancel_scope.cancel()


async def test_new_memory_of_the_same_agent_is_seen_and_nobody_is_forgotten(
    store: NixlMetadataStore,
) -> None:
    forgotten: list[str] = []

    def forget(agent: str) -> None:
        forgotten.append(agent)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.watch, forget)
        await store.put("e", metadata("e", "a1"), lease_id=0)
        await store.get("e")
        grown = msgspec.structs.replace(
            metadata("e", "a1"),
            memory_descriptors={"kv": described("a1"), "state": described("a1", 8192)},
        )
        await store.put("e", grown, lease_id=0)
        await trio.testing.wait_all_tasks_blocked()
        assert await store.get("e") == grown
        assert forgotten == []
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"engine_id": "e"}),
        msgspec.msgpack.encode(metadata("other", "a1")),
        msgspec.msgpack.encode(
            msgspec.structs.replace(metadata("e", "a1"), agent_name="somebody-else")
        ),
        msgspec.msgpack.encode(
            msgspec.structs.replace(metadata("e", "a1"), memory_descriptors={"kv": b"junk"})
        ),
        bytes(METADATA_BYTES_MAX + 1),
    ],
)
async def test_garbage_is_a_typed_error_and_is_not_cached(
    control: ControlPlane, store: NixlMetadataStore, garbage: bytes
) -> None:
    await control.put("dynamo/nixl_metadata/e", garbage)
    with pytest.raises(RemoteProtocolError):
        await store.get("e")
    await store.put("e", metadata("e", "a1"), lease_id=0)
    assert (await store.get("e")).agent_name == "a1"


async def test_what_is_too_large_or_of_another_is_not_stored(store: NixlMetadataStore) -> None:
    large = NixlMetadata(
        engine_id="e", agent_name="a1", memory_descriptors={"kv": bytes(METADATA_BYTES_MAX)}
    )
    for wrong in (large, metadata("other", "a1")):
        with pytest.raises(RequestError):
            await store.put("e", wrong, lease_id=0)
    for name in ("", "a/b", "x" * 129):
        with pytest.raises(RequestError):
            await store.get(name)


async def test_news_that_overtakes_a_read_is_not_lost(store: NixlMetadataStore) -> None:
    """What was read before the engine was replaced must not stay in the cache for ever."""

    class Overtaken(MemoryControlPlane):
        async def get(self, key: str) -> Entry | None:
            entry = await super().get(key)
            if not reads:
                await self.put(key, store.encode("e", metadata("e", "a2")))
                await trio.testing.wait_all_tasks_blocked()
            reads.append(key)
            return entry

    reads: list[str] = []
    control = Overtaken()
    overtaken = NixlMetadataStore("dynamo", control)

    def forget(agent: str) -> None:
        raise AssertionError("nobody was known yet")

    await control.put(overtaken.key("e"), store.encode("e", metadata("e", "a1")))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(overtaken.watch, forget)
        await trio.testing.wait_all_tasks_blocked()
        assert (await overtaken.get("e")).agent_name == "a2"
        assert len(reads) == 2
        nursery.cancel_scope.cancel()


async def test_who_was_read_before_the_store_began_anew_is_told_of() -> None:
    """As when etcd has lost its disk: its revisions, which are small now, say nothing of those."""
    sending, events = trio.open_memory_channel[WatchEvent](8)

    class Anew(MemoryControlPlane):
        entry: Entry | None = None

        async def get(self, key: str) -> Entry | None:
            await trio.lowlevel.checkpoint()
            return self.entry

        @asynccontextmanager
        async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[WatchEvent]]:
            yield events

    control, told = Anew(), list[str]()
    store = NixlMetadataStore("dynamo", control)
    key, value = store.key("e"), store.encode("e", metadata("e", "a1"))
    before, after = (Entry(key, value, rev, rev, 0) for rev in (1000, 3))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.watch, told.append)
        await trio.testing.wait_all_tasks_blocked()
        control.entry = before
        assert (await store.get("e")).agent_name == "a1"
        control.entry = after
        await sending.send(Resync(3, [after]))
        await trio.testing.wait_all_tasks_blocked()
        # It may live, and be there again already: it is asked.
        assert told == ["a1"]
        assert (await store.get("e")).agent_name == "a1"
        await sending.send(Delete(key, 9))
        await trio.testing.wait_all_tasks_blocked()
        assert told == ["a1", "a1"]
        nursery.cancel_scope.cancel()


async def test_what_was_dropped_is_read_again(
    control: ControlPlane, store: NixlMetadataStore
) -> None:
    await store.put("e", metadata("e", "a1"), lease_id=0)
    await store.get("e")
    await control.put(store.key("e"), store.encode("e", metadata("e", "a2")))
    assert (await store.get("e")).agent_name == "a1", "no watch runs, so the cache is believed"
    store.drop("e")
    assert (await store.get("e")).agent_name == "a2"


async def test_metadata_that_no_member_signed_are_none_and_end_nobody(
    control: ControlPlane, autojump_clock: MockClock
) -> None:
    """Somebody may write to etcd: his memory is not asked, and whose key he took stays known."""
    members = signed_control(control, RealEnv(), [bytes(range(32))])
    writer, reader = (NixlMetadataStore("dynamo", members) for _ in range(2))
    his = writer.encode("e", metadata("e", "his"))
    await control.put("dynamo/nixl_metadata/e", his)
    with pytest.raises(MetadataNotFoundError, match="has no signature"):
        await reader.get("e")
    gone: list[str] = []
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def put_back() -> None:
            await trio.sleep(0.5)
            await writer.put("e", metadata("e", "a1"), lease_id=0)

        assert (await reader.find("e", patience_s=5)).agent_name == "a1"
        reader.drop("e")
        nursery.start_soon(reader.watch, gone.append)
        await trio.sleep(1)
        assert (await reader.get("e")).agent_name == "a1"
        await control.put("dynamo/nixl_metadata/e", his)
        await trio.sleep(1)
        assert (await reader.get("e")).agent_name == "a1"
        assert gone == []
        await writer.put("e", metadata("e", "a2"), lease_id=0)
        await trio.sleep(1)
        assert (await reader.get("e")).agent_name == "a2"
        assert gone == ["a1"]
        nursery.cancel_scope.cancel()
