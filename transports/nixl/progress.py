"""The one thread that calls NIXL: it runs jobs step by step and polls all that is under way.

A copy over `cma` happens inside the call that starts it, and a look at a transfer may move
megabytes, so neither belongs on the event loop. The thread sleeps in its queue when there is
nothing to do, and wakes trio once for all jobs that ended together.

What the library does not do is done here: a transfer that was given up is watched to its end,
because releasing it would leave the bytes landing; a peer that was lost is dropped only when its
last transfer has ended.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import attrs
import trio

from trinamo.runtime.errors import (
    ConnectError,
    DisconnectedError,
    RemoteProtocolError,
    StaleMemoryError,
    TransferError,
    TrinamoError,
)
from trinamo.runtime.protocol.transfer.access_page import HEADER_BYTES
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.transports.one_sided.memory import SLOT_BYTES, Memory, OneSidedRemote
from trinamo.transports.one_sided.steps import BackendJob, MoveBlocks, ReadPage, Step, Tell

from .agent import Agent, PreparedLists

_log = logging.getLogger("trinamo.nixl")
_T = TypeVar("_T")
_LOOKS: Final = 100
"""Polls without a pause between them, about 200 us; then pauses that double."""
_PAUSE_S: Final = 20e-6
_PAUSE_MAX_S: Final = 1e-3


class Command(Protocol):
    """One thing to do."""

    def __call__(self, *, is_served: bool) -> None:
        """Do it or, where there is no thread any more, say so to whoever waits."""


def wake_up(*, is_served: bool) -> None:
    """A command that does nothing."""


def as_ours(error: Exception) -> TrinamoError:
    """A library's or a device's error as one of ours."""
    if isinstance(error, TrinamoError):
        return error
    return TransferError(f"{type(error).__name__}: {error}")


def ended() -> TrinamoError:
    """What is said when there is no thread any more."""
    return DisconnectedError("the thread that calls NIXL has ended")


@attrs.define(eq=False)
class _RemoteAgent:
    name: str
    lists: PreparedLists
    running: int = 0
    is_lost: bool = False
    is_forgotten: bool = False


@attrs.define(eq=False)
class _Running:
    job: BackendJob
    peer: _RemoteAgent
    handle: int | None = None


class ProgressThread:
    """Jobs go in by `submit`, calls by `call`; the thread lives from `start` to `stop`."""

    def __init__(
        self,
        agent: Agent,
        scratch: Memory,
        slot_count: int,
        *,
        spins: bool,
        notification_poll_s: float,
        on_told: Callable[[dict[str, list[bytes]]], None],
    ) -> None:
        self._agent = agent
        self._scratch, self._slot_count = scratch, slot_count
        self._spins, self._poll_s = spins, notification_poll_s
        self._on_told = on_told
        self._token = trio.lowlevel.current_trio_token()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        # Held only to put a command, or to say that there is nobody to take it any more.
        self._gate = threading.Lock()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        # Held by whoever calls the library: nearly always the thread.
        self._lock = threading.Lock()
        self._is_delivering = False
        self._is_stopping = False
        self.unheard_count = 0
        """How often notifications could not be taken from the library."""
        self._peers: dict[str, _RemoteAgent] = {}
        self._lists = PreparedLists(agent, None)
        self._header_list = 0
        self._ready: list[_Running] = []
        self._under_way: list[_Running] = []
        self._finished: list[tuple[BackendJob, TrinamoError | None]] = []

    # --- from trio -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin. Raises nothing: what fails later fails a call or a job."""
        self._thread.start()

    def submit(self, job: BackendJob) -> None:
        """Run a job. A small one begins here and now, unless the thread is busy.

        To hand over 4 KB takes two threads longer than to copy it; over `cma` it is done at once.
        """
        if job.is_small and not self._is_delivering and self._lock.acquire(blocking=False):
            try:
                self._begin(job)
                while self._ready:
                    self._advance(self._ready.pop())
                finished, self._finished = self._finished, []
            finally:
                self._lock.release()
            if not finished:
                self._put(wake_up)
            # What is submitted because this one has finished goes to the thread, lest we recurse.
            self._is_delivering = True
            self._deliver(finished, {})
            self._is_delivering = False
        else:
            self._put(partial(self._begin, job))

    async def call(self, function: Callable[[], _T]) -> _T:
        """Run `function` in the thread. Cancelled, it is run all the same.

        Whatever it raises is raised here, as a `TrinamoError`; so is the end of the thread.
        """
        done = trio.Event()
        results: list[_T] = []
        errors: list[TrinamoError] = []

        def run(*, is_served: bool) -> None:
            try:
                if is_served:
                    results.append(function())
                else:
                    errors.append(ended())
            except TrinamoError as error:
                errors.append(error)
            except Exception as error:  # noqa: BLE001 -- somebody waits for it
                errors.append(as_ours(error))
            self._wake(done.set)

        self._put(run)
        await done.wait()
        if errors:
            raise errors[0]
        return results[0]

    def post(self, function: Callable[[], None]) -> None:
        """Run `function` in the thread, if there still is one; nobody waits for it."""

        def run(*, is_served: bool) -> None:
            if is_served:
                function()

        self._put(run)

    def stop(self) -> None:
        """Ask the thread to end. Jobs that are under way are left as they are."""
        self._is_stopping = True
        self._put(wake_up)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; blocks. Whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, command: Command) -> None:
        """Have it done by the thread; told at once, here, if that has ended."""
        with self._gate:
            if not self._has_ended:
                self._commands.put(command)
                return
        command(is_served=False)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way: only then may the agent be destroyed."""
        return not (self._ready or self._under_way)

    # --- the thread ------------------------------------------------------------------------------

    def _wake(self, function: Callable[..., Any], *args: Any) -> None:
        # Once trio has ended nobody is left to be told.
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function, *args)

    def _run(self) -> None:
        looks = 0
        try:
            while not self._is_stopping:
                looks = 0 if self._look(looks) else looks + 1
        finally:
            # Whatever ended it: nobody waits for a thread that is no more, now or from now on.
            with self._gate:
                self._has_ended = True
            while (command := self._take(0)) is not None:
                command(is_served=False)

    def _take(self, timeout_s: float) -> Command | None:
        """The next command; None if none comes in time. 0 does not wait."""
        try:
            if timeout_s:
                return self._commands.get(timeout=timeout_s)
            return self._commands.get_nowait()
        except queue.Empty:
            return None

    def _look(self, looks: int) -> bool:
        command = self._next(looks)
        with self._lock:
            is_busy = command is not None
            while command is not None:
                try:
                    command(is_served=True)
                except Exception:  # noqa: BLE001 -- the next one is somebody else's
                    _log.exception("a call of NIXL failed, and nobody waits for it")
                command = self._next(0)
            is_busy |= self._turn()
            finished, self._finished = self._finished, []
            told = self._told()
        if finished or told:
            self._wake(self._deliver, finished, told)
        return is_busy

    def _told(self) -> dict[str, list[bytes]]:
        try:
            return self._agent.told()
        except Exception as error:  # noqa: BLE001 -- a peer's bytes must not end the thread
            self.unheard_count += 1
            if self.unheard_count.bit_count() == 1:  # At 1, 2, 4, 8, ...
                _log.warning("NIXL's notifications, %d times: %s", self.unheard_count, error)
            return {}

    def _next(self, looks: int) -> Command | None:
        """The next command, waited for as long as nothing else needs a look."""
        if self._ready or looks == 0 or (self._under_way and (self._spins or looks < _LOOKS)):
            return self._take(0)
        pause_s = self._poll_s
        if self._under_way:
            pause_s = min(_PAUSE_MAX_S, _PAUSE_S * 2 ** min(looks - _LOOKS, 10))
        return self._take(pause_s)

    def _turn(self) -> bool:
        """Take the steps that can be taken; whether there were any."""
        ready, self._ready = self._ready, []
        for running in ready:
            self._advance(running)
        return bool(ready) | self._poll()

    def _deliver(
        self, finished: list[tuple[BackendJob, TrinamoError | None]], told: dict[str, list[bytes]]
    ) -> None:
        if told:
            self._on_told(told)
        for job, error in finished:
            job.finish(error)

    # --- jobs ------------------------------------------------------------------------------------

    def _begin(self, job: BackendJob, *, is_served: bool = True) -> None:
        if not is_served:
            self._wake(job.finish, ended())
            return
        peer = self._peers.get(job.incarnation)
        if peer is None or peer.is_lost:
            self._finished.append(
                (job, DisconnectedError(f"peer {job.incarnation} is not connected"))
            )
            return
        peer.running += 1
        self._ready.append(_Running(job, peer))

    def _advance(self, running: _Running) -> None:
        """Take steps until one has to be waited for; after a large one others get their turn."""
        try:
            for step in running.job.steps:
                running.handle = self._take_step(running, step)
                if running.handle is not None:
                    self._under_way.append(running)
                    return
                if isinstance(step, MoveBlocks):
                    self._ready.append(running)
                    return
        except TrinamoError as error:
            self._end(running, error)
        except Exception as error:  # noqa: BLE001 -- a device's own error ends one transfer
            self._end(running, as_ours(error))
        else:
            self._end(running, None)

    def _poll(self) -> bool:
        under_way, self._under_way = self._under_way, []
        for running in under_way:
            assert running.handle is not None
            try:
                if not self._agent.is_done(running.handle):
                    self._under_way.append(running)
                    continue
            except Exception as error:  # noqa: BLE001 -- one transfer's; the others go on
                self._agent.release(running.handle)
                self._end(running, as_ours(error))
                continue
            self._agent.release(running.handle)
            running.handle = None
            self._advance(running)
        return len(self._under_way) < len(under_way) or bool(self._ready)

    def _end(self, running: _Running, error: TrinamoError | None) -> None:
        with contextlib.suppress(Exception):  # Its last words; it is over.
            running.job.steps.close()
        running.peer.running -= 1
        if isinstance(error, DisconnectedError) and not running.peer.is_lost:
            running.peer.is_lost = True
            _log.warning("NIXL peer %s is lost: %s", running.peer.name, error)
        if running.peer.is_forgotten and not running.peer.running:
            self._drop(running.peer)
        self._finished.append((running.job, error))

    def _take_step(self, running: _Running, step: Step) -> int | None:
        """Post what the step asks for; the handle to wait for, if any."""
        match step:
            case ReadPage():
                return self._read_page(running, step)
            case MoveBlocks(plan, start, stop):
                if plan.local.access.is_withdrawn:
                    raise StaleMemoryError("the region was deregistered")
                size = plan.local.block_bytes
                local = self._lists.over(plan.local.memory, size)
                remote = running.peer.lists.over(plan.remote.memory, size)
                return self._agent.post(
                    plan.direction,
                    (local, plan.local_blocks[start:stop]),
                    (remote, plan.remote_blocks[start:stop]),
                )
            case Tell(_, notice):
                self._agent.tell(running.peer.name, notice)
                return None

    def _read_page(self, running: _Running, step: ReadPage) -> int | None:
        slot, remote = running.job.slot, step.remote
        length = step.length
        there = running.peer.lists.over(Memory.at(remote.page + step.offset, length), length)
        if length == HEADER_BYTES:
            return self._agent.post(Direction.READ, (self._header_list, (slot,)), (there, (0,)))
        address = self._scratch.address + slot * SLOT_BYTES
        here = self._lists.over(Memory.at(address, length), length)
        return self._agent.post(Direction.READ, (here, (0,)), (there, (0,)))

    def prepare_scratch(self) -> None:
        """The list of all slots, for headers. Called in the thread, once."""
        self._header_list = self._agent.prepare(
            None,
            self._scratch,
            item_bytes=HEADER_BYTES,
            stride=SLOT_BYTES,
            count=self._slot_count,
        )

    # --- memory and peers, called in the thread ----------------------------------------------------

    def deregister(self, memory: Memory) -> None:
        """Release the lists over a range, then the range."""
        self._lists.release(memory)
        self._agent.deregister(memory)

    def connect(self, remote: OneSidedRemote) -> None:
        """Load the peer's metadata and prepare the lists of this region."""
        name = remote.description.incarnation
        peer = self._peers.get(name)
        if peer is not None and peer.is_lost:
            if peer.running:
                raise DisconnectedError(f"transfers with {name} have not ended yet")
            self._drop(peer)
            peer = None
        size = remote.description.block_bytes
        if peer is None or not peer.lists.has(remote.memory, size):
            try:
                loaded = self._agent.load(remote.address)
            except TransferError as error:
                # UCX has found no way to the address: nobody listens there, or no network leads there.
                raise ConnectError(f"peer {name} cannot be reached: {error}") from error
            if loaded != name:
                if loaded not in self._peers:
                    self._agent.unload(loaded)
                raise RemoteProtocolError(f"the metadata is of {loaded}, not of {name}")
            if peer is None:
                self._agent.connect(name)
                peer = self._peers[name] = _RemoteAgent(name, PreparedLists(self._agent, name))
        peer.lists.over(Memory.at(remote.page, HEADER_BYTES), HEADER_BYTES)
        peer.lists.over(remote.memory, size)

    def forget(self, name: str) -> None:
        """Drop a peer, or leave it marked as lost if it has jobs that do not end."""
        peer = self._peers.get(name)
        if peer is not None:
            peer.is_lost = peer.is_forgotten = True
            if not peer.running:
                self._drop(peer)

    def _drop(self, peer: _RemoteAgent) -> None:
        peer.lists.release()
        self._agent.unload(peer.name)
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]

    def close(self) -> None:
        """Let go of everything; only if `is_idle`."""
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._lists.release()
        self._agent.release_list(self._header_list)
        self._agent.close()
