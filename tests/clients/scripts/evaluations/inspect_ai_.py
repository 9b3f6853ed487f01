"""The UK AI Security Institute's inspect, on tasks of our own."""

import os
import tempfile

os.environ |= {"INSPECT_LOG_LEVEL": "error", "INSPECT_DISPLAY": "none"}

from checks import BASE, KEY, MODEL, tried
from inspect_ai import Task, eval  # noqa: A004
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import choice, includes
from inspect_ai.solver import generate, multiple_choice

STEADY = {"temperature": 0, "max_tokens": 24, "max_retries": 0}


def evaluate(place: str, task: Task, *, responses: bool = False, **more) -> list:
    """The samples of its log."""
    named = {"base_url": BASE, "api_key": KEY, "responses_api": responses}
    model = get_model(f"openai-api/own/{MODEL}", memoize=False, **named)
    config = GenerateConfig(**{**STEADY, **more}).model_dump(exclude_none=True)
    (log,) = eval(task, model=model, log_dir=place, **config)
    assert log.status == "success", log.error
    return log.samples


def questions() -> Task:
    return Task(
        dataset=[Sample("Say hello.", target="hello")], solver=generate(), scorer=includes()
    )


def main(place: str) -> None:
    with tried("generate"):
        assert evaluate(place, questions())[0].output.completion
    with tried("multiple choice"):
        sample = Sample("Paris is the capital of?", choices=["France", "Spain"], target="A")
        task = Task(dataset=[sample], solver=multiple_choice(), scorer=choice())
        assert evaluate(place, task)[0].scores
    with tried("logprobs"):
        (sample,) = evaluate(place, questions(), logprobs=True, top_logprobs=3)
        assert len(sample.output.choices[0].logprobs.content[0].top_logprobs) == 3
    with tried("stop, and seed"):
        (sample,) = evaluate(place, questions(), stop_seqs=["e"], seed=7)
        assert "e" not in sample.output.completion
    with tried("num_choices = 2"):
        (sample,) = evaluate(place, questions(), num_choices=2, temperature=0.7)
        assert len(sample.output.choices) == 2
    with tried("responses_api"):
        assert evaluate(place, questions(), responses=True)[0].output.completion
    with tried("a prompt that is too long is a stop for model_length"):
        task = Task(dataset=[Sample("word " * 6000, target="no")], solver=generate())
        assert evaluate(place, task)[0].output.stop_reason == "model_length"


with tempfile.TemporaryDirectory() as folder:
    main(folder)
