"""The threads that call the engine: each runs one job to its end, one looks for notifications.

A call cannot be cancelled. One that the engine gave up after its timeout may still land in our
memory, since the engine keeps the connection: such a job is not settled, until the peer turns out
to be gone or the plane is closed. Its blocks go into quarantine.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

import trio

from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    StaleMemoryError,
    TransferError,
    TrinamoError,
)
from trinamo.runtime.protocol.transfer.description import Direction, runs
from trinamo.transports.one_sided.memory import SLOT_BYTES
from trinamo.transports.one_sided.steps import BackendJob, MoveBlocks, ReadPage, Step, Tell

from .engine import SLICES_MAX, Engine, Told, session_of

_log = logging.getLogger("trinamo.mooncake")
_CONNECTIONS: Final = 4
"""To one peer, as the engine has it by default."""


class _Line:
    """Jobs that wait for a thread, a line for each peer, which take turns.

    A call to a peer that hangs keeps its thread for seconds. So no peer has more than `busy_max` of
    them, and jobs with the others go on.
    """

    def __init__(self, busy_max: int) -> None:
        self._busy_max = busy_max
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[BackendJob]] = {}
        self._busy: Counter[str] = Counter()
        self._is_closed = False

    def put(self, job: BackendJob) -> None:
        with self._changed:
            self._waiting.setdefault(job.incarnation, deque()).append(job)
            self._changed.notify_all()

    def take(self) -> BackendJob | None:
        """The next one, which must be `left`; None once all are taken and the line is closed."""
        with self._changed:
            while self._waiting or not self._is_closed:
                for peer in self._waiting:
                    if self._busy[peer] < self._busy_max:
                        jobs = self._waiting.pop(peer)
                        job = jobs.popleft()
                        if jobs:
                            self._waiting[peer] = jobs
                        self._busy[peer] += 1
                        return job
                self._changed.wait()
        return None

    def left(self, job: BackendJob) -> None:
        with self._changed:
            self._busy[job.incarnation] -= 1
            self._busy = +self._busy
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class Workers:
    """Jobs go in by `submit`; the threads live from `start` to `stop`."""

    def __init__(
        self,
        engine: Engine,
        scratch: int,
        name: str,
        *,
        threads: int,
        poll_s: float,
        on_told: Callable[[list[Told]], None],
        on_left: Callable[[BackendJob, TrinamoError], None],
    ) -> None:
        self._engine, self._scratch, self._name = engine, scratch, name
        self._poll_s = poll_s
        self._on_told, self._on_left = on_told, on_left
        self._token = trio.lowlevel.current_trio_token()
        self._line = _Line(max(1, threads - 1))
        self._stopping = threading.Event()
        self.unheard_count = 0
        """How often notifications could not be taken from the engine."""
        self._threads = [
            threading.Thread(target=self._work, name=f"mooncake-{n}", daemon=True)
            for n in range(threads)
        ]
        self._threads.append(
            threading.Thread(target=self._listen, name="mooncake-told", daemon=True)
        )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, job: BackendJob) -> None:
        self._line.put(job)

    def stop(self) -> None:
        self._stopping.set()
        self._line.close()

    def join(self) -> None:
        """Wait for the end of all threads, which a call may keep for long; blocks."""
        for thread in self._threads:
            thread.join()

    # --- the threads -----------------------------------------------------------------------------

    def _wake(self, function: Callable[..., Any], *args: Any) -> None:
        # Once trio has ended nobody is left to be told.
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function, *args)

    def _listen(self) -> None:
        while not self._stopping.wait(self._poll_s):
            try:
                told = self._engine.told()
            except Exception as error:  # noqa: BLE001 -- a peer's bytes must not end the thread
                self.unheard_count += 1
                if self.unheard_count.bit_count() == 1:  # At 1, 2, 4, 8, ...
                    _log.warning(
                        "Mooncake's notifications, %d times: %s", self.unheard_count, error
                    )
            else:
                if told:
                    self._wake(self._on_told, told)

    def _work(self) -> None:
        while (job := self._line.take()) is not None:
            error: TrinamoError | None = None
            try:
                for step in job.steps:
                    self._take_step(job, step)
            except TrinamoError as found:
                error = found
            except Exception as found:  # noqa: BLE001 -- a device's own error ends one transfer
                error = TransferError(f"{type(found).__name__}: {found}")
            with contextlib.suppress(Exception):  # Its last words; it is over.
                job.steps.close()
            self._line.left(job)
            if isinstance(error, ConnectError):
                self._wake(self._on_left, job, error)
            else:
                self._wake(job.finish, error)

    def _take_step(self, job: BackendJob, step: Step) -> None:
        slot = self._scratch + job.slot * SLOT_BYTES
        match step:
            case ReadPage(remote, offset, length):
                self._read_page(session_of(remote.address), slot, remote.page + offset, length)
            case MoveBlocks():
                self._move(step)
            case Tell(remote, notice):
                session = session_of(remote.address)
                self._engine.tell(session, slot, remote.page, (self._name, notice))

    def _read_page(self, session: str, slot: int, page: int, length: int) -> None:
        # A call that the peer refused spoils the connection it went over, of which the engine
        # keeps a few, and the next one over it fails for nothing.
        for attempts_left in reversed(range(_CONNECTIONS + 1)):
            try:
                self._engine.move(session, Direction.READ, [slot], [page], [length])
            except TransferError as error:
                if isinstance(error, (ConnectError, DisconnectedError)):
                    raise
                if not attempts_left:
                    raise StaleMemoryError(f"the access page is not there: {error}") from error
            else:
                return

    def _move(self, step: MoveBlocks) -> None:
        plan = step.transfer
        session = session_of(plan.remote.address)
        size = plan.local.block_bytes
        ours = plan.local_blocks[step.start : step.stop]
        theirs = plan.remote_blocks[step.start : step.stop]
        here_at, there_at = plan.local.memory, plan.remote.memory
        ranges = [
            (
                here_at.block_address(ours[start], size),
                there_at.block_address(theirs[start], size),
                count * size,
            )
            for start, count in runs(here_at.apart(ours, size), there_at.apart(theirs, size))
        ]
        for first in range(0, len(ranges), SLICES_MAX):
            here, there, lengths = zip(*ranges[first : first + SLICES_MAX], strict=True)
            self._engine.move(session, plan.direction, here, there, lengths)
