"""What members sign in discovery, who may read it without the secret, and what counts for nothing."""

from __future__ import annotations

import json
import random
from base64 import b64decode, b64encode

import pytest
import trio
import trio.testing

from tests.transports.security.test_identity import ANOTHER, NOW, SECRET, SetClock, SetEnv
from trinamo.runtime.env import Env
from trinamo.runtime.errors import RemoteProtocolError, RequestError, UnavailableError
from trinamo.runtime.planes import ControlPlane, Subscription
from trinamo.runtime.protocol.discovery.instances import Instance, decode_instance, encode_instance
from trinamo.runtime.protocol.undecodable import Unsigned
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane
from trinamo.transports.memory.store import MemoryStore
from trinamo.transports.security import signatures as signatures_module
from trinamo.transports.security.identity import RENEWED_S, VALID_S
from trinamo.transports.security.sealing import SealedEvents, Sealer
from trinamo.transports.security.signatures import Signatures
from trinamo.transports.security.signed import signed_control

ONE = Instance(endpoint="a/b/c", id="1f" * 8, transports={"tcp": "127.0.0.1:1"})
VALUE = encode_instance(ONE)
ED25519 = bytes.fromhex("06032b6570")
"""Its object identifier, in DER."""


def env(at: float = NOW) -> Env:
    return SetEnv(SetClock(at))


def plane(
    store: MemoryStore, *secrets: bytes, at: float = NOW, seen: Env | None = None
) -> ControlPlane:
    return signed_control(MemoryControlPlane(store), seen or env(at), secrets)


async def put(store: MemoryStore, secret: bytes = SECRET, *, leased: bool = True) -> None:
    writer = plane(store, secret)
    lease_id = (await writer.grant_lease(60.0)).id if leased else 0
    await writer.put(ONE.key, VALUE, lease_id=lease_id)


async def value(reader: ControlPlane) -> bytes:
    entry = await reader.get(ONE.key)
    assert entry is not None
    return entry.value


async def test_the_signature_is_a_line_of_its_own_that_tools_may_read() -> None:
    store = MemoryStore()
    await put(store)
    first, second = (await value(MemoryControlPlane(store))).split(b"\n")
    assert first == VALUE
    assert len(b64decode(json.loads(second)["signature"])) < 600


async def test_who_has_no_secret_reads_it_as_it_is() -> None:
    store = MemoryStore()
    await put(store)
    assert await value(plane(store)) == VALUE
    await plane(store).put(ONE.key, VALUE)
    assert await value(MemoryControlPlane(store)) == VALUE


@pytest.mark.parametrize("secrets", [[ANOTHER], [SECRET, ANOTHER], [ANOTHER, SECRET]])
async def test_any_of_the_secrets_counts_and_no_other(secrets: list[bytes]) -> None:
    store = MemoryStore()
    await put(store)
    read = await value(plane(store, *secrets))
    assert isinstance(read, Unsigned) is (SECRET not in secrets)
    assert read == (VALUE if SECRET in secrets else b"")


async def test_what_nobody_signed_says_so_and_what_to_do() -> None:
    store = MemoryStore()
    await plane(store).put(ONE.key, VALUE)
    reader = plane(store, SECRET)
    with pytest.raises(RemoteProtocolError, match=r"no signature.*secret_file.*delete it"):
        decode_instance(ONE.key, await value(reader))
    assert vars(reader)["unsigned_count"] == 1


async def test_a_certificate_that_no_library_understands_is_a_stranger_s_and_ends_no_reader() -> (
    None
):
    """Whoever may write to etcd sends it to all members at once."""
    store = MemoryStore()
    await put(store)
    written = await value(MemoryControlPlane(store))
    signature = b64decode(json.loads(written.split(b"\n")[1])["signature"])
    places = [at for at in range(len(signature)) if signature.startswith(ED25519, at)]
    assert len(places) == 3, "what it is signed with, twice, and the kind of its key"
    for at in places:
        other = signature[: at + 2] + b"\x27" + signature[at + 3 :]
        line = VALUE + b'\n{"signature":"' + b64encode(other) + b'"}'
        await MemoryControlPlane(store).put(ONE.key, line)
        assert isinstance(await value(plane(store, SECRET)), Unsigned)


@pytest.mark.parametrize("leased", [True, False])
@pytest.mark.parametrize("hours", [-13, -11, 11, 13])
async def test_what_lives_with_its_owner_is_believed_for_hours(hours: int, *, leased: bool) -> None:
    """What is written for good is believed for good."""
    store = MemoryStore()
    await put(store, leased=leased)
    read = await value(plane(store, SECRET, at=NOW + hours * 3600))
    is_old = leased and abs(hours * 3600) > VALID_S
    assert isinstance(read, Unsigned) is is_old
    if isinstance(read, Unsigned):
        assert "clocks" in read.fault


async def test_what_is_written_later_is_signed_with_a_fresh_certificate() -> None:
    store, clock = MemoryStore(), SetClock()
    writer = plane(store, SECRET, seen=SetEnv(clock))
    lease_id = (await writer.grant_lease(60.0)).id
    await writer.put(ONE.key, VALUE, lease_id=lease_id)
    before = await value(MemoryControlPlane(store))
    clock.at += RENEWED_S + 1
    await writer.put(ONE.key, VALUE, lease_id=lease_id)
    assert await value(MemoryControlPlane(store)) != before
    assert await value(plane(store, SECRET, at=NOW + RENEWED_S + VALID_S)) == VALUE


async def test_keys_that_nobody_acts_on_are_left_as_they_are() -> None:
    store = MemoryStore()
    await plane(store, SECRET).put("of/my/own", b"anything")
    entry = await MemoryControlPlane(store).get("of/my/own")
    assert entry is not None
    assert entry.value == b"anything"


def test_a_member_signs_for_itself_alone() -> None:
    signatures = Signatures([SECRET], env())
    signature = signatures.sign(ONE.id, ONE.key, 1, VALUE)
    assert signatures.fault(ONE.id, ONE.key, 1, VALUE, signature) == ""
    assert signatures.fault("2f" * 8, ONE.key, 1, VALUE, signature)


def test_a_certificate_for_connections_signs_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has the private key of one."""
    monkeypatch.setattr(signatures_module, "_URI", "trinamo://requests/")
    signature = Signatures([SECRET], env()).sign(ONE.id, ONE.key, 1, VALUE)
    monkeypatch.undo()
    assert Signatures([SECRET], env()).fault(ONE.id, ONE.key, 1, VALUE, signature)


async def test_who_reads_many_entries_lets_others_run() -> None:
    """A fleet's take a second together, in which a frontend has other work."""
    store = MemoryStore()
    writer, turns = plane(store, SECRET), 0
    for number in range(100):
        await writer.put(f"instances/a/b/c/{number:x}", VALUE)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        found = await plane(store, SECRET).range("instances/")
        nursery.cancel_scope.cancel()
    assert {each.value for each in found.entries} == {VALUE}
    assert turns >= 3


async def test_what_is_remembered_of_strangers_is_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    reader, keys = plane(store, SECRET), [f"models/m/{number:x}" for number in range(1025)]
    for key in keys:
        await MemoryControlPlane(store).put(key, b"{}")
    for _ in range(2):
        await reader.get(keys[0])
    assert len(caplog.messages) == 1
    for key in keys[1:]:
        await reader.get(key)
    await reader.get(keys[0])
    assert len(caplog.messages) == len(keys) + 1


async def test_a_message_of_the_largest_size_fits_sealed() -> None:
    broker = MemoryBroker()
    events = SealedEvents(MemoryEventPlane(broker), Sealer([SECRET], random.Random(1)))
    async with events.subscribe("a.b") as messages:
        await events.publish("a.b", bytes(events.message_bytes_max))
        with pytest.raises(RequestError):
            await events.publish("a.b", bytes(events.message_bytes_max + 1))
        assert len((await anext(messages)).payload) == events.message_bytes_max


async def test_who_forges_answers_keeps_nobody_from_a_snapshot(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """He is there first each time, and says what he likes, or that nobody is there in a word of his own."""
    broker, rng = MemoryBroker(), random.Random(1)
    stranger = MemoryEventPlane(broker)
    events = SealedEvents(MemoryEventPlane(broker), Sealer([SECRET], rng))
    owner = SealedEvents(MemoryEventPlane(broker), Sealer([SECRET], rng))

    async def forge(messages: Subscription) -> None:
        async for message in messages:
            for _ in range(3):
                await stranger.publish(message.reply, b"nobody is there")

    async with (
        stranger.subscribe("a.b") as heard,
        owner.subscribe("a.b") as asked,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(forge, heard)

        @nursery.start_soon
        async def answer() -> None:
            request = await anext(asked)
            await trio.sleep(0.5)
            await owner.publish(request.reply, b"all: " + request.payload)

        reply = await events.request("a.b", b"tell", timeout_s=60)
        nursery.cancel_scope.cancel()
    assert reply.payload == b"all: tell"
    # Once, in one series.
    assert (events.unsigned_count, events._sealer.refused) == (3, 0)
    with pytest.raises(UnavailableError):
        await events.request("a.c", b"tell", timeout_s=60)
