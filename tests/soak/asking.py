"""One request of a soak, and the judgement of what came back. Knows no process; see `ledger.py`."""

from __future__ import annotations

import enum
import json
from typing import Any, Final

import attrs
import httpx
import trio

from tests.soak.plan import Question

HUNG_S: Final = 120.0
"""Longer than anything that is bounded: a wait for a place, and the silence of a worker, thrice."""


COUNTED: Final = ("prompt_tokens", "completion_tokens")


class Outcome(enum.StrEnum):
    """What became of one request. Each is exactly one of these."""

    RIGHT = "right"
    LEFT = "left by its client"
    GONE = "gone with its frontend"
    BUSY = "503 with Retry-After"
    TYPED = "typed error in mid-stream"
    WRONG = "wrong text"
    CUT = "cut that looks whole"
    HUNG = "hung"
    UNKNOWN = "404"
    REFUSED = "refused otherwise"
    BROKEN = "broken off without a word"


RED: Final = (
    Outcome.WRONG,
    Outcome.CUT,
    Outcome.HUNG,
    Outcome.UNKNOWN,
    Outcome.REFUSED,
    Outcome.BROKEN,
)
"""None of these may happen."""


@attrs.define
class Answer:
    """What a client has seen of one answer."""

    status: int = 0
    retry_after_s: float | None = None
    worker: str = ""
    text: str = ""
    logprobs: list[Any] = attrs.field(factory=list)
    calls: list[tuple[str, str]] = attrs.field(factory=list)
    finish_reason: str = ""
    usage: dict[str, int] = attrs.field(factory=dict)
    is_ended: bool = False
    """By `[DONE]`, or by the end of a body that was not streamed."""
    error: str = ""
    """What the server said."""
    broken: str = ""
    """What the connection said."""

    def take(self, event: dict[str, Any]) -> None:
        """Add one event of a stream, or a whole body."""
        if "error" in event:
            self.error = json.dumps(event["error"])
        if event.get("usage"):
            self.usage = {key: event["usage"][key] for key in COUNTED}
        for choice in event.get("choices", ()):
            said = choice.get("message") or choice.get("delta") or {}
            self.text += choice.get("text") or said.get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.logprobs += (choice.get("logprobs") or {}).get("content") or []
            for call in said.get("tool_calls") or ():
                self._call(call.get("index", len(self.calls)), call["function"])

    def _call(self, index: int, function: dict[str, Any]) -> None:
        while len(self.calls) <= index:
            self.calls.append(("", ""))
        name, arguments = self.calls[index]
        self.calls[index] = (
            name + (function.get("name") or ""),
            arguments + (function.get("arguments") or ""),
        )

    def differences(self, whole: Answer) -> list[str]:
        """What is not as in the undisturbed answer, by field."""
        fields = ("text", "calls", "finish_reason", "usage", "logprobs")
        return [each for each in fields if getattr(self, each) != getattr(whole, each)]

    def is_begun_as(self, whole: Answer) -> bool:
        """Whether what was said so far is how `whole` begins."""
        mine, theirs = self.calls or [("", "")], whole.calls or [("", "")]
        return (
            whole.text.startswith(self.text)
            and len(mine) <= len(theirs)
            and mine[:-1] == theirs[: len(mine) - 1]
            and all(map(str.startswith, theirs[len(mine) - 1], mine[-1]))
            and self.logprobs == whole.logprobs[: len(self.logprobs)]
        )


def judged(answer: Answer, whole: Answer, *, is_gone: bool = False) -> Outcome:
    """What `answer` is beside the undisturbed one.

    `is_gone`: its frontend was killed, or stopped, while it was under way.
    """
    if answer.status == 200:
        return _judged_begun(answer, whole, is_gone=is_gone)
    if not answer.status:
        return Outcome.GONE if is_gone else Outcome.BROKEN
    if answer.status == 404:
        return Outcome.UNKNOWN
    is_busy = answer.status == 503 and answer.retry_after_s is not None
    return Outcome.BUSY if is_busy else Outcome.REFUSED


def _judged_begun(answer: Answer, whole: Answer, *, is_gone: bool) -> Outcome:
    if answer.is_ended and not answer.error and not answer.differences(whole):
        return Outcome.RIGHT
    if not answer.is_begun_as(whole):
        return Outcome.WRONG
    if answer.error:
        return Outcome.TYPED
    is_less = (answer.text, answer.calls) != (whole.text, whole.calls)
    if answer.is_ended or answer.finish_reason:
        if is_less:
            return Outcome.CUT
        if answer.is_ended:
            # The whole text with another usage, finish reason or number of log probabilities.
            return Outcome.WRONG
    return Outcome.GONE if is_gone else Outcome.BROKEN


async def ask(
    client: httpx.AsyncClient,
    url: str,
    question: Question,
    *,
    request_id: str,
    is_streamed: bool,
    answer: Answer,
) -> None:
    """Ask, and fill in `answer` as it comes, so that it is there for whoever leaves before the end."""
    try:
        async with client.stream(
            "POST",
            f"{url}/v1/{question.path}",
            json=question.asked(is_streamed=is_streamed),
            headers={"x-request-id": request_id},
        ) as response:
            answer.status = response.status_code
            answer.worker = response.headers.get("x-trinamo-worker", "")
            if "retry-after" in response.headers:
                answer.retry_after_s = float(response.headers["retry-after"])
            if is_streamed and response.status_code == 200:
                await _read_events(response, answer)
            else:
                await _read_body(response, answer)
    except httpx.HTTPError as error:
        answer.broken = repr(error)


async def _read_events(response: httpx.Response, answer: Answer) -> None:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            answer.is_ended = True
        elif line.startswith("data: "):
            answer.take(json.loads(line.removeprefix("data: ")))


async def _read_body(response: httpx.Response, answer: Answer) -> None:
    body = await response.aread()
    answer.is_ended = True
    try:
        answer.take(json.loads(body))
    except ValueError:
        answer.error = answer.error or (
            "" if answer.status == 200 else body[:200].decode("latin-1")
        )


async def ask_in_time(
    client: httpx.AsyncClient,
    url: str,
    question: Question,
    *,
    request_id: str,
    is_streamed: bool,
    leaves_after_s: float | None = None,
) -> tuple[Answer, Outcome | None]:
    """The answer, and what is known of its outcome without looking at it."""
    answer = Answer()
    with trio.move_on_after(HUNG_S if leaves_after_s is None else leaves_after_s) as scope:
        await ask(
            client, url, question, request_id=request_id, is_streamed=is_streamed, answer=answer
        )
    if not scope.cancelled_caught:
        return answer, None
    return answer, Outcome.HUNG if leaves_after_s is None else Outcome.LEFT
