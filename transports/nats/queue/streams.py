"""The streams behind work queues: found, made, changed, counted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import trio

from trinamo.runtime.errors import UnavailableError
from trinamo.runtime.protocol.queue.jobs import QueueLimits, QueueStatistics

from .api import (
    ConsumerInfo,
    JetStream,
    JetStreamError,
    QueuePlane,
    R,
    Reply,
    StreamInfo,
    StreamPage,
)
from .records import StreamNames, consumer_config, queue_limits, stream_configs

ADMINISTRATION_TIMEOUT_S: Final = 10.0
_NAME_IN_USE: Final = 10058


async def list_work_queues(plane: QueuePlane, *, rng: random.Random) -> list[str]:
    """The names of all queues on the server, sorted."""
    stream = JetStream(plane, rng=rng)
    deadline = trio.current_time() + ADMINISTRATION_TIMEOUT_S
    found: list[str] = []
    offset = 0
    while True:
        answer = await stream.call(
            "STREAM.NAMES", {"offset": offset}, StreamPage, deadline=deadline
        )
        page = answer.streams or ()
        found += [queue for each in page if (queue := StreamNames.queue_of(each)) is not None]
        offset += len(page)
        if not page or offset >= answer.total:
            return sorted(found)


async def existing_limits(stream: JetStream, names: StreamNames) -> QueueLimits:
    deadline = trio.current_time() + ADMINISTRATION_TIMEOUT_S
    answer = await stream.find(f"STREAM.INFO.{names.jobs}", {}, StreamInfo, deadline=deadline)
    if answer is None:
        raise UnavailableError(f"there is no queue {names.queue}")
    return queue_limits(answer.config.description)


async def make_streams(
    stream: JetStream, names: StreamNames, limits: QueueLimits, replicas: int
) -> None:
    deadline = trio.current_time() + ADMINISTRATION_TIMEOUT_S
    for config in stream_configs(names, limits, replicas=replicas):
        try:
            await stream.call(f"STREAM.CREATE.{config['name']}", config, Reply, deadline=deadline)
        except JetStreamError as error:
            if error.error_code != _NAME_IN_USE:
                raise
            await stream.call(f"STREAM.UPDATE.{config['name']}", config, Reply, deadline=deadline)
    await stream.call(
        f"CONSUMER.DURABLE.CREATE.{names.jobs}.{names.CONSUMER}",
        {"stream_name": names.jobs, "config": consumer_config(limits)},
        Reply,
        deadline=deadline,
    )


async def read_statistics(
    stream: JetStream, names: StreamNames, wall: Callable[[], float], *, deadline: float
) -> QueueStatistics:
    """Depth and age, asked of the streams' leaders; `wall` is the time since the epoch in s.

    Raises `UnavailableError` if a stream of the queue is not there, such as on a server that lost
    its disk.
    """

    async def info(what: str, kind: type[R]) -> R:
        answer = await stream.find(what, {}, kind, deadline=deadline)
        if answer is None:
            raise UnavailableError(f"there is no queue {names.queue}")
        return answer

    jobs = await info(f"STREAM.INFO.{names.jobs}", StreamInfo)
    consumer = await info(f"CONSUMER.INFO.{names.jobs}.{names.CONSUMER}", ConsumerInfo)
    dead = await info(f"STREAM.INFO.{names.dead}", StreamInfo)
    depth = jobs.state.messages
    age_s = jobs.age_s(wall()) if depth else 0.0
    return QueueStatistics(depth, min(depth, consumer.num_ack_pending), dead.state.messages, age_s)
