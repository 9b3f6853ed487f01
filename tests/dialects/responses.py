"""What a stream of `/v1/responses` may look like, and the response that it tells of."""

from __future__ import annotations

from typing import Any

ENDS = ("response.completed", "response.incomplete")
_OF_PARTS = {
    "message": ("response.output_text.delta", "response.output_text.done"),
    "function_call": (
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
    ),
}


def check_events(events: list[dict[str, Any]]) -> None:
    """Raise `AssertionError` unless the sequence is one that OpenAI's page allows."""
    kinds = [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert kinds[:2] == ["response.created", "response.in_progress"]
    is_whole = kinds[-1] in ENDS
    assert is_whole or kinds[-2:] == ["response.failed", "error"]
    middle = events[2 : -1 if is_whole else -2]
    assert not {*ENDS, "response.failed", "error"} & {event["type"] for event in middle}
    index, item = 0, None
    wanted: tuple[str, ...] = ("response.output_item.added",)
    for event in middle:
        kind = event["type"]
        assert kind in wanted, (kind, wanted)
        assert event["output_index"] == index
        if kind == "response.output_item.added":
            item = event["item"]
            assert item["status"] == "in_progress"
            wanted = _OF_PARTS[item["type"]]
            if item["type"] == "message":
                wanted = ("response.content_part.added",)
            continue
        assert item is not None
        if kind == "response.output_item.done":
            assert event["item"]["id"] == item["id"]
            assert event["item"]["status"] in ("completed", "incomplete")
            index, item, wanted = index + 1, None, ("response.output_item.added",)
            continue
        assert event["item_id"] == item["id"]
        if kind.endswith("_text.done"):
            wanted = ("response.content_part.done",)
        elif kind.endswith(".done"):
            wanted = ("response.output_item.done",)
        else:
            wanted = _OF_PARTS[item["type"]]
    assert item is None or not is_whole


def fold_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole response of a stream's last event, once what went before is seen to add up to it."""
    texts: dict[str, str] = {}
    items = []
    for event in events:
        kind = event["type"]
        if kind.endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        elif kind == "response.output_text.done":
            assert texts.get(event["item_id"], "") == event["text"]
        elif kind == "response.function_call_arguments.done":
            assert texts.get(event["item_id"], "") == event["arguments"]
        elif kind == "response.output_item.done":
            items.append(event["item"])
    whole: dict[str, Any] = events[-1]["response"]
    assert whole["output"] == items
    return whole
