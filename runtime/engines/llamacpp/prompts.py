"""From a request to the tokens of its prompt: text, ids, or a chat through the model's template."""

from __future__ import annotations

import hashlib
import random
import re
from typing import Any, Final

import msgspec

from ...env import draw_id
from ...errors import ContextLengthError, RequestError
from ...protocol.openai.generate import ChatMessage, GenerateRequest
from ..prompts import check_prompt_fits
from .chat_template import PROMPT_BYTES_PER_TOKEN_MAX, ChatTemplate
from .sandbox.sandbox import ExceededError, Sandbox

_KNOWN_TEMPLATES: Final = frozenset(
    {
        # SmolLM2's, of the file that `model_file.py` fetches: one loop over the messages.
        "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
    }
)
"""By their SHA-256: those that were read, and are rendered here, without a child's 0.2 ms."""


class Prompts:
    """Makes the prompts of one model; `template` is its chat template's source, or empty.

    One that nobody has read is rendered in a child process (`sandbox/`).
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: str,
        *,
        context_tokens_max: int,
        rng: random.Random,
    ) -> None:
        self._vocabulary = vocabulary
        self._context_tokens_max = context_tokens_max
        self._bytes_max = context_tokens_max * PROMPT_BYTES_PER_TOKEN_MAX
        self._rng = rng
        self.has_template = bool(template)
        """Whether the model takes chats."""
        self._template: ChatTemplate | None = None
        self._sandbox: Sandbox | None = None
        bos, eos, specials = vocabulary.bos_text, vocabulary.eos_text, vocabulary.special_texts
        if hashlib.sha256(template.encode()).hexdigest() in _KNOWN_TEMPLATES:
            self._template = ChatTemplate(
                template, chars_max=self._bytes_max, bos=bos, eos=eos, specials=specials
            )
        elif template:
            self._sandbox = Sandbox("template", (template, self._bytes_max, bos, eos, specials))

    async def check(self) -> None:
        """Raise `ConfigError` for a template that is malformed."""
        if self._sandbox is not None:
            await self._sandbox.call()

    def close(self) -> None:
        """End the child. Idempotent."""
        if self._sandbox is not None:
            self._sandbox.close()

    async def prepare(self, request: GenerateRequest) -> GenerateRequest:
        """The request with its chat made tokens; raises `RequestError`."""
        if request.messages is None:
            return request
        token_ids = await self._encode_chat(request, request.messages)
        check_prompt_fits(len(token_ids), self._context_tokens_max, request)
        return msgspec.structs.replace(request, messages=None, token_ids=token_ids)

    def encode(self, request: GenerateRequest) -> list[int]:
        """The tokens of a prompt that is prepared; raises `RequestError`."""
        vocabulary = self._vocabulary
        if request.token_ids is not None:
            if not all(0 <= token_id < vocabulary.size for token_id in request.token_ids):
                raise RequestError(
                    f"every token id must be from 0 to {vocabulary.size - 1}", param="prompt"
                )
            return list(request.token_ids)
        assert request.messages is None, "it is not prepared"
        text = request.prompt or ""
        self._check_size(len(text), "prompt")
        text = _characters(text)
        self._check_size(len(text.encode()), "prompt")
        # Whoever sends a prompt, and not messages, writes it as the model reads it: applies a chat template by
        # hand, or the marks between which the model fills in. Of a message that is no client's business.
        return vocabulary.begin(vocabulary.tokenize(text, parse_special=True))

    async def _render(self, request: GenerateRequest, messages: list[ChatMessage]) -> str:
        tools = "" if request.tool_choice == "none" else request.tools
        end = ""
        if request.continue_final_message:
            # What the template writes behind the text is left out, wherever else that text stands.
            end = f"\ue000{draw_id(self._rng)}\ue001"
            last = messages[-1]
            last = msgspec.structs.replace(last, content=last.content + end)
            messages = [*messages[:-1], last]
        asked = messages, tools, request.chat_template_kwargs, end
        if self._template is not None:
            return _characters(self._template.render(*asked))
        assert self._sandbox is not None, "there is no template"
        try:
            return _characters(await self._sandbox.call(*asked))
        except ExceededError as error:
            raise RequestError(
                f"the model's chat template takes more than {error} for these messages",
                param="messages",
            ) from None

    async def _encode_chat(
        self, request: GenerateRequest, messages: list[ChatMessage]
    ) -> list[int]:
        if not self.has_template:
            raise RequestError("the model has no chat template; send a prompt", param="messages")
        last = messages[-1]
        if request.continue_final_message and (last.role != "assistant" or last.tool_calls):
            raise RequestError(
                "'continue_final_message' needs a last message of the assistant, without calls",
                param="continue_final_message",
            )
        tools = "" if request.tool_choice == "none" else request.tools
        chars = sum(len(m.content) + len(m.tool_calls) for m in messages) + len(tools)
        self._check_size(chars + len(request.chat_template_kwargs), "messages")
        messages = [
            msgspec.structs.replace(message, content=_characters(message.content))
            for message in messages
        ]
        text = await self._render(request, messages)
        self._check_size(len(text.encode()), "messages")
        vocabulary = self._vocabulary
        if not any(mark in m.content for m in messages for mark in vocabulary.special_texts):
            return vocabulary.tokenize(text, parse_special=True)
        # Someone writes special tokens in a message, perhaps to end it and go on as the system.
        # So the template is rendered around markers, and what they stand for is plain text. Nobody
        # can write one, in a tool's description say, before it is drawn.
        drawn = draw_id(self._rng)
        marked = [
            msgspec.structs.replace(message, content=f"\ue000{drawn}-{number}\ue001")
            for number, message in enumerate(messages)
        ]
        tokens: list[int] = []
        rendered = await self._render(request, marked)
        for index, piece in enumerate(re.split(f"\ue000{drawn}-([0-9]+)\ue001", rendered)):
            is_content = index % 2 == 1
            text = messages[int(piece)].content if is_content else piece
            tokens += vocabulary.tokenize(text, parse_special=not is_content)
        return tokens

    def _check_size(self, size_bytes: int, param: str) -> None:
        """Called with the characters first, of which there are no more, then with the bytes."""
        if size_bytes > self._bytes_max:
            length = f"more than {self._bytes_max} bytes"
            raise ContextLengthError.of(self._context_tokens_max, length, param)


def _characters(text: str) -> str:
    """Without lone surrogates: they are no characters, and llama.cpp could not take them."""
    return text.encode("utf-8", "replace").decode("utf-8")


class Vocabulary:
    """What the engine asks of llama.cpp's vocabulary."""

    def __init__(self, vocabulary: Any) -> None:
        self._vocabulary = vocabulary
        self.size = int(vocabulary.n_vocab)
        self.end_ids = [each for each in range(self.size) if vocabulary.is_eog(each)]
        self.special_ids = [each for each in range(self.size) if vocabulary.is_control(each)]
        self.special_texts = [self.text(each) for each in self.special_ids]
        self._begin_ids = [int(vocabulary.token_bos())] if vocabulary.get_add_bos() else []
        self._specials = frozenset(self.special_ids)

    @property
    def bos_text(self) -> str:
        """What a chat template calls `bos_token`."""
        return self.text(self._vocabulary.token_bos())

    @property
    def eos_text(self) -> str:
        """What a chat template calls `eos_token`."""
        return self.text(self._vocabulary.token_eos())

    def text(self, token_id: int) -> str:
        """How the vocabulary writes a token: special ones as they stand in templates."""
        return str(self._vocabulary.get_text(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """From the vocabulary itself: llama.cpp's own pieces replace a split character."""
        if token_id in self._specials:
            return b""
        text = self.text(token_id)
        try:
            return bytes(_BYTE_OF[char] for char in text)
        except KeyError:
            # A token added to the vocabulary as plain text.
            return text.encode()

    def all_bytes(self) -> list[bytes]:
        """Of every token; special ones as they are written."""
        return [
            self.text(each).encode() if each in self._specials else self.token_bytes(each)
            for each in range(self.size)
        ]

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """The tokens of `text`; without `parse_special`, what it writes of special tokens is plain text."""
        add_special = False
        tokens = self._vocabulary.tokenize(text, add_special, parse_special)
        return [int(token_id) for token_id in tokens]

    def begin(self, tokens: list[int]) -> list[int]:
        """A prompt of these tokens, as the model was trained on the beginning of a text: it begins once."""
        begin_ids = self._begin_ids
        return tokens if tokens[: len(begin_ids)] == begin_ids else begin_ids + tokens


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of all bytes in a byte-level BPE vocabulary (GPT-2's)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
