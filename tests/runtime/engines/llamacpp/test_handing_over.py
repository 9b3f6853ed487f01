"""SmolLM2's KV in blocks: an answer goes on in another engine from where the first one left it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from tests import needs
from tests.runtime.engines.loop.hosting import Gathering
from tests.runtime.kv.ranges import memory_of, ranges_of
from trinamo.runtime.context import Context
from trinamo.runtime.engines.llamacpp.engine import LlamaCppEngine, open_llamacpp_engine
from trinamo.runtime.engines.llamacpp.model_file import find_model
from trinamo.runtime.engines.llamacpp.state import SequenceFormat
from trinamo.runtime.engines.loop.host import EngineHost
from trinamo.runtime.engines.loop.step import Sampling, StepItem
from trinamo.runtime.kv.memory import KvLayout, KvMemory
from trinamo.runtime.protocol.openai.generate import ChatMessage, GenerateRequest

pytestmark = pytest.mark.check

needs.LLAMACPP.imported()

TOKENS = 16
THINGS = (
    "cats",
    "the sea",
    "a bridge",
    "bread",
    "winter",
    "trains",
    "a violin",
    "rain",
    "gold",
    "bees",
)
QUESTIONS = [
    *(f"Write one sentence about {thing}." for thing in THINGS),
    *(f"Name three things that go well with {thing}, and say why each does." for thing in THINGS),
]


@pytest.fixture
async def prefill() -> AsyncIterator[EngineHost]:
    async with open_llamacpp_engine(kv_tokens=1024, context_tokens_max=512) as host:
        yield host


@pytest.fixture
async def decode() -> AsyncIterator[EngineHost]:
    async with open_llamacpp_engine(kv_tokens=1536, context_tokens_max=512) as host:
        yield host


def ask(question: str) -> GenerateRequest:
    return GenerateRequest(
        model="SmolLM2",
        messages=[ChatMessage("user", question)],
        max_tokens=TOKENS,
        temperature=0,
        # Behind what another question left, a prompt is computed in another batch, and a logit may
        # differ in its last digit.
        tenant=question,
    )


async def alone(host: EngineHost, request: GenerateRequest) -> str:
    sink = Gathering()
    await host.forward(request, Context("alone"), sink)
    return "".join(delta.text for delta in sink.deltas)


async def handed_over(
    source: EngineHost, target: EngineHost, request: GenerateRequest, dropped: Sequence[int] = ()
) -> str:
    assert source.kv is not None
    assert target.kv is not None
    sink = Gathering()
    async with target.reserve(request, Context("decode")) as reservation:
        async with source.prefill_and_keep(request, Context("prefill")) as kept:
            count = await kept.wait_filled(0)
            assert count == len(kept.block_ids) == len(reservation.block_ids)
            pairs = zip(kept.block_ids, reservation.block_ids, strict=True)
            for number, (here, there) in enumerate(pairs):
                if number not in dropped:
                    copy(memory_of(source.kv), here, memory_of(target.kv), there)
            first = await kept.first_token()
        await reservation.adopt(first, sink)
    return "".join(delta.text for delta in sink.deltas)


def copy(source: KvMemory, here: int, target: KvMemory, there: int) -> None:
    for a, b in zip(ranges_of(source, [here]), ranges_of(target, [there]), strict=True):
        b[:] = a


async def test_answers_are_the_same_whoever_computed_the_prompt(
    prefill: EngineHost, decode: EngineHost
) -> None:
    """Twenty greedy answers, from blocks at other numbers; without one block most differ."""
    assert prefill.kv is not None
    assert decode.kv is not None
    assert prefill.kv.fingerprint == decode.kv.fingerprint
    # Blocks are then at other numbers there than here.
    elsewhere = decode.kv.pool.take(31)
    changed = 0
    for question in QUESTIONS:
        request = ask(question)
        expected = await alone(decode, request)
        assert await handed_over(prefill, decode, request) == expected, question
        memory_of(decode.kv).view[:] = 0
        without = await handed_over(prefill, decode, request, dropped=[0])
        changed += without != expected
    assert changed > len(QUESTIONS) // 2
    decode.kv.pool.give_back(elsewhere or [])
    for host in (prefill, decode):
        assert host.statistics().blocks_used == 0


@pytest.fixture(scope="module")
def engine() -> LlamaCppEngine:
    return LlamaCppEngine(
        find_model(),
        model="SmolLM2",
        context_tokens_max=512,
        kv_tokens=1024,
        running_max=4,
        step_tokens_max=64,
        threads=1,
    )


def step(engine: LlamaCppEngine, tokens: int) -> None:
    item = StepItem(
        slot=2,
        token_ids=list(range(100, 100 + tokens)),
        position=0,
        block_ids=[],
        is_sampled=True,
        sampling=Sampling(),
    )
    engine.step([item])


def prefilled(engine: LlamaCppEngine, tokens: int) -> tuple[int, bytes]:
    """What llama.cpp writes of a sequence, and under which number."""
    step(engine, tokens)
    number = engine._sequences.of(2).id
    blob = bytes(engine._context.get_state_seq_data(number))
    engine.recover()
    return number, blob


@pytest.mark.parametrize("layout", KvLayout)
def test_what_llama_cpp_wrote_comes_back_byte_by_byte(
    engine: LlamaCppEngine, layout: KvLayout
) -> None:
    number, blob = prefilled(engine, 37)
    found = SequenceFormat.of(blob)
    assert found == SequenceFormat(magic=0xAF143CD8, layers=30, row_bytes=384)
    memory = KvMemory(found.shape(heads=3, block_tokens=16), 9, layout)
    found.save(blob, memory, [7, 0, 4], 37)
    assert found.blob(number, memory, [7, 0, 4], 37) == blob


def test_what_comes_has_room_in_the_cells_of_prompts_that_only_may_come_again(
    engine: LlamaCppEngine,
) -> None:
    step(engine, 64)
    engine.release(2)
    assert engine.find(list(range(100, 164)), "") == 63
    try:
        engine.load(1, 1000, range(63))
        assert not engine.find(list(range(100, 164)), "")
    finally:
        engine.recover()


def test_the_fingerprint_names_the_version_of_the_binding(engine: LlamaCppEngine) -> None:
    assert engine.info.kv_fingerprint == (
        "engine=llamacpp version=0.2.18 model=1a0c4c1d4a1e5d2f dtype=<f2 dimensions=30x2x3x64"
        " block_tokens=16 layout=block_first"
    ).replace("1a0c4c1d4a1e5d2f", engine.info.fingerprint)
