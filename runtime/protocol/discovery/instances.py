"""Names of endpoints, and what a worker registers for each endpoint that it serves.

`worker/registration.py` writes the entries, `caller/instances.py` keeps those that a caller knows.
"""

from __future__ import annotations

import re
from typing import Final

import attrs
import msgspec

from ...errors import RemoteProtocolError, RequestError
from ..undecodable import UNDECODABLE
from .addresses import is_address

INSTANCE_PREFIX: Final = "instances/"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
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
    kv_events: bool | None = None
    """Whether it tells which KV blocks it keeps for later requests; None if it keeps none that a
    prompt's tokens name."""
    kv_names: str = ""
    """By which names it tells them (`BlockNames.mark`); empty if it does not."""
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
