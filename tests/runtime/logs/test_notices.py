"""Log lines that do not flood, and a memory of them that does not grow."""

from __future__ import annotations

import logging

import pytest
import trio
import trio.testing

from trinamo.runtime.logs.notices import LogNotices


async def test_of_many_alike_the_first_is_logged_and_later_how_many_followed(
    caplog: pytest.LogCaptureFixture, autojump_clock: trio.testing.MockClock
) -> None:
    notices = LogNotices(logging.getLogger("trinamo.test"))
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


async def test_the_oldest_of_too_many_kinds_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    notices = LogNotices(logging.getLogger("trinamo.test"))
    for number in range(100):
        notices.warn(f"kind {number}", "x")
    notices.warn("kind 99", "held back")
    notices.warn("kind 0", "logged again")
    assert len(caplog.records) == 101
