"""Answers of an upstream as deltas: its bytes as they are, and beside them what we need to know.

A streamed answer is complete at `[DONE]`, or at its proper end once every choice that has begun has
a finish reason: an upstream that dies leaves neither. Of a chat it is known how many choices it has,
so that its last finish reason is its end already, and only usage may follow. Sans-IO.
"""

from __future__ import annotations

from typing import Final

import attrs
import msgspec
from msgspec import Raw
from msgspec.structs import replace

from trinamo.runtime.errors import DisconnectedError, RemoteProtocolError, TrinamoError
from trinamo.runtime.protocol.openai.generate import Delta, FinishReason
from trinamo.runtime.protocol.openai.passing import COMMENT, Renaming, continued
from trinamo.runtime.protocol.openai.shaping import ABSENT, is_absent
from trinamo.runtime.protocol.undecodable import UNDECODABLE

from .events import EventSplitter, Received
from .refusals import as_json, error_of_event

_DONE: Final = b"[DONE]"
_PIECE_BYTES: Final = 1 << 18
"""A long body travels in pieces of this."""
_ENDS: Final = (
    *("response.completed", "response.incomplete", "response.failed"),
    "message_stop",
)
"""Of the APIs whose streams have no `[DONE]`."""
_TOKENS_MAX: Final = 2**31 - 1
_CHOICES_MAX: Final = 4096
"""Where it is not known how many there are: of each the end is kept."""


class _Text(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    """Of vLLM, SGLang and llama.cpp; Ollama and later vLLMs call it `reasoning`."""
    reasoning: str | None = None
    tool_calls: Raw = Raw()

    @property
    def is_other(self) -> bool:
        """Whether it brings what is no text of the answer."""
        calls = bytes(self.tool_calls)
        return bool(self.reasoning_content or self.reasoning) or calls not in (b"", b"null", b"[]")


class _Choice(msgspec.Struct, frozen=True):
    index: int = 0
    delta: _Text | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    """Of chats and completions, and, by other names, of responses and messages."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def prompt(self) -> int:
        return _bounded(self.prompt_tokens or self.input_tokens)

    @property
    def output(self) -> int:
        return _bounded(self.completion_tokens or self.output_tokens)


class _Response(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


class _Told(msgspec.Struct, frozen=True):
    usage: _Usage | None = None
    error: Raw = ABSENT
    type: str = ""
    response: _Response | None = None


class _Event(_Told, frozen=True):
    choices: list[_Choice] = []


# What is made of JSON takes up to 25 times its bytes, and no budget counts it. So of what is long only
# the first choice is made, and the rest is read over.


class _First(msgspec.Struct, frozen=True, array_like=True):
    choice: _Choice | None = None


class _Long(_Told, frozen=True):
    choices: _First = _First()


_SHORT_BYTES: Final = 1 << 16
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_long = msgspec.json.Decoder(_Long).decode


def _read(data: bytes, what: str) -> tuple[_Told, list[_Choice]]:
    """What an event, or a whole answer, tells; of a long one the first choice alone."""
    try:
        if len(data) <= _SHORT_BYTES:
            event = _decode_event(data)
            return event, event.choices
        long = _decode_long(data)
    except msgspec.ValidationError:
        # JSON, and otherwise than we know it: the client may know better.
        return _Told(), []
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"{what} is no JSON: {error}") from error
    first = long.choices.choice
    return long, [] if first is None else [first]


def _bounded(count: int) -> int:
    return min(max(count, 0), _TOKENS_MAX)


def _reason(finish_reason: str | None) -> FinishReason:
    return FinishReason.LENGTH if finish_reason == "length" else FinishReason.STOP


@attrs.define(eq=False)
class StreamedAnswer:
    """One streamed answer. After `error` is set it takes nothing more."""

    _splitter: EventSplitter = attrs.field(converter=EventSplitter)
    _renaming: Renaming | None = None
    _choices: int = attrs.field(default=0, kw_only=True, alias="choices")
    """How many there will be; 0 if that is not known."""
    _opening: bytes = attrs.field(default=b"", kw_only=True, alias="opening")
    """What the client has of the beginning: what opens an answer again is left out."""
    _delivered: int = attrs.field(default=0, kw_only=True, alias="delivered")
    """The tokens behind it, which are prompt here."""
    _has_brought: bool = False
    _open: set[int] = attrs.field(factory=set)
    _finished: dict[int, FinishReason] = attrs.field(factory=dict)
    _output_tokens: int = 0
    _is_told: bool = False
    is_done: bool = False
    """Its last event has come."""
    error: TrinamoError | None = None
    """What ended it, after the deltas that came before."""

    def feed(self, body: bytes) -> list[Delta]:
        """What `body` brings: a delta for each event, and another for the end."""
        data = self._splitter.single(body)
        if data is None or data == _DONE or self._opening or self.is_done:
            self._splitter.has_comment = False
            deltas = self._take(self._splitter.feed(body))
            is_ping = self._splitter.has_comment and not (deltas or self.is_done or self.error)
            return [Delta(raw=COMMENT)] if is_ping else deltas
        try:
            delta = self._delta(Received(data), body)
        except TrinamoError as error:
            self.error = error
            return []
        return [] if delta is None else [delta]

    def finish(self) -> list[Delta]:
        """The body is over: what is left of the answer, or the error that it is not whole."""
        deltas = self._take(self._splitter.finish())
        if isinstance(self.error, RemoteProtocolError):
            # Half an event, as the end of a connection leaves it: no nonsense of the upstream.
            self.error = None
        if self.is_done or self.error is not None:
            return deltas
        if self._finished and not self._open and len(self._finished) >= self._choices:
            return [*deltas, self._end()]
        self.error = DisconnectedError("the upstream ended its answer in the middle")
        return deltas

    def _take(self, events: list[Received]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            if self.is_done:
                break
            if event.data == _DONE:
                self.is_done = True
                deltas.append(self._end())
                break
            try:
                delta = self._delta(event)
            except TrinamoError as error:
                self.error = error
                break
            if delta is None:
                continue
            is_new = bool(delta.output_tokens or self._finished)
            if self._opening and not (is_new or self._has_brought):
                continue
            self._has_brought = True
            deltas.append(delta)
        return deltas

    def _delta(self, event: Received, raw: bytes | None = None) -> Delta | None:
        """One event; `raw` if it is at hand as the client gets it. None for what follows a finish."""
        data = event.data
        told, choices = _read(data, "an event of the upstream")
        if not is_absent(told.error) and (not choices or event.event == b"error"):
            raise error_of_event(told.error)
        if len(choices) > (self._choices or _CHOICES_MAX):
            raise RemoteProtocolError(f"an event of the upstream holds {len(choices)} choices")
        text, count = "", 0
        for choice in choices:
            is_behind = choice.index in self._finished
            brought, is_any = self._choice(choice)
            if is_behind and is_any:
                return None
            text += brought
            count += is_any
        usage = told.usage or (told.response.usage if told.response is not None else None)
        prompt_tokens = 0
        if event.event.endswith((b".delta", b"block_delta")):
            count = 1
        if usage is not None and usage.output:
            count = max(usage.output - self._output_tokens, 0)
            prompt = max(usage.prompt - self._delivered, 0)
            prompt_tokens, self._is_told = (0 if self._is_told else prompt), True
        if self._renaming is not None or self._opening:
            data = data if self._renaming is None else self._renaming.apply(data)
            data = continued(data, self._opening, self._delivered) if self._opening else data
            event, raw = Received(data, event.event), None
        self._output_tokens += count
        delta = Delta(
            text,
            prompt_tokens=prompt_tokens,
            output_tokens=count,
            raw=event.to_bytes() if raw is None else raw,
            finish_reason=self._finish_reason() if self._finished else None,
        )
        if told.type in _ENDS:
            self.is_done = True
            return replace(delta, finish_reason=FinishReason.STOP)
        return delta

    def _choice(self, choice: _Choice) -> tuple[str, bool]:
        """The text of the one choice that could be gone on with, and whether it brings anything."""
        index = choice.index
        if not 0 <= index < min(self._choices or _CHOICES_MAX, _CHOICES_MAX):
            raise RemoteProtocolError(f"the upstream answers with a choice numbered {index}")
        # Some servers write an empty one where others write null.
        if choice.finish_reason:
            self._finished[index] = _reason(choice.finish_reason)
            self._open.discard(index)
        elif index not in self._finished:
            self._open.add(index)
        delta = choice.delta
        text = (choice.text if delta is None else delta.content) or ""
        is_any = bool(text) or (delta is not None and delta.is_other)
        return text if index == 0 else "", is_any

    def _finish_reason(self) -> FinishReason | None:
        """Once every choice has one: whoever dies between it and `[DONE]` has said all."""
        if self._open or len(self._finished) != self._choices:
            return None
        return self._finished.get(0, FinishReason.STOP)

    def _end(self) -> Delta:
        self.is_done = True
        return Delta(finish_reason=self._finished.get(0, FinishReason.STOP))


@attrs.define(eq=False)
class WholeAnswer:
    """One answer that is not streamed, as its body comes: at most `bytes_max` bytes."""

    _bytes_max: int
    _renaming: Renaming | None = None
    _pieces: list[bytes] = attrs.field(factory=list)
    _size: int = 0

    def feed(self, body: bytes) -> None:
        """Keep a piece; `RemoteProtocolError` for one too many."""
        self._size += len(body)
        if self._size > self._bytes_max:
            raise RemoteProtocolError(
                f"the upstream's answer is longer than {self._bytes_max} bytes"
            )
        self._pieces.append(body)

    def take(self) -> bytes:
        body = b"".join(self._pieces)
        self._pieces.clear()
        return body

    def finish(self, body: bytes) -> list[Delta]:
        told, choices = _read(body, "the upstream's answer")
        usage = told.usage or _Usage()
        if self._renaming is not None:
            body = self._renaming.apply(body)
        reason = _reason(choices[0].finish_reason if choices else None)
        end = Delta(finish_reason=reason, prompt_tokens=usage.prompt, output_tokens=usage.output)
        return _in_pieces(body, end)


def refused(status: int, body: bytes) -> list[Delta]:
    """A refusal that is the client's to read, as an answer in JSON."""
    return _in_pieces(as_json(status, body), Delta(finish_reason=FinishReason.STOP, status=status))


def _in_pieces(body: bytes, end: Delta) -> list[Delta]:
    cut = range(0, len(body), _PIECE_BYTES)
    *pieces, last = [body[i : i + _PIECE_BYTES] for i in cut] or [b""]
    return [*(Delta(status=end.status, raw=piece) for piece in pieces), replace(end, raw=last)]
