"""An engine that computes with KV in a place of its own: it is copied before a transfer, and after one."""

from __future__ import annotations

from collections.abc import Sequence

from tests.runtime.engines.loop.hosting import Gathering
from tests.runtime.engines.loop.scheduling import make_scheduler, make_sequence, step
from tests.runtime.kv.ranges import ranges_of
from trinamo.runtime.context import Context
from trinamo.runtime.engines.exact.engine import ExactEngine
from trinamo.runtime.engines.loop.host import EngineHost, open_engine_host
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


class Remembering:
    """What an engine keeps of ended sequences: the first token of every prompt."""

    def find(self, token_ids: Sequence[int], tenant: str) -> int:
        return min(1, len(token_ids) - 1)

    def begin(self, slot: int, token_ids: Sequence[int], tenant: str) -> int:
        return self.find(token_ids, tenant)


def test_kv_of_a_sequence_that_was_preempted_before_its_first_step_is_not_copied_in() -> None:
    """Its blocks are somebody else's, and it is computed again behind what the engine keeps itself."""
    engine = StagedExact()
    scheduler = make_scheduler(blocks=4, engine_prefixes=Remembering())
    adopted, other = make_sequence(7, 16), make_sequence(9, 16)
    adopted.is_pinned = adopted.is_held = True
    scheduler.submit(adopted)
    scheduler.plan()
    scheduler.adopt(adopted, 1)
    adopted.is_in_blocks_only = adopted.is_paused = True
    scheduler.submit(other)
    assert [work.sequence for work in step(scheduler).work] == [other]
    assert scheduler.preemptions == 1
    adopted.is_paused = False
    scheduler.end(other)
    (work,) = scheduler.plan().work
    assert (work.sequence, adopted.cached_tokens) == (adopted, 1)
    assert staged_step(engine, [work]) == engine.step
