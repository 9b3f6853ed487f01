"""The live set of one endpoint: what discovery says, minus what we found faulty ourselves.

Sans-IO: `worker/registration.py` writes the entries, `caller/router.py` feeds the watch in and
asks. An entry that does not decode is refused one at a time; the watcher lives on.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Container, Iterable
from typing import Final

import attrs
import msgspec

from ...errors import RemoteProtocolError, RequestError
from ..undecodable import UNDECODABLE
from .addresses import is_address

__all__ = [
    "INSTANCE_PREFIX",
    "EndpointName",
    "Instance",
    "InstanceChange",
    "LiveSet",
    "Standing",
    "decode_instance",
    "encode_instance",
    "is_instance_id",
]

INSTANCE_PREFIX: Final = "instances/"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_NOT_SUSPECTED: Final = object()
_NOT_LINGERING: Final = object()
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


def is_instance_id(text: str) -> bool:
    """Whether a worker may be called so."""
    return _ID.fullmatch(text) is not None


def encode_instance(instance: Instance) -> bytes:
    """The value to register."""
    return _encoder.encode(instance)


def decode_instance(key: str, value: bytes) -> Instance:
    """The instance registered under `key`; `RemoteProtocolError` if the two do not fit."""
    try:
        instance = _decoder.decode(value)
    except UNDECODABLE as error:
        raise RemoteProtocolError(f"{key}: not an instance: {error}") from error
    if instance.key != key or not is_instance_id(instance.id):
        raise RemoteProtocolError(f"{key}: holds the instance {instance.endpoint}/{instance.id}")
    for transport, address in instance.transports.items():
        if not is_address(transport, address):
            raise RemoteProtocolError(f"{key}: {address[:80]!r} is no address for {transport!r}")
    return instance


@attrs.frozen
class InstanceChange:
    """What one step changed. A re-registered instance is neither joined nor left."""

    joined: tuple[Instance, ...] = ()
    left: tuple[Instance, ...] = ()
    lingering: tuple[Instance, ...] = ()
    """Deleted from discovery but not gone: still in the set, until `dismiss`."""
    returned: tuple[Instance, ...] = ()
    """Registered again while they lingered."""
    draining: tuple[Instance, ...] = ()
    """Have begun to leave."""
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
    LINGERING = "lingering"
    """Discovery has deleted it, but it is reached: it may only have lost its lease."""
    SUSPECTED = "connection lost"
    """Discovery names it, but no connection reaches it."""
    FOREIGN = "no common transport"
    """It speaks none of the transports that are spoken here, so it is never chosen."""


class LiveSet:
    """Instances by id, in the order they joined; `transports` are those spoken here, None is all.

    With `keeps_deleted`, one that is deleted lingers if it did not say that it would leave and its
    connection stands (`trust`): a store that was stopped ends all leases in one moment, and the
    workers are as well as before. Whoever feeds the set says when that is over (`dismiss`).
    """

    def __init__(
        self, *, keeps_deleted: bool = False, transports: Collection[str] | None = None
    ) -> None:
        self._keeps_deleted = keeps_deleted
        self._transports = transports
        self._by_key: dict[str, Instance] = {}
        self._keys: dict[str, str] = {}
        """From id to key."""
        self._inhibited: dict[str, float] = {}
        self._foreign: dict[str, None] = {}
        self._nonsensical: dict[str, None] = {}
        """The inhibited ones that a connection says nothing of."""
        self._suspected: dict[str, object] = {}
        self._standing: dict[str, None] = {}
        self._lingering: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def instances(self) -> list[Instance]:
        """All that discovery names or that linger, also the inhibited ones."""
        return list(self._by_key.values())

    def get(self, instance_id: str) -> Instance | None:
        """The live instance with this id."""
        return self._by_key.get(self._keys.get(instance_id, ""))

    def replace(self, entries: Iterable[tuple[str, bytes]]) -> InstanceChange:
        """A snapshot or resync: what it does not name is deleted."""
        fresh = dict(entries)
        steps = [self.delete(key) for key in list(self._by_key) if key not in fresh]
        steps += [self.put(key, value) for key, value in fresh.items()]
        return InstanceChange(
            joined=tuple(i for step in steps for i in step.joined),
            left=tuple(i for step in steps for i in step.left),
            lingering=tuple(i for step in steps for i in step.lingering),
            returned=tuple(i for step in steps for i in step.returned),
            draining=tuple(i for step in steps for i in step.draining),
            moved=tuple(i for step in steps for i in step.moved),
            refused=tuple(why for step in steps for why in step.refused),
        )

    def put(self, key: str, value: bytes) -> InstanceChange:
        """One entry was written. A re-registration ends the instance's inhibition."""
        try:
            instance = decode_instance(key, value)
        except RemoteProtocolError as error:
            return InstanceChange(refused=(error.message,))
        known = self._by_key.get(key)
        self._by_key[key] = instance
        self._keys[instance.id] = key
        if self._transports is None or not instance.transports.keys().isdisjoint(self._transports):
            self._foreign.pop(instance.id, None)
        else:
            self._foreign[instance.id] = None
        if known != instance:
            self.clear_inhibition(instance.id)
        if known is None:
            return InstanceChange(joined=(instance,))
        drains = instance.draining and not known.draining
        has_moved = known.transports != instance.transports
        if has_moved:
            # What stands is the connection to where it was.
            self._standing.pop(instance.id, None)
        has_lingered = self._lingering.pop(instance.id, _NOT_LINGERING) is None
        return InstanceChange(
            returned=(instance,) if has_lingered else (),
            draining=(instance,) if drains else (),
            moved=(instance,) if has_moved else (),
        )

    def delete(self, key: str) -> InstanceChange:
        """One entry is gone: its instance has left, or lingers."""
        instance = self._by_key.get(key)
        if instance is None or instance.id in self._lingering:
            return InstanceChange()
        if self._keeps_deleted and not instance.draining and instance.id in self._standing:
            self._lingering[instance.id] = None
            return InstanceChange(lingering=(instance,))
        return self._leave(instance)

    def dismiss(self, instance_id: str) -> InstanceChange:
        """A lingering instance has left after all; nothing changes if it does not linger."""
        instance = self.get(instance_id) if instance_id in self._lingering else None
        return InstanceChange() if instance is None else self._leave(instance)

    def _leave(self, instance: Instance) -> InstanceChange:
        del self._by_key[instance.key], self._keys[instance.id]
        self.clear_inhibition(instance.id)
        for known in (self._suspected, self._standing, self._lingering, self._foreign):
            known.pop(instance.id, None)
        return InstanceChange(left=(instance,))

    # --- what we found out ourselves ---

    def inhibit(self, instance_id: str, until: float, *, is_nonsensical: bool = False) -> None:
        """Do not choose this instance before `until`, while there is another.

        That it is reached again ends this early, unless it is what it says that is wrong.
        """
        if self.get(instance_id) is not None:
            self._inhibited[instance_id] = until
            if is_nonsensical:
                self._nonsensical[instance_id] = None

    def clear_inhibition(self, instance_id: str) -> None:
        """The instance answered: choose it again."""
        self._inhibited.pop(instance_id, None)
        self._nonsensical.pop(instance_id, None)

    def suspect(self, instance_id: str) -> bool:
        """The connection to this instance is lost; whether that is news. Until `trust`."""
        if instance_id in self._suspected or self.get(instance_id) is None:
            return False
        self._suspected[instance_id] = None
        self._standing.pop(instance_id, None)
        return True

    def trust(self, instance_id: str) -> bool:
        """The connection stands, or stands again; whether the latter is news.

        Then what the last connection's end inhibited is over too.
        """
        if self.get(instance_id) is not None:
            self._standing[instance_id] = None
        is_back = self._suspected.pop(instance_id, _NOT_SUSPECTED) is None
        if is_back and instance_id not in self._nonsensical:
            self._inhibited.pop(instance_id, None)
        return is_back

    @property
    def suspected_count(self) -> int:
        """How many instances discovery names but no connection reaches."""
        return len(self._suspected)

    @property
    def lingering_count(self) -> int:
        """How many instances discovery has deleted and that are in the set all the same."""
        return len(self._lingering)

    def is_lingering(self, instance_id: str) -> bool:
        """Whether discovery has deleted this instance, which is in the set all the same."""
        return instance_id in self._lingering

    def is_foreign(self, instance_id: str) -> bool:
        """Whether this instance speaks nothing that is spoken here."""
        return instance_id in self._foreign

    def is_wanted(self, instance_id: str) -> bool:
        """Whether this instance is in the set and has not said that it leaves."""
        instance = self.get(instance_id)
        return instance is not None and not instance.draining

    def inhibited_count(self, now: float) -> int:
        """How many live instances are inhibited."""
        return sum(until > now for until in self._inhibited.values())

    def standing(self, instance: Instance, now: float) -> Standing:
        """How `instance`, which is in the set, is seen now."""
        if instance.id in self._foreign:
            return Standing.FOREIGN
        if instance.id in self._suspected:
            return Standing.SUSPECTED
        if instance.draining:
            return Standing.DRAINING
        if instance.id in self._lingering:
            return Standing.LINGERING
        is_inhibited = self._inhibited.get(instance.id, now) > now
        return Standing.INHIBITED if is_inhibited else Standing.LIVE

    def candidates(
        self, now: float, exclude: Collection[str] = (), among: Container[str] | None = None
    ) -> list[Instance]:
        """Whom to choose from, not among `exclude`: who neither drains nor is known to be faulty.

        With `among`, only those ids are chosen from.

        Faulty is who is inhibited or suspected. Who lingers comes after those that discovery names,
        unless it names less than half. If nobody is left, all that do not drain: their faults may
        have passed, and refusing the request outright would certainly fail it.
        """
        for instance_id in [i for i, until in self._inhibited.items() if until <= now]:
            self.clear_inhibition(instance_id)
        open_ones = [
            i
            for i in self._by_key.values()
            if not i.draining
            and i.id not in exclude
            and (among is None or i.id in among)
            and i.id not in self._foreign
        ]
        if not self._inhibited and not self._suspected and not self._lingering:
            return open_ones
        healthy = [
            i for i in open_ones if i.id not in self._inhibited and i.id not in self._suspected
        ]
        named = [i for i in healthy if i.id not in self._lingering]
        # When all leases have ended in one moment, the first to register again must not get what
        # all others were sent (Envoy's panic threshold has the same reason and the same half).
        return healthy if 2 * len(named) < len(healthy) else named or open_ones
