"""One request that has one answer, at one instance: a unary one, or a probe."""

from __future__ import annotations

import outcome
import trio

from ..context import Context
from ..errors import DisconnectedError, TrinamoError
from ..planes import RequestPlane
from ..protocol.discovery.presence import InFlight
from ..protocol.streams.request import Envelope, RequestAnswer


class UnaryAttempt(InFlight):
    """One unary request, or one probe, at one instance."""

    __slots__ = ("_context", "_error", "_scope", "_task")

    def __init__(self, context: Context) -> None:
        # Its only item is the answer, which a worker that leaves may still give.
        super().__init__(is_waiting=False)
        self._context = context
        self._task: trio.lowlevel.Task | None = None
        self._scope: trio.CancelScope | None = None
        """While it waits for room."""
        self._error: DisconnectedError | None = None

    async def run(
        self, plane: RequestPlane, address: str, envelope: Envelope, payload: bytes
    ) -> tuple[RequestAnswer, bytes]:
        """The answer and its result, unless the worker is silent and taken for lost before that.

        Cancelled, it has told the worker to forget the request, and why.
        """
        while (delivery := plane.post(address, envelope, payload, self._take)) is None:
            with trio.CancelScope() as self._scope:
                await plane.wait_room(address)
            self._scope = None
            if self._error is not None:
                raise self._error

        def abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        try:
            self._task = trio.lowlevel.current_task()
            said: tuple[RequestAnswer, bytes] = await trio.lowlevel.wait_task_rescheduled(abort)
            return said
        finally:
            # Of an answer that has come this does nothing.
            delivery.cancel(self._context.why_left())

    def heard(self) -> int:
        return 0

    def fail(self, error: DisconnectedError) -> None:
        self._error = error
        if self._scope is not None:
            self._scope.cancel()
        else:
            self._wake(outcome.Error(error))

    def _take(self, answer: RequestAnswer | TrinamoError, result: bytes) -> None:
        if isinstance(answer, TrinamoError):
            self._wake(outcome.Error(answer))
        else:
            self._wake(outcome.Value((answer, result)))

    def _wake(self, said: outcome.Outcome[tuple[RequestAnswer, bytes]]) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task, said)
