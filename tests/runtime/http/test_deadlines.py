"""A bound on a whole answer: of the service, of one request, and what a client sees of it."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import pytest
import trio

from tests.runtime.http.running import LocalEngine
from tests.runtime.http.test_chat import HELLO, NO_DELTAS, post
from trinamo.runtime.context import Context
from trinamo.runtime.errors import RequestError
from trinamo.runtime.http.exchanges import find_deadline
from trinamo.runtime.protocol.openai.generate import Delta, GenerateRequest

CHAT = "/v1/chat/completions"


async def never(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    for delta in NO_DELTAS:
        yield delta
    await trio.sleep_forever()


async def begin_only(_: GenerateRequest, __: Context) -> AsyncGenerator[Delta, None]:
    yield Delta("a", [1], None, 1)
    await trio.sleep_forever()


async def test_the_shorter_of_what_client_and_operator_say_counts(
    autojump_clock: trio.testing.MockClock,
) -> None:
    await trio.sleep(10)

    def left(given: bytes | None, allowed_s: float | None) -> float:
        headers = [] if given is None else [(b"x-trinamo-timeout", given)]
        return find_deadline(headers, allowed_s) - trio.current_time()

    assert left(None, None) == math.inf
    assert left(None, 5) == left(b"7", 5) == left(b"5.0", None) == left(b"5", 60) == 5


@pytest.mark.parametrize("given", [b"0", b"-1", b"nan", b"inf", b"86401", b"soon", b"", b"\xff"])
def test_what_is_no_time_is_refused(given: bytes) -> None:
    with pytest.raises(RequestError, match="X-Trinamo-Timeout"):
        find_deadline([(b"x-trinamo-timeout", given)], None)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_answer_that_has_not_begun_in_time_is_a_504(serve: Any, is_streamed: bool) -> None:
    running = await serve(never)
    body = {**HELLO, "stream": is_streamed}
    engine: LocalEngine = running.engine
    counted = partial(running.value, "cancellations_total", model="local", reason="deadline")
    before = 0.0
    # A stall may use up the time before the engine is asked: then another request is made.
    with trio.fail_after(120):
        while not engine.contexts:
            before = counted()
            response = await post(running, CHAT, body, **{"x-trinamo-timeout": "0.05"})
            assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline")
    assert engine.contexts[0].is_killed
    assert counted() == before + 1


async def test_the_time_of_an_answer_is_that_of_its_request_s_body_too(serve: Any) -> None:
    running = await serve(never, answer_timeout_s=0.05)
    async with await running.connect() as stream:
        await stream.send_all(running.post()[:-1])
        with trio.fail_after(120):
            answer = await stream.receive_some()
    assert answer.startswith(b"HTTP/1.1 504 ")
    assert b'"code":"deadline"' in answer
    await running.wait_quiet()


async def test_a_stream_that_has_begun_ends_with_an_event(serve: Any) -> None:
    running = await serve(begin_only, answer_timeout_s=0.05)
    response = await post(running, CHAT, {**HELLO, "stream": True})
    # A stall may use up the time before the answer begins: then another request is made.
    with trio.fail_after(120):
        while response.status_code == 504:
            response = await post(running, CHAT, {**HELLO, "stream": True})
    assert response.status_code == 200
    assert '"code":"deadline"' in response.text.splitlines()[-2]
    assert "[DONE]" not in response.text


async def test_a_time_that_is_none_is_a_400_before_anybody_is_asked(serve: Any) -> None:
    running = await serve(never)
    response = await post(running, CHAT, HELLO, **{"x-trinamo-timeout": "tomorrow"})
    assert (response.status_code, running.engine.requests) == (400, [])
    assert "X-Trinamo-Timeout" in response.json()["error"]["message"]
