"""A chat rendered as the model was trained on it: the Jinja template from the model's file.

A template is data that came with a download, so it runs in Jinja's immutable sandbox, its output
is bounded, and so is every string or list it builds by repetition. Needs the extra `llamacpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...errors import ConfigError, EngineError, RequestError
from ...protocol.openai.generate import ChatMessage

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """Renders messages up to where the assistant's answer begins.

    `chars_max` bounds the result. Raises `ConfigError` if `source` is no template.
    """

    def __init__(self, source: str, *, chars_max: int, bos: str = "", eos: str = "") -> None:
        self._chars_max = chars_max
        environment = _Environment(chars_max)
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template is malformed: {error}") from error
        self._tokens = {"bos_token": bos, "eos_token": eos}

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt. Raises `RequestError` if it gets too long or the template refuses it."""
        try:
            return self._render_bounded(messages)
        except RequestError:
            raise
        except Exception as error:
            # Whatever it raises: a template is data that came from elsewhere.
            raise EngineError(f"the model's chat template failed: {error}") from error

    def _render_bounded(self, messages: Sequence[ChatMessage]) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        pieces: list[str] = []
        chars = 0
        for piece in self._template.generate(
            messages=turns, add_generation_prompt=True, **self._tokens
        ):
            chars += len(piece)
            if chars > self._chars_max:
                raise RequestError(
                    f"the prompt has more than {self._chars_max} characters, more than the model's"
                    " context holds; shorten it",
                    param="messages",
                )
            pieces.append(piece)
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**"))

    def __init__(self, repeated_max: int) -> None:
        # White space as in the templates that models ship: a line of tags leaves no line.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        self._repeated_max = repeated_max

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse powers, and products that would build something large."""
        if operator == "**":
            raise SecurityError("powers are not allowed in a chat template")
        for sequence, count in ((left, right), (right, left)):
            is_repetition = isinstance(sequence, str | list | tuple) and isinstance(count, int)
            if is_repetition and len(sequence) * count > self._repeated_max:
                raise SecurityError("a repetition in the chat template is too long")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    raise RequestError(f"the model's chat template refuses these messages: {message}")
