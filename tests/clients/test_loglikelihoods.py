"""What an evaluation reads from an echo equals what a second binding of llama.cpp computes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from tests.cli.places import Place, RunningCluster, cluster
from tests.transports.openai.llamacpp.server import LlamaServer, llama_server

TEXTS: Final = (
    "Paris is the capital of France",
    "The sun rises in the east.",
    "Two and two make 4",
)
TOKENS_ALL: Final = 49_152
"""The model's vocabulary."""


@pytest.fixture(scope="module")
def second() -> Iterator[LlamaServer]:
    with llama_server() as server:
        yield server


@pytest.fixture(scope="module")
def running(
    second: LlamaServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCluster]:
    """After the second one, which skips where the model is not there."""
    place = Place(tmp_path_factory.mktemp("loglikelihoods"))
    with cluster(place, "--workers", "1", "--set", "worker.threads=1") as found:
        yield found


def asked(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(url, json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def computed(server: LlamaServer, before: list[int], token: int) -> float:
    """The log-softmax of the token's logit behind the tokens before it."""
    body = {"prompt": before, "n_predict": 1, "n_probs": TOKENS_ALL, "temperature": 0}
    found = asked(f"{server.url.removesuffix('/v1')}/completion", body)
    (step,) = found["completion_probabilities"]
    told = {each["id"]: each["logprob"] for each in step["top_logprobs"]}
    assert math.isclose(sum(math.exp(each) for each in told.values()), 1, abs_tol=1e-3)
    return float(told[token])


@pytest.mark.parametrize("text", TEXTS)
def test_the_log_probabilities_of_a_prompt_are_those_of_a_second_binding(
    text: str, running: RunningCluster, second: LlamaServer
) -> None:
    body = {"prompt": text, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    url = f"{running.url}/v1/completions"
    (choice,) = asked(url, {**body, "return_token_ids": True})["choices"]
    prompt = choice["prompt_token_ids"]
    told = choice["logprobs"]["token_logprobs"]

    assert told[0] is None
    assert len(told) == len(prompt) + 1
    for place, token in enumerate(prompt[1:], start=1):
        assert told[place] == pytest.approx(computed(second, prompt[:place], token), abs=1e-3)
