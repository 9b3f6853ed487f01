"""The `nixl_cu12` bindings, as few calls of them as are needed, with our errors.

Upstream's own Python class lets the library's thread spin, needs tensors for some calls, and wraps
numbers in objects; here a handle is a number, memory is `Memory`, and nothing imports torch. Call
everything but `import_library` from one thread; calls may block for as long as a copy takes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from trinamo.runtime.errors import (
    BackendMissingError,
    DisconnectedError,
    RemoteProtocolError,
    TransferError,
)
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.transports.one_sided.memory import Memory

_MODULES: Final = ("nixl_cu12._bindings", "nixl_cu13._bindings")


def import_library() -> Any:
    """The bindings; `BackendMissingError` if they are not installed or do not load."""
    # Every failure arrives as an exception, so the library need not write to our standard error.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    problems = []
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            problems.append(str(error))
    raise BackendMissingError(f"NIXL cannot be loaded: {'; '.join(problems)}")


def has_gpu() -> bool:
    """Whether this machine shows an NVIDIA GPU to us."""
    return Path("/dev/nvidiactl").exists()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def create_agent(name: str, environment: dict[str, str], *, progress_delay_s: float) -> Agent:
    """An agent with the UCX backend; `BackendMissingError` if UCX finds no usable transport.

    `environment` holds while UCX makes its context, so two agents of one process may differ. Do
    not make two at once.
    """
    library = import_library()
    with _environment(environment):
        config = library.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = round(progress_delay_s * 1e6)
        config.syncMode = library.NIXL_THREAD_SYNC_RW
        handle = library.nixlAgent(name, config)
        try:
            # Without this mode nobody is told that a peer has died.
            backend = handle.createBackend(
                "UCX", {"ucx_error_handling_mode": "peer", "num_workers": "1"}
            )
        except Exception as error:
            shown = " ".join(f"{key}={value}" for key, value in environment.items())
            raise BackendMissingError(
                f"NIXL finds no usable transport ({error}) with {shown}"
            ) from error
    return Agent(library, handle, backend)


class Agent:
    def __init__(self, library: Any, handle: Any, backend: int) -> None:
        self._library = library
        self._agent: Any = handle
        self._backends = [backend]
        self._done, self._in_progress = library.NIXL_SUCCESS, library.NIXL_IN_PROG
        self._operations = {
            Direction.READ: library.NIXL_READ,
            Direction.WRITE: library.NIXL_WRITE,
        }

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        library = self._library
        try:
            yield
        except library.nixlRemoteDisconnectError as error:
            raise DisconnectedError(f"{what}: the peer is gone") from error
        except (library.nixlMismatchError, library.nixlInvalidParamError) as error:
            raise RemoteProtocolError(f"{what}: {error}") from error
        except Exception as error:
            raise TransferError(f"{what}: {error}") from error

    def _segment(self, memory: Memory) -> Any:
        return self._library.DRAM_SEG if memory.device is None else self._library.VRAM_SEG

    def close(self) -> None:
        """Destroy the agent, which gives back all memory. Nothing may be under way."""
        self._agent = None

    # --- memory ----------------------------------------------------------------------------------

    def _registered(self, memory: Memory) -> Any:
        rows = [(each, memory.length, memory.device or 0, b"") for each in memory.addresses]
        return self._library.nixlRegDList(self._segment(memory), rows)

    def register(self, memory: Memory) -> None:
        """Register all ranges or none; the library accepts nonsense, so check it before."""
        with self._failures(f"registering {memory.length} bytes"):
            self._agent.registerMem(self._registered(memory), self._backends)

    def deregister(self, memory: Memory) -> None:
        """Give the ranges back. Release the lists over them first."""
        with self._failures("deregistering"):
            self._agent.deregisterMem(self._registered(memory), self._backends)

    def metadata(self) -> bytes:
        """Name, ways to reach us, and all registered memory: about 300 bytes and 42 a range."""
        with self._failures("describing memory"):
            return bytes(self._agent.getLocalMD())

    # --- peers -----------------------------------------------------------------------------------

    def load(self, metadata: bytes) -> str:
        """Learn a peer, or more of one that is known; its name."""
        with self._failures("peer metadata"):
            return str(self._agent.loadRemoteMD(metadata).decode())

    def connect(self, peer: str) -> None:
        """Begin to connect; does not wait for the peer."""
        with self._failures(f"connecting to {peer}"):
            self._agent.makeConnection(peer, self._backends)

    def unload(self, peer: str) -> None:
        """Forget a peer; no error for one that is unknown."""
        with contextlib.suppress(Exception):
            self._agent.invalidateRemoteMD(peer)

    def tell(self, peer: str, message: bytes) -> None:
        """Send a notification, behind everything that was moved before."""
        with self._failures(f"notifying {peer}"):
            self._agent.genNotif(peer, message, self._backends)

    def told(self) -> dict[str, list[bytes]]:
        """The notifications that have arrived, by peer."""
        with self._failures("notifications"):
            found: dict[str, list[bytes]] = self._agent.getNotifs({}, self._backends)
        return found

    # --- lists and transfers ---------------------------------------------------------------------

    def prepare(
        self, peer: str | None, memory: Memory, *, item_bytes: int, stride: int, count: int
    ) -> int:
        """A list of `count` equal items in each range, of a peer or (None) of ours; registered."""
        device = memory.device or 0
        rows = np.array(
            [[each, item_bytes, device, stride, count] for each in memory.addresses],
            dtype=np.uint64,
        )
        name = self._library.NIXL_INIT_AGENT if peer is None else peer
        try:
            return int(self._agent.prepXferDlist(name, self._segment(memory), rows, self._backends))
        except self._library.nixlNotFoundError as error:
            whose = "our" if peer is None else "the peer's"
            raise RemoteProtocolError(f"not all of it is {whose} registered memory") from error
        except Exception as error:
            raise TransferError(f"preparing a list of {count} blocks: {error}") from error

    def release_list(self, handle: int) -> None:
        with contextlib.suppress(Exception):
            self._agent.releasedDlistH(handle)

    def post(
        self,
        direction: Direction,
        local: tuple[int, Sequence[int]],
        remote: tuple[int, Sequence[int]],
    ) -> int | None:
        """Start to move items of one list to or from items of another.

        A handle to ask `is_done` for, or None if it was done at once.
        """
        with self._failures("transfer"):
            handle = self._agent.makeXferReq(
                self._operations[direction],
                local[0],
                np.array(local[1], dtype=np.int32),
                remote[0],
                np.array(remote[1], dtype=np.int32),
                b"",
                self._backends,
                skip_desc_merg=False,
            )
            try:
                status = self._agent.postXferReq(handle, b"")
            except BaseException:
                self.release(handle)
                raise
        if status == self._done:
            self.release(handle)
            return None
        return int(handle)

    def is_done(self, handle: int) -> bool:
        """Whether the transfer is done; raises what ended it. `release` it in either case."""
        with self._failures("transfer"):
            status = self._agent.getXferStatus(handle)
            if status not in (self._done, self._in_progress):
                raise TransferError(f"transfer ended as {status}")
        return bool(status == self._done)

    def release(self, handle: int) -> None:
        """Let go of a transfer that is over. One under way would go on writing, unwatched."""
        with contextlib.suppress(Exception):
            self._agent.releaseXferReq(handle)


_LISTS_MAX: Final = 4096
"""Bitmaps of tickets are read at many places; beyond this the oldest list is dropped."""


_Key = tuple[tuple[int, ...], int, int, int]


class PreparedLists:
    """The lists over memory of one peer, or (None) of our own."""

    def __init__(self, agent: Agent, peer: str | None) -> None:
        self._agent, self._peer = agent, peer
        self._handles: dict[_Key, int] = {}

    @staticmethod
    def _key(memory: Memory, item_bytes: int) -> _Key:
        device = -1 if memory.device is None else memory.device
        return memory.addresses, memory.length, device, item_bytes

    def has(self, memory: Memory, item_bytes: int) -> bool:
        """Whether `over` would find it made already."""
        return self._key(memory, item_bytes) in self._handles

    def over(self, memory: Memory, item_bytes: int) -> int:
        """The list of all items of `memory`; `RemoteProtocolError` if it is not registered."""
        key = self._key(memory, item_bytes)
        found = self._handles.get(key)
        if found is None:
            if len(self._handles) >= _LISTS_MAX:
                self._agent.release_list(self._handles.pop(next(iter(self._handles))))
            found = self._agent.prepare(
                self._peer,
                memory,
                item_bytes=item_bytes,
                stride=item_bytes,
                count=memory.length // item_bytes,
            )
            self._handles[key] = found
        return found

    def release(self, within: Memory | None = None) -> None:
        """Let go of all lists, or of those that begin in one of these ranges."""
        for key in list(self._handles):
            if within is None or any(0 <= key[0][0] - a < within.length for a in within.addresses):
                self._agent.release_list(self._handles.pop(key))
