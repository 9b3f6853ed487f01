"""`make search WHAT=answers`: what the model that `make up` ships answers to a newcomer.

Twenty questions without any parameter of sampling, each with several seeds: how many answers are cut by the bound, how
many repeat a sentence, how many are right. The row that it prints is one of `docs/http_api.md`. The options try other
defaults in place of the model's own. Answers are computed as in a worker, many in one step, without HTTP.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import Counter
from typing import Any, Final

import attrs
import msgspec
import trio

from trinamo.runtime.context import Context
from trinamo.runtime.engines.llamacpp.engine import open_llamacpp_engine
from trinamo.runtime.engines.llamacpp.model_file import MODEL_NAME
from trinamo.runtime.engines.threads import busy_cores, count_cores, threads_of_step
from trinamo.runtime.nurseries import open_nursery
from trinamo.runtime.protocol.openai.generate import (
    Delta,
    FinishReason,
    GenerateRequest,
    SamplingDefaults,
)
from trinamo.runtime.protocol.openai.requests import ChatCompletionRequest
from trinamo.runtime.sinks import Sink

QUESTIONS: Final[tuple[tuple[str, str], ...]] = (
    ("What is the capital of France?", r"\bparis\b"),
    ("What is 2 + 2?", r"\b(4|four)\b"),
    ("Say hello.", r"\bhello\b"),
    ("Who wrote Romeo and Juliet?", r"shakespeare"),
    ("What colour is the sky on a clear day?", r"\bblue\b"),
    ("How many days are there in a week?", r"\b(7|seven)\b"),
    ("What is the largest planet of the solar system?", r"jupiter"),
    ("At how many degrees Celsius does water boil?", r"\b100\b"),
    ("What is the opposite of hot?", r"\bcold\b"),
    ("What do bees make?", r"\bhoney\b"),
    ("What is H2O called in everyday life?", r"\bwater\b"),
    ("In which country is Tokyo?", r"\bjapan\b"),
    ("What is the first month of the year?", r"\bjanuary\b"),
    ("Translate 'good morning' into French.", r"\bbonjour\b"),
    ("Who are you?", ""),
    ("Tell me a story.", ""),
    ("Write a short poem about the sea.", ""),
    ("What is the meaning of life?", ""),
    ("Explain what a computer is.", ""),
    ("Give me three tips for a good night's sleep.", ""),
)
"""Each with what a right answer matches; empty where none is right or wrong."""
RIGHT_ONES: Final = sum(bool(right) for _, right in QUESTIONS)
REPEATED: Final = 3
"""So often a sentence stands in an answer that repeats itself."""
WORDS_MIN: Final = 3
"""Of a sentence: "Yes." and the number of a list's item may come again."""
CAP: Final = 700
"""Tokens of an answer where the defaults have no bound."""
LONG: Final = 600


@attrs.define
class Answer:
    """One answer, and the question's number."""

    question: int
    text: str = ""
    tokens: int = 0
    is_cut: bool = False
    took_s: float = 0.0

    @property
    def is_right(self) -> bool:
        right = QUESTIONS[self.question][1]
        return bool(right) and re.search(right, self.text.lower()) is not None

    @property
    def is_repeating(self) -> bool:
        return is_repeating(self.text)


def is_repeating(text: str) -> bool:
    """Whether a sentence or line of it comes `REPEATED` times."""
    sentences = (" ".join(each.lower().split()) for each in re.split(r"[.!?\n]+", text))
    counts = Counter(each for each in sentences if len(each.split()) >= WORDS_MIN)
    return max(counts.values(), default=0) >= REPEATED


class _Kept(Sink[Delta]):
    """Takes an answer as it comes."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    def take(self, items: list[Delta]) -> bool:
        for delta in items:
            self._answer.text += delta.text
            self._answer.tokens += len(delta.token_ids)
            self._answer.is_cut = delta.finish_reason is FinishReason.LENGTH
        return True


def request_of(question: str, seed: int, sampling: SamplingDefaults) -> GenerateRequest:
    """What a frontend makes of a body that says nothing but the question."""
    body = msgspec.json.encode({"messages": [{"role": "user", "content": question}], "seed": seed})
    asked = msgspec.json.decode(body, type=ChatCompletionRequest)
    found = asked.to_generate(MODEL_NAME, sampling=sampling)
    return found if found.max_tokens else msgspec.structs.replace(found, max_tokens=CAP)


async def study(options: argparse.Namespace) -> list[Answer]:
    """Ask everything, `options.together` at a time."""
    threads = options.threads or threads_of_step(count_cores(), busy=busy_cores(), sharing=1)
    said = {
        name: value
        for name in SamplingDefaults.__struct_fields__
        if (value := getattr(options, name)) is not None
    }
    answers: list[Answer] = []
    limit = trio.CapacityLimiter(options.together)
    async with open_llamacpp_engine(threads=threads, running_max=options.together) as host:
        sampling = msgspec.structs.replace(host.info.sampling, **said)
        print(f"{sampling}, {threads} threads, {options.together} at a time", flush=True)

        async def ask(number: int, question: str, seed: int) -> None:
            async with limit:
                answer, began = Answer(number), trio.current_time()
                with Context(f"{number}.{seed}") as context:
                    await host.forward(request_of(question, seed, sampling), context, _Kept(answer))
                answer.took_s = trio.current_time() - began
            answers.append(answer)
            if options.verbose or answer.is_repeating:
                print(f"{question} (seed {seed}, {answer.tokens} tokens)\n{answer.text}\n")

        async with open_nursery() as nursery:
            for seed in range(1, options.seeds + 1):
                for number, (question, _) in enumerate(QUESTIONS):
                    nursery.start_soon(ask, number, question, seed)
    return answers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make search WHAT=answers", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="answers to each question (5)")
    parser.add_argument("--together", type=int, default=1, help="at a time; for the time, 1 (1)")
    parser.add_argument("--threads", type=int, help="of a step; else the cores that are free")
    parser.add_argument("--verbose", action="store_true", help="print every answer")
    for name in SamplingDefaults.__struct_fields__:
        kind: Any = int if name in ("top_k", "max_tokens") else float
        parser.add_argument(f"--{name}", type=kind, help="in place of the model's own")
    return parser


def main() -> int:
    """Print the row; 1 if an answer repeats itself or has more than `LONG` tokens."""
    options = _parser().parse_args()
    began = time.monotonic()
    answers = trio.run(study, options)
    took = sorted(answer.took_s for answer in answers)
    repeating = sum(answer.is_repeating for answer in answers)
    long = sum(answer.tokens > LONG for answer in answers)
    mean = sum(answer.tokens for answer in answers) / len(answers)
    right = sum(answer.is_right for answer in answers) / options.seeds
    print(
        f"{len(answers)} answers: {repeating} repeat a sentence {REPEATED} times,"
        f" {sum(answer.is_cut for answer in answers)} cut by the bound, {long} longer than {LONG};"
        f" right {right:.1f} of {RIGHT_ONES}; {mean:.0f} tokens in the mean;"
        f" {took[len(took) // 2]:.1f} s in the median, {took[-1]:.1f} s at most;"
        f" {time.monotonic() - began:.0f} s in all, load {os.getloadavg()[0]:.0f}"
    )
    return int(repeating > 0 or long > 0)


if __name__ == "__main__":
    sys.exit(main())
