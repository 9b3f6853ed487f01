"""From a request to the tokens of its prompt: text, ids, or a chat through the model's template."""

from __future__ import annotations

import re

import msgspec

from ...errors import RequestError
from ...protocol.openai.generate import ChatMessage, GenerateRequest
from .chat_template import ChatTemplate
from .vocabulary import Vocabulary

PROMPT_BYTES_PER_TOKEN_MAX = 16
"""A longer prompt is refused before it is tokenised, which costs about a millisecond a kilobyte
and is done between two events of the loop. Prose has 4."""
_MARKER = re.compile("\ue000([0-9]+)\ue001")


class Prompts:
    """Makes the prompts of one model; `template` is its chat template's source, or empty.

    Raises `ConfigError` for a template that is malformed.
    """

    def __init__(self, vocabulary: Vocabulary, template: str, *, context_tokens_max: int) -> None:
        self._vocabulary = vocabulary
        self._context_tokens_max = context_tokens_max
        self._bytes_max = context_tokens_max * PROMPT_BYTES_PER_TOKEN_MAX
        self._template: ChatTemplate | None = None
        if template:
            self._template = ChatTemplate(
                template,
                chars_max=self._bytes_max,
                bos=vocabulary.bos_text,
                eos=vocabulary.eos_text,
                specials=vocabulary.special_texts,
            )

    @property
    def has_template(self) -> bool:
        """Whether the model takes chats."""
        return self._template is not None

    def encode(self, request: GenerateRequest) -> list[int]:
        """The prompt as it is, or the chat through the model's template; raises `RequestError`."""
        vocabulary = self._vocabulary
        if request.token_ids is not None:
            if not all(0 <= token_id < vocabulary.size for token_id in request.token_ids):
                raise RequestError(
                    f"every token id must be from 0 to {vocabulary.size - 1}", param="token_ids"
                )
            return list(request.token_ids)
        if request.messages is not None:
            return self._encode_chat(request, request.messages)
        text = request.prompt or ""
        self._check_size(len(text), "prompt")
        text = _characters(text)
        self._check_size(len(text.encode()), "prompt")
        return vocabulary.begin(vocabulary.tokenize(text, is_template=False))

    def _encode_chat(self, request: GenerateRequest, messages: list[ChatMessage]) -> list[int]:
        if self._template is None:
            raise RequestError("the model has no chat template; send a prompt", param="messages")
        tools = "" if request.tool_choice == "none" else request.tools
        chars = sum(len(m.content) + len(m.tool_calls) for m in messages) + len(tools)
        self._check_size(chars, "messages")
        messages = [
            msgspec.structs.replace(message, content=_characters(message.content))
            for message in messages
        ]
        text = _characters(self._template.render(messages, tools))
        self._check_size(len(text.encode()), "messages")
        vocabulary = self._vocabulary
        if not any(mark in m.content for m in messages for mark in vocabulary.special_texts):
            return vocabulary.tokenize(text, is_template=True)
        # Someone writes special tokens in a message, perhaps to end it and go on as the system.
        # So the template is rendered around markers, and what they stand for is plain text.
        marked = [
            msgspec.structs.replace(message, content=f"\ue000{number}\ue001")
            for number, message in enumerate(messages)
        ]
        tokens: list[int] = []
        rendered = _characters(self._template.render(marked, tools))
        for index, piece in enumerate(_MARKER.split(rendered)):
            is_content = index % 2 == 1
            text = messages[int(piece)].content if is_content else piece
            tokens += vocabulary.tokenize(text, is_template=not is_content)
        return tokens

    def _check_size(self, size_bytes: int, param: str) -> None:
        """Called with the characters first, of which there are no more, then with the bytes."""
        if size_bytes > self._bytes_max:
            raise RequestError(
                f"the prompt has more than {self._bytes_max} bytes, more than the model's"
                f" context of {self._context_tokens_max} tokens holds; shorten it",
                param=param,
            )


def _characters(text: str) -> str:
    """Without lone surrogates: they are no characters, and llama.cpp could not take them."""
    return text.encode("utf-8", "replace").decode("utf-8")
