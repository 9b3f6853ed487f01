"""Whole answers made of events, and events made of whole answers.

Some servers stream whatever is asked for, and some never do. `exchange.py` decides by what has come whether one of
these is needed; a client gets what it asked for. Chats and completions go both ways, a response out of its last event;
of anything else None says that it cannot be. Sans-IO.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Raw

from trinamo.runtime.errors import DisconnectedError, RemoteProtocolError
from trinamo.runtime.protocol.openai.answers import DONE, encode_data

from .events import EventSplitter
from .refusals import error_of_event

_KINDS: Final = {"chat.completion.chunk": "chat.completion", "text_completion": "text_completion"}
_CHUNKS: Final = {whole: chunk for chunk, whole in _KINDS.items()}
_DONE: Final = b"[DONE]"
_ENDED: Final = ("response.completed", "response.incomplete", "response.failed")
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


def whole_of(events: bytes) -> bytes | None:
    """The body of the answer that `events` are, all of them; None for those of an API that we do not convert.

    Raises the error that an event tells of, `DisconnectedError` if they end in the middle, and `RemoteProtocolError`
    for what are no such events.
    """
    splitter = EventSplitter(len(events))
    try:
        found = [event.data for event in [*splitter.feed(events), *splitter.finish()]]
        told = [_decode(data) for data in found if data != _DONE]
        for each in told:
            if each.get("error") is not None and not each.get("choices"):
                raise error_of_event(Raw(_encode(each["error"])))
            if each.get("type") in _ENDED:
                return _encode(each["response"])
        if not told or told[0].get("object") not in _KINDS:
            return None
        return _encode(_merged(told, is_done=found[-1] == _DONE))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"an event of the upstream is no JSON: {error}") from error
    except (TypeError, KeyError, AttributeError, ValueError, IndexError) as error:
        raise RemoteProtocolError(f"the upstream's events are no answer: {error!r}") from error


def _merged(chunks: list[dict[str, Any]], *, is_done: bool) -> dict[str, Any]:
    whole = {name: value for name, value in chunks[0].items() if name not in ("choices", "usage")}
    whole["object"] = _KINDS[whole["object"]]
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for each in chunk.get("choices") or ():
            index = each.get("index", 0)
            _add(choices.setdefault(index, {"index": index, "finish_reason": None}), each)
        if chunk.get("usage") is not None:
            whole["usage"] = chunk["usage"]
    if not choices or not all(is_done or each["finish_reason"] for each in choices.values()):
        raise DisconnectedError("the upstream ended its answer in the middle")
    for each in choices.values():
        each["finish_reason"] = each["finish_reason"] or "stop"
    whole["choices"] = [choices[index] for index in sorted(choices)]
    return whole


def _add(choice: dict[str, Any], more: dict[str, Any]) -> None:
    """Add a chunk's part of a choice: texts and lists grow, of all else the last that is said counts."""
    for name, value in more.items():
        if name == "delta":
            message = choice.setdefault("message", {"role": "assistant", "content": None})
            _grow(message, value or {})
        elif name == "logprobs":
            if value is not None:
                _grow(choice.setdefault("logprobs", {}), value)
        elif name == "text":
            _append(choice, name, value or "")
        elif value is not None:
            choice[name] = value


def _grow(grown: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        known = grown.get(name)
        if name == "tool_calls":
            calls = grown.setdefault(name, [])
            for call in value or ():
                _grow_call(calls, call)
        elif value is None:
            grown.setdefault(name, None)
        elif isinstance(value, list):
            grown[name] = known if isinstance(known, list) else []
            grown[name].extend(value)
        elif isinstance(value, str) and name != "role":
            _append(grown, name, value)
        else:
            grown[name] = value


def _grow_call(calls: list[dict[str, Any]], more: dict[str, Any]) -> None:
    index = more.get("index", len(calls) - 1 if calls and not more.get("id") else len(calls))
    if not 0 <= index <= len(calls):
        raise ValueError(f"a call is numbered {index}")
    if index == len(calls):
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call = calls[index]
    call["id"], call["type"] = more.get("id") or call["id"], more.get("type") or call["type"]
    function = more.get("function") or {}
    for name in ("name", "arguments"):
        _append(call["function"], name, function.get(name) or "")


def _append(grown: dict[str, Any], name: str, more: str) -> None:
    # Taken out first: a string that has one reference grows in place, and is not copied for each piece.
    text: str = grown.pop(name, None) or ""
    text += more
    grown[name] = text


def events_of(body: bytes) -> bytes | None:
    """The events of the answer that `body` is: its text, its end, and `[DONE]`; None if it is none."""
    try:
        whole = _decode(body)
        kind = _CHUNKS.get(whole.get("object", ""))
        if kind is None or not isinstance(whole.get("choices"), list):
            return None
        head = {name: value for name, value in whole.items() if name not in ("choices", "usage")}
        head["object"] = kind
        texts = [_begun(choice, index) for index, choice in enumerate(whole["choices"])]
        is_chat = kind != "text_completion"
        ends = [
            {
                "index": text["index"],
                **({"delta": {}} if is_chat else {"text": ""}),
                "finish_reason": choice.get("finish_reason") or "stop",
            }
            for text, choice in zip(texts, whole["choices"], strict=True)
        ]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, AttributeError):
        return None
    # Not in an event of its own, which has no choice in it, and is only for who asks for it.
    usage = {"usage": whole["usage"]} if whole.get("usage") is not None else {}
    made = [{**head, "choices": texts}, {**head, "choices": ends, **usage}]
    return b"".join([*(encode_data(_encode(each)) for each in made), DONE])


def _begun(choice: dict[str, Any], number: int) -> dict[str, Any]:
    found = {**choice, "index": choice.get("index", number), "finish_reason": None}
    if (message := found.pop("message", None)) is not None:
        calls = message.get("tool_calls")
        numbered = [{"index": index, **call} for index, call in enumerate(calls or ())]
        found["delta"] = message | ({"tool_calls": numbered} if numbered else {})
    return found
