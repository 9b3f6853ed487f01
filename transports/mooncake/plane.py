"""`open_mooncake_plane`: the transfer plane over Mooncake's transfer engine."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from trinamo.runtime.env import Env, RealEnv
from trinamo.runtime.errors import DisconnectedError, TrinamoError
from trinamo.runtime.planes import TransferPlane
from trinamo.runtime.protocol.transfer.description import draw_incarnation
from trinamo.transports.one_sided.memory import Memory, OneSidedRemote
from trinamo.transports.one_sided.mover import PROBES_MAX, OneSidedMover, open_one_sided_plane
from trinamo.transports.one_sided.steps import Backend, BackendJob

from .engine import (
    Engine,
    MooncakeOptions,
    Told,
    choose_path,
    make_engine,
    session_of,
)
from .workers import Workers

_log = logging.getLogger("trinamo.mooncake")


class MooncakeBackend(Backend):
    name = "mooncake"

    def __init__(
        self,
        engine: Engine,
        options: MooncakeOptions,
        path: str,
        incarnation: str,
        *,
        owns_engine: bool,
    ) -> None:
        super().__init__(path, PROBES_MAX + options.queue_depth)
        self._owns_engine = owns_engine
        self._registered: dict[int, Memory] = {}
        self._engine = engine
        self._peers: dict[str, str] = {}
        self._left: dict[str, list[BackendJob]] = {}
        self._drain_s = options.drain_s
        self._workers = Workers(
            engine,
            self.slots.address,
            incarnation,
            threads=options.threads,
            poll_s=options.notification_poll_s,
            on_told=self._on_told,
            on_left=self._on_left,
        )

    async def start(self) -> None:
        await self.register(self.slots)
        self._workers.start()

    def address(self) -> bytes:
        """`host:port` of the engine."""
        return self._engine.session.encode("ascii")

    async def register(self, memory: Memory) -> None:
        """Register a range. A cancellation waits for the engine, which is quick."""
        await trio.to_thread.run_sync(self._engine.register, memory)
        self._registered[memory.address] = memory

    async def deregister(self, memory: Memory) -> None:
        self._registered.pop(memory.address, None)
        await trio.to_thread.run_sync(self._engine.deregister, memory)

    async def connect(self, remote: OneSidedRemote) -> None:
        """Remember the peer; if calls to it were left behind, see whether it is gone."""
        incarnation = remote.description.incarnation
        session = session_of(remote.address)
        self._peers[incarnation] = session
        await self._settle(incarnation, session)

    async def forget(self, incarnation: str) -> None:
        """Refuse further jobs with the peer."""
        session = self._peers.pop(incarnation, None)
        if session is not None:
            await self._settle(incarnation, session)

    async def _settle(self, incarnation: str, session: str) -> None:
        """Let go of jobs that were left, if nobody listens where their peer was."""
        await trio.lowlevel.checkpoint()
        if incarnation not in self._left:
            return
        is_there = await trio.to_thread.run_sync(
            self._engine.is_reachable, session, abandon_on_cancel=True
        )
        if not is_there:
            for job in self._left.pop(incarnation, ()):
                job.finish(DisconnectedError(f"peer at {session} is gone"))

    def submit(self, job: BackendJob) -> None:
        """Run a job in the next thread that is free."""
        if job.incarnation in self._peers:
            self._workers.submit(job)
        else:
            error = DisconnectedError(f"peer {job.incarnation} is not connected")
            trio.lowlevel.current_trio_token().run_sync_soon(job.finish, error)

    def _on_told(self, told: list[Told]) -> None:
        for peer, notice in told:
            self.on_told(peer, notice)

    def _on_left(self, job: BackendJob, error: TrinamoError) -> None:
        job.fail(error)
        self._left.setdefault(job.incarnation, []).append(job)

    async def close(self) -> bool:
        """End the threads, give all memory back and destroy the engine if it is our own.

        Does nothing if a thread is stuck. Returns whether bytes may still move: by that thread's
        call, or by calls that were left behind with an engine that stays.
        """
        self._workers.stop()
        # One bound for all threads, however many are stuck in a call.
        with trio.move_on_after(self._drain_s) as scope:
            await trio.to_thread.run_sync(self._workers.join, abandon_on_cancel=True)
        if not scope.cancelled_caught:
            is_left_moving = bool(self._left) and not self._owns_engine
            if is_left_moving:
                self._keep()
            for memory in list(self._registered.values()):
                await self.deregister(memory)
            if self._owns_engine:
                await trio.to_thread.run_sync(self._engine.close)
            return is_left_moving
        _log.error("Mooncake is stuck in a call; the engine is left to the end of the process")
        self._keep()
        return True

    def _keep(self) -> None:
        """Until the process ends: the engine, and all memory that jobs of ours may still move."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


@asynccontextmanager
async def open_mooncake_plane(
    options: MooncakeOptions | None = None,
    env: Env | None = None,
    *,
    engine: Engine | None = None,
    incarnation: str = "",
) -> AsyncIterator[TransferPlane[OneSidedMover]]:
    """Load Mooncake, make an engine, and serve registered memory until the block is left.

    `incarnation` is the process's; empty: one is drawn. Raises `ConfigError` if Mooncake is not installed, a device does not exist, or the engine
    cannot listen. Leaving ends all transfers and destroys the engine, which takes a second of the
    engine's own; one that is given stays, with nothing registered.
    """
    options = MooncakeOptions() if options is None else options
    env = RealEnv() if env is None else env
    path = choose_path(options, os.environ)
    incarnation = incarnation or draw_incarnation(env.rng)
    owns_engine = engine is None
    if engine is None:
        engine = await trio.to_thread.run_sync(make_engine, options)
    async with open_one_sided_plane(
        MooncakeBackend(engine, options, path, incarnation, owns_engine=owns_engine),
        incarnation=incarnation,
        connect_timeout_s=options.connect_timeout_s,
        drain_s=options.drain_s,
        chunk_bytes=options.chunk_bytes,
    ) as plane:
        yield plane
