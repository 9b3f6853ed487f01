"""Names of endpoints, and what a worker registers for each endpoint that it serves; what a frontend registers.

`worker/registration.py` writes the entries, `caller/instances.py` keeps those that a caller knows. An address is
read strictly: whoever may write to the store could otherwise make every frontend dial what no resolver,
socket or broker was made for. It says nothing of whether anybody lives there.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

import attrs
import msgspec

from ...errors import RemoteProtocolError, RequestError
from ..undecodable import decoded, quoted
from ..versions import check_versions, encode_entry

INSTANCE_PREFIX: Final = "instances/"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_ID: Final = re.compile(r"[0-9a-f]{1,16}")
FRONTEND_PREFIX: Final = "frontends/"
_ID_DIGITS: Final = 16
_SUBJECT: Final = re.compile(r"[!-~]{1,255}")
"""Visible ASCII: what any transport may call a place."""
_HOST: Final = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_ZONE: Final = re.compile(r"[A-Za-z0-9_.-]{1,15}")
"""An interface of this machine, as Linux bounds their names."""
_HOST_CHARS_MAX: Final = 253
_PORT: Final = re.compile(r"[0-9]{1,5}")


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
                    f"{quoted(part)!r} is not a name: lower-case letters, digits, '.', '_' and '-', "
                    "at most 63, starting with a letter or digit"
                )

    @classmethod
    def parse(cls, text: str) -> EndpointName:
        """The name in `namespace/component/endpoint`; `RequestError` for anything else."""
        parts = text.split("/")
        if len(parts) != 3:
            raise RequestError(f"{quoted(text)!r} is not namespace/component/endpoint")
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
    kv_events: bool | None = None
    """Whether it tells which KV blocks it keeps for later requests; None if it keeps none that a
    prompt's tokens name."""
    kv_names: str = ""
    """By which names it tells them (`BlockNames.mark`); empty if it does not."""
    metadata: dict[str, str] = {}

    @property
    def key(self) -> str:
        return f"{INSTANCE_PREFIX}{self.endpoint}/{self.id}"


encode_instance: Final = encode_entry
_decoder = msgspec.json.Decoder(Instance)


def is_instance_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def decode_instance(key: str, value: bytes) -> Instance:
    """The instance registered under `key`.

    Raises `RemoteProtocolError` if the two do not fit, if no member of this cluster signed it, or if it
    speaks no version that is spoken here.
    """
    check_versions(key, value)
    instance = decoded(_decoder.decode, value, f"{key}: not an instance")
    if instance.key != key or not is_instance_id(instance.id):
        raise RemoteProtocolError(f"{key}: holds the instance {instance.endpoint}/{instance.id}")
    for transport, address in instance.transports.items():
        if not is_address(transport, address):
            raise RemoteProtocolError(f"{key}: {address[:80]!r} is no address for {transport!r}")
    return instance


def is_address(transport: str, address: str) -> bool:
    """Whether `address` can be one of `transport`: for tcp `host:port` or `[v6]:port`."""
    if not _SUBJECT.fullmatch(address):
        return False
    if transport != "tcp":
        return True
    host, _, port = address.rpartition(":")
    if not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        return False
    if not (host.startswith("[") and host.endswith("]")):
        return len(host) <= _HOST_CHARS_MAX and _HOST.fullmatch(host) is not None
    number, percent, zone = host[1:-1].partition("%")
    if percent and not _ZONE.fullmatch(zone):
        return False
    try:
        ipaddress.IPv6Address(number)
    except ValueError:
        return False
    return True


class FrontendEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One frontend process with a status port, as registered under its lease.

    Who scrapes or looks finds it there. Nobody routes by it, and a frontend serves as well without.
    """

    id: str
    """16 hexadecimal digits, new for every process."""
    url: str
    """Where it answers the API; several share it if they share a port."""
    status: str
    """Where it alone answers `/health` and `/metrics`."""
    host: str = ""
    """The name of its machine, for people; nobody connects to it."""


encode_frontend: Final = encode_entry
_frontend_decoder = msgspec.json.Decoder(FrontendEntry)


def frontend_key(frontend_id: str) -> str:
    return FRONTEND_PREFIX + frontend_id


def decode_frontend(key: str, value: bytes) -> FrontendEntry:
    """The frontend registered under `key`; raises as `decode_instance`."""
    check_versions(key, value)
    entry = decoded(_frontend_decoder.decode, value, f"{key}: not a frontend")
    if frontend_key(entry.id) != key or len(entry.id) != _ID_DIGITS:
        raise RemoteProtocolError(f"{key}: holds the frontend {entry.id[:32]!r}")
    return entry
