"""LiteLLM's SDK."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from checks import BASE, KEY, LONG, MODEL, SHORT, must_raise, tried

litellm.suppress_debug_info = True
STEADY = {
    "messages": SHORT,
    "api_base": BASE,
    "api_key": KEY,
    "temperature": 0,
    "max_tokens": 12,
    "num_retries": 0,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}

for provider in ("openai", "hosted_vllm"):
    model = f"{provider}/{MODEL}"
    with tried(f"{provider}: completion"):
        found = litellm.completion(model, **STEADY)
        assert found.choices[0].message.content
        assert found.usage.completion_tokens > 0
    with tried(f"{provider}: streamed"):
        pieces = litellm.completion(model, **STEADY, stream=True)
        assert "".join(each.choices[0].delta.content or "" for each in pieces)
    with tried(f"{provider}: a forced tool"):
        forced = {**STEADY, "max_tokens": 64, "tools": [TOOL], "tool_choice": "required"}
        found = litellm.completion(model, **forced).choices[0].message
        assert found.tool_calls[0].function.name == "get_weather"
    with tried(f"{provider}: a prompt that is too long"):
        asked = {**STEADY, "messages": [{"role": "user", "content": LONG}]}
        must_raise(litellm.ContextWindowExceededError, litellm.completion, model, **asked)
with tried("text_completion"):
    asked = {"api_base": BASE, "api_key": KEY, "max_tokens": 5}
    assert litellm.text_completion("Paris is", f"text-completion-openai/{MODEL}", **asked).choices
with tried("responses"):
    asked = {"api_base": BASE, "api_key": KEY, "max_output_tokens": 16}
    assert litellm.responses("Say hello.", f"openai/{MODEL}", **asked).output
with tried("a model that is not there"):
    must_raise(litellm.NotFoundError, litellm.completion, "openai/none", **STEADY)
