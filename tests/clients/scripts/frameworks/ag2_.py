"""AG2."""

import asyncio

from ag2 import Agent, tool
from ag2.config import OpenAIConfig
from checks import BASE, KEY, MODEL, tried
from pydantic import BaseModel, Field

STEADY = {"temperature": 0, "max_tokens": 80, "max_retries": 0}


class Person(BaseModel):
    name: str = Field(max_length=20)
    is_adult: bool


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


async def main() -> None:
    """In one event loop, as the client belongs to one."""
    for name, is_streaming in {"an agent": False, "an agent, streamed": True}.items():
        config = OpenAIConfig(
            model=MODEL, base_url=BASE, api_key=KEY, streaming=is_streaming, **STEADY
        )
        with tried(name):
            assert (await Agent("one", config=config).ask("Say hello.")).body
    with tried("an agent with a schema"):
        reply = await Agent("one", config=config).ask("Who is Bob?", response_schema=Person)
        assert isinstance(await reply.content(), Person)
    with tried("an agent with a tool"):
        agent = Agent("one", config=config, tools=[get_weather])
        assert await agent.ask("Weather in Rome?")


asyncio.run(main())
