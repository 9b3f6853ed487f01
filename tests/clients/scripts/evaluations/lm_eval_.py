"""EleutherAI's lm-evaluation-harness, on tasks of our own."""

import json
import math
import os
import tempfile
from pathlib import Path

from checks import BASE, KEY, MODEL, tried

os.environ |= {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}

import lm_eval
from lm_eval.tasks import TaskManager
from tokenizer import make_tokenizer

QUESTIONS = [
    {"question": "Paris is the capital of", "choices": [" France", " Spain", " Rome"], "answer": 0},
    {"question": "Two and two make", "choices": [" four", " five", " nine"], "answer": 0},
    {"question": "The sun rises in the", "choices": [" east", " west", " pot"], "answer": 0},
    {"question": "Water is", "choices": [" wet", " dry", " loud"], "answer": 0},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""
CHOICE = """output_type: multiple_choice
doc_to_choice: choices
metric_list: [{metric: acc}]"""
GENERATE = """output_type: generate_until
generation_kwargs: {until: ["."], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]"""


def evaluate(folder: Path, model: str, path: str, task: str, batch: int, **more: str) -> list:
    """What the tool knows of each document."""
    told = {"model": MODEL, "base_url": f"{BASE}{path}", "max_retries": 1, "max_length": 512}
    found = lm_eval.simple_evaluate(
        model,
        model_args={**told, **more},
        tasks=[task],
        batch_size=batch,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=path.startswith("/chat"),
        log_samples=True,
        bootstrap_iters=0,
    )
    return found["samples"][task]


def loglikelihoods(samples: list) -> list[float]:
    return [float(each[0]) for sample in samples for each in sample["filtered_resps"]]


def main(folder: Path) -> None:
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    for name, more in {"choosing": CHOICE, "generating": GENERATE}.items():
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data, more=more))
    tokenizer = {"tokenizer_backend": "huggingface", "tokenizer": str(make_tokenizer(folder))}

    with tried("loglikelihood"):
        one = evaluate(folder, "local-completions", "/completions", "choosing", 1, **tokenizer)
        assert all(each < 0 for each in loglikelihoods(one))
        assert len(loglikelihoods(one)) == 12
    with tried("loglikelihood, batch 2, says the same"):
        two = evaluate(folder, "local-completions", "/completions", "choosing", 2, **tokenizer)
        pairs = zip(loglikelihoods(one), loglikelihoods(two), strict=True)
        assert all(math.isclose(a, b, abs_tol=1e-2) for a, b in pairs)
    with tried("generation by completions"):
        assert evaluate(folder, "local-completions", "/completions", "generating", 2, **tokenizer)
    with tried("generation by chat"):
        path = "/chat/completions"
        assert evaluate(folder, "local-chat-completions", path, "generating", 1)


with tempfile.TemporaryDirectory() as place:
    main(Path(place))
