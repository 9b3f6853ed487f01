"""guidance."""

import json

import guidance
from checks import BASE, KEY, MODEL, tried
from guidance import assistant, gen, models, user
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)
    is_adult: bool


def model() -> models.OpenAI:
    return models.OpenAI(MODEL, base_url=BASE, api_key=KEY, echo=False)


with tried("text"):
    lm = model()
    with user():
        lm += "Say hello."
    with assistant():
        lm += gen("said", max_tokens=12)
    assert lm["said"]
with tried("JSON"):
    lm = model()
    with user():
        lm += "Who is Bob?"
    with assistant():
        lm += guidance.json("who", schema=Person, max_tokens=80, temperature=0)
    Person.model_validate(json.loads(lm["who"]))
