"""What a stream of `/v1/messages` may look like, and the message that it tells of."""

from __future__ import annotations

import json
from typing import Any

_DELTAS = {"text": "text_delta", "tool_use": "input_json_delta"}


def check_events(events: list[dict[str, Any]]) -> None:
    """Raise `AssertionError` unless the sequence is one that Anthropic's page allows."""
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start"
    is_whole = kinds[-2:] == ["message_delta", "message_stop"]
    assert is_whole or kinds[-1] == "error"
    index, block = 0, None
    for event in events[1 : -2 if is_whole else -1]:
        assert event["index"] == index
        match event["type"]:
            case "content_block_start":
                assert block is None
                block = event["content_block"]["type"]
            case "content_block_delta":
                assert event["delta"]["type"] == _DELTAS[str(block)]
            case "content_block_stop":
                assert block is not None
                index, block = index + 1, None
            case other:
                raise AssertionError(other)
    assert block is None or not is_whole


def fold_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole message that a stream adds up to, as Anthropic's client reads it."""
    message: dict[str, Any] = events[0]["message"]
    partial = ""
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                message["content"].append(event["content_block"])
                partial = ""
            case "content_block_delta" if "text" in event["delta"]:
                message["content"][-1]["text"] += event["delta"]["text"]
            case "content_block_delta":
                partial += event["delta"]["partial_json"]
            case "content_block_stop" if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = _object(partial)
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
            case _:
                pass
    return message


def _object(text: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        return {}
    return found
