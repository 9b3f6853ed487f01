"""The engine's Python binding with our errors, and what an operator may set about it.

Every call of the engine may block: only call it from a thread.

The engine answers with numbers: 0, or a negative one that seldom says why. So addresses are checked
before, and after a failure a probe tells a peer that is gone from one that refused.
"""

from __future__ import annotations

import base64
import importlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import attrs

from trinamo.runtime.config.planes import MooncakeConfig
from trinamo.runtime.errors import (
    BackendMissingError,
    ConfigError,
    ConnectError,
    DisconnectedError,
    RemoteProtocolError,
    RequestError,
    TransferError,
    TrinamoError,
)
from trinamo.runtime.protocol.transfer.description import Direction
from trinamo.transports.one_sided.memory import Memory

SLICES_MAX: Final = 512
"""Ranges of one call. Over TCP more than 1,024 were refused, and sometimes the engine with them."""
FORCE_TCP: Final = "MC_FORCE_TCP"


class MooncakeOptions(MooncakeConfig, frozen=True, kw_only=True):
    """The section `data_plane.mooncake`, and what others say of every backend."""

    host: str = "127.0.0.1"
    """The address that peers reach us at; the engine listens on all of them."""
    connect_timeout_s: float = 5.0
    drain_s: float = 6.0
    """How long forgetting, deregistering and closing wait for calls that cannot be stopped."""
    chunk_bytes: int = 16 << 20
    """What is moved between two looks at the peer's access page."""


def choose_path(
    options: MooncakeOptions,
    environment: Mapping[str, str],
    adapters: Path = Path("/sys/class/infiniband"),
) -> Literal["rdma", "tcp"]:
    """What the engine will really run over; `ConfigError` for what it would not say.

    Of these `BackendMissingError` is for a device that is not there, which others do without.

    Left to itself it takes TCP where there is no RDMA device, without a word, and takes
    `MC_FORCE_TCP=0` for a yes.
    """
    forced = environment.get(FORCE_TCP)
    if options.protocol == "tcp" or forced == "1":
        return "tcp"
    if forced is not None:
        raise ConfigError(
            f"{FORCE_TCP}={forced} makes Mooncake use TCP, as any value does, and "
            "mooncake.protocol is rdma: unset the variable, or set protocol to tcp"
        )
    there = sorted(each.name for each in adapters.iterdir()) if adapters.is_dir() else []
    if not there:
        raise BackendMissingError("mooncake.protocol is rdma, and this machine has no RDMA device")
    if options.device is not None and options.device not in there:
        raise BackendMissingError(
            f"mooncake.device: there is no RDMA device {options.device!r} here; "
            f"there are: {', '.join(there)}"
        )
    return "rdma"


def engine_environment(options: MooncakeOptions, path: Literal["rdma", "tcp"]) -> dict[str, str]:
    """The variables that must be set before the engine is made."""
    found = {
        "MC_TRANSFER_TIMEOUT": str(options.transfer_timeout_s),
        # The engine's own bound on waiting slices fails a whole batch when it is reached.
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
        # A connection per transfer runs out of ports.
        "MC_TCP_ENABLE_CONNECTION_POOL": "true",
    }
    if path == "tcp":
        found[FORCE_TCP] = "1"
    return found


Told = tuple[str, bytes]
"""Who says it, as it says, and what."""
_SESSION: Final = re.compile(rb"[A-Za-z0-9._-]{1,253}:[0-9]{1,5}")


def import_library() -> Any:
    """The binding; `BackendMissingError` if it is not installed or does not load."""
    # What goes wrong is in our errors; the engine's own log goes to standard error.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOG_minloglevel", "3")
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        hint = (
            "; apt-get install --no-install-recommends libibverbs1"
            if "libibverbs" in str(error)
            else ""
        )
        raise BackendMissingError(f"Mooncake cannot be loaded: {error}{hint}") from error


def session_of(address: bytes) -> str:
    """`host:port` of a peer, checked before the engine sees it; `RemoteProtocolError`."""
    if not _SESSION.fullmatch(address) or not 0 < int(address.rpartition(b":")[2]) < 65536:
        raise RemoteProtocolError("the address is no host:port")
    return address.decode("ascii")


def make_engine(options: MooncakeOptions) -> Engine:
    """An engine that listens; `ConfigError` if it cannot be made. Blocks for up to two seconds.

    Variables that the operator has set stay as they are. They are read when an engine is made, and
    some only by the first one of a process.
    """
    path = choose_path(options, os.environ)
    for name, value in engine_environment(options, path).items():
        os.environ.setdefault(name, value)
    device = (options.device or "") if path == "rdma" else ""
    library = import_library()
    engine = library.TransferEngine()
    if engine.initialize(options.host, "P2PHANDSHAKE", path, device) != 0:
        raise ConfigError(f"Mooncake cannot listen at {options.host} over {path} {device}".rstrip())
    session = f"{options.host}:{engine.get_rpc_port()}"
    return Engine(library, engine, session, timeout_s=options.transfer_timeout_s)


class Engine:
    def __init__(self, library: Any, engine: Any, session: str, *, timeout_s: float) -> None:
        self._library = library
        self._engine: Any = engine
        self._timeout_s = timeout_s
        self.session = session
        """How peers reach it."""

    def register(self, memory: Memory) -> None:
        """Register ranges that overlap no others, or none of them."""
        if memory.device is not None:
            raise RequestError("this Mooncake moves memory of the process, not of a device")
        for count, address in enumerate(memory.addresses):
            answer = self._engine.register_memory(address, memory.length)
            if answer:
                self.deregister(attrs.evolve(memory, addresses=memory.addresses[:count]))
                why = (
                    "it overlaps what is registered already" if answer == -7 else f"error {answer}"
                )
                raise TransferError(f"Mooncake refuses to register {memory.length} bytes: {why}")

    def deregister(self, memory: Memory) -> None:
        """Give ranges back; no error for one that is unknown."""
        for address in memory.addresses:
            self._engine.unregister_memory(address)

    def move(
        self,
        session: str,
        direction: Direction,
        here: Sequence[int],
        there: Sequence[int],
        lengths: Sequence[int],
        note: Any = None,
    ) -> None:
        """Move ranges, at most `SLICES_MAX`; blocks until they have moved or the call failed.

        A `note` reaches the peer with them.
        """
        operations = self._library.TransferOpcode
        operation = operations.Read if direction is Direction.READ else operations.Write
        started = time.perf_counter()
        answer = self._engine.batch_transfer_sync(
            session, list(here), list(there), list(lengths), operation, note
        )
        if answer:
            raise self._reason(session, answer, time.perf_counter() - started)

    def tell(self, session: str, ours: int, page: int, told: Told) -> None:
        """Notify the peer; the word read at `page` carries it."""
        name, notice = told
        note = self._library.TransferNotify(name, base64.b64encode(notice).decode("ascii"))
        self.move(session, Direction.READ, [ours], [page], [8], note)

    def _reason(self, session: str, answer: int, duration_s: float) -> TrinamoError:
        if duration_s >= self._timeout_s - 1:
            return ConnectError(
                f"peer at {session} did not answer for {duration_s:.0f} s", definite=False
            )
        if not self.is_reachable(session):
            return DisconnectedError(f"peer at {session} is gone")
        return TransferError(f"peer at {session} refused, or the link broke (error {answer})")

    def is_reachable(self, session: str) -> bool:
        return bool(self._engine.send_probe(session) == 0)

    def told(self) -> list[Told]:
        """The notifications that have arrived; what is none of ours is left out."""
        return [found for each in self._engine.get_notifies() if (found := _parse(each))]

    def close(self) -> None:
        """Destroy the engine, which takes about a second."""
        self._engine = None


def _parse(note: Any) -> Told | None:
    try:
        # Both are a stranger's bytes, which the binding makes text of when they are looked at.
        return str(note.name), base64.b64decode(note.msg.encode("ascii"), validate=True)
    except Exception:  # noqa: BLE001 -- one that is none of ours keeps no other from us
        return None
