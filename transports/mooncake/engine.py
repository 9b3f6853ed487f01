"""The engine's Python binding with our errors. Every call may block: only call it from a thread.

The engine answers with numbers: 0, or a negative one that seldom says why. So addresses are checked
before, and after a failure a probe tells a peer that is gone from one that refused.
"""

from __future__ import annotations

import base64
import importlib
import os
import re
import time
from collections.abc import Sequence
from typing import Any, Final

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
        hint = "; install libibverbs1" if "libibverbs" in str(error) else ""
        raise BackendMissingError(f"Mooncake cannot be loaded: {error}{hint}") from error


def session_of(address: bytes) -> str:
    """`host:port` of a peer, checked before the engine sees it; `RemoteProtocolError`."""
    if not _SESSION.fullmatch(address) or not 0 < int(address.rpartition(b":")[2]) < 65536:
        raise RemoteProtocolError("the address is no host:port")
    return address.decode("ascii")


def create_engine(
    host: str, path: str, device: str, environment: dict[str, str], *, timeout_s: float
) -> Engine:
    """An engine that listens; `ConfigError` if it cannot be made.

    Variables that the operator has set stay as they are. They are read when an engine is made, and
    some only by the first one of a process.
    """
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    library = import_library()
    engine = library.TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", path, device) != 0:
        raise ConfigError(f"Mooncake cannot listen at {host} over {path} {device}".rstrip())
    return Engine(library, engine, f"{host}:{engine.get_rpc_port()}", timeout_s=timeout_s)


class Engine:
    """One engine of this process."""

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
                self._deregister(memory.addresses[:count])
                why = (
                    "it overlaps what is registered already" if answer == -7 else f"error {answer}"
                )
                raise TransferError(f"Mooncake refuses to register {memory.length} bytes: {why}")

    def deregister(self, memory: Memory) -> None:
        """Give ranges back; no error for one that is unknown."""
        self._deregister(memory.addresses)

    def _deregister(self, addresses: Sequence[int]) -> None:
        for address in addresses:
            self._engine.unregister_memory(address)

    def move(
        self,
        session: str,
        direction: Direction,
        here: Sequence[int],
        there: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        """Move ranges, at most `SLICES_MAX`; blocks until they have moved or the call failed."""
        self._call(session, direction, here, there, lengths, None)

    def tell(self, session: str, ours: int, page: int, told: Told) -> None:
        """Notify the peer; the word read at `page` carries it."""
        name, notice = told
        text = base64.b64encode(notice).decode("ascii")
        note = self._library.TransferNotify(name, text)
        self._call(session, Direction.READ, [ours], [page], [8], note)

    def _call(
        self,
        session: str,
        direction: Direction,
        here: Sequence[int],
        there: Sequence[int],
        lengths: Sequence[int],
        note: Any,
    ) -> None:
        operations = self._library.TransferOpcode
        operation = operations.Read if direction is Direction.READ else operations.Write
        started = time.perf_counter()
        answer = self._engine.batch_transfer_sync(
            session, list(here), list(there), list(lengths), operation, note
        )
        if answer:
            raise self._reason(session, answer, time.perf_counter() - started)

    def _reason(self, session: str, answer: int, duration_s: float) -> TrinamoError:
        if duration_s >= self._timeout_s - 1:
            return ConnectError(
                f"peer at {session} did not answer for {duration_s:.0f} s", definite=False
            )
        if not self.is_reachable(session):
            return DisconnectedError(f"peer at {session} is gone")
        return TransferError(f"peer at {session} refused, or the link broke (error {answer})")

    def is_reachable(self, session: str) -> bool:
        """Whether the peer's engine answers."""
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
