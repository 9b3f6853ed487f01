"""Who wrote an entry of the store: the signature of a member, and the certificate that it is made with.

A process shows its certificate in what it writes, as it does on its connections: who reads an entry needs
the cluster's authority and nothing else. A certificate names whose entries it is for, so that
nobody else's are believed with it. What an entry says for as long as its owner lives (it is under a lease) is
signed with a certificate that is valid when it is read; what stands for good, such as a setting, with one of any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import attrs
import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from trinamo.runtime.env import Env

from .identity import RENEWED_S, authority_of, has_issued
from .roles import writers_of

if TYPE_CHECKING:
    from .fleet import Fleet

_URI: Final = "trinamo://entries/"
_LABEL: Final = "trinamo entry"
"""Keeps what is signed here apart from all else that the same key may sign."""
_SIGNATURE_BYTES: Final = 64
_KEPT_MAX: Final = 1 << 13
"""Verdicts that are remembered: entries are read by several, and again when a watch begins anew."""
_NO_MEMBERS: Final = "its signature is no member's of this cluster, or of something else"


@attrs.frozen
class _Own:
    """What this process signs with for one owner."""

    key: Ed25519PrivateKey
    certificate: bytes
    issued_at: float


@attrs.frozen
class _Verdict:
    """What is true of a signature at all times."""

    fault: str
    """Empty if a member made it."""
    first: float = 0.0
    last: float = 0.0


class Signatures:
    """Made and looked at by one process, for and against all who have one of `secrets`: it signs by the first."""

    def __init__(self, secrets: Sequence[bytes], env: Env, fleet: Fleet | None = None) -> None:
        self._env, self._fleet = env, fleet
        self._authority = authority_of(secrets[0])
        self._authorities = tuple(authority_of(each).certificate for each in secrets)
        self._own: dict[str, _Own] = {}

    def sign(self, owner: str, key: str, lease_id: int, value: bytes) -> bytes:
        """The signature of `value` under `key` and its lease, by `owner`, with its certificate behind it."""
        message = _message(key, lease_id, value)
        if self._fleet is not None and self._fleet.is_shown:
            fleet = self._fleet.certificate
            return fleet.key.sign(message) + fleet.shown
        own = self._own.get(owner)
        now = self._env.clock.wall()
        if own is None or abs(now - own.issued_at) > RENEWED_S:
            issued, key_pem = self._authority.issue([_uri_of(owner)], self._env)
            private = load_pem_private_key(key_pem, None)
            assert isinstance(private, Ed25519PrivateKey)
            shown = x509.load_pem_x509_certificate(issued).public_bytes(Encoding.DER)
            own = self._own[owner] = _Own(private, shown, now)
        return own.key.sign(message) + own.certificate

    def fault(self, owner: str, key: str, lease_id: int, value: bytes, signature: bytes) -> str:
        """What is wrong with the signature of an entry as it is read; empty if `owner` made it."""
        message = _message(key, lease_id, value)
        authorities, names = self._authorities, frozenset({_uri_of(owner)})
        fleet = self._fleet
        if fleet is not None:
            members = fleet.certificate.authorities
            roles = frozenset(role.uri for role in writers_of(key) or ())
            authorities = members + authorities if fleet.admits_secret else members
            names = roles | names if fleet.admits_secret else roles
        verdict = _verdict(authorities, names, message, signature)
        if verdict.fault or not lease_id:
            return verdict.fault
        if verdict.first <= self._env.clock.wall() <= verdict.last:
            return ""
        return "its signature is out of date: the clocks differ by hours, or it is a copy"


def _uri_of(owner: str) -> str:
    """URI of the owner of entries in a certificate: escaped, as a key may be any text."""
    return _URI + quote(owner, safe="")


def _message(key: str, lease_id: int, value: bytes) -> bytes:
    """What is signed: short, as strangers may write much, and verdicts are kept."""
    return sha256(msgspec.msgpack.encode((_LABEL, key, lease_id, value))).digest()


@lru_cache(maxsize=_KEPT_MAX)
def _verdict(
    authorities: tuple[str, ...], names: frozenset[str], message: bytes, signature: bytes
) -> _Verdict:
    """Of a signature by somebody who is one of `names`."""
    shown = _member(authorities, signature[_SIGNATURE_BYTES:])
    if shown is None:
        return _Verdict(_NO_MEMBERS)
    key, said, first, last = shown
    if names.isdisjoint(said):
        return _Verdict(f"{_NO_MEMBERS}: {', '.join(said)} may not write it")
    try:
        key.verify(signature[:_SIGNATURE_BYTES], message)
    except InvalidSignature:
        return _Verdict(_NO_MEMBERS)
    return _Verdict("", first, last)


@lru_cache(maxsize=_KEPT_MAX)
def _member(
    authorities: tuple[str, ...], shown: bytes
) -> tuple[Ed25519PublicKey, list[str], float, float] | None:
    """Key, names and time of a certificate; None if none of the authorities has issued it."""
    try:
        certificate = x509.load_der_x509_certificate(shown)
        if not any(has_issued(_authority(each), certificate) for each in authorities):
            return None
        key = certificate.public_key()
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        uris = names.value.get_values_for_type(x509.UniformResourceIdentifier)
    except Exception:  # noqa: BLE001 -- whatever a library says of a stranger's bytes, they are no member's
        return None
    if not isinstance(key, Ed25519PublicKey):
        return None
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return key, uris, first.timestamp(), last.timestamp()


@lru_cache(maxsize=16)
def _authority(pem: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem.encode())
