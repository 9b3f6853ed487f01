"""Log probabilities of prompts against those that another binding of llama.cpp computes.

`python -m tests.runtime.engines.llamacpp.second_binding` asks the HTTP API as evaluations do (`echo`,
`logprobs`, no token of an answer), and the server of the package `xllamacpp` for the token behind each prefix,
all of the vocabulary told. It prints the greatest difference, and fails if that is more than
`DIFFERENCE_MAX`. The package is put into a folder of its own beside the models' cache: it brings a
llama.cpp of its own along.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import trio

from trinamo import HttpService
from trinamo.runtime.engines.llamacpp.engine import open_llamacpp_engine
from trinamo.runtime.engines.llamacpp.model_file import cache_folder, find_model

REQUIREMENT: Final = "xllamacpp==2026.10.11549"
DIFFERENCE_MAX: Final = 1e-3
PROMPTS: Final = (
    "The capital of France is Paris.",
    "Question: Which of these is a fruit?\nA. stone\nB. apple\nAnswer: B",
    "def add(a, b):\n    return a + b\n",
    "Der Hund schläft — naïve café, 数学.",
)
_OTHER: Final = """
import json, sys
import xllamacpp
given = json.load(sys.stdin)
parameters = xllamacpp.CommonParams()
parameters.model.path = given["path"]
parameters.n_ctx, parameters.n_parallel, parameters.warmup = 512, 1, False
parameters.cpuparams.n_threads = 1
server = xllamacpp.Server(parameters)
found = []
# Of a token that ends no character, or the answer, it tells nothing. What it tells is of the logits as they were.
asked = {"n_predict": 1, "n_probs": given["size"], "cache_prompt": False, "temperature": 0}
asked["logit_bias"] = [[given["plain"], 1000]]
for ids in given["prompts"]:
    found.append([])
    for count in range(1, len(ids)):
        answer = server.handle_completions({**asked, "prompt": ids[:count]})
        told = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        found[-1].append(next(each["logprob"] for each in told if each["id"] == ids[count]))
json.dump(found, open(given["out"], "w"))
"""


def other_folder() -> Path:
    """The folder of the other binding, which is installed unless it is there."""
    folder = cache_folder().parent / "bindings" / REQUIREMENT
    if not (folder / "xllamacpp").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*command, str(folder), REQUIREMENT], check=True)
    return folder


def told_by_other(prompts: list[list[int]], size: int, out: Path) -> list[list[float]]:
    """What the other binding finds of each token but the first."""
    given: dict[str, Any] = {
        "path": str(find_model()),
        "prompts": prompts,
        "size": size,
        "out": str(out),
    }
    given["plain"] = prompts[0][0]
    subprocess.run(
        [sys.executable, "-c", _OTHER],
        input=json.dumps(given).encode(),
        env={**os.environ, "PYTHONPATH": str(other_folder())},
        stderr=subprocess.DEVNULL,
        check=True,
    )
    found: list[list[float]] = json.loads(out.read_text())
    return found


def asked(port: int, prompts: list[list[int]]) -> list[list[float]]:
    """What the HTTP API tells of them."""
    body: dict[str, Any] = {
        "model": "SmolLM2",
        "prompt": prompts,
        "echo": True,
        "logprobs": 1,
        "max_tokens": 0,
    }
    url = f"http://127.0.0.1:{port}/v1/completions"
    answer = httpx.post(url, json=body, timeout=120, trust_env=False).raise_for_status().json()
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [choice["logprobs"]["token_logprobs"][1:] for choice in choices]


async def differences(out: Path) -> list[float]:
    """Of each token of each prompt."""
    async with open_llamacpp_engine(model="SmolLM2", context_tokens_max=512) as host:
        engine: Any = host._engine
        vocabulary = engine._vocabulary
        prompts = [vocabulary.tokenize(each, is_template=False) for each in PROMPTS]
        service = HttpService.builder().config(port=0).build()
        service.model_manager().add_model(host.info.card("a/b/c", created=1), host)
        async with trio.open_nursery() as nursery:
            port = await nursery.start(service.run)
            ours = await trio.to_thread.run_sync(partial(asked, port, prompts))
            service.stop()
        size = vocabulary.size
    theirs = await trio.to_thread.run_sync(partial(told_by_other, prompts, size, out))
    return [
        abs(one - other)
        for mine, its in zip(ours, theirs, strict=True)
        for one, other in zip(mine, its, strict=True)
    ]


def main() -> int:
    """Print the greatest difference; 1 if it is too great."""
    out = cache_folder().parent / "bindings" / "found.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    found = trio.run(differences, out)
    print(
        f"{len(found)} tokens, greatest difference {max(found):.6f}, mean {sum(found) / len(found):.6f}"
    )
    return int(max(found) > DIFFERENCE_MAX)


if __name__ == "__main__":
    sys.exit(main())
