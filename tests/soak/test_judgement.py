"""What a soak calls an answer, beside the undisturbed one: each outcome, and that none hides another; and a late start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.soak import processes
from tests.soak.asking import RED, Answer, Outcome, judged
from tests.soak.processes import Process

USAGE = {"prompt_tokens": 3, "completion_tokens": 5}


def answer(text: str = "abcde", **more: Any) -> Answer:
    whole = {"status": 200, "finish_reason": "length", "usage": USAGE, "is_ended": True}
    return Answer(text=text, **{**whole, **more})


def cut(text: str = "ab", **more: Any) -> Answer:
    """One whose stream went on no further."""
    return answer(text, **{"finish_reason": "", "usage": {}, "is_ended": False, **more})


@pytest.mark.parametrize(
    ("seen", "outcome"),
    [
        (answer(), Outcome.RIGHT),
        (answer("abcdx"), Outcome.WRONG),
        (answer("abcdef"), Outcome.WRONG),
        (answer(usage={}), Outcome.WRONG),
        (answer(finish_reason="cancelled"), Outcome.WRONG),
        (answer("ab"), Outcome.CUT),
        (answer("ab", finish_reason="cancelled"), Outcome.CUT),
        (answer("", finish_reason="", usage={}), Outcome.CUT),
        (cut("ab", is_ended=True), Outcome.CUT),
        (cut("ab", finish_reason="length"), Outcome.CUT),
        (cut("ab", error="{}"), Outcome.TYPED),
        (cut("ab", error="{}", is_ended=True), Outcome.TYPED),
        (cut("ax", error="{}"), Outcome.WRONG),
        (cut("ab", broken="ReadError"), Outcome.BROKEN),
        (cut("abcde"), Outcome.BROKEN),
        (Answer(status=404), Outcome.UNKNOWN),
        (Answer(status=503, retry_after_s=1.0), Outcome.BUSY),
        (Answer(status=503), Outcome.REFUSED),
        (Answer(status=502, retry_after_s=1.0), Outcome.REFUSED),
        (Answer(broken="ConnectError"), Outcome.BROKEN),
    ],
)
def test_an_answer_is_one_thing_beside_the_undisturbed_one(seen: Answer, outcome: Outcome) -> None:
    assert judged(seen, answer()) is outcome


def test_a_frontend_that_is_killed_excuses_a_broken_connection_and_nothing_else() -> None:
    assert judged(cut("ab"), answer(), is_gone=True) is Outcome.GONE
    assert judged(Answer(), answer(), is_gone=True) is Outcome.GONE
    assert judged(cut("ax"), answer(), is_gone=True) is Outcome.WRONG
    assert judged(answer("ab"), answer(), is_gone=True) is Outcome.CUT
    assert judged(Answer(status=404), answer(), is_gone=True) is Outcome.UNKNOWN


def test_calls_of_tools_and_log_probabilities_are_compared_too() -> None:
    whole = answer("", calls=[("weather", '{"city": "1"}')], logprobs=[{"token": "a"}])
    other = answer("", calls=[("weather", '{"city": "2"}')], logprobs=[{"token": "a"}])
    half = answer("", calls=[("weather", '{"ci')], logprobs=[{"token": "a"}])
    none = answer("", logprobs=[{"token": "a"}])
    unlikely = answer("", calls=whole.calls, logprobs=[{"token": "b"}])

    found = [judged(each, whole) for each in (whole, other, half, none, unlikely)]

    assert found == [Outcome.RIGHT, Outcome.WRONG, Outcome.CUT, Outcome.CUT, Outcome.WRONG]


def test_pieces_of_a_stream_add_up_to_what_a_body_says_at_once() -> None:
    call = {"index": 0, "function": {"name": "f", "arguments": "{"}}
    more = {"index": 0, "function": {"arguments": "}"}}
    streamed, body = Answer(), Answer()
    for delta in ({"role": "assistant"}, {"content": "a"}, {"tool_calls": [call]}):
        streamed.take({"choices": [{"delta": delta, "finish_reason": None}]})
    streamed.take({"choices": [{"delta": {"tool_calls": [more]}, "finish_reason": "tool_calls"}]})
    streamed.take({"choices": [], "usage": {**USAGE, "total_tokens": 8}})
    message = {"content": "a", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    choice = {"message": message, "finish_reason": "tool_calls"}
    body.take({"choices": [choice], "usage": {**USAGE, "total_tokens": 8}})

    assert streamed == body
    assert body.calls == [("f", "{}")]
    assert body.usage == USAGE


def test_what_must_not_happen_is_named() -> None:
    fine = {Outcome.RIGHT, Outcome.LEFT, Outcome.GONE, Outcome.BUSY, Outcome.TYPED}
    assert set(Outcome) - set(RED) == fine


# --- starts -----------------------------------------------------------------------------------------


class Away:
    is_up = False


async def test_the_time_for_a_start_begins_once_all_servers_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """The plan may leave none of both for longer: that says nothing of who waits for them."""
    monkeypatch.setattr(processes, "START_S", 0.3)

    def spawn(*_: Any, **__: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import time; time.sleep(30)"]
        return subprocess.Popen(command, start_new_session=True)

    monkeypatch.setattr(processes, "spawn", spawn)
    (tmp_path / "log").touch()
    told: list[str] = []
    server: Any = Away()
    waiting = Process("worker", "worker", {}, tmp_path / "log", told.append, [server])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiting.start)
        await trio.sleep(1)
        assert not told
        server.is_up = True
    assert told == ["worker did not start within 0.3 s"]
    await waiting.kill()
