"""Requests of clients, as an engine gets them."""

from __future__ import annotations

import json
from typing import Any

from trinamo.runtime.http import endpoints
from trinamo.runtime.protocol.openai.generate import GenerateRequest

MESSAGES = [{"role": "user", "content": "hi"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def chat(**body: Any) -> GenerateRequest:
    body.setdefault("messages", MESSAGES)
    return endpoints.CHAT.decode(json.dumps(body).encode()).to_generate("m")


def completion(**body: Any) -> GenerateRequest:
    body.setdefault("prompt", "hi")
    return endpoints.COMPLETIONS.decode(json.dumps(body).encode()).to_generate("m")
