"""Confident AI's deepeval, by its class for models of one's own."""

import os

os.environ |= {"DEEPEVAL_TELEMETRY_OPT_OUT": "YES", "DEEPEVAL_DISABLE_DOTENV": "1"}

import asyncio

from checks import BASE, KEY, MODEL, tried
from deepeval.models import LocalModel
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)
    is_adult: bool


def model(**more) -> LocalModel:
    steady = {"max_tokens": 80, **more}
    return LocalModel(
        model=MODEL, base_url=BASE, api_key=KEY, temperature=0, generation_kwargs=steady
    )


with tried("text"):
    found, _cost = model().generate("Say hello.")
    assert found
with tried("text, asked asynchronously"):
    found, _cost = asyncio.run(model().a_generate("Say hello."))
    assert found
with tried("with a schema"):
    # It tells the server nothing of the schema unless it is told to.
    form = {"name": "person", "schema": Person.model_json_schema(), "strict": True}
    by_schema = model(response_format={"type": "json_schema", "json_schema": form})
    found, _cost = by_schema.generate("Who is Bob?", schema=Person)
    assert isinstance(found, Person), found
