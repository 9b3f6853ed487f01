"""Microsoft's AutoGen."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from checks import BASE, KEY, MODEL, tried
from pydantic import BaseModel, Field

INFO = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown"}
ASKED = [UserMessage(content="Say hello.", source="user")]


class Person(BaseModel):
    name: str = Field(max_length=20)
    is_adult: bool


async def weather(city: str) -> str:
    return f"sunny in {city}"


async def main() -> None:
    """In one event loop, as the client belongs to one."""
    client = OpenAIChatCompletionClient(
        model=MODEL,
        base_url=BASE,
        api_key=KEY,
        model_info={**INFO, "structured_output": True},
        temperature=0,
        max_tokens=80,
        max_retries=0,
    )
    tool = FunctionTool(weather, "The weather in a city.", name="get_weather", strict=True)
    with tried("chat"):
        answer = await client.create(ASKED)
        assert answer.content
        assert answer.usage.completion_tokens > 0
    with tried("streamed"):
        *pieces, whole = [each async for each in client.create_stream(ASKED)]
        assert "".join(pieces) == whole.content
    with tried("structured"):
        answer = await client.create(ASKED, json_output=Person)
        assert Person.model_validate_json(answer.content)
    with tried("tools"):
        answer = await client.create(ASKED, tools=[tool], tool_choice=tool)
        assert answer.content[0].name == "get_weather"
    with tried("an agent"):
        agent = AssistantAgent("one", client, tools=[tool])
        assert (await agent.run(task="Weather in Rome?")).messages


asyncio.run(main())
