"""One request's cancellation: Live -> Stopped -> Killed, monotone.

`stop()` asks: the engine is told and finishes early, still ending with Sentinel. `kill()` does
not wait: it cancels `scope`, so a handler asleep in a long prefill wakes at once. Both are
synchronous, without a checkpoint, so they work while their caller is itself being cancelled.

A request may have a deadline, which is that of `scope`: whoever runs inside is cancelled then, and
says why. What this module does not do: the grace period after `stop()`, which each end that runs the
request bounds for itself (`worker/worker.py`, `http/streaming.py`), and wires
(what listens here turns these states into frames: `_on_context` of a stream's registration).
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Final, NoReturn, Self

import trio

from .errors import DeadlineError
from .protocol.streams.request import Reason
from .traces.trace import NO_TRACE, RequestTrace

__all__ = ["Context", "KillableScope", "Reason", "State"]

_log = logging.getLogger("trinamo.context")
_SERVERS: Final = (Reason.FRONTEND_SHUTDOWN, Reason.WORKER_SHUTDOWN)
"""Why whoever serves a request ends it, which nobody asked for."""


class State(enum.IntEnum):
    """How far the request's cancellation has gone. Never goes down."""

    LIVE = 0
    STOPPED = 1
    KILLED = 2


class Context:
    """The cancellation of one request, shared by everyone who works for it.

    A child linked late inherits the state at once; `close()` (or leaving the `with`) unlinks it.
    `stop()` and `kill()` deliver to children first, in link order, then to itself, so that when
    the parent's watchers run no child is still live.
    """

    __slots__ = (
        "__weakref__",
        "_children",
        "_killed_event",
        "_listeners",
        "_parent",
        "_scope",
        "_stopped_event",
        "deadline",
        "id",
        "kill_reason",
        "silence_count",
        "state",
        "stop_reason",
        "trace",
    )

    def __init__(self, request_id: str, *, parent: Context | None = None) -> None:
        self.id = request_id
        self.state = State.LIVE
        self.stop_reason: Reason | None = None
        self.kill_reason: Reason | None = None
        self.silence_count = 0
        """How many workers fell silent while they held the request: it may be what blocks them."""
        self.deadline = math.inf
        """When the whole request must be over, on trio's clock; see `limit`."""
        self.trace: RequestTrace = NO_TRACE if parent is None else parent.trace
        """Where whoever works for the request writes the legs of its way."""
        # What most requests never need is made when it is asked for.
        self._scope: trio.CancelScope | None = None
        self._parent: Context | None = None
        # Insertion-ordered: children are told in the order they were linked.
        self._children: dict[Context, None] | None = None
        self._listeners: dict[Callable[[State], None], None] = {}
        self._stopped_event: trio.Event | None = None
        self._killed_event: trio.Event | None = None
        if parent is not None:
            parent.link(self)

    def __repr__(self) -> str:
        return f"<Context {self.id} {self.state.name}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def scope(self) -> trio.CancelScope:
        """What Kill cancels: the handler runs inside it."""
        if self._scope is None:
            self._scope = trio.CancelScope(deadline=self.deadline)
            if self.is_killed:
                self._scope.cancel()
        return self._scope

    @property
    def traceparent(self) -> str:
        """The header `traceparent` for whatever the handler asks of others; empty: none is traced."""
        return self.trace.traceparent

    @property
    def is_stopped(self) -> bool:
        """True once stopped or killed: the engine should produce nothing new."""
        return self.state >= State.STOPPED

    @property
    def is_killed(self) -> bool:
        """True once killed: nobody wants another byte."""
        return self.state is State.KILLED

    @property
    def reason(self) -> Reason | None:
        """Why it ended: the kill's reason if killed, else the stop's, else None."""
        return self.kill_reason or self.stop_reason

    @property
    def cut_by(self) -> Reason | None:
        """Why whoever serves the request stopped or killed it; None if nobody of them did.

        What there is of its answer is not the whole, whatever the engine says at its end.
        """
        if self.state is State.LIVE:
            return None
        return next((why for why in (self.stop_reason, self.kill_reason) if why in _SERVERS), None)

    def why_left(self) -> Reason:
        """Why somebody who leaves the request now does so.

        What ended it, else its time if that is over, else his own choice. A deadline cancels the
        scope before anybody can say so: who unwinds asks here.
        """
        if self.reason is not None:
            return self.reason
        is_late = self.deadline <= trio.current_time()
        return Reason.DEADLINE if is_late else Reason.CONSUMER_DROPPED

    def stop(self, reason: Reason = Reason.STOP_REQUESTED) -> None:
        """Ask the request to finish early. Idempotent; does nothing once stopped or killed."""
        if self.state >= State.STOPPED:
            return
        for child in tuple(self._children or ()):
            child.stop(reason)
        self.stop_reason = reason
        self._advance(State.STOPPED)

    def kill(self, reason: Reason = Reason.CONSUMER_DROPPED) -> None:
        """End the request now: cancels `scope`. Idempotent; never downgraded by a later stop."""
        if self.state is State.KILLED:
            return
        for child in tuple(self._children or ()):
            child.kill(reason)
        self.kill_reason = reason
        if self._scope is not None:
            self._scope.cancel()
        self._advance(State.KILLED)

    def limit(self, deadline: float) -> None:
        """Let the request, and those linked to it, end at `deadline`; a later one changes nothing."""
        if deadline >= self.deadline:
            return
        self.deadline = deadline
        if self._scope is not None:
            self._scope.deadline = min(self._scope.deadline, deadline)
        for child in self._children or ():
            child.limit(deadline)

    def _advance(self, state: State) -> None:
        self.state = state
        if self._stopped_event is not None:
            self._stopped_event.set()
        if state is State.KILLED and self._killed_event is not None:
            self._killed_event.set()
        for listener in tuple(self._listeners):
            self._tell(listener, state)

    def _tell(self, listener: Callable[[State], None], state: State) -> None:
        """One listener's mistake must lose neither the Kill nor the news of the others."""
        try:
            listener(state)
        except Exception:  # noqa: BLE001 -- whatever a driver raises
            _log.exception("request %s: a listener to %s failed", self.id, state.name)

    def link(self, child: Context) -> None:
        """Make `child` follow this context, starting with the state it is already in."""
        child._parent = self
        if self._children is None:
            self._children = {}
        self._children[child] = None
        child.limit(self.deadline)
        if self.state is State.KILLED:
            child.kill(self.kill_reason or Reason.CONSUMER_DROPPED)
        elif self.state is State.STOPPED:
            child.stop(self.stop_reason or Reason.STOP_REQUESTED)

    def unlink(self, child: Context) -> None:
        """Forget `child`; nothing happens if it is not linked."""
        if self._children is not None:
            self._children.pop(child, None)

    def close(self) -> None:
        """The request is over: unlink from the parent. Idempotent."""
        if self._parent is not None:
            self._parent.unlink(self)
            self._parent = None

    @property
    def child_count(self) -> int:
        """How many unfinished children are linked; zero at quiescence."""
        return len(self._children or ())

    def on_change(self, listener: Callable[[State], None]) -> None:
        """Call `listener(state)` synchronously at every change, and at once if no longer live.

        For drivers that must put a frame on the wire without waiting for a task to run. An
        exception that it raises is logged, and goes nowhere.
        """
        self._listeners[listener] = None
        if self.state is not State.LIVE:
            self._tell(listener, self.state)

    def off_change(self, listener: Callable[[State], None]) -> None:
        """Forget `listener`; nothing happens if it is not known."""
        self._listeners.pop(listener, None)

    def cancelled_by_kill(self) -> KillableScope:
        """A cancel scope of its own that Kill cancels, for waits outside the handler's `scope`.

        Check `is_killed` after it: being left early because of a Kill raises nothing.
        """
        return KillableScope(self, State.KILLED)

    def cancelled_by_stop(self) -> KillableScope:
        """The same, which Stop cancels, too: for waits that only an answer is worth."""
        return KillableScope(self, State.STOPPED)

    def in_time(self) -> AbstractContextManager[object]:
        """A block that its deadline leaves: the request is killed then, and `DeadlineError` raised.

        The caller's own end of a deadline that travels, for a worker that has fallen silent.
        """
        return _UNBOUNDED if self.deadline == math.inf else _TimedScope(self)

    def left_s(self) -> float:
        """Seconds until the deadline, 0 if there is none; `DeadlineError` once it is over."""
        if self.deadline == math.inf:
            return 0.0
        left = self.deadline - trio.current_time()
        if left <= 0:
            raise DeadlineError("the request's time was up before a worker had it")
        return left

    async def wait_stopped(self) -> None:
        """Return once stopped or killed; at once if it already is. Safe to cancel."""
        if self.state >= State.STOPPED:
            await trio.lowlevel.checkpoint()
            return
        if self._stopped_event is None:
            self._stopped_event = trio.Event()
        await self._stopped_event.wait()


class KillableScope:
    """A `with` block that ends early, silently, when its context is killed, or stopped already."""

    __slots__ = ("_context", "_scope", "_state")

    def __init__(self, context: Context, state: State) -> None:
        self._context = context
        self._state = state
        self._scope = trio.CancelScope()

    def __enter__(self) -> trio.CancelScope:
        self._context.on_change(self._cancel)
        return self._scope.__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._context.off_change(self._cancel)
        return bool(self._scope.__exit__(exc_type, exc, traceback))

    def _cancel(self, state: State) -> None:
        if state >= self._state:
            self._scope.cancel()


_UNBOUNDED: Final = nullcontext()


class _TimedScope:
    """See `Context.in_time`."""

    __slots__ = ("_context", "_scope")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._scope = trio.CancelScope(deadline=context.deadline)

    def __enter__(self) -> None:
        if trio.current_time() >= self._context.deadline:
            self._end()
        self._scope.__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        is_over = bool(self._scope.__exit__(exc_type, exc, traceback))
        if self._scope.cancelled_caught:
            self._end()
        return is_over

    def _end(self) -> NoReturn:
        self._context.kill(Reason.DEADLINE)
        raise DeadlineError("the request's time is up; the worker is told to end it")
