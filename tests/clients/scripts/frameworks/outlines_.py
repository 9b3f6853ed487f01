"""outlines, by OpenAI's way of asking for JSON and by vLLM's of asking for any constraint."""

import re
from typing import Literal

import openai
import outlines
from checks import BASE, KEY, MODEL, tried
from outlines.types import Regex
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0)
STEADY = {"temperature": 0, "max_tokens": 80}


class Person(BaseModel):
    name: str = Field(max_length=20)
    is_adult: bool


by_openai = outlines.from_openai(client, MODEL)
by_vllm = outlines.from_vllm(client, MODEL)
with tried("from_openai: text"):
    assert by_openai("Say hello.", **STEADY)
with tried("from_openai: JSON"):
    Person.model_validate_json(by_openai("Who is Bob?", Person, **STEADY))
with tried("from_vllm: text"):
    assert by_vllm("Say hello.", **STEADY)
with tried("from_vllm: streamed"):
    assert "".join(by_vllm.stream("Say hello.", **STEADY))
with tried("from_vllm: JSON"):
    Person.model_validate_json(by_vllm("Who is Bob?", Person, **STEADY))
with tried("from_vllm: choice"):
    assert by_vllm("Is it?", Literal["yes", "no"], **STEADY) in {"yes", "no"}
with tried("from_vllm: regex"):
    found = by_vllm("A date.", Regex("[0-9]{4}-[0-9]{2}"), **STEADY)
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", found), found
