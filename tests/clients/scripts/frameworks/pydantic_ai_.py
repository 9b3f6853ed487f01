"""pydantic-ai."""

import asyncio

from checks import BASE, KEY, LONG, MODEL, must_raise, tried
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import (
    ModelContextWindowExceededError,
    UnexpectedModelBehavior,
    UsageLimitExceeded,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

provider = OpenAIProvider(base_url=BASE, api_key=KEY)
chat = OpenAIChatModel(MODEL, provider=provider)
responses = OpenAIResponsesModel(MODEL, provider=provider)
STEADY = {"temperature": 0, "max_tokens": 80}


class Person(BaseModel):
    name: str = Field(max_length=20)
    is_adult: bool


async def stream(agent: Agent) -> str:
    async with agent.run_stream("Say hello.") as result:
        return "".join([piece async for piece in result.stream_text(delta=True)])


for name, model in {"chat": chat, "responses": responses}.items():
    with tried(f"{name}: text"):
        agent = Agent(model, model_settings=STEADY)
        found = agent.run_sync("Say hello.")
        assert found.output
        assert found.usage.output_tokens > 0
    with tried(f"{name}: streamed"):
        assert asyncio.run(stream(agent))
    with tried(f"{name}: tool output"):
        agent = Agent(model, output_type=ToolOutput(Person), model_settings=STEADY)
        assert isinstance(agent.run_sync("Who is Bob?").output, Person)
    with tried(f"{name}: native output"):
        agent = Agent(model, output_type=NativeOutput(Person), model_settings=STEADY)
        assert isinstance(agent.run_sync("Who is Bob?").output, Person)
with tried("a loop of tools"):
    agent = Agent(chat, model_settings=STEADY)
    agent.tool_plain(lambda: "sunny", name="get_weather")
    try:
        assert agent.run_sync("Weather?", usage_limits=UsageLimits(request_limit=3)).output
    except (UsageLimitExceeded, UnexpectedModelBehavior):
        """The model may go on to call, or make up arguments: each of its turns was understood."""
with tried("a prompt that is too long"):
    must_raise(ModelContextWindowExceededError, Agent(chat).run_sync, LONG)
