"""Calls to the broker's queues over a connection that comes and goes, and what became of them.

The rule of repetition is everybody's (`transports/etcd/client.py`): a call of which nothing was sent is
always tried again; one that may have taken effect only if a second effect would change nothing.
Everything is bounded by one deadline per call, each try of a repeatable call by a shorter one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import attrs
import msgspec
import trio

from trinamo.runtime.errors import (
    ConnectError,
    DeadlineError,
    TrinamoError,
    UnknownOutcomeError,
    error_from_wire,
)

from ..connector import Connector
from ..wire import Answer, Call, NoLeader, Refusal, Reply, encode

RETRY_PAUSE_MIN_S: Final = 0.02
RETRY_PAUSE_MAX_S: Final = 0.5


@attrs.define(eq=False)
class _Question:
    """A call on its way. `reply` stays None if the connection was lost."""

    settled: trio.Event = attrs.field(factory=trio.Event)
    reply: Reply | None = None
    data: bytes = b""


@attrs.frozen
class Result:
    """What a call returned, and whether an earlier try of it may have taken effect too."""

    value: Any
    is_doubtful: bool


class Caller:
    """The calls of one client. Its owner hands it every reply, and tells it of every loss."""

    def __init__(
        self,
        connector: Connector,
        *,
        timeout_s: float,
        per_try_timeout_s: float,
    ) -> None:
        self._connector = connector
        self._timeout_s, self._per_try_timeout_s = timeout_s, per_try_timeout_s
        self._questions: dict[int, _Question] = {}
        self._ids = itertools.count(1)

    async def read(self, op: str, arguments: tuple[Any, ...], kind: Any) -> Any:
        """A call without an effect. Raises `ConnectError`, `DeadlineError` or the service's no."""
        return (await self.call(op, arguments, kind, is_repeatable=True, writes=False)).value

    async def call(
        self,
        op: str,
        arguments: tuple[Any, ...],
        kind: Any,
        *,
        is_repeatable: bool,
        writes: bool,
        timeout_s: float | None = None,
        per_try_timeout_s: float | None = None,
    ) -> Result:
        """Ask until there is an answer of type `kind`, as far as repeating is allowed."""
        data = encode(arguments)
        deadline = trio.current_time() + (self._timeout_s if timeout_s is None else timeout_s)
        try_max_s = self._per_try_timeout_s if per_try_timeout_s is None else per_try_timeout_s
        pause_s = RETRY_PAUSE_MIN_S
        is_doubtful = False
        words = "no time was given"
        while (left_s := deadline - trio.current_time()) > 0:
            question = await self._try(
                op, data, min(left_s, try_max_s) if is_repeatable else left_s
            )
            if question is not None and isinstance(question.reply, Answer):
                return Result(msgspec.msgpack.decode(question.data, type=kind), is_doubtful)
            if question is not None and isinstance(question.reply, Refusal):
                refusal = question.reply
                raise error_from_wire(refusal.code, refusal.message, definite=True)
            words = _words(question, self._connector.last_words)
            is_doubtful |= question is not None and not isinstance(question.reply, NoLeader)
            if is_doubtful and not is_repeatable:
                break
            if deadline - trio.current_time() <= pause_s:
                break
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_PAUSE_MAX_S)
        raise _given_up(f"{op}: {words}", is_doubtful=is_doubtful, writes=writes)

    async def _try(
        self,
        op: str,
        data: bytes,
        try_s: float,
        forget: Callable[[int], bytes] | None = None,
    ) -> _Question | None:
        """Ask once. None if nothing was sent."""
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
                if forget is not None and not question.settled.is_set():
                    peer.post(forget(call.id))
        return question

    async def ask_once(
        self,
        op: str,
        arguments: tuple[Any, ...],
        kind: Any,
        *,
        timeout_s: float,
        forget: Callable[[int], bytes],
    ) -> tuple[bool, Any]:
        """Ask one time, over whatever connection comes: whether there was an answer, and it.

        If the wait is given up or cancelled, the service gets what `forget` makes of the call's
        id.
        """
        question = await self._try(op, encode(arguments), timeout_s, forget)
        if question is None or question.reply is None or isinstance(question.reply, NoLeader):
            return False, None
        if isinstance(question.reply, Refusal):
            raise error_from_wire(question.reply.code, question.reply.message, definite=True)
        return True, msgspec.msgpack.decode(question.data, type=kind)

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


def _words(question: _Question | None, last_words: str) -> str:
    if question is None:
        return last_words
    if isinstance(question.reply, NoLeader):
        return "the service has no leader"
    return "the connection was lost" if question.settled.is_set() else "no answer"


def _given_up(text: str, *, is_doubtful: bool, writes: bool) -> TrinamoError:
    if not is_doubtful:
        return ConnectError(text)
    return UnknownOutcomeError(text) if writes else DeadlineError(text)
