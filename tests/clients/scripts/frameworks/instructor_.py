"""instructor: answers as objects of pydantic."""

import instructor
import openai
from checks import BASE, KEY, MODEL, tried
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0)
WHO = {"messages": [{"role": "user", "content": "Who is Bob?"}]}
STEADY = {"model": MODEL, **WHO, "temperature": 0, "max_tokens": 80, "max_retries": 0}


class Person(BaseModel):
    name: str = Field(max_length=20)
    is_adult: bool


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    with tried(mode.name):
        by_mode = instructor.from_openai(client, mode=mode)
        assert isinstance(by_mode.create(response_model=Person, **STEADY), Person)
with tried("create_partial"):
    by_schema = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    last = list(by_schema.create_partial(response_model=Person, **STEADY))[-1]
    assert isinstance(last.is_adult, bool)
with tried("create_iterable"):
    by_tools = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    asked = {**STEADY, "max_tokens": 120}
    # How many there are the model decides, and where the limit cuts the last one.
    for each in by_tools.create_iterable(response_model=Person, **asked):
        assert isinstance(each, Person)
with tried("create_with_completion"):
    found, raw = by_tools.create_with_completion(response_model=Person, **STEADY)
    assert raw.usage.completion_tokens > 0
