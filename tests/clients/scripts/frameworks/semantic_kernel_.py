"""Microsoft's Semantic Kernel."""

import asyncio

from checks import BASE, KEY, MODEL, tried
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory


class Person(BaseModel):
    name: str = Field(max_length=20)
    is_adult: bool


def settings(**more) -> OpenAIChatPromptExecutionSettings:
    return OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=80, **more)


async def main() -> None:
    """In one event loop, as the client belongs to one."""
    client = AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0)
    service = OpenAIChatCompletion(MODEL, async_client=client)
    history = ChatHistory()
    history.add_user_message("Say hello.")
    with tried("chat"):
        answer = await service.get_chat_message_content(history, settings())
        assert answer.content
        assert answer.metadata["usage"].completion_tokens > 0
    with tried("streamed"):
        told = service.get_streaming_chat_message_content(history, settings())
        assert "".join([str(each) async for each in told])
    with tried("structured"):
        answer = await service.get_chat_message_content(history, settings(response_format=Person))
        assert Person.model_validate_json(answer.content)
    with tried("an agent"):
        agent = ChatCompletionAgent(service=service, name="one", instructions="Be short.")
        assert (await agent.get_response("Say hello.")).content


asyncio.run(main())
