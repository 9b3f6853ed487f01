"""Requests under way, instances and planes as the tests of a router need them."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio

from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import ConnectError, DisconnectedError, TrinamoError
from trinamo.runtime.planes import Entry, PostedRequest, TakeAnswer
from trinamo.runtime.protocol.discovery.instances import EndpointName, Instance, encode_instance
from trinamo.runtime.protocol.discovery.presence import InFlight
from trinamo.runtime.protocol.streams.request import (
    AckStatus,
    Envelope,
    Reason,
    RequestAnswer,
    RequestKind,
)

NAME = EndpointName("ns", "engine", "generate")


def instance(instance_id: str, *, draining: bool = False, incarnation: int = 1) -> Instance:
    """One that speaks nothing."""
    return Instance(
        endpoint=str(NAME),
        id=instance_id,
        transports={},
        draining=draining,
        incarnation=incarnation,
    )


def entry(each: Instance) -> Entry:
    return Entry(each.key, encode_instance(each), 1, 1)


def place(instance_id: str) -> str:
    """The address of an instance, whatever the transport."""
    return f"host-{instance_id}:1"


class SeededEnv(RealEnv):
    """The rng always says alike, and it is written down what was worth a note."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(7)
        self.notes: list[str] = []

    def note(self, kind: str, /, **fields: Any) -> None:
        self.notes.append(kind)


class Request(InFlight):
    """One that has brought as much as `came` says, and remembers when and how it was ended."""

    def __init__(self, came: int | None = 1, *, is_waiting: bool = False) -> None:
        super().__init__(is_waiting=is_waiting)
        self.came = came
        self.ended: list[tuple[float, str]] = []

    @property
    def ended_at(self) -> list[float]:
        return [at for at, _ in self.ended]

    def heard(self) -> int | None:
        return self.came

    def fail(self, error: DisconnectedError) -> None:
        self.ended.append((trio.current_time(), str(error)))


class ToldPlane:
    """A request plane whose connections stand, and whose probes are answered, as told."""

    def __init__(
        self, transport: str = "tcp", *, can_break: bool = True, stands: bool = True
    ) -> None:
        self.transport = transport
        self.is_usable = True
        self.acknowledges = True
        self.stands = stands
        self.status: AckStatus | None = AckStatus.ACCEPTED
        """What is answered; None is no answer."""
        self.life = ""
        """Who answers, as it says itself."""
        self.delay_s = 0.0
        self.asked_at: list[float] = []
        self.open_count = 0
        self._can_break = can_break
        self._lost = trio.Event()

    async def hold(
        self, address: str, on_connected: Callable[[], None], *, instance_id: str = ""
    ) -> None:
        await trio.lowlevel.checkpoint()
        if not self.stands:
            raise ConnectError(f"{address} refuses")
        on_connected()
        if self._can_break:
            await self._lost.wait()
        else:
            await trio.sleep_forever()

    def break_off(self) -> None:
        """End the connections, and let none be made."""
        self.stands = False
        self._lost.set()
        self._lost = trio.Event()

    def post(
        self, address: str, envelope: Envelope, payload: bytes, take: TakeAnswer
    ) -> PostedRequest | None:
        assert (envelope.kind, payload) == (RequestKind.PROBE, b"")
        assert (envelope.endpoint, place(envelope.instance_id)) == (str(NAME), address)
        assert self.is_usable
        self.asked_at.append(trio.current_time())
        return Posted(partial(self._answer, envelope), take)

    async def wait_room(self, address: str) -> None:
        raise AssertionError

    async def _answer(self, envelope: Envelope) -> tuple[RequestAnswer, bytes]:
        self.open_count += 1
        try:
            await trio.sleep(self.delay_s)
            if self.status is None:
                await trio.sleep_forever()
                raise AssertionError
            return RequestAnswer(id=envelope.id, status=self.status, instance_id=self.life), b""
        finally:
            self.open_count -= 1


class Posted:
    """A request under way: what `answer` returns or raises is taken, unless it is cancelled."""

    def __init__(
        self, answer: Callable[[], Awaitable[tuple[RequestAnswer, bytes]]], take: TakeAnswer
    ) -> None:
        self._answer, self._take = answer, take
        self._scope = trio.CancelScope()
        trio.lowlevel.spawn_system_task(self._run)

    def cancel(self, reason: Reason = Reason.CONSUMER_DROPPED) -> None:
        self._scope.cancel()

    def forget(self) -> None:
        self._scope.cancel()

    async def _run(self) -> None:
        said: RequestAnswer | TrinamoError
        result = b""
        with self._scope:
            try:
                said, result = await self._answer()
            except TrinamoError as error:
                said = error
            self._take(said, result)
