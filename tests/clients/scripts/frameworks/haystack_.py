"""deepset's Haystack."""

import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from checks import BASE, KEY, MODEL, tried
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)
    is_adult: bool


def generator(**more) -> OpenAIChatGenerator:
    settings = {"temperature": 0, "max_tokens": 80, **more}
    key = Secret.from_token(KEY)
    return OpenAIChatGenerator(key, MODEL, api_base_url=BASE, generation_kwargs=settings)


CITY = {"type": "string", "maxLength": 20}
weather = Tool(
    name="get_weather",
    description="The weather in a city.",
    parameters={"type": "object", "properties": {"city": CITY}, "required": ["city"]},
    function=lambda city: f"sunny in {city}",
)
asked = [ChatMessage.from_user("Say hello.")]

with tried("chat"):
    (answer,) = generator().run(asked)["replies"]
    assert answer.text
    assert answer.meta["usage"]["completion_tokens"] > 0
with tried("streamed"):
    pieces = []
    generator().run(asked, streaming_callback=pieces.append)
    assert "".join(each.content for each in pieces)
with tried("structured"):
    (answer,) = generator(response_format=Person).run(asked)["replies"]
    assert Person.model_validate_json(answer.text)
with tried("tools"):
    (answer,) = generator(tool_choice="required").run(asked, tools=[weather])["replies"]
    assert answer.tool_calls[0].tool_name == "get_weather"
with tried("an agent"):
    agent = Agent(chat_generator=generator(), tools=[weather], max_agent_steps=2)
    assert agent.run([ChatMessage.from_user("Weather in Rome?")])["messages"]
