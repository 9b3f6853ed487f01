"""A real language model on the CPU: llama.cpp through cyllama, one batched decode a step.

Needs the extra: `pip install 'trinamo[llamacpp]'`, and a GGUF file with a byte-level BPE
vocabulary (`model_file.py` knows how to get one). llama.cpp keeps the KV in cells of its own, which
the scheduler's blocks only count; what another worker is to have of it is copied to and from blocks
of memory beside it (`blocks.py`).

Its tokens may differ in the last digit of a logit with the batch they are computed in. For answers
that are the same everywhere, take `engines/exact/engine.py`.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs
import trio

from ...env import Env
from ...errors import ConfigError, RequestError
from ...kv.memory import KvLayout, KvMemory
from ...protocol.openai.generate import ChatMessage, GenerateRequest
from ..generation import EngineInfo
from ..loop.host import EngineHost, open_engine_host
from ..loop.step import Hop, StepItem
from .blocks import StagedBlocks
from .model_file import MODEL_NAME, find_model, sample_digest

if TYPE_CHECKING:
    from .chat_template import ChatTemplate

__all__ = ["LlamaCppEngine", "open_llamacpp_engine"]

_log = logging.getLogger("trinamo.engine")
BLOCK_TOKENS = 16
PROMPT_BYTES_PER_TOKEN_MAX = 16
"""A longer prompt is refused before it is tokenised, which costs about a millisecond a kilobyte
and is done between two events of the loop. Prose has 4."""
_MARKER = re.compile("\ue000([0-9]+)\ue001")
_EVERY = -1
"""All sequences, or up to the last position, in llama.cpp's calls on its KV memory."""


class LlamaCppEngine:
    """A step engine; loading takes a good part of a second, so construct it in a thread.

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
    ) -> None:
        llama = _import_llama()
        self._llama = llama
        self._model = _load_model(llama, path)
        self._vocabulary = self._model.get_vocab()
        context_tokens_max = min(context_tokens_max, self._model.n_ctx_train)
        self.info = EngineInfo(
            engine="llamacpp",
            model=model,
            context_tokens_max=context_tokens_max,
            block_tokens=BLOCK_TOKENS,
            block_count=kv_tokens // BLOCK_TOKENS,
            fingerprint=sample_digest(path),
            can_resume=True,
        )
        vocabulary = self._vocabulary
        self.end_token_ids = frozenset(
            token_id for token_id in range(vocabulary.n_vocab) if vocabulary.is_eog(token_id)
        )
        self._special_texts = [
            _text(vocabulary, token_id)
            for token_id in range(vocabulary.n_vocab)
            if vocabulary.is_control(token_id)
        ]
        self._prompt_bytes_max = context_tokens_max * PROMPT_BYTES_PER_TOKEN_MAX
        self._template = self._chat_template()
        parameters = llama.LlamaContextParams()
        parameters.n_ctx = self.info.block_count * BLOCK_TOKENS
        parameters.n_seq_max = running_max
        parameters.n_threads = parameters.n_threads_batch = threads
        # One pool of cells for all sequences, as the scheduler's block count assumes.
        parameters.kv_unified = True
        parameters.flash_attn_type = 1
        parameters.n_batch = parameters.n_ubatch = step_tokens_max
        self._context = _make_context(llama, self._model, parameters)
        self._context.install_cancel_callback()
        self._batch = llama.LlamaBatch(n_tokens=step_tokens_max, embd=0, n_seq_max=running_max)
        self._greedy = llama.LlamaSampler(llama.LlamaSamplerChainParams())
        self._greedy.add_greedy()
        self._blocks = self._stage(layout)
        if self._blocks is not None:
            fingerprint = self._blocks.fingerprint(self.info.fingerprint)
            self.info = attrs.evolve(self.info, kv_fingerprint=fingerprint)

    def _stage(self, layout: KvLayout) -> StagedBlocks | None:
        try:
            return StagedBlocks(
                self._context,
                self._batch,
                heads=self._model.n_head_kv,
                block_tokens=BLOCK_TOKENS,
                block_count=self.info.block_count,
                layout=layout,
            )
        except ValueError as error:
            _log.warning("the KV of %s cannot leave llama.cpp: %s", self.info.model, error)
            return None

    @property
    def memory(self) -> KvMemory | None:
        """Blocks that KV is copied to and from; None for a model where that cannot be."""
        return None if self._blocks is None else self._blocks.memory

    def save(self, slot: int, tokens: int, block_ids: Sequence[int]) -> None:
        """See `StagesKv.save`."""
        assert self._blocks is not None, "there are no blocks to copy to"
        self._blocks.save(slot, tokens, block_ids)

    def load(self, slot: int, tokens: int, block_ids: Sequence[int]) -> None:
        """See `StagesKv.load`."""
        assert self._blocks is not None, "there are no blocks to copy from"
        self._blocks.load(slot, tokens, block_ids)

    def _chat_template(self) -> ChatTemplate | None:
        from .chat_template import ChatTemplate  # noqa: PLC0415 -- needs the extra

        source = self._model.get_default_chat_template()
        if not source:
            return None
        vocabulary = self._vocabulary
        return ChatTemplate(
            source,
            chars_max=self._prompt_bytes_max,
            bos=_text(vocabulary, vocabulary.token_bos()),
            eos=_text(vocabulary, vocabulary.token_eos()),
        )

    def encode(self, request: GenerateRequest) -> list[int]:
        """The prompt as it is, or the chat through the model's template."""
        if request.token_ids is not None:
            vocabulary_size = self._vocabulary.n_vocab
            if not all(0 <= token_id < vocabulary_size for token_id in request.token_ids):
                raise RequestError(
                    f"every token id must be from 0 to {vocabulary_size - 1}", param="token_ids"
                )
            return list(request.token_ids)
        if request.messages is not None:
            return self._encode_chat(request.messages)
        text = request.prompt or ""
        self._check_size(len(text), "prompt")
        text = _characters(text)
        self._check_size(len(text.encode()), "prompt")
        tokens = self._tokenize(text, is_template=False)
        if self._vocabulary.get_add_bos():
            tokens.insert(0, int(self._vocabulary.token_bos()))
        return tokens

    def _encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        if self._template is None:
            raise RequestError("the model has no chat template; send a prompt", param="messages")
        self._check_size(sum(len(m.content) for m in messages), "messages")
        messages = [ChatMessage(m.role, _characters(m.content)) for m in messages]
        text = self._template.render(messages)
        self._check_size(len(text.encode()), "messages")
        if not any(mark in m.content for m in messages for mark in self._special_texts):
            return self._tokenize(text, is_template=True)
        # Someone writes special tokens in a message, perhaps to end it and go on as the system.
        # So the template is rendered around markers, and what they stand for is plain text.
        marked = [ChatMessage(m.role, f"\ue000{n}\ue001") for n, m in enumerate(messages)]
        tokens: list[int] = []
        for index, piece in enumerate(_MARKER.split(self._template.render(marked))):
            is_content = index % 2 == 1
            text = messages[int(piece)].content if is_content else piece
            tokens += self._tokenize(text, is_template=not is_content)
        return tokens

    def _check_size(self, size_bytes: int, param: str) -> None:
        """Called with the characters first, of which there are no more, then with the bytes."""
        if size_bytes > self._prompt_bytes_max:
            raise RequestError(
                f"the prompt has more than {self._prompt_bytes_max} bytes, more than the model's"
                f" context of {self.info.context_tokens_max} tokens holds; shorten it",
                param=param,
            )

    def _tokenize(self, text: str, *, is_template: bool) -> list[int]:
        # A template writes its special tokens itself; anywhere else they are plain text.
        add_special, parse_special = False, is_template
        tokens = self._vocabulary.tokenize(text, add_special, parse_special)
        return [int(token_id) for token_id in tokens]

    def token_bytes(self, token_id: int) -> bytes:
        """From the vocabulary itself: llama.cpp's own pieces replace a split character."""
        if self._vocabulary.is_control(token_id):
            return b""
        text = _text(self._vocabulary, token_id)
        try:
            return bytes(_BYTE_OF[char] for char in text)
        except KeyError:
            # A token added to the vocabulary as plain text.
            return text.encode()

    def step(self, items: Sequence[StepItem]) -> list[int | None]:
        """One llama.cpp decode for all items, then a sampler for each that wants a token."""
        batch = self._batch
        batch.clear()
        row = 0
        rows: list[int] = []
        for item in items:
            last = len(item.token_ids) - 1
            for offset, token_id in enumerate(item.token_ids):
                is_output = item.is_sampled and offset == last
                batch.add(token_id, item.position + offset, [item.slot], is_output)
            row += len(item.token_ids)
            rows.append(row - 1)
        self._context.decode(batch)
        return [
            self._sample(row, item) if item.is_sampled else None
            for row, item in zip(rows, items, strict=True)
        ]

    def _sample(self, row: int, item: StepItem) -> int:
        sampling = item.sampling
        if sampling.temperature == 0:
            return int(self._greedy.sample(self._context, row))
        # A chain for each token, as its seed must depend on the position and on nothing that an
        # earlier step left behind: see `Sampling`.
        sampler = self._llama.LlamaSampler(self._llama.LlamaSamplerChainParams())
        sampler.add_temp(sampling.temperature)
        if sampling.top_p < 1:
            sampler.add_top_p(sampling.top_p, 1)
        sampler.add_dist(sampling.draw(item.position + len(item.token_ids)) & 0xFFFFFFFF)
        token_id = int(sampler.sample(self._context, row))
        sampler.close()
        return token_id

    def release(self, slot: int) -> None:
        """Free the sequence's cells."""
        self._context.memory_seq_rm(slot, _EVERY, _EVERY)

    def recover(self) -> None:
        """Drop all sequences: a decode that failed may have written some of them."""
        self._context.memory_seq_rm(_EVERY, _EVERY, _EVERY)

    def interrupt(self) -> None:
        """Let the running decode raise `InterruptedError` at its next operation."""
        self._context.cancel = True

    def close(self) -> None:
        """Free llama.cpp's memory; the blocks stay for as long as a transfer names them."""
        self._greedy.close()
        self._batch.close()
        self._context.close()
        self._model.close()


def _import_llama() -> ModuleType:
    try:
        # By name, as a type checker cannot look into the extension module.
        llama = importlib.import_module("cyllama.llama.llama_cpp")
        importlib.import_module("jinja2")
    except ImportError as error:
        raise ConfigError(
            "the llamacpp engine needs an extra that is not installed"
            f" ({error}): pip install 'trinamo[llamacpp]'"
        ) from error
    return llama


def _load_model(llama: Any, path: Path) -> Any:
    llama.disable_logging()
    llama.ggml_backend_load_all()
    parameters = llama.LlamaModelParams()
    parameters.n_gpu_layers = 0
    try:
        model = llama.LlamaModel(str(path), parameters)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"llama.cpp cannot load {path}: {error}") from error
    kind = model.meta_val_str("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(
            f"{path} has a {kind!r} vocabulary; only byte-level BPE ('gpt2') is supported"
        )
    return model


def _make_context(llama: Any, model: Any, parameters: Any) -> Any:
    try:
        return llama.LlamaContext(model, parameters)
    except (MemoryError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"llama.cpp cannot make a context of {parameters.n_ctx} tokens and"
            f" {parameters.n_seq_max} sequences: {error}"
        ) from error


def _characters(text: str) -> str:
    """Without lone surrogates: they are no characters, and llama.cpp could not take them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _text(vocabulary: Any, token_id: int) -> str:
    return str(vocabulary.get_text(token_id))


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of all bytes in a byte-level BPE vocabulary (GPT-2's)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


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
        )

    engine = await trio.to_thread.run_sync(load)
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
