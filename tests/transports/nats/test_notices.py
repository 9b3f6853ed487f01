"""Log lines that do not flood."""

from __future__ import annotations

import logging

import pytest
import trio

from trinamo.transports.nats.notices import Notices


async def test_a_kind_is_logged_once_per_interval_with_the_count_of_the_rest(
    caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    notices = Notices(interval_s=5)
    with caplog.at_level(logging.WARNING, "trinamo.nats"):
        for number in range(900):
            notices.warn("error", number)
        notices.warn("disconnected", "x")
        await trio.sleep(5)
        notices.warn("error", "again")
        await trio.sleep(5)
        notices.warn("error", "later")
    assert [record.getMessage() for record in caplog.records] == [
        "error: 0",
        "disconnected: x",
        "error: again (899 more since the last line)",
        "error: later",
    ]
