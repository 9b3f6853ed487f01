"""The live set of one endpoint: what discovery says, minus what we found faulty ourselves.

Sans-IO: `registration.py` writes the entries, `router.py` feeds the watch in and asks. An entry
that does not decode is refused one at a time; the watcher lives on.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import Final

import attrs
import msgspec

from ..errors import RemoteProtocolError, RequestError
from .undecodable import UNDECODABLE

__all__ = [
    "INSTANCE_PREFIX",
    "EndpointName",
    "Instance",
    "InstanceChange",
    "LiveSet",
    "Standing",
    "decode_instance",
    "encode_instance",
]

INSTANCE_PREFIX: Final = "instances/"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_NOT_SUSPECTED: Final = object()
_ID: Final = re.compile(r"[0-9a-f]{1,16}")


@attrs.frozen
class EndpointName:
    """`namespace/component/endpoint`: what callers ask for and workers serve."""

    namespace: str
    component: str
    endpoint: str

    def __attrs_post_init__(self) -> None:
        for part in (self.namespace, self.component, self.endpoint):
            if not _NAME.fullmatch(part):
                raise RequestError(
                    f"{part!r} is not a name: lower-case letters, digits, '.', '_' and '-', "
                    "at most 63, starting with a letter or digit"
                )

    @classmethod
    def parse(cls, text: str) -> EndpointName:
        """The name in `namespace/component/endpoint`; `RequestError` for anything else."""
        parts = text.split("/")
        if len(parts) != 3:
            raise RequestError(f"{text!r} is not namespace/component/endpoint")
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.component}/{self.endpoint}"

    @property
    def key_prefix(self) -> str:
        """Where its instances are registered; ends with `/`, so `foo` does not match `foobar`."""
        return f"{INSTANCE_PREFIX}{self}/"


class Instance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker process serving one endpoint, as registered under its lease."""

    endpoint: str
    id: str
    """16 hexadecimal digits; kept over a lost lease, new for every process."""
    transports: dict[str, str]
    """Request-plane transport to address, such as `{"tcp": "10.0.0.7:4711"}`."""
    incarnation: int = 1
    """Counts registrations under this id: a fresh one after every lost lease."""
    draining: bool = False
    """It finishes what it has and takes nothing new; it leaves when that is done."""
    metadata: dict[str, str] = {}

    @property
    def key(self) -> str:
        """Its key in the control plane."""
        return f"{INSTANCE_PREFIX}{self.endpoint}/{self.id}"


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Instance)


def encode_instance(instance: Instance) -> bytes:
    """The value to register."""
    return _encoder.encode(instance)


def decode_instance(key: str, value: bytes) -> Instance:
    """The instance registered under `key`; `RemoteProtocolError` if the two do not fit."""
    try:
        instance = _decoder.decode(value)
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"{key}: not an instance: {error}") from error
    if instance.key != key or not _ID.fullmatch(instance.id):
        raise RemoteProtocolError(f"{key}: holds the instance {instance.endpoint}/{instance.id}")
    return instance


@attrs.frozen
class InstanceChange:
    """What one step changed. A re-registered instance is neither joined nor left."""

    joined: tuple[Instance, ...] = ()
    left: tuple[Instance, ...] = ()
    moved: tuple[Instance, ...] = ()
    """Re-registered under other addresses."""
    refused: tuple[str, ...] = ()
    """Why entries were not taken, one sentence each."""


class Standing(enum.StrEnum):
    """How a live set sees one of its instances."""

    LIVE = "live"
    DRAINING = "draining"
    INHIBITED = "inhibited"
    """It failed a request a moment ago, and is passed over while another lives."""
    SUSPECTED = "connection lost"
    """Discovery names it, but no connection reaches it."""


class LiveSet:
    """Instances by id, in the order they joined."""

    def __init__(self) -> None:
        self._by_key: dict[str, Instance] = {}
        self._inhibited: dict[str, float] = {}
        self._suspected: dict[str, object] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def instances(self) -> list[Instance]:
        """All that discovery names, also the inhibited ones."""
        return list(self._by_key.values())

    def get(self, instance_id: str) -> Instance | None:
        """The live instance with this id."""
        return next((i for i in self._by_key.values() if i.id == instance_id), None)

    def replace(self, entries: Iterable[tuple[str, bytes]]) -> InstanceChange:
        """A snapshot or resync: what it does not name has left."""
        fresh = dict(entries)
        left = tuple(self._by_key.pop(key) for key in list(self._by_key) if key not in fresh)
        joined: list[Instance] = []
        moved: list[Instance] = []
        refused: list[str] = []
        for key, value in fresh.items():
            change = self.put(key, value)
            joined += change.joined
            moved += change.moved
            refused += change.refused
        self._forget(left)
        return InstanceChange(tuple(joined), left, tuple(moved), tuple(refused))

    def put(self, key: str, value: bytes) -> InstanceChange:
        """One entry was written. A re-registration ends the instance's inhibition."""
        try:
            instance = decode_instance(key, value)
        except RemoteProtocolError as error:
            return InstanceChange(refused=(error.message,))
        known = self._by_key.get(key)
        self._by_key[key] = instance
        if known != instance:
            self._inhibited.pop(instance.id, None)
        if known is None:
            return InstanceChange(joined=(instance,))
        has_moved = known.transports != instance.transports
        return InstanceChange(moved=(instance,) if has_moved else ())

    def delete(self, key: str) -> InstanceChange:
        """One entry is gone."""
        instance = self._by_key.pop(key, None)
        left = () if instance is None else (instance,)
        self._forget(left)
        return InstanceChange(left=left)

    def _forget(self, left: tuple[Instance, ...]) -> None:
        for instance in left:
            self._inhibited.pop(instance.id, None)
            self._suspected.pop(instance.id, None)

    # --- what we found out ourselves ---

    def inhibit(self, instance_id: str, until: float) -> None:
        """Do not choose this instance before `until`, while there is another."""
        if self.get(instance_id) is not None:
            self._inhibited[instance_id] = until

    def clear_inhibition(self, instance_id: str) -> None:
        """The instance answered: choose it again."""
        self._inhibited.pop(instance_id, None)

    def suspect(self, instance_id: str) -> bool:
        """The connection to this instance is lost; whether that is news. Until `trust`."""
        if instance_id in self._suspected or self.get(instance_id) is None:
            return False
        self._suspected[instance_id] = None
        return True

    def trust(self, instance_id: str) -> bool:
        """The connection stands again; whether that is news."""
        self._inhibited.pop(instance_id, None)
        return self._suspected.pop(instance_id, _NOT_SUSPECTED) is None

    @property
    def suspected_count(self) -> int:
        """How many instances discovery names but no connection reaches."""
        return len(self._suspected)

    def inhibited_count(self, now: float) -> int:
        """How many live instances are inhibited."""
        return sum(until > now for until in self._inhibited.values())

    def standing(self, instance: Instance, now: float) -> Standing:
        """How `instance`, which is in the set, is seen now."""
        if instance.id in self._suspected:
            return Standing.SUSPECTED
        if instance.draining:
            return Standing.DRAINING
        is_inhibited = self._inhibited.get(instance.id, now) > now
        return Standing.INHIBITED if is_inhibited else Standing.LIVE

    def candidates(self, now: float) -> list[Instance]:
        """Whom to choose from: the live ones not draining, not inhibited and not suspected.

        If that leaves nobody, all that do not drain: their faults may have passed, and refusing
        the request outright would certainly fail it.
        """
        for instance_id in [i for i, until in self._inhibited.items() if until <= now]:
            del self._inhibited[instance_id]
        open_ones = [i for i in self._by_key.values() if not i.draining]
        if not self._inhibited and not self._suspected:
            return open_ones
        healthy = [
            i for i in open_ones if i.id not in self._inhibited and i.id not in self._suspected
        ]
        return healthy or open_ones
