"""OpenAI's SDK for Python."""

import asyncio
import json
from contextlib import suppress

import openai
from checks import BASE, KEY, LONG, MODEL, SHORT, must_raise, tried
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0, timeout=60)
chat = client.chat.completions
STEADY = {"model": MODEL, "messages": SHORT, "temperature": 0, "max_tokens": 12}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
FORCED = {
    "tools": [WEATHER],
    "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    "max_tokens": 64,
}


class Person(BaseModel):
    name: str = Field(max_length=20)
    is_adult: bool


def text_of(stream) -> str:
    return "".join(each.choices[0].delta.content or "" for each in stream if each.choices)


def chats() -> None:
    with tried("models"):
        assert MODEL in [each.id for each in client.models.list()]
        assert client.models.retrieve(MODEL).id == MODEL
    with tried("chat"):
        whole = chat.create(**STEADY)
        assert whole.choices[0].message.content
        assert whole.choices[0].finish_reason in {"stop", "length"}
        usage = whole.usage
        assert usage.prompt_tokens > 0
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert whole._request_id
    with tried("chat, streamed"):
        assert text_of(chat.create(**STEADY, stream=True))
    with tried("usage at the end of a stream"):
        events = list(chat.create(**STEADY, stream=True, stream_options={"include_usage": True}))
        assert events[-1].usage.completion_tokens > 0
        assert not events[-1].choices
    with tried("chat.completions.stream"), chat.stream(**STEADY, stop=[" "]) as stream:
        assert stream.get_final_completion().choices[0].message.content
    with tried("chat without a limit, and every parameter a null"):
        nulls = dict.fromkeys(("temperature", "top_p", "stop", "seed", "n", "tools", "logit_bias"))
        found = chat.create(model=MODEL, messages=SHORT, max_completion_tokens=8, **nulls)
        assert found.choices[0].message.content
    with tried("what only labels a request"):
        labels = {"store": False, "metadata": {"a": "b"}, "user": "me", "service_tier": "auto"}
        assert chat.create(**STEADY, **labels).choices
    with tried("seed"):
        # That it repeats an answer holds with no other request beside it, and another program runs.
        warm = {**STEADY, "temperature": 1, "seed": 7}
        assert chat.create(**warm).choices[0].message.content
    with tried("stop"):
        found = chat.create(**{**STEADY, "max_tokens": 40}, stop=[" ", "\n"])
        assert " " not in found.choices[0].message.content
        assert found.choices[0].finish_reason == "stop"
    with tried("max_tokens"):
        found = chat.create(**{**STEADY, "max_tokens": 2})
        assert found.choices[0].finish_reason == "length"
        assert found.usage.completion_tokens == 2
    with tried("logprobs"):
        found = chat.create(**STEADY, logprobs=True, top_logprobs=3).choices[0]
        assert all(len(each.top_logprobs) == 3 for each in found.logprobs.content)
        assert "".join(each.token for each in found.logprobs.content) == found.message.content
    with tried("n = 2"):
        found = chat.create(**{**STEADY, "temperature": 1}, n=2)
        assert [each.index for each in found.choices] == [0, 1]
        assert found.usage.completion_tokens > len(found.choices)
    with tried("n = 2, streamed"):
        events = [each for each in chat.create(**STEADY, n=2, stream=True) if each.choices]
        assert {each.choices[0].index for each in events} == {0, 1}
    with tried("eight at once"):
        asyncio.run(eight())


async def eight() -> None:
    async with openai.AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0) as several:
        asked = (several.chat.completions.create(**STEADY) for _ in range(8))
        answers = await asyncio.gather(*asked)
    assert all(each.choices[0].message.content for each in answers)


def shapes() -> None:
    with tried("parse"):
        found = chat.parse(**{**STEADY, "max_tokens": 80}, response_format=Person)
        assert isinstance(found.choices[0].message.parsed, Person)
    with tried("json_object"):
        asked = {**STEADY, "max_tokens": 200, "response_format": {"type": "json_object"}}
        found = chat.create(**asked).choices[0]
        assert found.finish_reason == "length" or json.loads(found.message.content) is not None
    with tried("a forced tool"):
        whole = chat.create(**{**STEADY, **FORCED}).choices[0]
        call = whole.message.tool_calls[0]
        assert whole.finish_reason == "tool_calls"
        assert set(json.loads(call.function.arguments)) == {"city"}
    with tried("a forced tool, streamed"):
        events = [each for each in chat.create(**{**STEADY, **FORCED}, stream=True) if each.choices]
        pieces = [call for each in events for call in each.choices[0].delta.tool_calls or ()]
        assert pieces[0].function.name == "get_weather"
        json.loads("".join(each.function.arguments or "" for each in pieces))
    with tried("a tool's result"):
        turns = [
            *SHORT,
            {"role": "assistant", "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]
        found = chat.create(**{**STEADY, "messages": turns}, tools=[WEATHER])
        assert found.choices[0].message.content or found.choices[0].message.tool_calls


def completions() -> None:
    plain = {"model": MODEL, "temperature": 0, "max_tokens": 5}
    with tried("completion"):
        assert client.completions.create(prompt="Paris is", **plain).choices[0].text
    with tried("completion, streamed"):
        events = client.completions.create(prompt="Paris is", **plain, stream=True)
        assert "".join(each.choices[0].text for each in events if each.choices)
    with tried("echo with logprobs"):
        found = client.completions.create(prompt="Paris is", **plain, echo=True, logprobs=1)
        told = found.choices[0]
        assert told.text.startswith("Paris is")
        assert told.text != "Paris is"
        assert told.logprobs.token_logprobs[0] is None
        assert all(each <= 0 for each in told.logprobs.token_logprobs[1:])
        assert len(told.logprobs.tokens) == found.usage.total_tokens
    with tried("a list of prompts"):
        found = client.completions.create(prompt=["Paris is", "One, two,"], **plain)
        assert [each.index for each in found.choices] == [0, 1]
        assert all(each.text for each in found.choices)
        assert found.usage.completion_tokens == 10
    with tried("a prompt of tokens"):
        assert client.completions.create(prompt=[504, 318, 253], **plain).choices[0].text


def responses() -> None:
    asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 16}
    with tried("responses"):
        whole = client.responses.create(input="Say hello.", instructions="Be short.", **asked)
        assert whole.output_text
        assert whole.status in {"completed", "incomplete"}
        assert whole.usage.output_tokens > 0
    with tried("responses, streamed"):
        events = list(client.responses.create(input="Say hello.", stream=True, **asked))
        assert events[0].type == "response.created"
        assert events[-1].type in {"response.completed", "response.incomplete"}
        numbers = [each.sequence_number for each in events]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
        assert "".join(deltas) == events[-1].response.output_text
    with tried("responses, parsed"):
        found = client.responses.parse(
            input="Who is Bob?", text_format=Person, **{**asked, "max_output_tokens": 80}
        )
        assert isinstance(found.output_parsed, Person)
    with tried("responses, a tool"):
        tool = {"type": "function", **WEATHER["function"]}
        found = client.responses.create(
            input="Weather in Rome?",
            tools=[tool],
            tool_choice="required",
            **{**asked, "max_output_tokens": 64},
        )
        assert [each.name for each in found.output if each.type == "function_call"]


def errors() -> None:
    with tried("a model that is not there"):
        found = must_raise(openai.NotFoundError, chat.create, **{**STEADY, "model": "none"})
        assert found.code == "model_not_found"
    with tried("a prompt that is too long"):
        messages = [{"role": "user", "content": LONG}]
        found = must_raise(openai.BadRequestError, chat.create, model=MODEL, messages=messages)
        assert found.code == "context_length_exceeded", found
        assert found.param == "messages", found
    with tried("a parameter that is wrong names itself"):
        asked = {**STEADY, "temperature": 9}
        assert must_raise(openai.BadRequestError, chat.create, **asked).param == "temperature"
    with tried("a constraint that nobody knows is refused"):
        extra = {"extra_body": {"structured_outputs": {"nonsense": 1}}}
        must_raise(openai.BadRequestError, chat.create, **STEADY, **extra)
    with tried("what a model cannot do is no absent model"), suppress(openai.BadRequestError):
        assert client.embeddings.create(model=MODEL, input="a").data[0].embedding
    with tried("a time-out"):
        asked = {**STEADY, "max_tokens": 400, "timeout": 0.05}
        must_raise(openai.APITimeoutError, chat.create, **asked)
    with tried("a stream that is left"):
        with chat.create(**{**STEADY, "max_tokens": 400}, stream=True) as stream:
            next(iter(stream))
        assert chat.create(**STEADY).choices


chats()
shapes()
completions()
responses()
errors()
