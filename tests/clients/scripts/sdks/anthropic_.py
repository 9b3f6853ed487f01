"""Anthropic's SDK for Python."""

import anthropic
from checks import KEY, LONG, MODEL, SERVER, SHORT, must_raise, tried

client = anthropic.Anthropic(base_url=SERVER, api_key=KEY, max_retries=0, timeout=60)
STEADY = {
    "model": MODEL,
    "messages": SHORT,
    "max_tokens": 12,
    "extra_body": {"temperature": 0},
}
TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    },
}
FORCED = {
    **STEADY,
    "max_tokens": 64,
    "tools": [TOOL],
    "tool_choice": {"type": "tool", "name": "get_weather"},
}

with tried("messages"):
    whole = client.messages.create(**STEADY)
    assert whole.content[0].type == "text"
    assert whole.content[0].text
    assert whole.role == "assistant"
    assert whole.stop_reason in {"end_turn", "max_tokens"}
    assert whole.usage.input_tokens > 0
    assert whole.usage.output_tokens > 0
with tried("a system's words"):
    assert client.messages.create(**STEADY, system="Be short.").content[0].text
with tried("parts and turns"):
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Say hello."}]},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Again."},
    ]
    assert client.messages.create(**{**STEADY, "messages": turns}).content[0].text
with tried("streamed"):
    with client.messages.stream(**STEADY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text
    assert final.stop_reason in {"end_turn", "max_tokens"}
    assert final.usage.output_tokens > 0
with tried("events in their order"):
    kinds = [each.type for each in client.messages.create(**STEADY, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.index("content_block_start") < kinds.index("content_block_delta")
    assert kinds[-3] == "content_block_stop"
with tried("max_tokens"):
    found = client.messages.create(**{**STEADY, "max_tokens": 2})
    assert found.stop_reason == "max_tokens"
    assert found.usage.output_tokens == 2
with tried("stop_sequences"):
    found = client.messages.create(**{**STEADY, "max_tokens": 40}, stop_sequences=[" "])
    assert found.stop_reason == "stop_sequence"
    assert found.stop_sequence == " "
with tried("a forced tool"):
    called = client.messages.create(**FORCED)
    assert called.stop_reason == "tool_use"
    (use,) = [each for each in called.content if each.type == "tool_use"]
    assert use.name == "get_weather"
    assert set(use.input) == {"city"}
with tried("a forced tool, streamed"), client.messages.stream(**FORCED) as stream:
    (use,) = [each for each in stream.get_final_message().content if each.type == "tool_use"]
    assert set(use.input) == {"city"}
with tried("a tool's result"):
    turns = [
        *SHORT,
        {"role": "assistant", "content": [each.model_dump() for each in called.content]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}],
        },
    ]
    assert client.messages.create(**{**STEADY, "messages": turns}, tools=[TOOL]).content
with tried("count_tokens"):
    counted = client.messages.count_tokens(model=MODEL, messages=SHORT)
    cached = whole.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == whole.usage.input_tokens + cached
with tried("a model that is not there"):
    must_raise(anthropic.NotFoundError, client.messages.create, **{**STEADY, "model": "none"})
with tried("a prompt that is too long"):
    long = [{"role": "user", "content": LONG}]
    asked = {**STEADY, "messages": long}
    error = must_raise(anthropic.BadRequestError, client.messages.create, **asked)
    assert error.body["error"]["type"] == "invalid_request_error", error.body
    assert "too long" in error.body["error"]["message"], error.body
