"""`NixlMetadataStore`: how each engine's memory is reached, in the control plane.

The metadata of an engine lives under `{namespace}/nixl_metadata/{engine_id}`, with the lease of its
worker, so it goes when the worker does (NIXL's own publishing knows no lease and leaves the dead
behind). `get` remembers what it found; `watch` forgets it when it changes, and tells who must
`forget` the peer. What is stored was written by strangers: it is bounded and checked here, and
once more by the plane that connects.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Final

import attrs
import msgspec

from trinamo.runtime.errors import RemoteProtocolError, RequestError, TransferError
from trinamo.runtime.planes import (
    ControlPlane,
    Delete,
    Entry,
    MemoryRegion,
    Put,
    Resync,
    Snapshot,
)
from trinamo.runtime.protocol.transfer import DESCRIPTION_BYTES_MAX, decode_description

__all__ = [
    "METADATA_BYTES_MAX",
    "NIXL_METADATA_KEY",
    "MetadataNotFoundError",
    "NixlMetadata",
    "NixlMetadataStore",
]

NIXL_METADATA_KEY: Final = "nixl_metadata"
METADATA_BYTES_MAX: Final = 512 * 1024
"""Of one engine's metadata as it is stored; control planes take 1 MiB at most."""
_REGIONS_MAX: Final = 64
_ENGINE_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class MetadataNotFoundError(TransferError):
    """No engine of this id has stored metadata, or its worker is gone. Ask discovery who lives."""

    code = "metadata_not_found"
    default_definite = True


class NixlMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What the peers of one engine must know."""

    engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    agent_name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    """The incarnation of its transfer plane; another after every restart."""
    memory_descriptors: Annotated[
        dict[str, Annotated[bytes, msgspec.Meta(max_length=DESCRIPTION_BYTES_MAX)]],
        msgspec.Meta(max_length=_REGIONS_MAX),
    ]
    """What the engine calls a region, and its `MemoryRegion.describe`."""

    @classmethod
    def of(cls, engine_id: str, agent_name: str, regions: dict[str, MemoryRegion]) -> NixlMetadata:
        """The metadata of regions as they are described now."""
        described = {name: region.describe() for name, region in regions.items()}
        return cls(engine_id=engine_id, agent_name=agent_name, memory_descriptors=described)


@attrs.frozen
class _Known:
    metadata: NixlMetadata
    mod_revision: int


Forget = Callable[[str], Awaitable[None]]
"""Called with the `agent_name` of a peer that is gone, such as `TransferPlane.forget`."""


class NixlMetadataStore:
    """One namespace's metadata. Its cache is right while `watch` runs, and only then."""

    def __init__(self, namespace: str, control: ControlPlane) -> None:
        if not _ENGINE_ID.fullmatch(namespace):
            raise RequestError(f"{namespace!r} is no namespace")
        self._control = control
        self._key_prefix = f"{namespace}/{NIXL_METADATA_KEY}/"
        self._cached: dict[str, _Known] = {}
        self._stored: set[str] = set()

    def _key(self, engine_id: str) -> str:
        if not _ENGINE_ID.fullmatch(engine_id):
            raise RequestError(f"{engine_id!r} is no engine id")
        return self._key_prefix + engine_id

    async def put(self, engine_id: str, metadata: NixlMetadata, *, lease_id: int) -> None:
        """Store it until the lease ends; again after a lease was lost or memory registered.

        Raises `RequestError` if it is over `METADATA_BYTES_MAX` or of another engine, and what
        `ControlPlane.put` raises.
        """
        key = self._key(engine_id)
        if metadata.engine_id != engine_id:
            raise RequestError(f"metadata of {metadata.engine_id} put as that of {engine_id}")
        packed = msgspec.msgpack.encode(metadata)
        if len(packed) > METADATA_BYTES_MAX:
            raise RequestError(
                f"metadata of {len(packed)} bytes; at most {METADATA_BYTES_MAX} are stored. "
                "Register one range of memory, not many"
            )
        if len(metadata.memory_descriptors) > _REGIONS_MAX:
            raise RequestError(f"an engine describes at most {_REGIONS_MAX} regions")
        await self._control.put(key, packed, lease_id=lease_id)
        self._stored.add(engine_id)

    async def get(self, engine_id: str) -> NixlMetadata:
        """From the cache, or the control plane.

        Raises `MetadataNotFoundError`, `RemoteProtocolError` for what is none, and what
        `ControlPlane.get` raises.
        """
        known = self._cached.get(engine_id)
        if known is not None:
            return known.metadata
        entry = await self._control.get(self._key(engine_id))
        if entry is None:
            raise MetadataNotFoundError(f"metadata not found for engine {engine_id}")
        metadata = self._parse(engine_id, entry.value)
        self._cached[engine_id] = _Known(metadata, entry.mod_revision)
        return metadata

    async def delete(self, engine_id: str) -> None:
        """Take it back before the lease ends."""
        self._stored.discard(engine_id)
        self._cached.pop(engine_id, None)
        await self._control.delete(self._key(engine_id))

    @property
    def stored(self) -> frozenset[str]:
        """The engines whose metadata we have put."""
        return frozenset(self._stored)

    def _parse(self, engine_id: str, value: bytes) -> NixlMetadata:
        if len(value) > METADATA_BYTES_MAX:
            raise RemoteProtocolError(f"metadata of {engine_id} has {len(value)} bytes")
        try:
            found = msgspec.msgpack.decode(value, type=NixlMetadata)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RemoteProtocolError(f"metadata of {engine_id} is none: {error}") from error
        if found.engine_id != engine_id:
            raise RemoteProtocolError(f"metadata of {found.engine_id} is stored as {engine_id}")
        for name, described in found.memory_descriptors.items():
            memory = decode_description(described)
            if memory.incarnation != found.agent_name:
                raise RemoteProtocolError(
                    f"region {name} of {engine_id} is of {memory.incarnation}, "
                    f"not of {found.agent_name}"
                )
        return found

    async def watch(self, forget: Forget) -> None:
        """Keep the cache right until cancelled; call `forget` for every peer that is gone.

        Run it in the nursery that owns the transfer plane. A peer that restarted under the same
        engine id is forgotten by its old agent name. `forget` is waited for, so keep it bounded.
        """
        async with self._control.watch(self._key_prefix) as events:
            async for gone in self._changes(events):
                await forget(gone)

    async def _changes(
        self, events: AsyncIterator[Snapshot | Put | Delete | Resync]
    ) -> AsyncIterator[str]:
        async for event in events:
            gone: list[str] = []
            match event:
                case Put(entry):
                    gone = self._replaced([entry])
                case Delete(key):
                    gone = self._drop([key.removeprefix(self._key_prefix)])
                case Snapshot(_, entries) | Resync(_, entries):
                    there = {each.key.removeprefix(self._key_prefix) for each in entries}
                    missing = [each for each in self._cached if each not in there]
                    gone = self._drop(missing) + self._replaced(entries)
            for name in gone:
                yield name

    def _drop(self, engine_ids: Sequence[str]) -> list[str]:
        known = [self._cached.pop(each, None) for each in engine_ids]
        return [each.metadata.agent_name for each in known if each is not None]

    def _replaced(self, entries: Sequence[Entry]) -> list[str]:
        """Drop what is older than `entries`; the agents that are not there any more."""
        gone = []
        for entry in entries:
            engine_id = entry.key.removeprefix(self._key_prefix)
            known = self._cached.get(engine_id)
            if known is None or known.mod_revision >= entry.mod_revision:
                continue
            del self._cached[engine_id]
            try:
                is_same = self._parse(engine_id, entry.value).agent_name == (
                    known.metadata.agent_name
                )
            except RemoteProtocolError:
                is_same = False
            if not is_same:
                gone.append(known.metadata.agent_name)
        return gone
