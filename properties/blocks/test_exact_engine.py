"""The reference transformer: how a sequence is computed does not change a token, its KV does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.runtime.kv.ranges import ranges_of
from trinamo.runtime.engines.exact.engine import Dims, ExactEngine
from trinamo.runtime.engines.loop.step import Sampling, StepItem
from trinamo.runtime.kv.memory import KvLayout

BLOCK_TOKENS = 4
BLOCK_COUNT = 64
CONTEXT_TOKENS = 96
GREEDY = Sampling()

prompts = st.binary(min_size=1, max_size=40).map(list)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1.0]),
    top_p=st.sampled_from([0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


def make_engine(layout: KvLayout = KvLayout.BLOCK_FIRST, *, small: bool = True) -> ExactEngine:
    dims = Dims(layers=2, width=32, hidden=64, heads=4, kv_heads=2) if small else Dims()
    return ExactEngine(
        dims=dims,
        context_tokens_max=CONTEXT_TOKENS,
        block_tokens=BLOCK_TOKENS,
        block_count=BLOCK_COUNT,
        layout=layout,
    )


ENGINES = {layout: make_engine(layout) for layout in KvLayout}


def item(
    tokens: Sequence[int], start: int, end: int, blocks: Sequence[int], sampling: Sampling = GREEDY
) -> StepItem:
    return StepItem(
        slot=0,
        token_ids=list(tokens[start:end]),
        position=start,
        block_ids=blocks,
        is_sampled=end == len(tokens),
        sampling=sampling,
    )


def sampled(token_ids: list[int | None]) -> int:
    token_id = token_ids[-1]
    assert token_id is not None
    return token_id


def prefill(
    engine: ExactEngine,
    prompt: list[int],
    blocks: Sequence[int],
    sampling: Sampling = GREEDY,
    chunks: Sequence[int] = (),
) -> int:
    """Compute the prompt in the given chunks, then the rest at once; the first new token."""
    start = 0
    for chunk in chunks:
        end = min(start + chunk, len(prompt) - 1)
        if end > start:
            assert engine.step([item(prompt, start, end, blocks, sampling)]) == [None]
            start = end
    return sampled(engine.step([item(prompt, start, len(prompt), blocks, sampling)]))


def decode(
    engine: ExactEngine,
    known: list[int],
    blocks: Sequence[int],
    count: int,
    sampling: Sampling = GREEDY,
) -> list[int]:
    """`count` tokens after `known`, the last of which has no KV yet."""
    tokens = list(known)
    for _ in range(count):
        work = item(tokens, len(tokens) - 1, len(tokens), blocks, sampling)
        tokens.append(sampled(engine.step([work])))
    return tokens[len(known) :]


def alone(prompt: list[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    engine = ENGINES[KvLayout.BLOCK_FIRST]
    blocks = range(BLOCK_COUNT)
    first = prefill(engine, prompt, blocks, sampling)
    return [first, *decode(engine, [*prompt, first], blocks, count - 1, sampling)]


@settings(max_examples=25, deadline=None)
@given(
    prompts,
    samplings,
    st.lists(st.integers(1, 20), max_size=6),
    st.permutations(range(BLOCK_COUNT)),
    st.sampled_from(list(KvLayout)),
)
def test_chunks_layout_and_placement_change_no_token(
    prompt: list[int],
    sampling: Sampling,
    chunks: list[int],
    blocks: list[int],
    layout: KvLayout,
) -> None:
    """Tokens are a function of prompt and sampling alone; what else the blocks held is nothing."""
    engine = ENGINES[layout]
    first = prefill(engine, prompt, blocks, sampling, chunks)
    rest = decode(engine, [*prompt, first], blocks, 7, sampling)
    assert [first, *rest] == alone(prompt, 8, sampling)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(prompts, samplings), min_size=2, max_size=4),
    st.lists(st.integers(1, 9), min_size=4, max_size=4),
)
def test_the_company_in_a_batch_changes_no_token(
    requests: list[tuple[list[int], Sampling]], chunks: list[int]
) -> None:
    """Prefills and decodes of other sequences in the same step leave a sequence as it is."""
    engine = ENGINES[KvLayout.BLOCK_FIRST]
    share = BLOCK_COUNT // len(requests)
    blocks = [range(i * share, (i + 1) * share) for i in range(len(requests))]
    tokens = [list(prompt) for prompt, _ in requests]
    cached = [0] * len(requests)
    for _ in range(60):
        work = []
        for i, (prompt, sampling) in enumerate(requests):
            if len(tokens[i]) < len(prompt) + 6:
                end = min(cached[i] + chunks[i], len(tokens[i]))
                work.append((i, end, item(tokens[i], cached[i], end, blocks[i], sampling)))
        if not work:
            break
        for (i, end, _), token_id in zip(work, engine.step([w for *_, w in work]), strict=True):
            cached[i] = end
            if token_id is not None:
                tokens[i].append(token_id)
    for known, (prompt, sampling) in zip(tokens, requests, strict=True):
        assert known[len(prompt) :] == alone(prompt, 6, sampling)


def hand_over(layout: KvLayout, prompt: list[int], damage: str, where: int) -> list[int]:
    """Prefill in one engine, move the KV range by range, decode in another; 24 tokens."""
    here, there = ENGINES[layout], make_engine(layout)
    count = -(-len(prompt) // BLOCK_TOKENS)
    source = list(range(count))
    target = [BLOCK_COUNT - 2 - 2 * i for i in range(count)]
    first = prefill(here, prompt, source)
    moved = bytearray(b"".join(ranges_of(here.memory, source)))
    if damage == "flip":
        moved[where] ^= 1
    elif damage == "drop":
        size = here.memory.range_bytes
        moved[where * size : (where + 1) * size] = bytes(size)
    position = 0
    for each in ranges_of(there.memory, target):
        each[:] = moved[position : position + len(each)]
        position += len(each)
    assert position == len(moved)
    spare = [i for i in range(BLOCK_COUNT) if i not in target]
    return [first, *decode(there, [*prompt, first], [*target, *spare], 23)]


@settings(max_examples=10, deadline=None)
@given(prompts, st.sampled_from(list(KvLayout)))
def test_kv_moved_whole_goes_on_with_the_same_tokens(prompt: list[int], layout: KvLayout) -> None:
    """Disaggregated and aggregated answers are equal."""
    assert hand_over(layout, prompt, "none", 0) == alone(prompt, 24)


# Of 32 fixed bytes: whether damage shows is chance for each step (1 in 4 misses it), so the
# property needs examples that do not vary, and 23 steps make a miss one in 10**13.
PROMPT = list(b"the quick brown fox jumps, again")
PROMPT_BLOCKS = len(PROMPT) // BLOCK_TOKENS


@pytest.mark.parametrize("layout", KvLayout)
def test_any_dropped_range_changes_the_tokens(layout: KvLayout) -> None:
    whole = alone(PROMPT, 24)
    memory = ENGINES[layout].memory
    count = PROMPT_BLOCKS * memory.parts
    kept = [i for i in range(count) if hand_over(layout, PROMPT, "drop", i) == whole]
    assert kept == []


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_flipped_bit_changes_the_tokens(data: st.DataObject) -> None:
    """The lowest bit of any byte of the prompt's KV."""
    memory = ENGINES[KvLayout.BLOCK_FIRST].memory
    where = data.draw(st.integers(0, PROMPT_BLOCKS * memory.shape.block_bytes - 1))
    assert hand_over(KvLayout.BLOCK_FIRST, PROMPT, "flip", where) != alone(PROMPT, 24)


@settings(max_examples=5, deadline=None)
@given(st.lists(st.integers(0, 255), min_size=CONTEXT_TOKENS - 8, max_size=CONTEXT_TOKENS - 8))
def test_keys_and_values_stay_within_their_bounds(prompt: list[int]) -> None:
    """Of the full-size model, so that int16 never wraps; the bound is derived at `Dims`."""
    engine = make_engine(small=False)
    prefill(engine, prompt, range(BLOCK_COUNT))
    assert np.abs(engine.memory.view.astype(np.int64)).max() <= 1280
