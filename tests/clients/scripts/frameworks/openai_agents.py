"""OpenAI's Agents SDK, with its default, which is the Responses API."""

import asyncio
from contextlib import suppress

import agents
from agents import Agent, ModelBehaviorError, ModelSettings, Runner, function_tool
from checks import BASE, KEY, MODEL, tried
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

agents.set_tracing_disabled(True)
# Without the repetition penalty of the model's defaults, by which a greedy answer goes on to its bound.
STEADY = {"temperature": 0, "max_tokens": 80, "extra_body": {"repetition_penalty": 1}}


class Person(BaseModel):
    name: str = Field(max_length=20)
    is_adult: bool


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def agent(tool_choice: str | None = None, **more) -> Agent:
    settings = ModelSettings(**STEADY, tool_choice=tool_choice)
    return Agent(name="one", instructions="Be short.", model=MODEL, model_settings=settings, **more)


async def stream(one: Agent) -> list[str]:
    kinds = []
    # The model may talk to its limit, of which the end of a stream tells as an error.
    with suppress(ModelBehaviorError):
        async for each in Runner.run_streamed(one, "Weather in Rome?").stream_events():
            kinds.append(each.type)  # noqa: PERF401
    return kinds


async def try_all(api: str) -> None:
    """In one event loop, as a client of it belongs to one."""
    agents.set_default_openai_client(AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0))
    agents.set_default_openai_api(api)
    with tried(f"{api}: text"):
        found = await Runner.run(agent(), "Say hello.")
        assert found.final_output
        assert found.context_wrapper.usage.output_tokens > 0
    with tried(f"{api}: output_type"):
        found = await Runner.run(agent(output_type=Person), "Who is Bob?")
        assert isinstance(found.final_output, Person)
    with tried(f"{api}: a tool"):
        calling = agent("required", tools=[get_weather], tool_use_behavior="stop_on_first_tool")
        assert "sunny" in (await Runner.run(calling, "Weather in Rome?")).final_output
    with tried(f"{api}: a tool, and its result goes back"):
        calling = agent("required", tools=[get_weather])
        assert (await Runner.run(calling, "Weather?", max_turns=6)).final_output is not None
    with tried(f"{api}: streamed"):
        assert "raw_response_event" in await stream(agent())
    with tried(f"{api}: a tool, streamed"):
        assert "run_item_stream_event" in await stream(calling)


for each in ("responses", "chat_completions"):
    asyncio.run(try_all(each))
