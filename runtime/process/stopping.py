"""What SIGINT and SIGTERM mean to a process of a cluster: during its start, then, and again.

The first one ends a start that is under way, however long etcd or a model keeps it waiting, and
asks a process that serves to leave in order. The second one ends everything at once; where that
waits for what cannot be cancelled, such as an engine's thread, the third one kills the process.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import trio

from ..nurseries import open_nursery

_log = logging.getLogger("trinamo.runtime")


class StopRequest:
    """Whether this process was asked to end."""

    def __init__(self) -> None:
        self.everything = trio.CancelScope()
        """All that the process does belongs inside; a second request cancels it."""
        self._requested = trio.Event()
        self._start: trio.CancelScope | None = self.everything

    @property
    def is_requested(self) -> bool:
        """Whether the process was asked."""
        return self._requested.is_set()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """The last part of the start: asked to end in it, only this is left early.

        What was opened before can then leave in order. Outside, before, all of it is left early.
        """
        with trio.CancelScope() as self._start:
            # Asked before: the body would begin what nobody wants.
            if self._requested.is_set():
                self._start.cancel()
            yield
        self._start = None

    async def wait(self) -> None:
        """Return once the process was asked to end; at once if it was in its start."""
        await self._requested.wait()

    def request(self) -> str:
        """Ask it to end; returns what follows, in words. Synchronous."""
        if self._requested.is_set():
            self.everything.cancel()
            return "ending at once"
        self._requested.set()
        if self._start is None:
            return "shutting down in order"
        self._start.cancel()
        return "ending the start"


@asynccontextmanager
async def stopped_by_signals(*, is_supervised: bool = False) -> AsyncIterator[StopRequest]:
    """Yield what SIGINT and SIGTERM ask; all inside is the start until `starting` is left.

    In a process that `is_supervised` SIGTERM hurries nothing: an operator has sent it to this one, and
    its supervisor, which has deadlines and a kill, sends it to all when they are to end.

    Raises `RuntimeError` in another thread than the main one, which signals do not reach.
    """
    stop = StopRequest()
    with ExitStack() as stack:
        try:
            receiver = trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM)
            signals = stack.enter_context(receiver)
        except RuntimeError as error:
            raise RuntimeError(
                "signals reach the main thread alone; in another give what asks it to end, such as `trio.run"
                "(partial(trinamo.serve, engine, stop=stop))` with `stop = trinamo.StopRequest()`"
            ) from error
        stack.enter_context(stop.everything)
        async with open_nursery() as nursery:

            async def listen() -> None:
                async for number in signals:
                    is_second = stop.is_requested
                    if is_second and is_supervised and number == signal.SIGTERM:
                        continue
                    _log.info("%s: %s", signal.Signals(number).name, stop.request())
                    if is_second:
                        for each in (signal.SIGINT, signal.SIGTERM):
                            signal.signal(each, signal.SIG_DFL)

            nursery.start_soon(listen)
            yield stop
            nursery.cancel_scope.cancel()
