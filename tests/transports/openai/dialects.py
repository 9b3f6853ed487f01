"""Streams in the forms in which servers differ: those of llama.cpp recorded, the others as documented.

Recorded are answers of the server of xllamacpp 2026.10.11549, which is llama.cpp's own; `server.py`
beside the recordings starts it. They are bodies as curl -N wrote them, for `HI` and `BY_TOOL` of
`test_passing.py` or the prompt "one two three", with 3 tokens at the most and temperature 0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from trinamo.runtime.protocol.openai.generate import Delta, FinishReason
from trinamo.transports.openai.answers import StreamedAnswer

EVENT_BYTES_MAX = 1 << 16
RECORDED = Path(__file__).parent / "llamacpp" / "recorded"


@attrs.frozen
class Dialect:
    """One answer: its bytes, and what is to be found in them."""

    name: str
    body: bytes
    text: str = "Hello"
    output_tokens: int = 2
    prompt_tokens: int = 0
    finish_reason: FinishReason = FinishReason.STOP


def chunk(delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choices = []
    if delta is not None:
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
    shared = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return {**shared, "choices": choices, **more}


def lines(*chunks: Any, end: str = "\n", done: bool = True, space: str = " ") -> bytes:
    data = [json.dumps(each, separators=(",", ":")) for each in chunks]
    if done:
        data.append("[DONE]")
    return "".join(f"data:{space}{each}{end}{end}" for each in data).encode()


def recorded(name: str) -> bytes:
    return (RECORDED / name).read_bytes()


ROLE = chunk({"role": "assistant", "content": ""})
HEL, LO = chunk({"content": "Hel"}), chunk({"content": "lo"})
STOP = chunk({}, "stop")
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
TOOL = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

DIALECTS = (
    Dialect("vllm", lines(ROLE, HEL, LO, STOP)),
    Dialect(
        "vllm with usage in a chunk without choices",
        lines(ROLE, HEL, LO, STOP, chunk(None, usage=USAGE)),
        prompt_tokens=7,
    ),
    Dialect(
        "vllm with usage in every chunk",
        lines(
            chunk({"content": "Hel"}, usage=USAGE | {"completion_tokens": 1}),
            chunk({"content": "lo"}, "length", usage=USAGE),
        ),
        prompt_tokens=7,
        finish_reason=FinishReason.LENGTH,
    ),
    Dialect(
        "sglang, its last chunk with null content and matched_stop",
        lines(ROLE, HEL, LO, chunk({"content": None, "reasoning_content": None}, "stop")),
    ),
    Dialect(
        "a model that reasons",
        lines(
            ROLE,
            chunk({"reasoning_content": "Hm."}),
            chunk({"reasoning": "Hm."}),
            HEL,
            LO,
            STOP,
        ),
        output_tokens=4,
    ),
    Dialect(
        "a tool is called",
        lines(ROLE, chunk({"tool_calls": [TOOL]}), chunk({}, "tool_calls")),
        text="",
        output_tokens=1,
    ),
    Dialect(
        "llama.cpp, a chat",
        recorded("chat.sse"),
        text='The phrase "',
        output_tokens=3,
        finish_reason=FinishReason.LENGTH,
    ),
    Dialect(
        "llama.cpp, a chat with usage",
        recorded("chat_with_usage.sse"),
        text='The phrase "',
        output_tokens=3,
        prompt_tokens=10,
        finish_reason=FinishReason.LENGTH,
    ),
    Dialect(
        # Each piece of the arguments is taken for a token, where usage does not say better.
        "llama.cpp, a tool is called",
        recorded("tools.sse"),
        text="",
        output_tokens=8,
    ),
    Dialect(
        "llama.cpp, a completion",
        recorded("completions.sse"),
        text=" years ago,",
        output_tokens=3,
        prompt_tokens=3,
        finish_reason=FinishReason.LENGTH,
    ),
    Dialect(
        "llama.cpp, a response",
        recorded("responses.sse"),
        text="",
        output_tokens=3,
        prompt_tokens=10,
    ),
    Dialect(
        "with timings and no [DONE]",
        lines(
            ROLE,
            HEL,
            LO,
            chunk({}, "stop", usage=USAGE, timings={"prompt_ms": 1.5}),
            done=False,
        ),
        prompt_tokens=7,
    ),
    Dialect("ollama, without blanks", lines(HEL, LO, STOP, space="")),
    Dialect("carriage returns", lines(ROLE, HEL, LO, STOP, end="\r\n")),
    Dialect("carriage returns alone", lines(ROLE, HEL, LO, STOP, end="\r")),
    Dialect(
        "comments before and between",
        b": ping - 2026-01-01\n\n: OPENROUTER PROCESSING\n\n"
        + lines(ROLE, HEL, done=False)
        + b":\n\n: ping\r\n\r\n"
        + lines(LO, STOP),
    ),
    Dialect("a byte order mark", b"\xef\xbb\xbf" + lines(HEL, LO, STOP)),
    Dialect(
        "ids, names and a last event without its empty line",
        b"retry: 3000\nid: 1\n" + lines(HEL, LO, STOP).rstrip(b"\n"),
    ),
    Dialect("text that is not ASCII", lines(chunk({"content": "Grüß"}), chunk({"content": "e 🙂"}), STOP), text="Grüße 🙂"),
    Dialect(
        "completions",
        lines(
            {"id": "cmpl-1", "choices": [{"index": 0, "text": "Hel", "finish_reason": None}]},
            {"id": "cmpl-1", "choices": [{"index": 0, "text": "lo", "finish_reason": "stop"}]},
        ),
    ),
)  # fmt: skip


def read(pieces: list[bytes]) -> tuple[list[Delta], StreamedAnswer]:
    answer = StreamedAnswer(EVENT_BYTES_MAX)
    deltas = [delta for piece in pieces for delta in answer.feed(piece)]
    if not answer.is_done and answer.error is None:
        deltas += answer.finish()
    return deltas, answer
