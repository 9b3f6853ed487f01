"""Which headers give a request its id."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.runtime.http.running import on_every_server
from trinamo import HttpService
from trinamo.runtime.errors import ConfigError
from trinamo.runtime.http.exchanges import RequestIds

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


@on_every_server
async def test_the_first_header_that_holds_an_id_gives_it_and_comes_back(serve: Any) -> None:
    running = await serve(request_id_headers=["X-Correlation-Id", "x-request-id"])
    async with running.client() as client:
        both = {"x-correlation-id": "mine", "x-request-id": "other"}
        response = await client.post(PATH, json=HELLO, headers=both)
        told = response.headers
        assert (told["x-request-id"], told["x-correlation-id"]) == ("mine", "mine")
        response = await client.post(PATH, json=HELLO, headers={"x-request-id": "other"})
        assert response.headers["x-request-id"] == "other"
        assert "x-correlation-id" not in response.headers
    await running.wait_quiet()


def test_by_default_it_is_x_request_id_alone() -> None:
    ids = RequestIds(random.Random(1))
    headers = [(b"x-correlation-id", b"a"), (b"x-request-id", b"b\x00c")]
    public, inner = ids.make(headers)
    assert public == "bc"
    assert inner.startswith("bc-")
    assert ids.answer_headers(headers, public) == [(b"x-request-id", b"bc")]


def test_a_new_id_is_made_where_none_is_given() -> None:
    ids = RequestIds(random.Random(1), [])
    public, inner = ids.make([(b"x-request-id", b"a")])
    assert public == inner != "a"


@pytest.mark.parametrize("name", ["Authorization", "content-length", "no space", ""])
def test_headers_that_hold_no_id_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="request_id_headers"):
        HttpService.builder().config(request_id_headers=[name])
