"""What every transfer is, whatever moves its blocks: asked for, confirmed, over, settled.

`plan_transfer` is the one check of what `TransferPlane.start` is given; `TransferState` the one
answer to `wait` and `abort`. Each backend adds how its bytes move, and when it is settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import attrs
import trio

from trinamo.runtime.errors import KilledError, StaleMemoryError, TrinamoError, error_from_wire
from trinamo.runtime.planes.transfer import RemoteMemory, TransferReport
from trinamo.runtime.protocol.transfer.access import AccessTable
from trinamo.runtime.protocol.transfer.description import (
    Direction,
    MemoryDescription,
    check_transfer,
)


class _Local(Protocol):
    """What a plan needs of a region of ours."""

    @property
    def access(self) -> AccessTable: ...

    @property
    def description(self) -> MemoryDescription: ...


RegionT = TypeVar("RegionT", bound=_Local)
RemoteT = TypeVar("RemoteT", bound=RemoteMemory)


@attrs.frozen(kw_only=True)
class TransferPlan(Generic[RegionT, RemoteT]):
    """What is asked for, checked; the lists are our own."""

    direction: Direction
    local: RegionT
    local_blocks: tuple[int, ...]
    remote: RemoteT
    remote_blocks: tuple[int, ...]
    deadline_s: float
    notify: bytes | None
    ticket: int

    @property
    def there(self) -> MemoryDescription:
        """What the peer said of its region."""
        return self.remote.description

    @property
    def block_count(self) -> int:
        """How many blocks move."""
        return len(self.local_blocks)

    @property
    def byte_count(self) -> int:
        """How many bytes those are."""
        return len(self.local_blocks) * self.there.block_bytes


def plan_transfer(
    direction: Direction,
    local: RegionT,
    local_blocks: Sequence[int],
    remote: RemoteT,
    remote_blocks: Sequence[int],
    *,
    deadline_s: float,
    notify: bytes | None,
    ticket: int,
) -> TransferPlan[RegionT, RemoteT]:
    """The plan of one transfer; raises what `TransferPlane.start` says."""
    if local.access.is_withdrawn:
        raise StaleMemoryError("the local region was deregistered")
    check_transfer(
        direction,
        local.description,
        local_blocks,
        remote.description,
        remote_blocks,
        notify=notify,
        ticket=ticket,
    )
    return TransferPlan(
        direction=direction,
        local=local,
        local_blocks=tuple(local_blocks),
        remote=remote,
        remote_blocks=tuple(remote_blocks),
        deadline_s=deadline_s,
        notify=notify,
        ticket=ticket,
    )


def again(error: TrinamoError) -> TrinamoError:
    """The same error to raise in one more task."""
    if isinstance(error, KilledError):
        return KilledError(error.message, reason=error.reason)
    return error_from_wire(error.code, error.message, definite=error.definite)


class TransferState:
    """The part of `Transfer` that is the same everywhere; who extends it calls `settle`."""

    def __init__(self) -> None:
        self._confirmed = 0
        self._report: TransferReport | None = None
        self._error: TrinamoError | None = None
        self._over, self._settled = trio.Event(), trio.Event()

    @property
    def confirmed_count(self) -> int:
        """Leading blocks that are certain; see `Transfer.confirmed_count`."""
        return self._confirmed

    @property
    def is_over(self) -> bool:
        """Whether `wait` has an answer. May be read from any thread."""
        return self._error is not None or self._report is not None

    @property
    def is_settled(self) -> bool:
        """Whether it touches no byte of our memory any more."""
        return self._settled.is_set()

    async def wait(self) -> TransferReport:
        """The report, or the error that ended it."""
        await self._over.wait()
        if self._report is not None:
            return self._report
        assert self._error is not None
        raise again(self._error)

    async def wait_over(self) -> None:
        """Return once `is_over`, whatever came of it."""
        await self._over.wait()

    async def wait_settled(self) -> None:
        """Return once `is_settled`."""
        await self._settled.wait()

    def abort(self) -> None:
        """End it with `KilledError`, unless it is over."""
        self.fail(KilledError("the transfer was aborted", reason="aborted"))

    def fail(self, error: TrinamoError) -> None:
        """End it with this error, unless it is over."""
        if not self.is_over:
            self._error = error
            self._over.set()

    def succeed(self, report: TransferReport) -> None:
        """It is done, unless it is over."""
        if not self.is_over:
            self._report = report
            self._over.set()

    def settle(self) -> None:
        """It touches nothing any more. Again, it changes nothing."""
        self._settled.set()
