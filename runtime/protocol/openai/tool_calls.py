"""How an answer calls tools, in its text, and how the calls are taken out of it. Sans-IO.

The form is Hermes', which Qwen and many others write too, and which every other model is asked for
(`engines/llamacpp/chat_template.py`):

    <tool_call>
    {"name": "weather", "arguments": {"place": "Bern"}}
    </tool_call>

Arguments are handed on as they come. What looks like a call and is none stays text.
"""

from __future__ import annotations

import enum
import json
import re
from typing import Final

import attrs

CALL_BEGIN: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"
_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([^"\\]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_HEAD_CHARS_MAX: Final = 1024
_NAME: Final = re.compile(r'[^"\\\ud800-\udfff]{1,64}\Z')
_MARKS: Final = re.compile(r'["\\{}\[\]]')


@attrs.frozen
class CallPiece:
    """Some of the call with this number; its first piece has the name, and no other has."""

    index: int
    name: str
    arguments: str


class _In(enum.Enum):
    TEXT = enum.auto()
    HEAD = enum.auto()
    """Behind `CALL_BEGIN`: what is called is not known yet."""
    ARGUMENTS = enum.auto()
    TAIL = enum.auto()
    """Behind the arguments, up to `CALL_END`."""


class ToolCallParser:
    """Text in, text and calls out, the same for any split of the text but for where pieces end."""

    def __init__(self) -> None:
        self.call_count = 0
        """Of those that have begun."""
        self._in = _In.TEXT
        self._pending = ""
        self._depth = 0
        self._is_quoted = self._is_escaped = self._is_behind_call = False

    def push(self, text: str) -> list[str | CallPiece]:
        """What `text` completes, in order."""
        self._pending += text
        pieces: list[str | CallPiece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[str | CallPiece]:
        """The answer is over: what was kept back. A call that was cut short stays as it is."""
        pieces: list[str | CallPiece] = []
        pending, self._pending = self._pending, ""
        if self._in is _In.HEAD:
            pending = CALL_BEGIN + pending
        if self._in in (_In.TEXT, _In.HEAD):
            self._say(pending, pieces)
        return pieces

    def _step(self, pieces: list[str | CallPiece]) -> bool:
        """Take what can be taken of what is pending; whether there may be more."""
        match self._in:
            case _In.TEXT:
                return self._take_text(pieces)
            case _In.HEAD:
                return self._take_head(pieces)
            case _In.ARGUMENTS:
                return self._take_arguments(pieces)
            case _In.TAIL:
                return self._take_tail()

    def _take_text(self, pieces: list[str | CallPiece]) -> bool:
        text, begin, rest = self._pending.partition(CALL_BEGIN)
        if begin:
            self._say(text, pieces)
            self._in, self._pending = _In.HEAD, rest
            return True
        held = _held(text, CALL_BEGIN)
        self._say(text[: len(text) - held], pieces)
        self._pending = text[len(text) - held :]
        return False

    def _take_head(self, pieces: list[str | CallPiece]) -> bool:
        head = _HEAD.match(self._pending, 0, _HEAD_CHARS_MAX)
        if head is not None:
            pieces.append(CallPiece(self.call_count, head[1], ""))
            self.call_count += 1
            self._in, self._pending = _In.ARGUMENTS, self._pending[head.end() :]
            self._depth, self._is_quoted, self._is_escaped = 0, False, False
            return True
        body, end, rest = self._pending.partition(CALL_END)
        if not end:
            return False
        self._in, self._pending = _In.TEXT, rest
        call = _whole(body)
        if call is None:
            self._say(CALL_BEGIN + body + CALL_END, pieces)
        else:
            pieces.append(CallPiece(self.call_count, *call))
            self.call_count += 1
            self._is_behind_call = True
        return True

    def _take_arguments(self, pieces: list[str | CallPiece]) -> bool:
        text, self._pending = self._pending, ""
        length = self._scan(text)
        if text[:length]:
            pieces.append(CallPiece(self.call_count - 1, "", text[:length]))
        if self._depth:
            return False
        self._in, self._pending = _In.TAIL, text[length:]
        return bool(length)

    def _scan(self, text: str) -> int:
        """How much of `text` belongs to the JSON object that begins, or goes on, with it."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            mark = _MARKS.search(text, at)
            if mark is None:
                break
            at = mark.end()
            char = mark[0]
            if char == "\\":
                self._is_escaped = self._is_quoted
            elif char == '"':
                self._is_quoted = not self._is_quoted
            elif not self._is_quoted:
                self._depth += 1 if char in "{[" else -1
                if self._depth == 0:
                    return at
        return len(text)

    def _take_tail(self) -> bool:
        _, end, rest = self._pending.partition(CALL_END)
        if not end:
            self._pending = self._pending[1 - len(CALL_END) :]
            return False
        self._in, self._pending, self._is_behind_call = _In.TEXT, rest, True
        return True

    def _say(self, text: str, pieces: list[str | CallPiece]) -> None:
        if self._is_behind_call:
            # What separates calls is no text.
            text = text.lstrip()
            self._is_behind_call = not text
        if text:
            pieces.append(text)


def _held(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def _whole(body: str) -> tuple[str, str] | None:
    """Name and arguments of a call in some other order; None if it is none."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    name = call.get("name") if isinstance(call, dict) else None
    # A name that is none, or no text that could be sent, is no call.
    if not isinstance(name, str) or not _NAME.match(name):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        # Half of a character may be escaped, as JSON allows, and cannot be sent.
        return name, arguments.encode("utf-8", "replace").decode()
    return name, json.dumps(arguments)
