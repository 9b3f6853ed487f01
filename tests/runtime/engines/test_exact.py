"""The exact engine: golden tables and tokens, the same on every machine."""

from __future__ import annotations

import math
from contextlib import aclosing

import pytest

from trinamo.runtime.context import Context
from trinamo.runtime.engines.exact.engine import ExactEngine, open_exact_engine
from trinamo.runtime.engines.exact.tables import integers, rotations, softmax
from trinamo.runtime.engines.loop.step import Sampling, StepItem
from trinamo.runtime.engines.prompts import Special
from trinamo.runtime.errors import RequestError
from trinamo.runtime.kv.memory import KvLayout
from trinamo.runtime.protocol.openai.generate import ChatMessage, GenerateRequest


async def generate(request: GenerateRequest) -> str:
    async with (
        open_exact_engine() as host,
        aclosing(host.generate(request, Context("r"))) as deltas,
    ):
        return "".join([delta.text async for delta in deltas])


def test_the_integers_are_splitmix64() -> None:
    # The first outputs of SplitMix64 from seed 0, published with the algorithm.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert integers(0, 3, 7).tolist() == [number % 15 - 7 for number in published]


def test_the_rotations_are_cosines_and_sines() -> None:
    cosines, sines = rotations(300, 16)
    for position in range(0, 300, 7):
        for pair in range(16):
            angle = position / 2**pair
            assert abs(cosines[position, pair] - 64 * math.cos(angle)) <= 0.5 + 1e-9
            assert abs(sines[position, pair] - 64 * math.sin(angle)) <= 0.5 + 1e-9


def test_the_softmax_table_is_an_exponential_that_ends_at_zero() -> None:
    table = softmax()
    for step in range(511):
        assert abs(table[step] - 65536 * math.exp(-step / 32)) <= 0.5 + 1e-9
    assert table[511] == 0


GOLDEN = "hi'lwrs   jwri'lw. utuqeyymqtg'lbqe,wricbscbscqe,shicft'  utuqe,"
GOLDEN_SAMPLED = "r.  j, j, uq  u j'hrtjwddd.icnhiao;l,shrdllhdl,qbtuqe,wuhrdxz's "


async def test_a_greedy_answer_is_the_same_everywhere() -> None:
    messages = [ChatMessage("system", "Be exact."), ChatMessage("user", "Say anything.")]
    asked = GenerateRequest(model="exact", messages=messages, temperature=0, max_tokens=64)
    assert await generate(asked) == GOLDEN


async def test_a_sampled_answer_is_the_same_everywhere() -> None:
    asked = GenerateRequest(model="exact", prompt="Say anything.", seed=7, max_tokens=64)
    assert await generate(asked) == GOLDEN_SAMPLED


async def test_a_small_top_p_leaves_one_candidate() -> None:
    asked = [
        GenerateRequest(model="exact", prompt="a", top_p=0.2, seed=seed, max_tokens=32)
        for seed in (1, 2)
    ]
    assert await generate(asked[0]) == await generate(asked[1])


async def test_a_seed_repeats_an_answer_and_none_draws_one() -> None:
    async def ask(seed: int | None) -> str:
        return await generate(GenerateRequest(model="exact", prompt="a", seed=seed, max_tokens=30))

    assert await ask(3) == await ask(3)
    assert await ask(-1) == await ask(2**64 - 1)
    assert await ask(3) != await ask(4)
    assert await ask(None) != await ask(None)


async def test_a_pool_smaller_than_one_context_is_refused() -> None:
    with pytest.raises(ValueError, match="do not hold one context"):
        async with open_exact_engine(context_tokens_max=512, block_tokens=16, block_count=31):
            pass


def test_a_chat_is_framed_by_special_tokens() -> None:
    messages = [ChatMessage("user", "hi"), ChatMessage("assistant", "é")]
    encoded = ExactEngine().encode(GenerateRequest(model="exact", messages=messages))
    assert encoded == [
        Special.START,
        Special.USER,
        *b"hi",
        Special.END,
        Special.ASSISTANT,
        *"é".encode(),
        Special.END,
        Special.ASSISTANT,
    ]


def test_token_ids_are_taken_as_they_are() -> None:
    engine = ExactEngine()
    assert engine.encode(GenerateRequest(model="exact", token_ids=[0, 260])) == [0, 260]
    with pytest.raises(RequestError, match="from 0 to 260"):
        engine.encode(GenerateRequest(model="exact", token_ids=[261]))


def test_text_with_a_lone_surrogate_is_taken() -> None:
    assert ExactEngine().encode(GenerateRequest(model="exact", prompt="\ud800"))[1:] == [*b"?"]


def test_specials_have_no_text() -> None:
    engine = ExactEngine()
    assert [engine.token_bytes(token_id) for token_id in (65, 255, 256, 260)] == [
        b"A",
        b"\xff",
        b"",
        b"",
    ]


def test_an_interrupted_step_raises() -> None:
    engine = ExactEngine()
    engine.interrupt()
    item = StepItem(
        slot=0,
        token_ids=[1],
        position=0,
        block_ids=[0],
        is_sampled=True,
        sampling=Sampling(),
    )
    with pytest.raises(InterruptedError):
        engine.step([item])


def test_the_fingerprint_differs_with_all_that_changes_the_bytes() -> None:
    engines = [
        ExactEngine(),
        ExactEngine(seed=1),
        ExactEngine(block_tokens=32),
        ExactEngine(layout=KvLayout.LAYER_FIRST),
    ]
    assert len({engine.info.kv_fingerprint for engine in engines}) == 4
    assert ExactEngine(block_count=512).info.kv_fingerprint == engines[0].info.kv_fingerprint


@pytest.mark.parametrize("seed", [-1, 1 << 22])
def test_a_seed_of_weights_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="seed of the weights"):
        ExactEngine(seed=seed)
