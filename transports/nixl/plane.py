"""`open_nixl_plane`: the transfer plane over NIXL and its UCX backend.

One agent and one thread per plane; open one plane per process. Memory of the process and of
GPUs is registered alike; for the latter the plane calls the device's `synchronize` before a
transfer begins to move and before each part of it is reported. Without a GPU that path is not
tested.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from trinamo.runtime.env import Env, RealEnv
from trinamo.runtime.planes import TransferPlane
from trinamo.runtime.protocol.transfer.description import draw_incarnation
from trinamo.transports.one_sided.memory import Memory, OneSidedRemote
from trinamo.transports.one_sided.mover import PROBES_MAX, OneSidedMover, open_one_sided_plane
from trinamo.transports.one_sided.steps import Backend, BackendJob

from .agent import Agent, create_agent, has_gpu
from .options import NixlOptions, find_devices, ucx_environment
from .progress import ProgressThread

_log = logging.getLogger("trinamo.nixl")
_making: Final = trio.Lock()


class NixlBackend(Backend):
    name = "nixl"

    def __init__(self, agent: Agent, options: NixlOptions, path: str) -> None:
        super().__init__(path, PROBES_MAX + options.queue_depth)
        self.agent = agent
        self.thread = ProgressThread(
            agent,
            self.slots,
            self.slot_count,
            spins=options.completion_mode == "polling",
            notification_poll_s=options.notification_poll_s,
            on_told=self._on_told,
        )
        self._metadata = b""

    async def start(self) -> None:
        self.thread.start()

        def prepare() -> bytes:
            self.agent.register(self.slots)
            self.thread.prepare_scratch()
            return self.agent.metadata()

        self._metadata = await self.thread.call(prepare)

    def address(self) -> bytes:
        """The metadata as of the last registration."""
        return self._metadata

    async def register(self, memory: Memory) -> None:
        """Register a range; cancelled, it is given back."""

        def register() -> bytes:
            self.agent.register(memory)
            return self.agent.metadata()

        try:
            self._metadata = await self.thread.call(register)
        except trio.Cancelled:
            self.thread.post(lambda: self.thread.deregister(memory))
            raise

    async def deregister(self, memory: Memory) -> None:
        await self.thread.call(lambda: self.thread.deregister(memory))

    async def connect(self, remote: OneSidedRemote) -> None:
        """Load the peer's metadata, unless it is loaded."""
        await self.thread.call(lambda: self.thread.connect(remote))

    async def forget(self, incarnation: str) -> None:
        await self.thread.call(lambda: self.thread.forget(incarnation))

    def submit(self, job: BackendJob) -> None:
        self.thread.submit(job)

    def _on_told(self, told: dict[str, list[bytes]]) -> None:
        for peer, messages in told.items():
            for message in messages:
                self.on_told(peer, message)

    async def close(self) -> bool:
        """End the thread and let go of the agent, unless it still moves bytes; whether it does."""
        self.thread.stop()
        has_ended = await trio.to_thread.run_sync(self.thread.join, 5.0)
        if has_ended and self.thread.is_idle:
            self.thread.close()
            return False
        # Destroying an agent under a transfer ends the process, and freeing the memory under one
        # is worse: both are kept until the process ends.
        _log.error("NIXL still moves bytes; the agent is left to the end of the process")
        for kept in (self.agent, self.scratch, self.thread):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        return True


@asynccontextmanager
async def open_nixl_plane(
    options: NixlOptions | None = None, env: Env | None = None, *, incarnation: str = ""
) -> AsyncIterator[TransferPlane[OneSidedMover]]:
    """Load NIXL, make an agent, and serve registered memory until the block is left.

    `incarnation` is the process's; empty: one is drawn. Raises `ConfigError` if NIXL is not installed, the device does not exist, or UCX finds no
    transport. Opening takes up to half a second, in a thread. Leaving ends all transfers; memory
    of one that cannot be stopped is kept.
    """
    options = NixlOptions() if options is None else options
    env = RealEnv() if env is None else env
    devices = find_devices(options.rdma_interface)
    environment = ucx_environment(options, devices, has_gpu=has_gpu())
    incarnation = incarnation or draw_incarnation(env.rng)
    # The environment is the process's, so agents are made one after the other.
    async with _making:
        agent = await trio.to_thread.run_sync(
            lambda: create_agent(
                incarnation, environment, progress_delay_s=options.progress_delay_s
            )
        )
    async with open_one_sided_plane(
        NixlBackend(agent, options, f"ucx:{environment['UCX_TLS']}"),
        incarnation=incarnation,
        connect_timeout_s=options.connect_timeout_s,
        drain_s=options.drain_s,
        chunk_bytes=options.chunk_bytes,
    ) as plane:
        yield plane
