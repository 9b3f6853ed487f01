"""Predicted loads are what is under way, each block counted once, and nothing once all has ended."""

from __future__ import annotations

import random
from collections import Counter

import trio
import trio.testing
from hypothesis import given, strategies as st

from tests.runtime.kv.indexing import held
from tests.runtime.kv.naming import OWN
from trinamo.runtime.caller.kv.loads import ActiveRequest, PredictedLoads
from trinamo.runtime.caller.kv.recent import RecentBlocks
from trinamo.runtime.caller.kv.routing import KvRouting
from trinamo.runtime.config.router import RouterKvConfig
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.kv.names import RoutingHint, hint_of_text, hint_of_tokens
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane

ENDPOINT = EndpointName("ns", "engine", "generate")
INSTANCES = ("a", "b", "c")
INSTANCE = st.sampled_from(INSTANCES)
REQUEST = st.integers(0, 5)
# Few different tokens in short blocks, so that prompts share their first blocks.
PROMPT = st.lists(st.integers(0, 1), max_size=9).map(lambda ids: hint_of_tokens(OWN, ids, 2))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), REQUEST, INSTANCE, PROMPT),
        st.tuples(st.just("begin"), REQUEST, INSTANCE, PROMPT),
        st.tuples(st.just("first"), REQUEST, INSTANCE, PROMPT),
        st.tuples(st.just("end"), REQUEST, INSTANCE, PROMPT),
    ),
    max_size=40,
)
Steps = list[tuple[str, int, str, RoutingHint]]


@given(STEPS)
def test_the_load_is_that_of_the_requests_under_way(steps: Steps) -> None:
    """After any step each instance's blocks, tokens and requests are those of what is under way."""
    loads = PredictedLoads()
    active: dict[int, tuple[str, RoutingHint, int]] = {}
    for kind, number, instance_id, hint in steps:
        if kind == "begin":
            loads.begin(number, ActiveRequest(instance_id, hint.keys, hint.tokens))
            active[number] = instance_id, hint, hint.tokens
        elif kind == "first":
            loads.first_token(number)
            if number in active:
                active[number] = (*active[number][:2], 0)
        else:
            assert loads.end(number) == (number in active)
            active.pop(number, None)
        for each in INSTANCES:
            own = [one for one in active.values() if one[0] == each]
            load = loads.load(each)
            assert load.requests == len(own)
            assert load.prefill_tokens == sum(tokens for _, _, tokens in own)
            assert load.blocks == Counter(key for _, hint, _ in own for key in hint.keys)
    for number in list(active):
        loads.end(number)
    assert loads.totals == (0, 0)
    assert len(loads) == 0


FATES = st.lists(st.sampled_from(["arrives", "arrives", "lost"]), min_size=40, max_size=40)


@given(STEPS, STEPS, FATES)
def test_routers_agree_whatever_is_lost(one: Steps, other: Steps, fates: list[str]) -> None:
    """Once events are quiet both predict the same, and nothing once all requests have ended.

    A router that ends without a word is forgotten with all that it sent.
    """

    async def play() -> None:
        broker = MemoryBroker()
        scopes = [trio.CancelScope(), trio.CancelScope()]
        routers = [
            KvRouting(
                MemoryEventPlane(broker),
                ENDPOINT,
                RouterKvConfig(events=False),
                random.Random(seed),
                OWN,
            )
            for seed in (1, 2)
        ]

        async def run(at: int) -> None:
            with scopes[at]:
                await routers[at].run()

        async with trio.open_nursery() as nursery:
            for at in range(2):
                nursery.start_soon(run, at)
            await trio.sleep(0.1)
            under_way: set[tuple[int, int]] = set()
            mixed = [(at, step) for at, steps in enumerate((one, other)) for step in steps]
            for (at, (kind, number, instance_id, hint)), fate in zip(mixed, fates, strict=False):
                if fate == "lost":
                    broker.drop_next(1)
                if kind == "begin":
                    routers[at].end(number)
                    routers[at].begin(instance_id, number, hint)
                    under_way.add((at, number))
                elif kind == "first":
                    routers[at].first_token(number)
                else:
                    routers[at].end(number)
                    under_way.discard((at, number))
                await trio.sleep(0.01)
            broker.drop_next(0)
            await trio.sleep(10)
            found = [
                (each.active_requests, each.active_blocks, each.waiting_prefill_tokens)
                for each in (router.statistics() for router in routers)
            ]
            assert found[0] == found[1]
            assert found[0][0] == len(under_way)
            for at, number in under_way:
                if at == 0:
                    routers[0].end(number)
            # The second dies with its requests under way.
            scopes[1].cancel()
            await trio.sleep(10)
            left = routers[0].statistics()
            assert (left.active_requests, left.active_blocks) == (0, 0)
            assert (left.waiting_prefill_tokens, left.routers) == (0, 0)
            nursery.cancel_scope.cancel()

    trio.run(play, clock=trio.testing.MockClock(autojump_threshold=0))


SENT = st.lists(
    st.tuples(INSTANCE, PROMPT, st.integers(0, 70)),
    max_size=12,
)


@given(SENT, PROMPT)
def test_what_was_sent_lately_is_thought_to_be_there(
    sent: list[tuple[str, RoutingHint, int]], asked: RoutingHint
) -> None:
    """Without events an instance is thought to hold what it was sent within the time, and no more."""
    recent, now = RecentBlocks(120.0), 0.0
    times: dict[tuple[str, int], float] = {}
    for instance_id, hint, pause in sent:
        now += pause
        recent.send(instance_id, hint.keys, now)
        times.update(dict.fromkeys(((instance_id, key) for key in hint.keys), now))
    found = held(recent.reach(asked.keys, now))
    for each in INSTANCES:
        lately = {key for (name, key), at in times.items() if name == each and at > now - 120}
        leading = next((at for at, key in enumerate(asked.keys) if key not in lately), None)
        assert found.get(each, 0) == (len(asked.keys) if leading is None else leading)
    recent.expire(now + 120)
    assert len(recent) == 0


@given(st.text(max_size=200), st.text(max_size=200))
def test_texts_that_begin_alike_share_their_first_blocks(one: str, other: str) -> None:
    """As many as full pieces of both are equal, and no more."""
    first, second = one.encode(), other.encode()
    size = 2 * 4
    same = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    ours, theirs = hint_of_text(OWN, first, 2).keys, hint_of_text(OWN, second, 2).keys
    shared = sum(a == b for a, b in zip(ours, theirs, strict=False))
    assert shared == same // size
