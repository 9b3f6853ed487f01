"""What a status port answers with is a stranger's word: anybody who may register names one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio

from trinamo.runtime.traces.ring import ProcessView
from trinamo.runtime.view.listing import InstanceLook
from trinamo.runtime.view.requests import ask_places
from trinamo.runtime.view.snapshot import Snapshots
from trinamo.runtime.view.survey import Asking, Survey, ask_instances
from trinamo.transports.openai.client import fetch

DEEP = b"[" * 100_000
BODIES = {
    "nested without end": DEEP,
    "nested without end beside what is asked": b'{"status": "ready", "traces": [], "x": ' + DEEP,
    "half a surrogate": b'{"status": "\\ud800", "active": 1}',
    "a number that no encoder takes": b'{"status": "ready", "active": 1%b}' % (b"0" * 400),
    "a number that is none": b'{"status": "ready", "active": NaN}',
    "no UTF-8": b'{"status": "\xff\xfe"}',
}


@asynccontextmanager
async def answering(body: bytes) -> AsyncIterator[tuple[str, list[int]]]:
    """The URL of a port that answers everything with `body`, and a number for each question."""
    asked: list[int] = []

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            try:
                asked.append(len(await stream.receive_some(4096)))
                head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
                await stream.send_all(head + body)
                await stream.receive_some(1)
            except trio.BrokenResourceError:
                pass

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, answer, listeners)
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}", asked
        nursery.cancel_scope.cancel()


def instance(number: int, url: str) -> InstanceLook:
    told = {"model": "m", "pid": "7", "status": url}
    return InstanceLook("a/b/c", f"{number:016x}", "1f", 1, False, {}, told)


def look(*instances: InstanceLook) -> Survey:
    return Survey(etcd="etcd", cluster=None, frontend=None, instances=list(instances))


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
async def test_a_worker_that_answers_with_nonsense_spoils_no_look(body: bytes) -> None:
    async with answering(body) as (url, _):
        found = look(instance(1, url))
        await ask_instances(found, Asking(fetch, timeout_s=10))
        legs, away = await ask_places(fetch, "/traces/id", ProcessView, {url: "nonsense"})

    made = Snapshots().make(found, None, {}, [], interval_s=1.0, now_s=1.0, wall=1.0)
    [row] = msgspec.json.decode(msgspec.json.encode(made))["instances"]
    assert row["active"] is None
    assert legs == []
    assert len(away) == 1


async def test_no_more_instances_are_asked_than_are_shown() -> None:
    """A page that looks every second would keep a frontend of a large cluster busy otherwise."""
    async with answering(b'{"status": "ready"}') as (url, asked):
        survey = look(*(instance(number, f"{url}/{number}") for number in range(5)))
        await ask_instances(survey, Asking(fetch, timeout_s=10, asked_max=2))

    assert len(asked) == 2
    assert [each.health is not None for each in survey.instances] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert survey.away == []
