"""An engine without a model that takes the time, and keeps the blocks, of one with a GPU.

For load tests and the simulator: parameters and timing are those of Dynamo's mocker (its names and
defaults are `MockerOptions`), the step loop, its admission and its preemption are the ones every
engine here has (`engines/loop/host.py`, `engines/loop/scheduler.py`). Time is `trio.sleep`, so on a
virtual clock a thousand seconds of load take none.

The next token is a function of the seed and of all tokens before it. So an answer depends on its
prompt alone, goes on unchanged after a preemption or on another worker, and can be computed without
an engine (`expected_text`). It is read from KV memory: the key of each position is a digest of all
tokens up to it, and every block knows the digest before it. So an answer that goes on from blocks that
somebody else filled is another one if any of them is wrong or missing. Temperature and seed of a
request change nothing; it has no token that ends an answer, so one is as long as `max_tokens` unless
`stop_token_ids` end it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio

from ...env import Env
from ...kv.memory import KvLayout, KvMemory, KvShape, fingerprint
from ...protocol.openai.generate import Feature, GenerateRequest
from ..generation import EngineInfo
from ..loop.host import EngineHost, open_engine_host
from ..loop.step import Ends, Hop, StepItem, scramble
from ..prompts import BYTES_MOCKER, encode_mocker

KV_VERSION: Final = "1"
KV_BYTES_MIN: Final = 16
"""A key and a value of 64 bits. In the first of the keys is the digest, the rest is weight."""
OUTPUTS: Final = b"abcdefghijklmnopqrstuvwxyz" + b" " * 6


@attrs.frozen(kw_only=True)
class Timing:
    """How long a step takes, in milliseconds: two polynomials fitted to an H100 upstream.

    Prefill of n new tokens takes `prefill_ms[0]`·n² + `[1]`·n + `[2]`, once for the batch. A decode step at the share u of the KV memory in use takes
    `decode_ms[0]`·u² + `[1]`·u + `[2]`, at least `decode_min_ms`.
    """

    prefill_ms: tuple[float, float, float] = (4.209989e-7, 1.518344e-2, 16.50142)
    decode_ms: tuple[float, float, float] = (-25.74, 54.01, 5.74)
    decode_min_ms: float = 1.0

    def prefill(self, new_tokens: Sequence[int]) -> float:
        """Milliseconds for prompts with so many uncached tokens each; 0 without any."""
        square, linear, constant = self.prefill_ms
        count = sum(new_tokens)
        return square * count * count + linear * count + constant if count else 0.0

    def decode(self, usage: float) -> float:
        """Milliseconds for one decode step; `usage` is the KV memory's, from 0 to 1."""
        square, linear, constant = self.decode_ms
        return max(square * usage * usage + linear * usage + constant, self.decode_min_ms)


@attrs.frozen(kw_only=True)
class MockerOptions:
    """Upstream's arguments by their names, with its defaults."""

    num_gpu_blocks: int = 16_384
    block_size: int = 64
    """Tokens of one block."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    """Off, a prompt is one chunk as long as the step's budget allows."""
    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0
    """On top of `speedup_ratio`, for decoding."""
    startup_time_s: float = 0.0
    kv_bytes_per_token: int = KV_BYTES_MIN
    """What a transfer moves; an 8B model with bfloat16 has 131,072."""
    timing: Timing = Timing()

    def __attrs_post_init__(self) -> None:
        if self.speedup_ratio <= 0 or self.decode_speedup_ratio <= 0:
            raise ValueError("the speed-up ratios of the mocker must be more than 0")
        if self.startup_time_s < 0:
            raise ValueError("the start-up time of the mocker must not be negative")
        if self.kv_bytes_per_token < KV_BYTES_MIN or self.kv_bytes_per_token % KV_BYTES_MIN:
            raise ValueError(
                f"kv_bytes_per_token of the mocker must be a multiple of {KV_BYTES_MIN}"
            )


class MockerEngine:
    """A step engine that computes nothing but its own cost; `step_s` is that of the last step."""

    end_token_ids: frozenset[int] = frozenset()

    def __init__(
        self,
        options: MockerOptions | None = None,
        *,
        model: str = "mocker",
        seed: int = 0,
        context_tokens_max: int = 32_768,
    ) -> None:
        self.options = options = options or MockerOptions()
        shape = KvShape(
            layers=1,
            heads=1,
            channels=options.kv_bytes_per_token // KV_BYTES_MIN,
            block_tokens=options.block_size,
            dtype="<u8",
        )
        self.info = EngineInfo(
            engine="mocker",
            model=model,
            context_tokens_max=context_tokens_max,
            block_tokens=options.block_size,
            block_count=options.num_gpu_blocks,
            fingerprint=str(seed),
            kv_fingerprint=fingerprint(
                "mocker", KV_VERSION, str(seed), shape, KvLayout.BLOCK_FIRST
            ),
            has_prefix_cache=options.enable_prefix_caching,
            tokenizer=BYTES_MOCKER,
            can_resume=True,
            features=frozenset({Feature.END_TOKENS, Feature.TOKENIZE}),
        )
        self.memory = KvMemory(shape, options.num_gpu_blocks)
        self._digests: memoryview[int] = self.memory.view[0, 0, :, :, 0, 0].data
        """`[block, slot]`: of all tokens up to the one there."""
        self._parents: memoryview[int] = self.memory.view[0, 1, :, 0, 0, 0].data
        """`[block]`: the digest of all tokens before it."""
        self._usage = KvUsage(options.block_size)
        self.step_s = 0.0
        self._seed = seed

    def encode(self, request: GenerateRequest) -> list[int]:
        """As `bytes/mocker` in `engines/prompts.py`."""
        return encode_mocker(request, self.info.context_tokens_max)

    def token_bytes(self, token_id: int) -> bytes:
        """The byte itself; the start token has no text."""
        return bytes((token_id,)) if token_id < 256 else b""

    def step(self, items: Sequence[StepItem]) -> list[int | None]:
        """The next tokens, at once; what the step would have cost is then in `step_s`."""
        prefills: list[int] = []
        is_decoding = False
        chosen: list[int | None] = []
        for item in items:
            count, position = len(item.token_ids), item.position
            if position and count == 1 and item.is_sampled:
                is_decoding = True
            else:
                prefills.append(count)
            digest = self._before(item, is_new=not self._usage.knows(item.slot))
            self._usage.grow(item.slot, position + count, item.block_ids)
            digest = self._write(item, digest)
            chosen.append(_choose(digest, item.barred) if item.is_sampled else None)
        options, cost_ms = self.options, 0.0
        if prefills:
            cost_ms += options.timing.prefill(prefills) / options.speedup_ratio
        if is_decoding:
            usage = self._usage.tokens / (options.num_gpu_blocks * options.block_size)
            speedup = options.speedup_ratio * options.decode_speedup_ratio
            cost_ms += options.timing.decode(min(usage, 1.0)) / speedup
        self.step_s = cost_ms / 1e3
        return chosen

    def _before(self, item: StepItem, *, is_new: bool) -> int:
        """The digest of all tokens before `item`; another one if the KV there is not all right."""
        if not item.position:
            return self._seed
        digests, last = self._digests, self.options.block_size - 1
        block, slot = divmod(item.position - 1, self.options.block_size)
        digest = digests[item.block_ids[block], slot]
        if is_new:
            # Somebody else's KV, all of which a model would read: each block follows the one before.
            end = self._seed
            for block_id in item.block_ids[: block + 1]:
                if self._parents[block_id] != end:
                    digest = scramble(digest)
                end = digests[block_id, last]
        return digest

    def _write(self, item: StepItem, digest: int) -> int:
        """Go on from the digest of the token before, and leave one for each new token."""
        digests, block_ids, block_tokens = self._digests, item.block_ids, self.options.block_size
        position = item.position
        for token_id in item.token_ids:
            block, slot = divmod(position, block_tokens)
            if not slot:
                self._parents[block_ids[block]] = digest
            digest = scramble(digest ^ (token_id + 1))
            digests[block_ids[block], slot] = digest
            position += 1
        return digest

    def release(self, slot: int) -> None:
        """The sequence in `slot` is gone."""
        self._usage.release(slot)

    def recover(self) -> None:
        """Forget all sequences."""
        self._usage.clear()

    def interrupt(self) -> None:
        """Nothing to do: the sleep of a step is cancelled with the step loop."""

    def close(self) -> None:
        """Nothing to do: the memory goes with the object."""


def costed_hop(engine: MockerEngine) -> Hop:
    """A hop that sleeps as long as the step would have taken."""

    async def hop(
        step: Callable[[Sequence[StepItem]], list[int | None]], items: Sequence[StepItem]
    ) -> list[int | None]:
        token_ids = step(items)
        await trio.sleep(engine.step_s)
        return token_ids

    return hop


def expected_text(request: GenerateRequest, tokens: int, *, seed: int = 0) -> str:
    """The first `tokens` tokens of the answer to `request`, as text: what a client must get.

    One that ends it has no text.
    """
    engine = MockerEngine()
    prompt_ids = engine.encode(request)
    ends = Ends.of(request, engine.end_token_ids, len(prompt_ids))
    digest = _digest(seed, prompt_ids)
    answer = bytearray()
    for position in range(len(prompt_ids), len(prompt_ids) + tokens):
        token_id = _choose(digest, () if ends is None else ends.barred(position))
        if ends is not None and token_id in ends.stop_ids:
            break
        answer.append(token_id)
        digest = _digest(digest, answer[-1:])
    return answer.decode()


def _digest(digest: int, token_ids: Sequence[int]) -> int:
    # Token by token, so that chunks, blocks and preemptions cannot change it.
    for token_id in token_ids:
        digest = scramble(digest ^ (token_id + 1))
    return digest


def _choose(digest: int, barred: Sequence[int] = ()) -> int:
    outputs = OUTPUTS
    if barred:
        outputs = bytes(each for each in OUTPUTS if each not in barred) or OUTPUTS
    return outputs[scramble(digest) % len(outputs)]


@asynccontextmanager
async def open_mocker_engine(
    options: MockerOptions | None = None,
    *,
    model: str = "mocker",
    seed: int = 0,
    context_tokens_max: int = 32_768,
    env: Env | None = None,
    waiting_max: int = 1024,
    queued_deltas_max: int = 256,
) -> AsyncIterator[EngineHost]:
    """The mocker behind the step loop, after `startup_time_s`; see `open_engine_host`."""
    options = options or MockerOptions()
    await trio.sleep(options.startup_time_s)
    engine = MockerEngine(options, model=model, seed=seed, context_tokens_max=context_tokens_max)
    budget = options.max_num_batched_tokens
    async with open_engine_host(
        engine,
        env=env,
        hop=costed_hop(engine),
        running_max=options.max_num_seqs,
        waiting_max=waiting_max,
        step_tokens_max=budget,
        chunk_tokens_max=budget if options.enable_chunked_prefill else context_tokens_max,
        queued_deltas_max=queued_deltas_max,
    ) as host:
        yield host


class KvUsage:
    """The tokens of the sequences in the steps, those in blocks that several share counted once."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks: dict[int, list[int]] = {}
        """The full blocks of the sequence in each slot."""
        self._users: dict[int, int] = {}
        """How many sequences use each of them."""
        self._partial: dict[int, int] = {}
        """The tokens of each slot that fill no block."""

    @property
    def tokens(self) -> int:
        """All of them now."""
        return len(self._users) * self._block_tokens + sum(self._partial.values())

    def knows(self, slot: int) -> bool:
        """Whether the sequence in `slot` has grown before."""
        return slot in self._blocks

    def grow(self, slot: int, end: int, block_ids: Sequence[int]) -> None:
        """The first `end` tokens of the sequence in `slot` have KV, in these blocks."""
        full, partial = divmod(end, self._block_tokens)
        self._partial[slot] = partial
        counted = self._blocks.get(slot)
        if counted is None:
            counted = self._blocks[slot] = []
        if full > len(counted):
            new = block_ids[len(counted) : full]
            counted += new
            for block_id in new:
                self._users[block_id] = self._users.get(block_id, 0) + 1

    def release(self, slot: int) -> None:
        """The sequence in `slot` is gone."""
        self._partial.pop(slot, None)
        for block_id in self._blocks.pop(slot, ()):
            self._users[block_id] -= 1
            if not self._users[block_id]:
                del self._users[block_id]

    def clear(self) -> None:
        """All sequences are."""
        self._partial.clear()
        self._blocks.clear()
        self._users.clear()
