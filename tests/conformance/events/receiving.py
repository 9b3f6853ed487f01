"""Receiving with a limit of time, for tests of event planes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from tests.session import needs
from trinamo.runtime.planes import EventPlane, Message, Subscription

DEBIAN_SERVER = Path("/usr/sbin/nats-server")
NATS: Any = pytest.param("nats", marks=pytest.mark.services)
DEBIAN: Any = pytest.param(
    "nats-debian",
    marks=[pytest.mark.services, needs.SYSTEM_NATS.unless(DEBIAN_SERVER.exists())],
)


BROKERS = ["memory", "simulated", NATS, DEBIAN]


async def receive(subscription: Subscription) -> Message:
    with trio.fail_after(10):
        return await anext(subscription)


async def payloads(subscription: Subscription, count: int) -> list[bytes]:
    return [(await receive(subscription)).payload for _ in range(count)]


async def assert_nothing_pending(
    plane: EventPlane, subscription: Subscription, subject: str
) -> None:
    """A mark published now is the next thing received, so nothing else was waiting."""
    await plane.publish(subject, b"mark")
    assert await payloads(subscription, 1) == [b"mark"]


async def echo(
    plane: EventPlane,
    subject: str,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    async with plane.subscribe(subject) as requests:
        task_status.started()
        async for message in requests:
            await plane.publish(message.reply, b"re:" + message.payload)
