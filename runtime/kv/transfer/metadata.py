"""`NixlMetadataStore`: how each engine's memory is reached, in the control plane.

The metadata of an engine lives under `{namespace}/nixl_metadata/{engine_id}`, with the lease of its
worker, so it goes when the worker does (NIXL's own publishing knows no lease and leaves the dead
behind). It names every backend the engine can be reached by; the key has the name of the first
backend there was. `get` remembers what it found; `watch` forgets it when it changes, and tells who
must be forgotten. What is stored was written by strangers: it is bounded and checked here, and
once more by the plane that connects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Final

import attrs
import msgspec
import trio

from ...errors import MetadataNotFoundError, RemoteProtocolError, RequestError
from ...planes import ControlPlane, Delete, Entry, Put, Resync, Snapshot
from ...protocol.transfer.description import decode_description, decode_descriptions
from ...protocol.undecodable import UNDECODABLE, UNSIGNED_REMEDY, Unsigned, decoding_fault
from .routes import RoutedMemory

NIXL_METADATA_KEY: Final = "nixl_metadata"
METADATA_BYTES_MAX: Final = 512 * 1024
"""Of one engine's metadata as it is stored; control planes take 1 MiB at most."""
_REGIONS_MAX: Final = 64
_READS_MAX: Final = 100
_PAUSE_MIN_S: Final = 0.05
_ENGINE_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class NixlMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What the peers of one engine must know."""

    engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    agent_name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    """The incarnation of its process; another after every restart."""
    memory_descriptors: Annotated[
        dict[str, Annotated[bytes, msgspec.Meta(max_length=METADATA_BYTES_MAX)]],
        msgspec.Meta(max_length=_REGIONS_MAX),
    ]
    """What the engine calls a region, and its `RoutedMemory.describe`: an offer of backends."""

    @classmethod
    def of(cls, engine_id: str, agent_name: str, regions: dict[str, RoutedMemory]) -> NixlMetadata:
        """The metadata of regions as they are described now."""
        described = {name: region.describe() for name, region in regions.items()}
        return cls(engine_id=engine_id, agent_name=agent_name, memory_descriptors=described)


@attrs.frozen
class _Known:
    metadata: NixlMetadata
    mod_revision: int


Tell = Callable[[str], None]
"""Called with the incarnation of a peer that is not stored any more; whether it lives is another
question (`engine.py`)."""


class NixlMetadataStore:
    """One namespace's metadata. Its cache is right while `watch` runs, and only then."""

    def __init__(self, namespace: str, control: ControlPlane) -> None:
        if not _ENGINE_ID.fullmatch(namespace):
            raise RequestError(f"{namespace!r} is no namespace")
        self._control = control
        self._key_prefix = f"{namespace}/{NIXL_METADATA_KEY}/"
        self._cached: dict[str, _Known] = {}
        self._changes_seen = 0
        """Counts what `watch` was told, so that a read can see that it was overtaken."""

    def key(self, engine_id: str) -> str:
        """Where the metadata of an engine is; `RequestError` for what is no engine id."""
        if not _ENGINE_ID.fullmatch(engine_id):
            raise RequestError(f"{engine_id!r} is no engine id")
        return self._key_prefix + engine_id

    def encode(self, engine_id: str, metadata: NixlMetadata) -> bytes:
        """What is stored under `key`: for `put`, or for a registrar that puts it again and again.

        Raises `RequestError` if it is over `METADATA_BYTES_MAX` or of another engine.
        """
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
        return packed

    async def put(self, engine_id: str, metadata: NixlMetadata, *, lease_id: int) -> None:
        """Store it until the lease ends; again after a lease was lost or memory registered.

        Raises what `encode` and `ControlPlane.put` raise.
        """
        packed = self.encode(engine_id, metadata)
        await self._control.put(self.key(engine_id), packed, lease_id=lease_id)

    async def get(self, engine_id: str) -> NixlMetadata:
        """From the cache, or the control plane.

        Raises `MetadataNotFoundError`, also where no member has signed what is there, `RemoteProtocolError`
        for what is none, and what `ControlPlane.get` raises.
        """
        key = self.key(engine_id)
        for _ in range(_READS_MAX):
            known = self._cached.get(engine_id)
            if known is not None:
                return known.metadata
            seen = self._changes_seen
            entry = await self._control.get(key)
            if entry is None:
                break
            if isinstance(entry.value, Unsigned):
                # Whose it is puts his own back, once he hears of it.
                why = f"{entry.value.fault}: {UNSIGNED_REMEDY}"
                raise MetadataNotFoundError(f"metadata of {engine_id}: {why}")
            metadata = self._parse(engine_id, entry.value)
            # What the watch was told while we read may be the end of what we have read: nobody
            # would ever drop it from the cache.
            if seen == self._changes_seen:
                self._cached[engine_id] = _Known(metadata, entry.mod_revision)
                return metadata
        raise MetadataNotFoundError(f"metadata not found for engine {engine_id}")

    async def find(self, engine_id: str, *, patience_s: float) -> NixlMetadata:
        """As `get`, but an engine that is not there, or whose entry no member signed, is asked for again for `patience_s` seconds.

        Whoever names a peer knows that it lives. It may not be registered for a moment: a store
        that was away for longer than the leases comes back with nobody in it, and everybody puts
        itself there again, while all who waited for the store ask it first.
        """
        ends_at: float | None = None
        pause_s = _PAUSE_MIN_S
        while True:
            try:
                return await self.get(engine_id)
            except MetadataNotFoundError:
                now = trio.current_time()
                if ends_at is None:
                    ends_at = now + patience_s
                if now >= ends_at:
                    raise
            await trio.sleep(min(pause_s, ends_at - now))
            pause_s *= 2

    def drop(self, engine_id: str) -> None:
        """Forget what is cached: `get` asks the control plane again. Never waits."""
        self._cached.pop(engine_id, None)

    def _parse(self, engine_id: str, value: bytes) -> NixlMetadata:
        if len(value) > METADATA_BYTES_MAX:
            raise RemoteProtocolError(f"metadata of {engine_id} has {len(value)} bytes")
        try:
            found = msgspec.msgpack.decode(value, type=NixlMetadata)
        except UNDECODABLE as error:
            raise RemoteProtocolError(
                f"metadata of {engine_id} is none: {decoding_fault(error)}"
            ) from error
        if found.engine_id != engine_id:
            raise RemoteProtocolError(f"metadata of {found.engine_id} is stored as {engine_id}")
        for name, offer in found.memory_descriptors.items():
            for each in decode_descriptions(offer).values():
                described = decode_description(each)
                if described.incarnation != found.agent_name:
                    raise RemoteProtocolError(
                        f"region {name} of {engine_id} is of {described.incarnation} "
                        f"by {described.backend}, not of {found.agent_name}"
                    )
        return found

    async def watch(self, tell_missing: Tell, begun: Callable[[], None] = lambda: None) -> None:
        """Keep the cache right until cancelled; call `tell_missing` for every peer that is gone.

        Run it in the nursery that owns the transfer planes. A peer that restarted under the same
        engine id is told of by its old incarnation. `begun` is called with each event.
        """
        async with self._control.watch(self._key_prefix) as events:
            async for event in events:
                begun()
                self._changes_seen += 1
                gone: list[str] = []
                match event:
                    case Put(entry):
                        gone = self._replaced([entry])
                    case Delete(key, revision):
                        gone = self._drop([key.removeprefix(self._key_prefix)], revision)
                    case Snapshot(revision, entries) | Resync(revision, entries):
                        there = {each.key.removeprefix(self._key_prefix) for each in entries}
                        # Read later than this, or of a store that has begun anew since: who knows?
                        missing = [
                            engine_id
                            for engine_id, known in self._cached.items()
                            if engine_id not in there or known.mod_revision > revision
                        ]
                        gone = self._drop(missing) + self._replaced(entries)
                for agent in gone:
                    tell_missing(agent)

    def _drop(self, engine_ids: Sequence[str], revision: float = math.inf) -> list[str]:
        """Drop what was gone at `revision`; what was put after it is younger than the news."""
        old = [
            each
            for each in engine_ids
            if each in self._cached and self._cached[each].mod_revision <= revision
        ]
        return [self._cached.pop(each).metadata.agent_name for each in old]

    def _replaced(self, entries: Sequence[Entry]) -> list[str]:
        """Drop what is older than `entries`; the agents that are not there any more."""
        gone = []
        for entry in entries:
            engine_id = entry.key.removeprefix(self._key_prefix)
            known = self._cached.get(engine_id)
            if known is None or known.mod_revision >= entry.mod_revision:
                continue
            # What a member said stays in force.
            if isinstance(entry.value, Unsigned):
                continue
            del self._cached[engine_id]
            agent = known.metadata.agent_name
            with suppress(RemoteProtocolError):
                metadata = self._parse(engine_id, entry.value)
                if metadata.agent_name == agent:
                    # Its end is still to be told.
                    self._cached[engine_id] = _Known(metadata, entry.mod_revision)
                    continue
            gone.append(agent)
        return gone
