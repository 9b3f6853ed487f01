"""Nobody is dearer than who is taken, though a few are compared: as by comparing them all."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing
from hypothesis import given, strategies as st

from tests.runtime.caller.requests import Request
from tests.runtime.kv.naming import OWN
from trinamo.runtime.caller.kv.cost import Candidate, costs
from trinamo.runtime.caller.kv.routing import KvRouting
from trinamo.runtime.caller.router import Router
from trinamo.runtime.config.router import RouterKvConfig
from trinamo.runtime.env import RealEnv
from trinamo.runtime.planes import Entry, Snapshot
from trinamo.runtime.protocol.discovery.candidates import Policy
from trinamo.runtime.protocol.discovery.instances import EndpointName, Instance, encode_instance
from trinamo.runtime.protocol.kv.names import RoutingHint, hint_of_tokens
from trinamo.transports.memory.control import MemoryControlPlane
from trinamo.transports.memory.events import MemoryBroker, MemoryEventPlane

ENDPOINT = EndpointName("ns", "engine", "generate")
IDS = ("a", "b", "c", "d")
BLOCK_TOKENS = 2
# Few different tokens in short blocks, so that prompts share their first blocks.
PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=9)
STEP = st.one_of(
    st.tuples(st.just("ask"), PROMPT, st.integers(0, 9)),
    st.tuples(st.just("ask"), PROMPT, st.integers(0, 9)),
    st.tuples(st.sampled_from(["first", "end", "fail"]), PROMPT, st.integers(0, 9)),
)


def plain(
    under_way: list[tuple[str, RoutingHint, int, Request]],
    sent: list[tuple[str, RoutingHint]],
    hint: RoutingHint,
    instance_id: str,
) -> Candidate:
    """An instance as it would be with the prompt, found by going through all that was sent."""
    own = [(each, left) for name, each, left, _ in under_way if name == instance_id]
    blocks = {key for each, _ in own for key in each.keys}
    held = {key for name, each in sent if name == instance_id for key in each.keys}
    overlap = next((at for at, key in enumerate(hint.keys) if key not in held), len(hint.keys))
    return Candidate(
        overlap_blocks=overlap,
        prefill_tokens=sum(left for _, left in own),
        decode_blocks=len(blocks | set(hint.keys)),
        active_requests=len(own),
    )


@given(
    steps=st.lists(STEP, max_size=30),
    weights=st.builds(
        RouterKvConfig,
        overlap_credit=st.sampled_from([0.0, 1.0, 3.0]),
        overlap_credit_decay=st.sampled_from([0.0, 0.0, 1.0]),
        prefill_load_scale=st.sampled_from([1.0, 0.5]),
        active_request_weight=st.sampled_from([0.0, 2.0]),
        events=st.just(False),
        sync=st.just(False),
    ),
)
def test_nobody_is_dearer_than_who_is_taken(
    steps: list[tuple[str, list[int], int]], weights: RouterKvConfig
) -> None:
    """Whatever was sent, computed and lost before; nothing is told, so all is what was sent."""

    async def play() -> None:
        rng = random.Random(1)
        kv = KvRouting(MemoryEventPlane(MemoryBroker()), ENDPOINT, weights, rng, OWN)
        router = Router(MemoryControlPlane(), ENDPOINT, RealEnv(), policy=Policy.KV, kv=kv)
        instances = [Instance(endpoint=str(ENDPOINT), id=each, transports={}) for each in IDS]
        entries = [Entry(each.key, encode_instance(each), 1, 1) for each in instances]
        router.apply(Snapshot(1, entries))
        under_way: list[tuple[str, RoutingHint, int, Request]] = []
        sent: list[tuple[str, RoutingHint]] = []
        for kind, prompt, number in steps:
            if kind == "ask":
                hint = hint_of_tokens(OWN, prompt, BLOCK_TOKENS)
                exclude = IDS[: number % 3]
                taken = router.choose(hint=hint, exclude=exclude)
                left = [each for each in IDS if each not in exclude]
                found = costs(
                    kv._weights,
                    [plain(under_way, sent, hint, each) for each in left],
                    tokens=hint.tokens,
                    block_tokens=BLOCK_TOKENS,
                )
                assert found[left.index(taken.id)] == pytest.approx(min(found))
                request = Request()
                overlap = plain(under_way, sent, hint, taken.id).overlap_blocks
                router.begin(taken, request, hint)
                tokens = max(hint.tokens - overlap * BLOCK_TOKENS, 0)
                under_way.append((taken.id, hint, tokens, request))
                sent.append((taken.id, hint))
            elif under_way:
                name, hint, tokens, request = under_way.pop(number % len(under_way))
                if kind == "first":
                    router.first_item(request)
                    under_way.append((name, hint, 0, request))
                else:
                    router.end(instances[IDS.index(name)], request)

    trio.run(play, clock=trio.testing.MockClock())
