"""A real language model on the CPU: llama.cpp through cyllama, one batched decode a step.

Needs the extra: `pip install 'trinamo[llamacpp]'`, and a GGUF file with a byte-level BPE
vocabulary (`model_file.py` knows how to get one). llama.cpp keeps the KV in cells of its own, which
the scheduler's blocks only count; what another worker is to have of it is copied to and from blocks
of memory beside it (`state.py`).

Its logits differ by some hundredths with the batch they are computed in, and so may tokens. For answers
that are the same everywhere, take `engines/exact/engine.py`.
"""

from __future__ import annotations

import importlib
import logging
import math
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import attrs
import numpy as np

from ...env import Env, RealEnv
from ...errors import ConfigError
from ...kv.memory import KvLayout, KvMemory
from ...protocol.openai.generate import Feature, GenerateRequest
from ..generation import EngineInfo
from ..loop.host import EngineHost, open_engine_host, open_step_thread
from ..loop.sampler import Array, Sampler
from ..loop.step import Hop, StepItem
from .forms import Grammars
from .grammars import Compiler
from .model_file import MODEL_NAME, find_model, sample_digest, sampling_of
from .pooling import Pooled, pooling_of
from .prompts import Prompts, Vocabulary
from .sandbox.sandbox import Sandbox
from .sequences import Sequences, sequence_count
from .state import StagedBlocks

_log = logging.getLogger("trinamo.engine")
BLOCK_TOKENS = 16
FEATURES: Final = frozenset(
    {
        Feature.LOGPROBS,
        Feature.PENALTIES,
        Feature.LOGIT_BIAS,
        Feature.TOP_K,
        Feature.MIN_P,
        Feature.JSON_SCHEMA,
        Feature.GRAMMAR,
        Feature.END_TOKENS,
        Feature.PROMPT_LOGPROBS,
        Feature.TOKENIZE,
    }
)
"""What every model can."""
CHAT_FEATURES: Final = frozenset({Feature.TOOLS, Feature.CHAT_TEMPLATE})
"""What one with a chat template can, too."""


class LlamaCppEngine:
    """A step engine; loading takes a good part of a second, so construct it in the thread of its steps.

    `running_max` sequences share `kv_tokens` cells of KV memory (22.5 KiB each for SmolLM2, all
    taken at the start). Raises `ConfigError` if the extra or the model is unusable.
    """

    def __init__(
        self,
        path: Path,
        *,
        model: str,
        context_tokens_max: int,
        kv_tokens: int,
        running_max: int,
        step_tokens_max: int,
        threads: int,
        layout: KvLayout = KvLayout.BLOCK_FIRST,
        rng: random.Random | None = None,
        closes_objects: bool = True,
        embeds: bool = False,
    ) -> None:
        """`embeds`: make embeddings, too, with a model that is not made for it."""
        llama = self._llama = import_llama()
        self._model = load_model(llama, path)
        vocabulary = self._vocabulary = Vocabulary(self._model.get_vocab())
        context_tokens_max = min(context_tokens_max, self._model.n_ctx_train)
        digest, metadata = sample_digest(path), self._model.metadata()
        self.info = EngineInfo(
            engine="llamacpp",
            model=model,
            context_tokens_max=context_tokens_max,
            block_tokens=BLOCK_TOKENS,
            block_count=kv_tokens // BLOCK_TOKENS,
            fingerprint=digest,
            has_prefix_cache=True,
            can_resume=True,
            sampling=sampling_of(metadata, digest),
        )
        self.end_token_ids = frozenset(vocabulary.end_ids)
        self._prompts = Prompts(
            vocabulary,
            self._model.get_default_chat_template() or "",
            context_tokens_max=context_tokens_max,
            rng=rng or RealEnv().rng,
        )
        pooling = pooling_of(metadata) or ("mean" if embeds else "")
        self._pooled = Pooled(llama, self._pooling_context, step_tokens_max, pooling)
        can = FEATURES | (CHAT_FEATURES if self._prompts.has_template else frozenset())
        can |= {Feature.EMBEDDINGS} if pooling else frozenset()
        self.info = attrs.evolve(self.info, features=can)
        texts = vocabulary.all_bytes()
        end_ids, special_ids = vocabulary.end_ids, vocabulary.special_ids
        tokenize = partial(vocabulary.tokenize, parse_special=False)
        compiler = Compiler(texts, tokenize, end_ids=end_ids, special_ids=special_ids)
        self._sandbox = Sandbox("grammar", (texts, end_ids, special_ids))
        self._grammars = Grammars(compiler, self._sandbox, closes_objects)
        self._sampler = Sampler(vocabulary.token_bytes, self._grammars.open)
        self._threads, self._step_tokens_max = threads, step_tokens_max
        parameters = self._parameters()
        parameters.n_ctx = self.info.block_count * BLOCK_TOKENS
        parameters.n_seq_max = sequence_count(running_max)
        # One pool of cells for all sequences, as the scheduler's block count assumes.
        parameters.kv_unified = True
        self._context = make_context(llama, self._model, parameters)
        self._context.install_cancel_callback()
        self._sequences = Sequences(self._context, running_max, parameters.n_ctx)
        self._batch = llama.LlamaBatch(n_tokens=step_tokens_max, embd=0, n_seq_max=1)
        self._greedy = llama.LlamaSampler(llama.LlamaSamplerChainParams())
        self._greedy.add_greedy()
        self._blocks: StagedBlocks | None = None
        try:
            self._blocks = StagedBlocks(
                self._context,
                self._batch,
                heads=self._model.n_head_kv,
                block_tokens=BLOCK_TOKENS,
                block_count=self.info.block_count,
                layout=layout,
            )
        except ValueError as error:
            _log.warning("the KV of %s cannot leave llama.cpp: %s", model, error)
        else:
            fingerprint = self._blocks.fingerprint(self.info.fingerprint)
            self.info = attrs.evolve(self.info, kv_fingerprint=fingerprint)

    def _parameters(self) -> Any:
        """What all contexts of the model have in common."""
        parameters = self._llama.LlamaContextParams()
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.flash_attn_type = 1
        parameters.n_batch = parameters.n_ubatch = self._step_tokens_max
        return parameters

    def _pooling_context(self) -> Any:
        parameters = self._parameters()
        parameters.n_ctx, parameters.n_seq_max = self.info.context_tokens_max, 1
        parameters.embeddings, parameters.pooling_type = True, 0
        context = make_context(self._llama, self._model, parameters)
        context.install_cancel_callback()
        return context

    def embed(self, token_ids: list[int]) -> Iterator[bytes]:
        """See `Embeds.embed`."""
        return self._pooled.embed(token_ids)

    @property
    def memory(self) -> KvMemory | None:
        """Blocks that KV is copied to and from; None for a model where that cannot be."""
        return None if self._blocks is None else self._blocks.memory

    def save(self, slot: int, tokens: int, block_ids: Sequence[int]) -> None:
        """See `StagesKv.save`."""
        assert self._blocks is not None, "there are no blocks to copy to"
        self._blocks.save(self._sequences.of(slot).id, tokens, block_ids)

    def load(self, slot: int, tokens: int, block_ids: Sequence[int]) -> None:
        """See `StagesKv.load`."""
        assert self._blocks is not None, "there are no blocks to copy from"
        held = self._sequences.of(slot)
        self._with_room(partial(self._blocks.load, held.id, tokens, block_ids))
        held.is_known = False

    def find(self, token_ids: Sequence[int], tenant: str) -> int:
        """See `KeepsPrefixes.find`."""
        return self._sequences.find(token_ids, tenant)

    def begin(self, slot: int, token_ids: Sequence[int], tenant: str) -> int:
        """See `KeepsPrefixes.begin`."""
        return self._sequences.begin(slot, token_ids, tenant)

    async def check(self) -> None:
        """Raise `ConfigError` for a model whose chat template is malformed."""
        await self._prompts.check()

    async def prepare(self, request: GenerateRequest) -> GenerateRequest:
        """Its grammar made, and its chat gone through the model's template; see `Prepares`."""
        await self._grammars.prepare(request)
        return await self._prompts.prepare(request)

    def encode(self, request: GenerateRequest) -> list[int]:
        """The prompt of a request that is prepared."""
        return self._prompts.encode(request)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; special tokens have none."""
        return self._vocabulary.token_bytes(token_id)

    def step(self, items: Sequence[StepItem]) -> list[int | None]:
        """One llama.cpp decode for all items, then a sampler for each that wants a token."""
        batch = self._batch
        batch.clear()
        row = 0
        rows: list[int] = []
        held = [self._sequences.of(item.slot) for item in items]
        for each, item in zip(held, items, strict=True):
            last = len(item.token_ids) - 1
            is_told = item.shaping is not None and item.shaping.tells_prompt
            for offset, token_id in enumerate(item.token_ids):
                is_output = is_told or (item.is_sampled and offset == last)
                batch.add(token_id, item.position + offset, [each.id], is_output)
            row += len(item.token_ids)
            rows.append(row - 1)
        self._with_room(partial(self._context.decode, batch))
        for each, item in zip(held, items, strict=True):
            each.token_ids += item.token_ids
        for row, item in zip(rows, items, strict=True):
            if item.shaping is not None and item.shaping.tells_prompt:
                first = row + 1 - len(item.token_ids)
                self._sampler.tell_prompt(partial(self._logits, first), item)
        return [
            self._next(row, item) if item.is_sampled else None
            for row, item in zip(rows, items, strict=True)
        ]

    def _with_room(self, call: Callable[[], object]) -> None:
        """Have llama.cpp fill cells."""
        while True:
            try:
                call()
            except ValueError:
                # No cells are free, and those of prompts that only may come again must go.
                if not self._sequences.drop_oldest():
                    raise
            else:
                return

    def _next(self, row: int, item: StepItem) -> int | None:
        if item.shaping is None:
            return self._sample(row, item)
        return self._sampler.sample(self._logits(row), item, lambda: self._sample(row, item))

    def _logits(self, row: int, offset: int = 0) -> Array:
        return np.array(self._context.get_logits_ith(row + offset), np.float32)

    def _sample(self, row: int, item: StepItem) -> int:
        sampling = item.sampling
        if sampling.temperature == 0 and not item.barred:
            return int(self._greedy.sample(self._context, row))
        # A chain for each token, as its seed must depend on the position and on nothing that an
        # earlier step left behind: see `Sampling`.
        sampler = self._llama.LlamaSampler(self._llama.LlamaSamplerChainParams())
        if item.barred:
            barred = [(each, -math.inf) for each in item.barred if each < self._vocabulary.size]
            sampler.add_logit_bias(self._vocabulary.size, barred)
        if sampling.temperature == 0:
            sampler.add_greedy()
        else:
            if sampling.top_k:
                sampler.add_top_k(sampling.top_k)
            sampler.add_temp(sampling.temperature)
            if sampling.top_p < 1:
                sampler.add_top_p(sampling.top_p, 1)
            if sampling.min_p > 0:
                sampler.add_min_p(sampling.min_p, 1)
            sampler.add_dist(sampling.draw(item.end) & 0xFFFFFFFF)
        token_id = int(sampler.sample(self._context, row))
        sampler.close()
        return token_id

    def release(self, slot: int) -> None:
        """Keep the sequence's cells for prompts that begin alike."""
        self._sequences.release(slot)

    def recover(self) -> None:
        """Drop all sequences: a decode that failed may have written some of them."""
        self._sequences.clear()

    def interrupt(self) -> None:
        """Let the running decode raise `InterruptedError` at its next operation."""
        self._context.cancel = True
        self._pooled.interrupt()

    def close(self) -> None:
        """Free llama.cpp's memory; the blocks stay for as long as a transfer names them."""
        self._sandbox.close()
        self._prompts.close()
        self._pooled.close()
        self._greedy.close()
        self._batch.close()
        self._context.close()
        self._model.close()


@asynccontextmanager
async def open_llamacpp_engine(
    path: Path | str | None = None,
    *,
    model: str = MODEL_NAME,
    context_tokens_max: int = 4096,
    kv_tokens: int = 8192,
    threads: int = 1,
    env: Env | None = None,
    hop: Hop | None = None,
    running_max: int = 16,
    waiting_max: int = 1024,
    step_tokens_max: int = 64,
    chunk_tokens_max: int = 64,
    queued_deltas_max: int = 256,
    layout: KvLayout = KvLayout.BLOCK_FIRST,
    closes_objects: bool = True,
    embeds: bool = False,
) -> AsyncIterator[EngineHost]:
    """The model at `path`, or where `find_model` finds it, behind the step loop.

    The sequences running at once share `kv_tokens` tokens of KV memory. The default step of 64
    tokens takes about half a second of one core in prefill: that long, at most, do the others wait
    for their next token. See `open_engine_host` for the other bounds.
    """
    found = find_model(path)

    def load() -> LlamaCppEngine:
        return LlamaCppEngine(
            found,
            model=model,
            context_tokens_max=context_tokens_max,
            kv_tokens=kv_tokens,
            running_max=running_max,
            step_tokens_max=step_tokens_max,
            threads=threads,
            layout=layout,
            rng=None if env is None else env.rng,
            closes_objects=closes_objects,
            embeds=embeds,
        )

    async with open_step_thread() as thread:
        engine = await thread.run(load)
        try:
            await engine.check()
        except BaseException:
            engine.close()
            raise
        async with open_engine_host(
            engine,
            env=env,
            hop=hop or thread.run,
            running_max=running_max,
            waiting_max=waiting_max,
            step_tokens_max=step_tokens_max,
            chunk_tokens_max=chunk_tokens_max,
            queued_deltas_max=queued_deltas_max,
        ) as host:
            yield host


def import_llama() -> ModuleType:
    """The extension module; `ConfigError` if the extra is not installed."""
    try:
        # By name, as a type checker cannot look into the extension module.
        llama = importlib.import_module("cyllama.llama.llama_cpp")
        importlib.import_module("jinja2")
        importlib.import_module("llguidance")
    except ImportError as error:
        raise ConfigError(
            "the llamacpp engine needs an extra that is not installed"
            f" ({error}): pip install 'trinamo[llamacpp]'"
        ) from error
    return llama


def load_model(llama: Any, path: Path) -> Any:
    """The model at `path`, for the CPU; `ConfigError` if it cannot be used."""

    class Model(llama.LlamaModel):  # type: ignore[misc]
        @property
        def n_vocab(self) -> int:
            """`LlamaContext.get_logits_ith` of cyllama 0.2.18 asks for it, and nobody has it."""
            return int(self.get_vocab().n_vocab)

    llama.disable_logging()
    llama.ggml_backend_load_all()
    parameters = llama.LlamaModelParams()
    parameters.n_gpu_layers = 0
    try:
        model: Any = Model(str(path), parameters)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"llama.cpp cannot load {path}: {error}") from error
    kind = model.meta_val_str("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(
            f"{path} has a {kind!r} vocabulary; only byte-level BPE ('gpt2') is supported"
        )
    return model


def make_context(llama: Any, model: Any, parameters: Any) -> Any:
    """Raises `ConfigError` if there is no memory for it."""
    try:
        return llama.LlamaContext(model, parameters)
    except (MemoryError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"llama.cpp cannot make a context of {parameters.n_ctx} tokens and"
            f" {parameters.n_seq_max} sequences: {error}"
        ) from error
