"""Requests that are refused because every worker has said that it is busy, before they are read."""

from __future__ import annotations

import httpx
import msgspec
import pytest
import trio

from tests.runtime.http.models.test_migrating import House, open_house
from trinamo.runtime.caller import choices, record
from trinamo.runtime.events.load import BusyLimits, LoadReport
from trinamo.runtime.http.status import STATUS_TABLE

BUSY = LoadReport(1, 9, 10, 400)
IDLE = LoadReport(1, 8, 10, 399)
AGE_MAX_S = 60.0


@pytest.mark.parametrize(
    ("limits", "report", "is_busy"),
    [
        (BusyLimits(), BUSY, False),
        (BusyLimits(blocks=0.9), BUSY, True),
        (BusyLimits(blocks=0.9), IDLE, False),
        (BusyLimits(blocks=0.1), LoadReport(5), False),
        (BusyLimits(waiting_tokens=400), BUSY, True),
        (BusyLimits(waiting_tokens=400), IDLE, False),
        (BusyLimits(0.95, 400), BUSY, True),
    ],
)
def test_a_worker_is_busy_where_either_bound_is_reached(
    limits: BusyLimits, report: LoadReport, *, is_busy: bool
) -> None:
    assert limits.is_busy(report) is is_busy


def test_whoever_is_told_to_come_back_is_told_when() -> None:
    for error, row in STATUS_TABLE.items():
        if row.status in (429, 503):
            assert row.retry_after_s, error


@pytest.fixture
def reports_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reports count for a minute, so that a stall makes none too old."""
    for module in (choices, record):
        monkeypatch.setattr(module, "REPORT_AGE_MAX_S", AGE_MAX_S)


def tell(house: House, *reports: LoadReport) -> None:
    """Have the workers say this of their load."""
    (client,) = house.frontend.clients
    assert client.router.reports is not None
    for instance, report in zip(client.router.instances, reports, strict=True):
        client.router.reports.loads.receive(instance.id, msgspec.msgpack.encode(report))


async def ask(house: House) -> httpx.Response:
    return await house.client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})


@pytest.mark.usefixtures("reports_last")
async def test_a_request_is_refused_while_all_are_busy_and_taken_when_one_is_not() -> None:
    async with open_house(http__queue_max=0, http__busy_waiting_tokens=400) as house:
        assert (await ask(house)).status_code == 200
        tell(house, BUSY, IDLE)
        assert (await ask(house)).status_code == 200
        tell(house, BUSY, BUSY)
        response = await ask(house)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "overloaded"
        # Nobody has read the rest: what was announced is never sent.
        url = house.client.base_url
        stream = await trio.open_tcp_stream(url.host, url.port or 0)
        async with stream:
            await stream.send_all(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n"
                b"content-type: application/json\r\n\r\n"
            )
            with trio.fail_after(120):
                head = bytes(await stream.receive_some(4096))
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head
        tell(house, IDLE, BUSY)
        assert (await ask(house)).status_code == 200


@pytest.mark.usefixtures("reports_last")
async def test_an_old_report_refuses_nobody() -> None:
    """The broker is away: what workers said last may be long over."""
    async with open_house(http__queue_max=0, http__busy_blocks=0.9) as house:
        tell(house, BUSY, BUSY)
        assert (await ask(house)).status_code == 503
        (client,) = house.frontend.clients
        for each in client.router._known:
            each.reported_at -= AGE_MAX_S
            client.router._known.choices.renew(each)
        assert (await ask(house)).status_code == 200
