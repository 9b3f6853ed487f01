"""Hugging Face's smolagents."""

from checks import BASE, KEY, MODEL, tried
from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage, MessageRole

STEADY = {"temperature": 0, "max_tokens": 60}
model = OpenAIModel(model_id=MODEL, api_base=BASE, api_key=KEY, **STEADY)


@tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    return f"sunny in {city}"


def said(text: str) -> list[ChatMessage]:
    return [ChatMessage(role=MessageRole.USER, content=text)]


with tried("generate"):
    answer = model.generate(said("Say hello."))
    assert answer.content
    assert answer.token_usage.output_tokens > 0
with tried("stop_sequences"):
    whole = answer.content
    found = model.generate(said("Say hello."), stop_sequences=[whole[5:8]])
    assert whole[5:8] not in found.content, found.content
with tried("generate_stream"):
    pieces = list(model.generate_stream(said("Say hello.")))
    assert "".join(each.content or "" for each in pieces)
    assert any(each.token_usage for each in pieces)
with tried("tools"):
    found = model.generate(said("Weather in Rome?"), tools_to_call_from=[get_weather])
    assert found.tool_calls[0].function.name == "get_weather"
with tried("an agent"):
    agent = ToolCallingAgent(tools=[get_weather], model=model, max_steps=1, verbosity_level=0)
    assert agent.run("Weather in Rome?") is not None
