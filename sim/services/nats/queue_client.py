"""A client's handle of a work queue on a simulated broker, and its calls over a connection that comes and goes.

Every call may be repeated, a put by its id and the rest by their token, so what is lost on the way
costs time only. A taker asks for a while at a time and asks again; one that goes away says so, and
a job that was already on its way to it comes back when its lease expires.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import attrs
import msgspec
import trio
from typing_extensions import override

from trinamo.runtime.errors import (
    DeadlineError,
    OverloadedError,
    UnknownOutcomeError,
    error_from_wire,
)
from trinamo.runtime.planes import LeasedJob, PutResult, QueueLimits
from trinamo.runtime.protocol.queue.jobs import check_queue_name
from trinamo.transports.memory.queue import ADMINISTRATION_TIMEOUT_S, AskedQueue

from ..connector import Connector
from ..wire import Call, CallResult, Forget, NoLeader, Refusal, Reply, encode

TRY_S: Final = 1.0
RETRY_PAUSE_MIN_S: Final = 0.02
RETRY_PAUSE_MAX_S: Final = 0.5
POLL_S: Final = 2.0
"""How long the broker lets a taker wait before it answers that there is nothing."""
POLL_ANSWER_S: Final = 1.0
PAUSE_S: Final = 0.1
T = TypeVar("T")


@attrs.define(eq=False)
class _Question:
    """A call on its way. `reply` stays None if the connection was lost."""

    settled: trio.Event = attrs.field(factory=trio.Event)
    reply: Reply | None = None
    data: bytes = b""

    def result(self, kind: Any) -> Any:
        """What was answered, of this type; raises the service's no."""
        if isinstance(self.reply, Refusal):
            raise error_from_wire(self.reply.code, self.reply.message, definite=True)
        return msgspec.msgpack.decode(self.data, type=kind)

    @property
    def words(self) -> str:
        """Why there is no answer."""
        if isinstance(self.reply, NoLeader):
            return "the service has no leader"
        return "the connection was lost" if self.settled.is_set() else "no answer"


class BrokerCalls:
    """The calls of one client. Its owner hands it every reply, and tells it of every loss."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._questions: dict[int, _Question] = {}
        self._ids = itertools.count(1)

    async def call(
        self,
        op: str,
        arguments: tuple[Any, ...],
        kind: Any,
        *,
        timeout_s: float = ADMINISTRATION_TIMEOUT_S,
    ) -> tuple[Any, bool]:
        """Ask again and again; what is returned, and whether an earlier try may have had its effect.

        Raises the service's no, `DeadlineError` if there is no answer and certainly was no effect,
        else `UnknownOutcomeError`.
        """
        data = encode(arguments)
        deadline = trio.current_time() + timeout_s
        pause_s = RETRY_PAUSE_MIN_S
        is_doubtful = False
        words = "no time was given"
        while (left_s := deadline - trio.current_time()) > 0:
            question = await self._try(op, data, min(left_s, TRY_S))
            if question is not None and isinstance(question.reply, CallResult | Refusal):
                return question.result(kind), is_doubtful
            words = self._connector.last_words if question is None else question.words
            is_doubtful |= question is not None and not isinstance(question.reply, NoLeader)
            if deadline - trio.current_time() <= pause_s:
                break
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_PAUSE_MAX_S)
        if is_doubtful:
            raise UnknownOutcomeError(f"{op}: {words}")
        raise DeadlineError(f"{op}: {words}", definite=True)

    async def _try(
        self, op: str, data: bytes, try_s: float, *, forgets: bool = False
    ) -> _Question | None:
        """Ask once, over whatever connection comes. None if nothing was sent.

        With `forgets` the service is told when the wait is given up or cancelled.
        """
        question = None
        call = Call(next(self._ids), op)
        with trio.move_on_after(try_s):
            peer = await self._connector.wait_open()
            await trio.lowlevel.checkpoint_if_cancelled()
            question = self._questions[call.id] = _Question()
            try:
                peer.post(encode(call), data)
                await question.settled.wait()
            finally:
                self._questions.pop(call.id, None)
                if forgets and not question.settled.is_set():
                    peer.post(encode(Forget(call.id)))
        return question

    async def take(self, queue: str, wait_s: float) -> tuple[bool, LeasedJob | None]:
        """Ask one time for a job: whether there was an answer, and it."""
        timeout_s = wait_s + POLL_ANSWER_S
        question = await self._try("take", encode((queue, wait_s)), timeout_s, forgets=True)
        if question is None or question.reply is None or isinstance(question.reply, NoLeader):
            return False, None
        return True, question.result(LeasedJob | None)

    def receive(self, reply: Reply, data: bytes) -> None:
        """A reply came. It may come twice, or after its question was given up."""
        question = self._questions.get(reply.id)
        if question is not None and not question.settled.is_set():
            question.reply, question.data = reply, data
            question.settled.set()

    def lost(self) -> None:
        """The connection is gone: whoever waits tries again or gives up."""
        for question in self._questions.values():
            question.settled.set()


class SimulatedWorkQueue(AskedQueue):
    """One process's handle of a queue. Nothing to close: leases end by themselves."""

    def __init__(
        self,
        caller: BrokerCalls,
        name: str,
        limits: QueueLimits,
        *,
        payload_bytes_max: int,
        call_ids: Iterator[str],
    ) -> None:
        super().__init__(name, payload_bytes_max=payload_bytes_max)
        self._caller = caller
        self._call_ids = call_ids
        self._limits = limits

    @property
    def limits(self) -> QueueLimits:
        """See `WorkQueue.limits`."""
        return self._limits

    async def take(self, *, wait_s: float) -> LeasedJob | None:
        """See `WorkQueue.take`."""
        give_up_at = trio.current_time() + wait_s
        while True:
            left_s = max(0.0, give_up_at - trio.current_time())
            has_answer, job = await self._caller.take(self._name, min(left_s, POLL_S))
            if job is not None or trio.current_time() >= give_up_at:
                return job
            if not has_answer:
                await trio.sleep(min(PAUSE_S, max(0.0, give_up_at - trio.current_time())))

    @override
    async def _ask(
        self,
        step: str,
        kind: type[T],
        *arguments: object,
        timeout_s: float = ADMINISTRATION_TIMEOUT_S,
    ) -> T:
        given = [self._name, *arguments]
        if step in ("ack", "nak"):
            # The broker knows a repetition by it.
            given.insert(2, next(self._call_ids))
        try:
            result, is_doubtful = await self._caller.call(
                step, tuple(given), kind, timeout_s=timeout_s
            )
        except OverloadedError as error:
            bound = self._limits.depth_max
            raise OverloadedError(error.message, bound="depth_max", value=bound) from error
        # A copy of our own earlier try, whose answer was lost, is no duplicate.
        done: dict[str, Any] = {"put": PutResult.ADDED, "requeue": True} if is_doubtful else {}
        found: T = done.get(step, result)
        return found


@asynccontextmanager
async def open_queue(
    caller: BrokerCalls,
    name: str,
    limits: QueueLimits | None,
    *,
    payload_bytes_max: int,
    call_ids: Iterator[str],
) -> AsyncIterator[SimulatedWorkQueue]:
    """Open the queue called `name`; see `EventPlane.work_queue`.

    `call_ids` tells the calls of all processes apart.
    """
    check_queue_name(name)
    in_force, _ = await caller.call("open", (name, limits), QueueLimits)
    yield SimulatedWorkQueue(
        caller, name, in_force, payload_bytes_max=payload_bytes_max, call_ids=call_ids
    )
