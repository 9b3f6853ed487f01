"""Whatever stands in discovery is taken or refused for itself, as it was signed or as nothing; and which card of a
model is in force."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import trio
from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.runtime.caller.tables import HandEnv
from tests.transports.security.test_identity import SetEnv
from trinamo.runtime.caller.router import Router
from trinamo.runtime.planes import Delete, Entry, Message, Put, Snapshot
from trinamo.runtime.protocol.discovery.instances import EndpointName, is_address
from trinamo.runtime.protocol.discovery.model_cards import (
    ANYBODY,
    ModelTable,
    encode_card,
    model_key,
)
from trinamo.runtime.protocol.openai.generate import ModelCard
from trinamo.runtime.protocol.undecodable import Unsigned
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane
from trinamo.transports.memory.store import MemoryStore
from trinamo.transports.security.sealing import SealedEvents, Sealer
from trinamo.transports.security.signed import signed_control
from trinamo.transports.tcp.sockets import split_address

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.sampled_from(
        ["a/b/c", "1", "m", "chat", "[::1%\0]:80", "h:1", "h:0", "[::1]:1", "127.0.0.1:1"]
    ),
)
values = st.recursive(
    leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)
near_misses = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("incarnation", "draining", "metadata", "created", "chat"), values),
        "protocol": st.just(["3.0"]) | st.lists(st.text()) | values,
        "build": st.text() | values,
        "endpoint": st.just("a/b/c") | values,
        "id": st.sampled_from("12") | values,
        "name": st.sampled_from(["m", "chat", "1", "m/1", ""]) | values,
        "transports": st.dictionaries(st.sampled_from(["tcp", "nats", ""]), leaves) | values,
    },
)
entries = st.one_of(
    st.binary(),
    values.map(lambda value: json.dumps(value).encode()),
    near_misses.map(lambda value: json.dumps(value).encode()),
)
keys = st.one_of(
    st.sampled_from(
        [
            "a/b/c/1",
            "a/b/c/2",
            "m/1",
            "m/2",
            "chat/m",
            "chat/1",
            "chat/chat",
            "%00/1",
            "",
            "/",
            "m/",
        ]
    ),
    st.text(),
)


@given(st.lists(st.tuples(keys, entries, st.booleans()), max_size=20))
def test_no_entry_ends_a_watch(steps: list[tuple[str, bytes, bool]]) -> None:
    """No bytes under any key raise; what is taken has addresses that can be dialled."""
    router = Router(MemoryControlPlane(), EndpointName("a", "b", "c"), HandEnv())
    table = ModelTable(lambda *_: 1.0)
    for key, value, is_deleted in steps:
        if is_deleted:
            router.apply(Delete(f"instances/{key}", 2))
            table.delete(f"models/{key}", 0)
        else:
            router.apply(Put(Entry(f"instances/{key}", value, 1, 1)))
            table.put(f"models/{key}", value)
        table.review(0.5)
    router.apply(Snapshot(3, [Entry(f"instances/{key}", value, 1, 1) for key, value, _ in steps]))
    table.replace(((f"models/{key}", value) for key, value, _ in steps), 0)
    for instance in router.instances:
        if "tcp" in instance.transports:
            split_address(instance.transports["tcp"])
    table.review(10)


@given(st.text(max_size=40) | st.from_regex(r"\A[\[\]:%.a-f0-9-]{1,24}\Z"))
def test_an_address_that_is_taken_can_be_split_and_encoded(address: str) -> None:
    if is_address("tcp", address):
        host, port = split_address(address)
        assert host.encode("idna" if not set(host) & set(":%") else "ascii")
        assert 0 < port < 65536


cards = st.builds(
    ModelCard,
    name=st.sampled_from("mn"),
    endpoint=st.sampled_from(["a/b/c", "a/b/d"]),
    context_tokens_max=st.integers(0, 1),
    created=st.integers(0, 3),
)
IGNORED = {"created": 0}


def said(card: ModelCard) -> ModelCard:
    return msgspec.structs.replace(card, **IGNORED)


class ModelTableMachine(RuleBasedStateMachine):
    """The table beside a dictionary of cards: who is asked for a model always agrees about it."""

    @initialize()
    def open(self) -> None:
        self.table = ModelTable()
        self.cards: dict[str, ModelCard] = {}
        self.in_force: dict[str, ModelCard] = {}

    def _check(self, change: Any) -> None:
        now = self.table.models
        assert {card.name for card in change.removed} == self.in_force.keys() - now.keys()
        assert {card.name for card in change.added} == now.keys() - self.in_force.keys()
        assert {card.name for card in change.updated} == {
            name
            for name in now.keys() & self.in_force.keys()
            if said(now[name]) != said(self.in_force[name])
        }
        for name in now.keys() & self.in_force.keys():
            stands = [c for c in self.cards.values() if said(c) == said(self.in_force[name])]
            # No card takes the place of one that a worker still stands by.
            assert not stands or said(now[name]) == said(self.in_force[name])
        self.in_force = now

    @rule(card=cards, worker=st.sampled_from("1234"))
    def put(self, card: ModelCard, worker: str) -> None:
        key = model_key(card.name, worker)
        self.cards[key] = card
        self._check(self.table.put(key, encode_card(card)))

    @rule(name=st.sampled_from("mn"), worker=st.sampled_from("1234"))
    def delete(self, name: str, worker: str) -> None:
        self.cards.pop(model_key(name, worker), None)
        self._check(self.table.delete(model_key(name, worker), 0))

    @rule(found=st.lists(st.tuples(cards, st.sampled_from("1234")), max_size=6))
    def replace(self, found: list[tuple[ModelCard, str]]) -> None:
        self.cards = {model_key(card.name, worker): card for card, worker in found}
        entries = [(key, encode_card(card)) for key, card in self.cards.items()]
        self._check(self.table.replace(entries, 0))

    @invariant()
    def exactly_those_that_agree_are_asked(self) -> None:
        if not hasattr(self, "table"):
            return
        assert self.table.models.keys() == {card.name for card in self.cards.values()}
        for name, in_force in self.table.models.items():
            of_it = {key: card for key, card in self.cards.items() if card.name == name}
            agreeing = {key for key, card in of_it.items() if said(card) == said(in_force)}
            assert agreeing
            assert ANYBODY not in self.table.servers(name)
            assert set(self.table.servers(name)) == {key.rpartition("/")[2] for key in agreeing}
            assert self.table.refused_count(name) == len(of_it) - len(agreeing)


TestModelTable = ModelTableMachine.TestCase


# --- signatures ---

SECRET = b"the secret of these properties, a long one"
KEY = "instances/a/b/c/1f"
KEYS = st.sampled_from([KEY, "instances/a/b/c/1e", "instances/a/b/d/1f", "models/m/1f"])


class Stored:
    """One signed entry, as the store has it, and a plane that reads what it is told the store has."""

    def __init__(self, value: bytes) -> None:
        store = MemoryStore()
        self.plane = signed_control(MemoryControlPlane(store), SetEnv(), [SECRET])
        trio.run(self._put, store, value)

    async def _put(self, store: MemoryStore, value: bytes) -> None:
        lease = await self.plane.grant_lease(60.0)
        await self.plane.put(KEY, value, lease_id=lease.id)
        entry = await MemoryControlPlane(store).get(KEY)
        assert entry is not None
        self.entry = entry

    def read(self, key: str, value: bytes, lease_id: int) -> bytes:
        plane: Any = self.plane
        read: Entry = plane._read(Entry(key, value, 1, 1, lease_id))
        return read.value


VALUES = st.binary(max_size=64)


@given(VALUES)
def test_what_was_signed_is_read(value: bytes) -> None:
    stored = Stored(value)
    entry = stored.entry
    assert stored.read(entry.key, entry.value, entry.lease_id) == value


@given(VALUES, KEYS, st.integers(0, 3), st.data())
def test_what_has_changed_is_read_as_nothing(
    value: bytes, key: str, lease: int, data: st.DataObject
) -> None:
    stored = Stored(value)
    entry = stored.entry
    at = data.draw(st.integers(0, len(entry.value) - 1))
    flipped = data.draw(st.integers(0, 255))
    changed = bytearray(entry.value)
    changed[at] ^= flipped
    cut = bytes(changed[: data.draw(st.sampled_from([len(changed), at]))])
    is_same = (key, cut, lease) == (entry.key, entry.value, entry.lease_id)
    read = stored.read(key, cut, lease)
    assert isinstance(read, Unsigned) is not is_same
    assert read == (value if is_same else b"")


@given(st.binary(max_size=300))
def test_junk_is_read_as_nothing(value: bytes) -> None:
    stored = Stored(b"{}")
    for each in (value, b"{}\n" + value, b'{}\n{"signature":"' + value + b'"}'):
        assert isinstance(stored.read(KEY, each, stored.entry.lease_id), Unsigned)


@given(st.binary(max_size=64), st.binary(max_size=64), st.data())
def test_a_message_is_opened_as_it_was_published_or_not_at_all(
    payload: bytes, junk: bytes, data: st.DataObject
) -> None:
    sealer = Sealer([SECRET], random.Random(1))
    events = SealedEvents(MemoryEventPlane(MemoryBroker()), sealer)
    sealed = sealer.seal(payload, b"event a.b")
    opened = events.opened(Message("a.b", sealed))
    assert opened is not None
    assert opened.payload == payload
    changed = bytearray(sealed)
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))

    async def others() -> None:
        assert events.opened(Message("a.c", sealed)) is None
        assert events.opened(Message("a.b", junk)) is None
        assert events.opened(Message("a.b", bytes(changed))) is None

    trio.run(others)
