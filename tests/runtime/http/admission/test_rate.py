"""A bound on how often requests come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import trio

from tests.runtime.http.running import on_every_server

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


@on_every_server
async def test_one_too_many_is_told_when_to_come_back(serve: Any) -> None:
    running = await serve(rate_per_s=0.001, rate_burst=2)
    async with running.client() as client:
        for left in (1, 0):
            response = await client.post(PATH, json=HELLO)
            assert response.status_code == 200
            assert response.headers["x-ratelimit-limit-requests"] == "2"
            assert response.headers["x-ratelimit-remaining-requests"] == str(left)
        response = await client.post(PATH, json=HELLO)
        assert response.status_code == 429
        assert 900 <= int(response.headers["retry-after"]) <= 1000
        assert 900_000 <= int(response.headers["retry-after-ms"]) <= 1_000_000
        assert response.headers["x-should-retry"] == "true"
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        full = response.headers["x-ratelimit-reset-requests"]
        assert 1_900_000 <= int(full.removesuffix("ms")) <= 2_000_000
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert running.value("requests_refused_total", bound="rate_per_s") == 1
        # Questions of operators are not requests for models.
        assert (await client.get("/v1/models")).status_code == 200
    await running.wait_quiet()


@on_every_server
async def test_who_asks_too_often_takes_nothing_of_another_s_rate(
    serve: Any, tmp_path: Path
) -> None:
    """Before: one bucket for all keys, and refused requests took from it, too."""
    keys = tmp_path / "keys"
    keys.write_text("greedy: sk-greedy-0123456789\nlight: sk-light-0123456789\n", "utf-8")
    running = await serve(api_keys_file=str(keys), rate_per_s=0.001, rate_burst=3)
    told: dict[str, list[int]] = {"greedy": [], "light": []}
    async with running.client() as client:
        for name in ["greedy"] * 8 + ["light"] * 4:
            headers = {"authorization": f"Bearer sk-{name}-0123456789"}
            told[name].append((await client.post(PATH, json=HELLO, headers=headers)).status_code)
    assert told == {"greedy": [200] * 3 + [429] * 5, "light": [200] * 3 + [429]}
    await running.wait_quiet()


async def test_the_bound_can_be_set_and_lifted_while_it_runs(serve: Any) -> None:
    running = await serve()
    section = running.service.config
    async with running.client() as client:
        assert (await client.post(PATH, json=HELLO)).status_code == 200
        for rate_per_s, status in ((0.001, 200), (0.002, 429), (None, 200)):
            running.service.tune(
                msgspec.structs.replace(section, rate_per_s=rate_per_s, rate_burst=1)
            )
            with trio.fail_after(120):
                assert (await client.post(PATH, json=HELLO)).status_code == status
    await running.wait_quiet()
