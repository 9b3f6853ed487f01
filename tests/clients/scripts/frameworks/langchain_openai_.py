"""LangChain's package for OpenAI's API."""

from checks import BASE, KEY, LONG, MODEL, must_raise, tried
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

SAME = {"model": MODEL, "base_url": BASE, "api_key": KEY, "temperature": 0, "max_retries": 0}
model = ChatOpenAI(**SAME, max_tokens=80, stream_usage=True)


class Person(BaseModel):
    name: str = Field(max_length=20)
    is_adult: bool


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


with tried("invoke"):
    whole = model.invoke("Say hello.")
    assert whole.content
    assert whole.usage_metadata["output_tokens"] > 0
with tried("stream"):
    pieces = list(model.stream("Say hello."))
    assert "".join(each.content for each in pieces)
    assert any(each.usage_metadata for each in pieces)
with tried("batch"):
    assert all(each.content for each in model.batch(["Say hello.", "Say yes.", "Say no."]))
for method in ("json_schema", "function_calling"):
    with tried(f"structured by {method}"):
        structured = model.with_structured_output(Person, method=method)
        assert isinstance(structured.invoke("Who is Bob?"), Person)
with tried("bind_tools, and the tool's result"):
    bound = model.bind_tools([get_weather], tool_choice="get_weather", strict=True)
    asked = HumanMessage("Weather in Rome?")
    called = bound.invoke([asked])
    (call,) = called.tool_calls
    assert set(call["args"]) == {"city"}
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert model.bind_tools([get_weather]).invoke([asked, called, result]).content is not None
with tried("logprobs"):
    told = model.bind(logprobs=True).invoke("Say hello.").response_metadata["logprobs"]
    assert told["content"]
with tried("completion"):
    assert OpenAI(**SAME, max_tokens=5).invoke("Paris is")
with tried("by responses"):
    other = ChatOpenAI(**SAME, max_tokens=16, use_responses_api=True)
    assert other.invoke("Say hello.").text
    assert "".join(each.text for each in other.stream("Say hello."))
with tried("a prompt that is too long"):
    must_raise(ContextOverflowError, model.invoke, LONG)
