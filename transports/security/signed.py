"""The control plane of a cluster that has a secret: what members write is signed, and nobody looks at all else.

A signature is a line behind the value, in base64, so that tools and who only looks can read an entry
without the secret. It covers key, lease and value, and its certificate names the last part of the key: a
copy under another key, of another owner or under another lease counts for nothing. In place of a value
that no member signed readers get `Unsigned`.
"""

from __future__ import annotations

import logging
import re
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
import trio

from trinamo.runtime.env import Env
from trinamo.runtime.planes import (
    ControlPlane,
    CountsControl,
    Entry,
    Put,
    PutOutcome,
    Resync,
    Snapshot,
    WatchEvent,
)
from trinamo.runtime.protocol.undecodable import UNSIGNED_REMEDY, Unsigned

from .roles import writers_of

if TYPE_CHECKING:
    from .fleet import Fleet
    from .signatures import Signatures

_log = logging.getLogger("trinamo.discovery")
_LINE: Final = re.compile(rb'\n\{"signature":"([A-Za-z0-9+/=]{88,2048})"\}\Z')
_MARK: Final = b'\n{"signature":"'
_TOLD_MAX: Final = 1 << 10
_KEY_CHARS_MAX: Final = 160
_AT_ONCE: Final = 32
"""Entries whose signatures are looked at without a checkpoint: some 10 ms."""


def _owner_of(key: str) -> str:
    """Whose certificate must have signed it; empty for a key that nobody signs."""
    # Whoever reads these acts on them. Locks have no value that anybody acts on.
    return "" if writers_of(key) is None else key.rpartition("/")[2]


def signed_control(
    plane: ControlPlane, env: Env, secrets: Sequence[bytes], fleet: Fleet | None = None
) -> ControlPlane:
    """`plane` as the members share it that have one of `secrets`, and sign by the first, or as `fleet` says.

    Empty ones are none; without any, entries are read as they are.
    """
    known = [each for each in secrets if each]
    return cast("ControlPlane", SignedControlPlane(plane, env, known, fleet))


class SignedControlPlane:
    """Signs what is put, and looks at the signature of what is read; everything else is the plane's."""

    def __init__(
        self, plane: ControlPlane, env: Env, secrets: Sequence[bytes], fleet: Fleet | None = None
    ) -> None:
        self._plane = plane
        self._told: dict[str, None] = {}
        self.unsigned_count = 0
        """Values that no member has signed, each time that one was read."""
        self._signatures: Signatures | None = None
        if secrets:
            # Brings `cryptography` along, which who has no secret never needs.
            from .signatures import Signatures

            self._signatures = Signatures(secrets, env, fleet)
        if isinstance(plane, CountsControl):
            self.statistics = plane.statistics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    async def get(self, key: str) -> Entry | None:
        entry = await self._plane.get(key)
        return None if entry is None else self._read(entry)

    async def range(self, prefix: str) -> Snapshot:
        found = await self._plane.range(prefix)
        return Snapshot(found.revision, await self._read_all(found.entries))

    async def put(self, key: str, value: bytes, *, lease_id: int = 0) -> int:
        signed = self._signed(key, value, lease_id)
        return await self._plane.put(key, signed, lease_id=lease_id)

    async def compare_and_put(
        self, key: str, value: bytes, *, mod_revision: int, lease_id: int = 0
    ) -> PutOutcome:
        return await self._plane.compare_and_put(
            key,
            self._signed(key, value, lease_id),
            mod_revision=mod_revision,
            lease_id=lease_id,
        )

    @asynccontextmanager
    async def watch(self, prefix: str) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        async with self._plane.watch(prefix) as events:
            yield _Read(events, self.read)

    async def read(self, event: WatchEvent) -> WatchEvent:
        """The event of a watch, as its reader may believe it. Cannot be cancelled, as it would be lost."""
        match event:
            case Put(entry):
                return Put(self._read(entry))
            case Snapshot(revision, entries) | Resync(revision, entries):
                with trio.CancelScope(shield=True):
                    entries = await self._read_all(entries)
                return type(event)(revision, entries)
            case _:
                return event

    def _signed(self, key: str, value: bytes, lease_id: int) -> bytes:
        owner = _owner_of(key)
        if self._signatures is None or not owner:
            return value
        signature = self._signatures.sign(owner, key, lease_id, value)
        return value + _MARK + b64encode(signature) + b'"}'

    async def _read_all(self, entries: Sequence[Entry]) -> list[Entry]:
        read = []
        for number, entry in enumerate(entries, 1):
            read.append(self._read(entry))
            if self._signatures is not None and number % _AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        return read

    def _read(self, entry: Entry) -> Entry:
        """The entry without its signature, and without its value if that is nobody's of this cluster."""
        owner = _owner_of(entry.key)
        if not owner:
            return entry
        found = _LINE.search(entry.value, max(0, entry.value.rfind(_MARK)))
        value = entry.value if found is None else entry.value[: found.start()]
        fault = ""
        if self._signatures is not None:
            fault = self._fault(owner, entry, value, found)
        if fault:
            value = Unsigned(fault, value)
            self._refuse(entry.key, fault)
        elif found is None:
            return entry
        return attrs.evolve(entry, value=value)

    def _fault(self, owner: str, entry: Entry, value: bytes, found: re.Match[bytes] | None) -> str:
        assert self._signatures is not None
        if found is None:
            return "it has no signature"
        try:
            signature = b64decode(found[1], validate=True)
        except ValueError:
            signature = b""
        if b64encode(signature) != found[1]:
            return "its signature is none"
        return self._signatures.fault(owner, entry.key, entry.lease_id, value, signature)

    def _refuse(self, key: str, fault: str) -> None:
        self.unsigned_count += 1
        if key in self._told:
            return
        if len(self._told) >= _TOLD_MAX:
            # Strangers may write as many as they like.
            self._told.clear()
        self._told[key] = None
        _log.warning("%r: %s: %s", key[:_KEY_CHARS_MAX], fault, UNSIGNED_REMEDY)


class _Read:
    """The events of a watch, as its reader may believe them; as a generator it would end with a cancelled read."""

    def __init__(
        self,
        events: AsyncIterator[WatchEvent],
        read: Callable[[WatchEvent], Awaitable[WatchEvent]],
    ) -> None:
        self._events, self._read = events, read

    def __aiter__(self) -> _Read:
        return self

    async def __anext__(self) -> WatchEvent:
        return await self._read(await anext(self._events))
