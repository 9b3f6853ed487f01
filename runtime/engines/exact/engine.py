"""The reference transformer: tiny, seeded, and exact to the last bit.

Its arithmetic is on integers held in float64, with every product and sum below 2**53, so tokens
do not depend on batch, chunking, block placement, layout, thread count or BLAS. And the next
token depends on a checksum of every KV byte the last position attends to, so missing, stale,
misplaced or damaged KV shows in the text within a few tokens, where a real model may absorb it.
It writes nonsense: lower-case letters, spaces and punctuation. It never ends an answer by itself.

Its tokens are bytes (`engines/prompts.py`). Why no value overflows is said at `Dims`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ...env import Env
from ...kv.memory import KvLayout, KvMemory, KvShape, fingerprint
from ...kv.pool import block_count_for
from ...protocol.openai.generate import Feature, GenerateRequest
from ..generation import EngineInfo
from ..loop.host import EngineHost, open_engine_host
from ..loop.sampler import Sampler
from ..loop.step import Hop, StepItem, scramble
from ..prompts import BYTES_EXACT, VOCABULARY, encode_exact
from .tables import ROTATION_SCALE, SOFTMAX_STEPS, integers, rotations, softmax

Array = npt.NDArray[Any]

OUTPUTS = b"abcdefghijklmnopqrstuvwxyz" + b" " * 8 + b".,-';\n"
"""The token of each row of the head. Several rows are the space, which makes words of it."""
CANDIDATES = 4
"""The checksum chooses among so many tokens with the largest logits: each is as likely as the others."""
LOGIT_UNIT = 1024
"""What the logits are scaled by where they are told: biases are in units of an ordinary model's."""
LOGIT_GAP = 20.0
"""How far all others are behind the candidates, which are alike."""
LOGIT_TIE = 1e-9
"""What sets the candidates apart, in the order of the checksum."""
FEATURES = frozenset(
    {
        Feature.LOGPROBS,
        Feature.PENALTIES,
        Feature.LOGIT_BIAS,
        Feature.TOP_K,
        Feature.MIN_P,
        Feature.END_TOKENS,
        Feature.PROMPT_LOGPROBS,
        Feature.TOKENIZE,
    }
)
KV_VERSION = "1"
"""Count it up when a change of the arithmetic changes what is in the blocks."""
SEEDS = 1 << 22
QUERY_ROWS_MAX = 32
"""Positions attended from at once: bounds the score matrix, changes no result."""


@attrs.frozen(kw_only=True)
class Dims:
    """The size of the model.

    With the defaults and weights from -7 to 7, by Cauchy-Schwarz: a normed row has length
    ≤ 64·√128 (+6 from rounding), so |h| ≤ 904 after a projection, |q|, |k| ≤ 1279 after the
    rotation, |v| ≤ 904: int16 holds them. A score is ≤ 32·1279² < 2**26; a weighted sum of values
    ≤ 65536·904 a token, below 2**53 for 10**8 tokens. The stream grows by ≤ 64,000 (attention) and
    ≤ 715,000 (512·7·904²/4096) a layer to < 2**22, its sum of squares is < 2**51. Do the sum
    again when you change a number.
    """

    layers: int = 4
    width: int = 128
    hidden: int = 512
    heads: int = 4
    kv_heads: int = 2

    @property
    def channels(self) -> int:
        """Of one head."""
        return self.width // self.heads


class _Layer:
    """The weights of layer `number`, `[in, out]`."""

    def __init__(self, dims: Dims, seed: int, number: int) -> None:
        qkv_width = (dims.heads + 2 * dims.kv_heads) * dims.channels
        first = 4 * number + 4
        self.qkv = _weights(seed, first, dims.width, qkv_width)
        self.out = _weights(seed, first + 1, dims.width, dims.width)
        self.up = _weights(seed, first + 2, dims.width, 2 * dims.hidden)
        self.down = _weights(seed, first + 3, dims.hidden, dims.width)


class ExactEngine:
    """A step engine over real paged KV memory.

    `temperature` 0 follows the checksum rule alone; above it the seed takes part, and `top_p`
    narrows the candidates to the first ceil(4 · top_p), as `top_k` does to so many. `min_p` leaves them
    all: they are alike. Where penalties and biases are asked for, a token is chosen by logits that say
    the same. `seed` here is that of the weights.
    """

    end_token_ids: frozenset[int] = frozenset()

    def __init__(
        self,
        *,
        model: str = "exact",
        seed: int = 0,
        dims: Dims | None = None,
        context_tokens_max: int = 2048,
        block_tokens: int = 16,
        block_count: int = 512,
        layout: KvLayout = KvLayout.BLOCK_FIRST,
        has_prefix_cache: bool = True,
    ) -> None:
        if not 0 <= seed < SEEDS:
            raise ValueError(f"the seed of the weights is {seed}; it must be from 0 to {SEEDS - 1}")
        self.dims = dims = dims or Dims()
        shape = KvShape(
            layers=dims.layers,
            heads=dims.kv_heads,
            channels=dims.channels,
            block_tokens=block_tokens,
            dtype="<i2",
        )
        digest = f"{zlib.crc32(repr((seed, attrs.astuple(dims))).encode()):08x}"
        self.info = EngineInfo(
            engine="exact",
            model=model,
            context_tokens_max=context_tokens_max,
            block_tokens=block_tokens,
            block_count=block_count,
            fingerprint=digest,
            kv_fingerprint=fingerprint("exact", KV_VERSION, digest, shape, layout),
            has_prefix_cache=has_prefix_cache,
            tokenizer=BYTES_EXACT,
            can_resume=True,
            features=FEATURES,
        )
        # Before the tables of a context that is far too long are computed.
        self.info.check_context_fits()
        self.memory = KvMemory(shape, block_count, layout)
        self._embedding = 64 * _weights(seed, 0, VOCABULARY, dims.width)
        self._layers = [_Layer(dims, seed, number) for number in range(dims.layers)]
        self._head = _weights(seed, 1, dims.width, len(OUTPUTS))
        self._cosines, self._sines = rotations(context_tokens_max, dims.channels // 2)
        self._softmax = softmax()
        self._sampler = Sampler(self.token_bytes)
        self._is_interrupted = False

    def encode(self, request: GenerateRequest) -> list[int]:
        """As `bytes/exact` in `engines/prompts.py`."""
        return encode_exact(request, self.info.context_tokens_max)

    def token_bytes(self, token_id: int) -> bytes:
        """The byte itself; specials have no text."""
        return bytes((token_id,)) if token_id < 256 else b""

    def release(self, slot: int) -> None:
        """Nothing to do: all state of a sequence is in its blocks."""

    def recover(self) -> None:
        """Nothing to do, see `release`."""

    def interrupt(self) -> None:
        """Let the running step raise `InterruptedError` before its next layer."""
        self._is_interrupted = True

    def close(self) -> None:
        """Nothing to do: the memory goes with the object."""

    def step(self, items: Sequence[StepItem]) -> list[int | None]:
        """Compute all items as one batch; see `StepEngine.step`."""
        rows = _Rows(items, self.info.block_tokens)
        x = self._embedding[rows.token_ids]
        digests = [0] * len(items)
        for number, layer in enumerate(self._layers):
            if self._is_interrupted:
                raise InterruptedError("the engine is closing")
            x = x + self._attend(number, layer, x, rows, digests)
            gate, up = np.split(np.rint(_norm(x) @ layer.up / 64), 2, axis=-1)
            x = x + np.rint(np.maximum(gate, 0) * up @ layer.down / 4096)
        for index, item in enumerate(items):
            if item.shaping is not None and item.shaping.tells_prompt:
                first = rows.first_rows[index]
                self._tell_prompt(x[first : first + len(item.token_ids)], item)
        logits = _norm(x[rows.last_rows]) @ self._head
        return [
            self._next(row, digest, item) if item.is_sampled else None
            for item, row, digest in zip(items, logits, digests, strict=True)
        ]

    def _attend(
        self, number: int, layer: _Layer, x: Array, rows: _Rows, digests: list[int]
    ) -> Array:
        """Write this layer's KV, attend, and add it to the digest of every sampled item."""
        dims = self.dims
        query_width, kv_width = dims.width, dims.kv_heads * dims.channels
        h = np.rint(_norm(x) @ layer.qkv / 64).reshape(len(x), -1, dims.channels)
        assert h.shape[1] * dims.channels == query_width + 2 * kv_width
        cosines, sines = self._cosines[rows.positions], self._sines[rows.positions]
        q = _rotate(h[:, : dims.heads], cosines, sines)
        keys, values = self.memory.view[number]
        keys[rows.block_ids, rows.slots] = _rotate(
            h[:, dims.heads : dims.heads + dims.kv_heads], cosines, sines
        )
        values[rows.block_ids, rows.slots] = h[:, dims.heads + dims.kv_heads :]
        attended = np.empty((len(x), query_width))
        for index, item in enumerate(rows.items):
            first = rows.first_rows[index]
            end = item.position + len(item.token_ids)
            k, v = (self._gather(plane, item.block_ids, end) for plane in (keys, values))
            if item.is_sampled:
                digests[index] = zlib.crc32(v.data, zlib.crc32(k.data, digests[index]))
            k = k.transpose(1, 2, 0).astype(np.float64)
            v = v.transpose(1, 0, 2).astype(np.float64)
            for start in range(0, len(item.token_ids), QUERY_ROWS_MAX):
                stop = min(start + QUERY_ROWS_MAX, len(item.token_ids))
                attended[first + start : first + stop] = self._attention(
                    q[first + start : first + stop], k, v, item.position + start
                )
        projected: Array = np.rint(attended @ layer.out / 16)
        return projected

    def _gather(self, plane: Array, block_ids: Sequence[int], end: int) -> Array:
        """A copy of the first `end` slots of a sequence: [end, kv_heads, channels]."""
        count = block_count_for(end, self.info.block_tokens)
        gathered: Array = plane[list(block_ids[:count])]
        slots: Array = gathered.reshape(-1, *gathered.shape[2:])[:end]
        return slots

    def _attention(self, q: Array, k: Array, v: Array, position: int) -> Array:
        """Causal attention of rows at `position` and after: [rows, width]."""
        dims = self.dims
        count, end = len(q), k.shape[-1]
        group = dims.heads // dims.kv_heads
        q = q.reshape(count, dims.kv_heads, group, -1).transpose(1, 2, 0, 3)
        scores = q.reshape(dims.kv_heads, group * count, -1) @ k
        scores = scores.reshape(dims.kv_heads, group, count, end)
        if count > 1 or end > position + 1:
            later = np.arange(end) > (position + np.arange(count))[:, None]
            scores[:, :, later] = -np.inf
        distances = (scores.max(-1, keepdims=True) - scores) / 1024
        steps = np.minimum(distances, SOFTMAX_STEPS - 1).astype(np.int64)
        weights = self._softmax[steps].reshape(dims.kv_heads, group * count, end)
        mixed = np.rint((weights @ v) / weights.sum(-1, keepdims=True))
        mixed = mixed.reshape(dims.kv_heads, group, count, -1).transpose(2, 0, 1, 3)
        rows: Array = mixed.reshape(count, -1)
        return rows

    def _tell_prompt(self, x: Array, item: StepItem) -> None:
        logits = _norm(x) @ self._head
        self._sampler.tell_prompt(lambda row: _told(logits[row]), item)

    def _next(self, logits: Array, digest: int, item: StepItem) -> int | None:
        if item.shaping is None:
            return _choose(logits, digest, item)
        told = _told(logits, digest)
        return self._sampler.sample(told, item, lambda: _choose(logits, digest, item))


def _choose(logits: Array, digest: int, item: StepItem) -> int:
    sampling = item.sampling
    candidates = _candidates(logits, item.barred)
    if sampling.temperature == 0:
        return candidates[scramble(digest) % CANDIDATES]
    kept = max(1, math.ceil(CANDIDATES * sampling.top_p))
    if sampling.top_k:
        kept = min(kept, sampling.top_k)
    return candidates[scramble(sampling.draw(item.end) ^ digest) % kept]


def _candidates(logits: Array, barred: Sequence[int] = ()) -> list[int]:
    candidates: list[int] = []
    # Stable: of equal logits the earlier row wins on every machine.
    for row in np.argsort(-logits, kind="stable"):
        if OUTPUTS[row] not in candidates and OUTPUTS[row] not in barred:
            candidates.append(OUTPUTS[row])
            if len(candidates) == CANDIDATES:
                return candidates
    # As many, of however few are left; where all are barred, as if none was.
    return (candidates * CANDIDATES)[:CANDIDATES] if candidates else _candidates(logits)


def _told(logits: Array, digest: int = 0) -> Array:
    """The logits of the whole vocabulary that `_choose` follows: of the candidates all are equally likely.

    The checksum decides between them here, too: a damaged block shows in an answer of any kind.
    """
    told = np.full(VOCABULARY, -np.inf)
    candidates = _candidates(logits)
    worst = max(logits[row] for row, token_id in enumerate(OUTPUTS) if token_id == candidates[-1])
    for row, token_id in enumerate(OUTPUTS):
        told[token_id] = max(told[token_id], (logits[row] - worst) / LOGIT_UNIT - LOGIT_GAP)
    for number, token_id in enumerate(candidates):
        told[token_id] = -LOGIT_TIE * ((number - scramble(digest)) % CANDIDATES)
    return told


class _Rows:
    """The items of a step laid end to end, one row a token."""

    def __init__(self, items: Sequence[StepItem], block_tokens: int) -> None:
        self.items = items
        counts = np.array([len(item.token_ids) for item in items])
        ends = np.cumsum(counts)
        self.last_rows = ends - 1
        self.first_rows = ends - counts
        self.token_ids = np.concatenate([np.asarray(item.token_ids) for item in items])
        self.positions = np.concatenate(
            [np.arange(i.position, i.position + len(i.token_ids)) for i in items]
        )
        self.slots = self.positions % block_tokens
        self.block_ids = np.concatenate(
            [
                np.asarray(i.block_ids)[
                    np.arange(i.position, i.position + len(i.token_ids)) // block_tokens
                ]
                for i in items
            ]
        )


def _weights(seed: int, number: int, rows: int, columns: int) -> Array:
    # 2**32 numbers for each matrix, 2**10 matrices for each seed: no two overlap.
    stream = (seed << 10 | number) << 32
    return integers(stream, rows * columns, 7).reshape(rows, columns)


def _norm(x: Array) -> Array:
    # The sum is exact; IEEE 754 rounds the division and the square root correctly.
    normed: Array = np.rint(x * 64 / np.sqrt((x * x).sum(-1, keepdims=True) / x.shape[-1] + 1))
    return normed


def _rotate(x: Array, cosines: Array, sines: Array) -> Array:
    """Rotary position embedding on pairs of neighbouring channels."""
    cosines, sines = cosines[:, None], sines[:, None]
    even, odd = x[..., ::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., ::2] = np.rint((even * cosines - odd * sines) / ROTATION_SCALE)
    out[..., 1::2] = np.rint((even * sines + odd * cosines) / ROTATION_SCALE)
    return out


@asynccontextmanager
async def open_exact_engine(
    *,
    model: str = "exact",
    seed: int = 0,
    context_tokens_max: int = 2048,
    block_tokens: int = 16,
    block_count: int = 512,
    layout: KvLayout = KvLayout.BLOCK_FIRST,
    env: Env | None = None,
    hop: Hop | None = None,
    running_max: int = 32,
    waiting_max: int = 1024,
    step_tokens_max: int = 128,
    chunk_tokens_max: int = 128,
    queued_deltas_max: int = 256,
) -> AsyncIterator[EngineHost]:
    """The reference transformer behind the step loop; see `open_engine_host` for the bounds.

    `block_count` blocks of `block_tokens` tokens take 1 KiB a token, when they are first used.
    """
    engine = ExactEngine(
        model=model,
        seed=seed,
        context_tokens_max=context_tokens_max,
        block_tokens=block_tokens,
        block_count=block_count,
        layout=layout,
    )
    async with open_engine_host(
        engine,
        env=env,
        hop=hop,
        running_max=running_max,
        waiting_max=waiting_max,
        step_tokens_max=step_tokens_max,
        chunk_tokens_max=chunk_tokens_max,
        queued_deltas_max=queued_deltas_max,
    ) as host:
        yield host
