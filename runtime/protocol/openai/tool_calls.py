"""How an answer calls tools, in its text, how the calls are taken out of it, and how a chat tells them. Sans-IO.

The form is Hermes', which Qwen and many others write too, and which every other model is asked for
(`engines/llamacpp/chat_template.py`):

    <tool_call>
    {"name": "weather", "arguments": {"place": "Bern"}}
    </tool_call>

Arguments are handed on as they come. What looks like a call and is none stays text, and so does what follows a
call that its model leaves unfinished: nothing waits for an end that may never come.
"""

from __future__ import annotations

import enum
import json
import math
import re
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final

import attrs
import msgspec

from .answers import (
    ChatAnswer,
    ChatDelta,
    ChatReply,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    encode_data,
)
from .generate import Delta, FinishReason

CALL_BEGIN: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"
_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*"([^"\\\n]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_HEAD_CHARS_MAX: Final = 1024
_NAME: Final = re.compile(r'[^"\\\ud800-\udfff]{1,64}\Z')
_BEGINS: Final = re.compile(r"\s*(?:\{|\Z)")
_TAIL_END: Final = re.compile(f"{CALL_END}|(?={CALL_BEGIN})")
_IN_STRING: Final = re.compile(r'["\\\n]')
_OUTSIDE: Final = re.compile(r'["\\{}\[\]<A-DF-Z]')
"""What opens and closes, and what no JSON has outside its strings: a tag, `NaN`, the beginning of a sentence."""
_encode = msgspec.json.Encoder().encode


@attrs.frozen
class CallPiece:
    """Some of the call with this number; its first piece has the name, and no other has."""

    index: int
    name: str
    arguments: str


class _In(enum.Enum):
    TEXT = enum.auto()
    HEAD = enum.auto()
    """After `CALL_BEGIN`: what is called is not known yet."""
    ARGUMENTS = enum.auto()
    TAIL = enum.auto()
    """After the arguments: what is left of the JSON object, and `CALL_END`."""


class ToolCallParser:
    """Text in, text and calls out, the same for any split of the text but for where pieces end.

    Of calls beyond the first `calls_max` nothing is told.
    """

    def __init__(self, calls_max: float = math.inf) -> None:
        self._calls_max = calls_max
        self.call_count = 0
        """Of those that have begun."""
        self._in = _In.TEXT
        self._pending = ""
        self._body: list[str] = []
        """Of a call in some other order: what was scanned, before `_pending`."""
        self._scanned = 0
        """Of `_pending`."""
        self._is_behind_call = False
        self._begin_object()

    def _begin_object(self) -> None:
        self._depth, self._is_quoted, self._is_escaped, self._is_broken = 0, False, False, False

    def push(self, text: str) -> list[str | CallPiece]:
        self._pending += text
        pieces: list[str | CallPiece] = []
        while self._TAKES[self._in](self, pieces):
            pass
        return [each for each in pieces if isinstance(each, str) or each.index < self._calls_max]

    def finish(self) -> list[str | CallPiece]:
        """The answer is over: what was kept back. A call that was cut short stays as it is."""
        pieces: list[str | CallPiece] = []
        pending, self._pending = self._pending, ""
        if self._in is _In.HEAD:
            pending = "".join((CALL_BEGIN, *self._body, pending))
        if self._in in (_In.TEXT, _In.HEAD):
            self._say(pending, pieces)
        return pieces

    def _take_text(self, pieces: list[str | CallPiece]) -> bool:
        text, begin, rest = self._pending.partition(CALL_BEGIN)
        if begin:
            self._say(text, pieces)
            self._in, self._pending, self._scanned = _In.HEAD, rest, 0
            self._begin_object()
            return True
        held = _held(text, CALL_BEGIN)
        self._say(text[: len(text) - held], pieces)
        self._pending = text[len(text) - held :]
        return False

    def _take_head(self, pieces: list[str | CallPiece]) -> bool:
        if not self._body:
            head = _HEAD.match(self._pending, 0, _HEAD_CHARS_MAX)
            if head is not None:
                pieces.append(CallPiece(self.call_count, head[1], ""))
                self.call_count += 1
                self._in, self._pending = _In.ARGUMENTS, self._pending[head.end() :]
                self._begin_object()
                return True
            if not _BEGINS.match(self._pending):
                self._in = _In.TEXT
                self._say(CALL_BEGIN, pieces)
                return True
        end = self._scan(self._pending, self._scanned)
        if end is None:
            self._scanned = len(self._pending)
            if self._scanned > _HEAD_CHARS_MAX:
                # No head begins any more: what was scanned is not copied again with each token.
                self._body.append(self._pending)
                self._pending, self._scanned = "", 0
            return False
        body = "".join((*self._body, self._pending[:end]))
        self._body.clear()
        self._pending = self._pending[end:]
        call = None if self._is_broken else _whole(body)
        if call is None:
            self._in = _In.TEXT
            self._say(CALL_BEGIN + body, pieces)
        else:
            self._in = _In.TAIL
            pieces.append(CallPiece(self.call_count, *call))
            self.call_count += 1
        return True

    def _take_arguments(self, pieces: list[str | CallPiece]) -> bool:
        text, self._pending = self._pending, ""
        end = self._scan(text)
        if text[:end]:
            pieces.append(CallPiece(self.call_count - 1, "", text[:end]))
        if end is None:
            return False
        self._in, self._pending = _In.TAIL, text[end:]
        return True

    def _scan(self, text: str, at: int = 0) -> int | None:
        """Where the JSON object that begins, or goes on, at `at` ends, or is none; None: not in `text`.

        Arguments are on their way already, so they are as lax as models are: a tag alone ends them.
        """
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            mark = (_IN_STRING if self._is_quoted else _OUTSIDE).search(text, at)
            if mark is None:
                break
            at = mark.end()
            char = mark[0]
            if char == "\\":
                self._is_escaped = self._is_quoted
            elif char == '"':
                self._is_quoted = not self._is_quoted
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at
            elif char == "<" or self._in is _In.HEAD:
                self._is_broken = True
                return at - 1
        return None

    def _take_tail(self, _: list[str | CallPiece]) -> bool:
        tail = self._pending.lstrip(" \t\r\n}")
        self._pending = tail
        if tail.startswith(","):
            # Other members, which nothing is told of.
            end = _TAIL_END.search(tail)
            if end is None:
                self._pending = "," + tail[1:][1 - len(CALL_END) :]
                return False
            tail = tail[end.end() :]
        elif tail.startswith(CALL_END):
            tail = tail[len(CALL_END) :]
        elif CALL_END.startswith(tail):
            return False
        # Nothing else belongs to the call, though the tag that ends it is missing.
        self._in, self._pending, self._is_behind_call = _In.TEXT, tail, True
        return True

    _TAKES: Final = {
        _In.TEXT: _take_text,
        _In.HEAD: _take_head,
        _In.ARGUMENTS: _take_arguments,
        _In.TAIL: _take_tail,
    }
    """Each takes what can be taken of what is pending, and says whether there may be more."""

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


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _whole(body: str) -> tuple[str, str] | None:
    """Name and arguments of a call in some other order; None if it is none."""
    try:
        call = json.loads(body, parse_constant=_refuse_constant)
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


class ToolAnswer(ChatAnswer):
    """One choice of an answer of `/v1/chat/completions` to a request with tools."""

    def __init__(
        self, answer_id: str, *known: Any, index: int = 0, calls_max: float = math.inf, **told: Any
    ) -> None:
        super().__init__(answer_id, *known, index=index, **told)
        self._call_prefix = f"call_{answer_id}_{index}" if index else f"call_{answer_id}"
        self._parser = ToolCallParser(calls_max)
        self._called: list[tuple[str, list[str]]] = []

    def add_event(self, delta: Delta) -> bytes:
        events = [
            super(ToolAnswer, self).add_event(Delta(piece))
            if isinstance(piece, str)
            else self._call_event(piece)
            for piece in self._pieces(delta)
        ]
        if delta.logprobs or delta.finish_reason is not None or self._ids is not None:
            events.append(super().add_event(self._rest(delta)))
        return b"".join(events)

    def add_text(self, delta: Delta) -> None:
        for piece in self._pieces(delta):
            if isinstance(piece, str):
                super().add_text(Delta(piece))
            elif piece.name:
                self._called.append((piece.name, [piece.arguments]))
            else:
                self._called[-1][1].append(piece.arguments)
        super().add_text(self._rest(delta))

    def _reply(self, text: str) -> ChatReply:
        if not self._called:
            return super()._reply(text)
        calls = [
            ToolCall(f"{self._call_prefix}_{index}", FunctionDelta(name, "".join(arguments)))
            for index, (name, arguments) in enumerate(self._called)
        ]
        return ChatReply("assistant", text or None, calls)

    def _pieces(self, delta: Delta) -> list[str | CallPiece]:
        pieces = self._parser.push(delta.text) if delta.text else []
        return pieces if delta.finish_reason is None else pieces + self._parser.finish()

    def _rest(self, delta: Delta) -> Delta:
        reason = delta.finish_reason
        if reason is FinishReason.STOP and self._parser.call_count:
            reason = FinishReason.TOOL_CALLS
        return msgspec.structs.replace(delta, text="", finish_reason=reason)

    def _call_event(self, piece: CallPiece) -> bytes:
        call = ToolCallDelta(piece.index, FunctionDelta(arguments=piece.arguments))
        if piece.name:
            call = ToolCallDelta(
                piece.index,
                FunctionDelta(piece.name, piece.arguments),
                f"{self._call_prefix}_{piece.index}",
                "function",
            )
        role = None if self._is_begun else "assistant"
        self._is_begun = True
        return self._event(ChatDelta(role=role, tool_calls=[call]), Delta())


class PartedAnswer(ABC):
    """An answer in parts of which events tell how they grow: text, and calls of tools.

    Where it may hold any calls, they are taken out of the text.
    """

    ends_itself: ClassVar = False

    def __init__(self, answer_id: str, model: str, *, calls_max: float) -> None:
        self._id, self._model = answer_id, model
        self._parser = ToolCallParser(calls_max) if calls_max else None
        self._reason: FinishReason | None = None
        self._events: list[bytes] | None = None
        """Since the last ones were taken; None where nobody wants any."""

    def add_text(self, delta: Delta) -> None:
        if self._parser is None:
            if delta.text:
                self._add(delta.text)
        elif delta.text:
            self._add_pieces(self._parser.push(delta.text))
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason

    def _add_pieces(self, pieces: list[str | CallPiece]) -> None:
        for piece in pieces:
            if isinstance(piece, str):
                self._add(piece)
            else:
                self._add_call(piece)

    @abstractmethod
    def _add(self, text: str) -> None:
        """Text for the part that grows, or for a new one."""

    @abstractmethod
    def _add_call(self, piece: CallPiece) -> None:
        """A call that begins, or more of the one that grows."""

    def _say(self, kind: str, **told: Any) -> None:
        """Add an event, unless nobody wants any."""
        if self._events is not None:
            self._events.append(encode_data(_encode({"type": kind, **told}), kind.encode()))

    def _taken(self) -> bytes:
        events, self._events = self._events or [], []
        return b"".join(events)
