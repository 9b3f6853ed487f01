"""Requests of clients, as an engine gets them."""

from __future__ import annotations

import json
from typing import Any

from trinamo.runtime.protocol.openai.generate import GenerateRequest
from trinamo.runtime.protocol.openai.requests import (
    decode_chat_request,
    decode_completion_request,
)

MESSAGES = [{"role": "user", "content": "hi"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def chat(**body: Any) -> GenerateRequest:
    body.setdefault("messages", MESSAGES)
    return decode_chat_request(json.dumps(body).encode()).to_generate("m")


def completion(**body: Any) -> GenerateRequest:
    body.setdefault("prompt", "hi")
    return decode_completion_request(json.dumps(body).encode()).to_generate("m")
