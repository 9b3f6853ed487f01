"""DSPy."""

import json
import os
from contextlib import suppress

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import dspy
from checks import BASE, KEY, MODEL, tried
from dspy.utils.exceptions import AdapterParseError
from pydantic import BaseModel


class Answer(BaseModel):
    is_so: bool


model = dspy.LM(
    f"openai/{MODEL}",
    api_base=BASE,
    api_key=KEY,
    temperature=0,
    max_tokens=60,
    cache=False,
    num_retries=0,
)
with tried("LM"):
    assert model("Say hello.")[0]
with tried("LM, several answers"):
    assert len(model("Say hello.", n=2, temperature=0.7)) == 2
# The adapter may not find its marks in what so small a model says.
with tried("a signature"), dspy.context(lm=model), suppress(AdapterParseError):
    assert dspy.Predict("question -> answer")(question="Is it?").answer
with tried("LM, by a schema"):
    # JSONAdapter asks no model for a schema whose name it does not know.
    assert isinstance(json.loads(model("Is it?", response_format=Answer)[0])["is_so"], bool)
