"""Who gets in: requests in flight, their bound, and the drain.

Every inference request is a child context of one root, so that a shutdown reaches all of them.
Decided synchronously; the service (`service.py`) owns the deadlines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from ..context import Context, Reason
from ..errors import OverloadedError, UnavailableError
from .bodies import Bodies

__all__ = ["Admission"]


class Admission:
    """The requests of one service: those that arrive and those in flight, at most `requests_max`."""

    def __init__(self, *, requests_max: int = 4096, bodies_bytes_max: int = 256 << 20) -> None:
        self.bodies = Bodies(bodies_bytes_max)
        self._requests_max = requests_max
        self._arriving = 0
        self._root = Context("http")
        self._idle: trio.Event | None = None
        self.is_draining = False

    @property
    def in_flight(self) -> int:
        """How many requests are admitted and not over; zero at quiescence."""
        return self._root.child_count

    def check_open(self) -> None:
        """Raise `UnavailableError` while draining, `OverloadedError` at the bound."""
        if self.is_draining:
            raise UnavailableError("the server is shutting down; ask another one")
        if self.in_flight + self._arriving >= self._requests_max:
            raise OverloadedError(
                f"{self._requests_max} requests are under way, which is the limit",
                bound="requests_max",
                value=self._requests_max,
            )

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Hold a place for a request whose body arrives; raises as `check_open` does.

        A drain does not wait for it: it is in flight once it is admitted.
        """
        self.check_open()
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    @contextmanager
    def admit(self, request_id: str) -> Iterator[Context]:
        """Hold one request in flight while inside; raises as `check_open` does."""
        self.check_open()
        try:
            with Context(request_id, parent=self._root) as context:
                yield context
        finally:
            if self._idle is not None and not self.in_flight:
                self._idle.set()

    def drain(self) -> None:
        """Admit nothing from now on."""
        self.is_draining = True

    def stop(self, reason: Reason) -> None:
        """Ask every request in flight to finish early."""
        self._root.stop(reason)

    def kill(self, reason: Reason) -> None:
        """End every request in flight now."""
        self._root.kill(reason)

    async def wait_idle(self) -> None:
        """Return once nothing is in flight. For one waiter at a time."""
        if not self.in_flight:
            return
        self._idle = trio.Event()
        await self._idle.wait()
