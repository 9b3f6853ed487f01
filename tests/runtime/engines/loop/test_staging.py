"""An engine that computes with KV in a place of its own: it is copied before a transfer, and after one."""

from __future__ import annotations

from collections.abc import Sequence

from tests.runtime.engines.loop.hosting import Gathering
from tests.runtime.kv.ranges import ranges_of
from trinamo.runtime.context import Context
from trinamo.runtime.engines.exact.engine import ExactEngine
from trinamo.runtime.engines.loop.host import EngineHost, open_engine_host
from trinamo.runtime.engines.loop.scheduler import TokenSequence, Work
from trinamo.runtime.engines.loop.step import StagesKv
from trinamo.runtime.engines.loop.steps import staged_step
from trinamo.runtime.kv.memory import KvMemory
from trinamo.runtime.protocol.openai.generate import GenerateRequest

PROMPT = "the quick brown fox jumps over it"


class StagedExact(ExactEngine):
    """What others see of its blocks is a copy, made when it is told to."""

    def __init__(self) -> None:
        super().__init__(context_tokens_max=256, block_count=40)
        self.own = self.memory
        self.memory = KvMemory(self.own.shape, 40)
        self.copied: list[str] = []

    def step(self, items: Sequence[object]) -> list[int | None]:
        shown, self.memory = self.memory, self.own
        try:
            return super().step(items)  # type: ignore[arg-type]
        finally:
            self.memory = shown

    def save(self, slot: int, tokens: int, block_ids: Sequence[int]) -> None:
        self.copied.append(f"save {tokens}")
        self.memory.view[:, :, block_ids] = self.own.view[:, :, block_ids]

    def load(self, slot: int, tokens: int, block_ids: Sequence[int]) -> None:
        self.copied.append(f"load {tokens}")
        self.own.view[:, :, block_ids] = self.memory.view[:, :, block_ids]


def ask(prompt: str = PROMPT) -> GenerateRequest:
    return GenerateRequest(model="exact", prompt=prompt, max_tokens=12, temperature=0)


async def text_of(host: EngineHost) -> str:
    sink = Gathering()
    await host.forward(ask(), Context("alone"), sink)
    return "".join(delta.text for delta in sink.deltas)


async def test_kv_is_copied_out_when_the_prompt_is_complete_and_in_before_it_is_decoded() -> None:
    one, two = StagedExact(), StagedExact()
    assert isinstance(one, StagesKv)
    sink = Gathering()
    async with (
        open_engine_host(one, chunk_tokens_max=8) as source,
        open_engine_host(two, chunk_tokens_max=8) as target,
        target.reserve(ask(), Context("decode")) as reservation,
    ):
        async with source.prefill_and_keep(ask(), Context("prefill")) as kept:
            # No block is told as filled before the copy is there, which is made once, of all.
            assert await kept.wait_filled(0) == len(kept.block_ids) == 3
            assert one.copied == ["save 34"]
            for here, there in zip(kept.block_ids, reservation.block_ids, strict=True):
                for a, b in zip(
                    ranges_of(one.memory, [here]), ranges_of(two.memory, [there]), strict=True
                ):
                    b[:] = a
            first = await kept.first_token()
        await reservation.adopt(first, sink)
        assert two.copied == ["load 34"]
        assert "".join(delta.text for delta in sink.deltas) == await text_of(source)
        # Plain answers are copied nowhere.
        assert (one.copied, two.copied) == (["save 34"], ["load 34"])


def adopted(cached_tokens: int) -> TokenSequence:
    return TokenSequence(
        token_ids=[1, 2, 3, 4],
        prompt_tokens=3,
        tokens_max=9,
        cached_tokens=cached_tokens,
        is_in_blocks_only=True,
    )


def test_kv_of_a_sequence_that_was_preempted_before_its_first_step_is_not_copied_in() -> None:
    """Its blocks are somebody else's, and it is computed again."""
    engine = StagedExact()
    sequence = adopted(0)
    assert staged_step(engine, [Work(sequence, 4)]) == engine.step
    sequence.cached_tokens = 3
    assert staged_step(engine, [Work(sequence, 1)]) == engine.step
