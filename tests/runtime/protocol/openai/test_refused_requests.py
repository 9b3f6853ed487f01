"""What a client is told for each request that is refused, whole: error bodies are an interface.

`refused.json` has the answers; `python -m tests.runtime.protocol.openai.test_refused_requests` writes it anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import trio

from tests.runtime.small_cluster import MODEL, SmallCluster, open_small_cluster
from trinamo.runtime.errors import RequestError
from trinamo.runtime.protocol.discovery.instances import EndpointName
from trinamo.runtime.protocol.openai.generate import Delta

GOLDEN = Path(__file__).with_name("refused.json")
USER: Final = {"role": "user", "content": "a"}
TOOL: Final = {"type": "function", "function": {"name": "f"}}
SHARED: Final[dict[str, list[Any]]] = {
    "model": [1, "none"],
    "max_tokens": [0, -2, 1.5, "1", 2**31],
    "temperature": [-0.1, 2.1, "1", 1e999],
    "top_p": [0, 1.5, -1],
    "seed": [2**63, 1.5],
    "n": [129, 0],
    "stop": [["x"] * 33, ["x", ""], [1], 1, "", ["x" * 4097]],
    "stream": [1],
    "stream_options": [{"include_usage": True}],
    "presence_penalty": [-2.1, 3],
    "frequency_penalty": [-2.1, 3],
    "repetition_penalty": [0, 2.1],
    "top_k": [-2, 2**31],
    "min_p": [-0.1, 1.1, 0.5],
    "logit_bias": [{"1": 101}, {"-1": 1}, {"a": 1}, [1]],
    "response_format": [{"type": "xml"}, {"type": "json_schema"}, {}, {"type": "json_object"}],
    "structured_outputs": [{"choice": ["a"]}, {"json": {}}, {}, {"regex": "a", "choice": ["a"]}, 1],
    "guided_choice": [["a"], []],
    "guided_regex": ["a"],
    "guided_json": [{}],
    "grammar": ['root ::= "a"', 'start: "a"'],
    "ignore_eos": [True, 1],
    "min_tokens": [1, 2, -1],
    "stop_token_ids": [[1], [-1], [1] * 129],
    "prompt_logprobs": [1, 21],
    "return_token_ids": [True],
    "n_predict": [5, -1],
    "options": [{"temperature": 0}],
    "bad_words": [["a"]],
    "skip_special_tokens": [False, True],
    "min_tokn": [1],
}
CHATS: Final[dict[str, list[Any]]] = {
    **SHARED,
    "messages": [
        [],
        None,
        1,
        [{"role": "king", "content": "a"}],
        [{"role": "user"}],
        [USER, {"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}],
        [USER, {"role": "tool", "content": "a"}],
        [USER, {"role": "assistant", "content": "a", "function_call": {"name": "f"}}],
        [USER] * 2049,
        [{"role": "user", "content": "a" * 2048}],
        [{"role": "user", "content": "a" * (2048 * 256 + 1)}],
    ],
    "max_completion_tokens": [0],
    "logprobs": ["a", 1],
    "top_logprobs": [1, 21],
    "tools": [[TOOL], [TOOL, TOOL], [{"type": "x", "function": {"name": "f"}}], [{}]],
    "tool_choice": ["required", "king", {"type": "function", "function": {"name": "f"}}],
    "functions": [[{"name": "f"}]],
    "function_call": [{"name": "f"}],
    "modalities": [["audio"]],
    "audio": [{"voice": "a"}],
    "web_search_options": [{}],
    "chat_template_kwargs": [{"a": 1}, {}, 1],
    "continue_final_message": [True, False],
    "add_generation_prompt": [True, False],
}
COMPLETIONS: Final[dict[str, list[Any]]] = {
    **SHARED,
    "prompt": [
        None,
        "",
        [],
        [""],
        ["a"] * 129,
        ["a", 1],
        [1, "a"],
        [[]],
        [-1],
        [261],
        [1] * 2048,
        "a" * 2048,
    ],
    "logprobs": [True, 21, -1, "a"],
    "suffix": ["a"],
    "echo": [1],
    "best_of": [2],
}
GOOD: Final = {"model": MODEL, "prompt": "a", "max_tokens": 1}
WIRE: Final[dict[str, list[Any]]] = {
    "model": ["none", 1, None],
    "messages": [[], [USER], [{"role": "king", "content": "a"}]],
    "prompt": [None, "", 1],
    "token_ids": [[1], []],
    "max_tokens": [0, -1, "1", 2**31],
    "temperature": [-0.1, 2.1, float("nan"), float("inf"), "1", None],
    "top_p": [0, 1.5, float("nan")],
    "top_k": [-1, 2**31],
    "min_p": [-1, 2, float("nan")],
    "presence_penalty": [3, float("nan")],
    "frequency_penalty": [-3],
    "repetition_penalty": [0, 3, float("nan")],
    "logprobs": [-1, 21],
    "logit_bias": [{1: 101.0}, {1: float("inf")}, {1: float("nan")}],
    "stop": [["x"] * 33, ["x", ""], ["x" * 4097], "x"],
    "delivered_ids": [[1] * 3, [300]],
    "json_schema": ["{}"],
    "tools": ["[]"],
    "tenant": ["x" * 65],
}
"""What a member may send to a worker, without a frontend that looked at it."""


async def refusals(cluster: SmallCluster) -> dict[str, Any]:
    """By what was sent: a frontend's answer, or the error that a worker's caller is given."""
    found: dict[str, Any] = {}
    good: tuple[dict[str, Any], ...] = ({"messages": [USER]}, {"prompt": "a"})
    for path, cases, rest in zip(
        ("chat/completions", "completions"), (CHATS, COMPLETIONS), good, strict=True
    ):
        for name, values in cases.items():
            for value in values:
                body = {"model": MODEL, "max_tokens": 1, **rest, name: value}
                answer = await cluster.http.post(
                    f"/v1/{path}",
                    content=json.dumps(body),
                    headers={"content-type": "application/json"},
                )
                told = answer.json().get("error", "answered")
                found[f"{path} {name} {_short(value)}"] = [answer.status_code, told]
    for name, values in WIRE.items():
        for value in values:
            told = await _ask_worker(cluster, {**GOOD, name: value})
            found[f"worker {name} {_short(value)}"] = told
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 100 else f"{text[:40]}… {len(text)}"


async def _ask_worker(cluster: SmallCluster, payload: dict[str, Any]) -> Any:
    card = cluster.service.model_manager().views()[0]
    client = await cluster.frontend.client(EndpointName.parse(card.endpoint))
    try:
        async with client.stream(payload, item_type=Delta) as deltas:
            async for _ in deltas:
                pass
    except RequestError as error:
        return [error.code, error.message]
    except Exception as error:  # noqa: BLE001 -- what it is, the golden file says
        return [getattr(error, "code", repr(error))]
    finally:
        cluster.frontend.release(client)
    return "answered"


async def test_each_refusal_has_the_words_that_are_known() -> None:
    async with open_small_cluster() as cluster:
        found = await refusals(cluster)
    assert found == json.loads(GOLDEN.read_text("utf-8"))


async def main() -> None:
    async with open_small_cluster() as cluster:
        found = await refusals(cluster)
    GOLDEN.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    trio.run(main)
