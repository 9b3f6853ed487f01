"""What SIGINT and SIGTERM mean to a process of a cluster: during its start, then, and again.

The first one ends a start that is under way, however long etcd or a model keeps it waiting, and
asks a process that serves to leave in order. The second one ends everything at once.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio

from trinamo.runtime.nurseries import open_nursery

__all__ = ["Told", "until_told"]

_log = logging.getLogger("trinamo.cli")


class Told:
    """Whether this process was told to end."""

    def __init__(self, everything: trio.CancelScope) -> None:
        self._told = trio.Event()
        self._everything = everything
        self._start: trio.CancelScope | None = everything

    @contextmanager
    def starting(self) -> Iterator[None]:
        """The last part of the start: told to end in it, only this is left early.

        What was opened before can then leave in order. Outside, before, all of it is left early.
        """
        with trio.CancelScope() as self._start:
            # Told before: the body would begin what nobody wants.
            if self._told.is_set():
                self._start.cancel()
            yield
        self._start = None

    async def wait(self) -> None:
        """Return once the process was told to end; at once if it was in its start."""
        await self._told.wait()

    def tell(self, name: str) -> None:
        """A signal has come; synchronous."""
        if self._told.is_set():
            _log.warning("%s again: ending at once", name)
            self._everything.cancel()
            return
        self._told.set()
        if self._start is None:
            _log.info("%s: shutting down in order", name)
        else:
            _log.info("%s during the start: ending", name)
            self._start.cancel()


@asynccontextmanager
async def until_told() -> AsyncIterator[Told]:
    """Yield what SIGINT and SIGTERM tell; all inside is the start until `starting` is left."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with open_nursery() as nursery:
            told = Told(nursery.cancel_scope)

            async def listen() -> None:
                async for number in signals:
                    told.tell(signal.Signals(number).name)

            nursery.start_soon(listen)
            yield told
            nursery.cancel_scope.cancel()
