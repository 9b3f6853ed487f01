"""LlamaIndex, by its class for servers that are like OpenAI's."""

from checks import BASE, KEY, MODEL, tried
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)
    is_adult: bool


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def model(**more) -> OpenAILike:
    steady = {"temperature": 0, "max_tokens": 80, "max_retries": 0, "context_window": 4096}
    return OpenAILike(model=MODEL, api_base=BASE, api_key=KEY, **steady, **more)


chat = model(is_chat_model=True, is_function_calling_model=True)
ASKED = [ChatMessage("Say hello.")]
with tried("chat"):
    assert chat.chat(ASKED).message.content
with tried("chat, streamed"):
    assert "".join(each.delta or "" for each in chat.stream_chat(ASKED))
with tried("completion"):
    assert model(is_chat_model=False).complete("Paris is").text
with tried("completion, streamed"):
    pieces = model(is_chat_model=False).stream_complete("Paris is")
    assert "".join(each.delta or "" for each in pieces)
with tried("tools"):
    tool = FunctionTool.from_defaults(get_weather)
    answer = chat.chat_with_tools([tool], "Weather in Rome?", tool_required=True)
    assert chat.get_tool_calls_from_response(answer)[0].tool_name == "get_weather"
with tried("structured"):
    by_schema = model(is_chat_model=True, should_use_structured_outputs=True)
    assert isinstance(by_schema.as_structured_llm(Person).complete("Who is Bob?").raw, Person)
