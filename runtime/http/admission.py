"""Who gets in: requests in flight, their bound, and the drain.

Every inference request is a child context of one root, so that a shutdown reaches all of them.
Decided synchronously; the service (`service.py`) owns the deadlines.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import trio

from ..context import Context, Reason
from ..errors import OverloadedError, UnavailableError
from ..events.busy import BusyLimits
from .bodies import Bodies

__all__ = ["Admission"]


class Admission:
    """The requests of one service: those that arrive and those in flight, at most `requests_max`."""

    def __init__(self, *, requests_max: int = 4096, bodies_bytes_max: int = 256 << 20) -> None:
        self.bodies = Bodies(bodies_bytes_max)
        self.requests_max = requests_max
        """One more at once is refused."""
        self.busy: BusyLimits | None = None
        """From which load on workers are given no new requests; None: from none."""
        self._places = _Places(self)
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
        if self.in_flight + self._places.count >= self.requests_max:
            raise OverloadedError(
                f"{self.requests_max} requests are under way, which is the limit",
                bound="requests_max",
                value=self.requests_max,
            )

    def arriving(self) -> AbstractContextManager[None]:
        """Hold a place for a request whose body arrives; entering it raises as `check_open` does.

        A drain does not wait for it: it is in flight once it is admitted.
        """
        return self._places

    def admit(self, request_id: str) -> AbstractContextManager[Context]:
        """Hold one request in flight while inside; entering it raises as `check_open` does."""
        return _Admitted(self, request_id)

    def enter(self, request_id: str) -> Context:
        """One more in flight; raises as `check_open` does."""
        self.check_open()
        return Context(request_id, parent=self._root)

    def leave(self, context: Context) -> None:
        """One less in flight."""
        context.close()
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


class _Places(AbstractContextManager[None]):
    """Those that arrive: entered and left by many at once."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.count = 0

    def __enter__(self) -> None:
        self._admission.check_open()
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self.count -= 1


class _Admitted(AbstractContextManager[Context]):
    """One in flight. A class, because a generator costs more than all that it would do."""

    __slots__ = ("_admission", "_context", "_request_id")

    def __init__(self, admission: Admission, request_id: str) -> None:
        self._admission, self._request_id = admission, request_id

    def __enter__(self) -> Context:
        self._context = self._admission.enter(self._request_id)
        return self._context

    def __exit__(self, *_: object) -> None:
        self._admission.leave(self._context)
