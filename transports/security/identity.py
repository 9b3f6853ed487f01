"""What a process shows to the others of its cluster: a certificate of the authority that their secret makes.

Whoever has the secret derives the same authority from it, and issues itself what it shows. So there is
nothing to hand out and nothing to renew by hand, and all holders of the secret are equal: a name in a
certificate says who somebody is among them, and keeps out everybody else. While a cluster changes its
secret, the authority of a second one is trusted as well.

Numbers, keys and times come from `Env`, and so does the time at which a peer's certificate must be valid:
OpenSSL would ask the machine's clock, which a simulated run does not have.
"""

from __future__ import annotations

import datetime as dt
import os
import ssl
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from trinamo.runtime.env import Env
from trinamo.runtime.errors import ConnectError, ImpostorError
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.transports.sockets.wire import TlsSession

VALID_S: Final = 12 * 3600.0
"""How long before and after it is issued a certificate is valid: so much may two clocks differ."""
RENEWED_S: Final = VALID_S / 2
_KEY_BYTES: Final = 32
_SERIAL_BITS: Final = 127
_NO_CHECK_TIME: Final = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which `ssl` has no name."""
_HOST: Final = "trinamo"
"""Names nobody: who is meant is in the certificate, and must not be told to who listens on the way."""
_NAME: Final = "trinamo"
Contexts: TypeAlias = tuple[ssl.SSLContext, ssl.SSLContext]
_FIRST_DAY = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
_LAST_DAY = dt.datetime(9999, 12, 31, tzinfo=dt.UTC)


class Shown(ABC):
    """What a process shows to others, and what it asks of them."""

    def __init__(self, env: Env) -> None:
        self._env = env

    @abstractmethod
    def session(self, *, dials: bool) -> TlsSession:
        """A session of its own for each connection, with what is valid now."""

    def peer_of(self, session: TlsSession) -> list[str]:
        """Who is at the other end, once hands were shaken. Raises `ConnectError` if it is out of date."""
        shown: dict[str, Any] = session.peer_certificate() or {}
        first, last = (ssl.cert_time_to_seconds(shown[key]) for key in ("notBefore", "notAfter"))
        if not first <= self._env.clock.wall() <= last:
            raise ConnectError(
                f"its certificate is for {shown['notBefore']} to {shown['notAfter']}: it was not renewed,"
                " or the clocks of both machines differ by hours; set them right"
            )
        return [value for kind, value in shown.get("subjectAltName", ()) if kind == "URI"]

    @abstractmethod
    def check_dialler(self, peer: Sequence[str], purpose: Purpose) -> None:
        """Raise `ConnectError` if who dialled may not ask for this."""

    @abstractmethod
    def check_listener(self, peer: Sequence[str], purpose: Purpose, name: str) -> None:
        """Raise `ImpostorError` if who listens, and says that it is `name`, is somebody else.

        Or if it may not listen for this.
        """


class Authority:
    """Who says in certificates what somebody is."""

    def __init__(self, key: Ed25519PrivateKey, certificate: x509.Certificate) -> None:
        self._key, self._shown = key, certificate
        self.certificate = _pem(certificate).decode()
        """In PEM."""

    @classmethod
    def make(
        cls,
        key: Ed25519PrivateKey,
        *,
        name: str = _NAME,
        serial: int = 1,
        first: dt.datetime = _FIRST_DAY,
        last: dt.datetime = _LAST_DAY,
    ) -> Authority:
        """A new one, byte for byte the same each time that it is made of the same."""
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=False,
            encipher_only=False,
            decipher_only=False,
        )
        subject = _subject(name)
        builder = (
            _builder(subject, subject, key.public_key(), key.public_key(), serial, first, last)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
        )
        return cls(key, builder.sign(key, None))

    @classmethod
    def derived(cls, secret: bytes) -> Authority:
        """Of everybody who has `secret`: the same one in each process."""
        seed = HKDF(hashes.SHA256(), _KEY_BYTES, None, b"trinamo authority").derive(secret)
        return cls.make(Ed25519PrivateKey.from_private_bytes(seed))

    def issue(
        self,
        uris: Sequence[str],
        env: Env,
        *,
        name: str = _NAME,
        before_s: float = VALID_S,
        after_s: float = VALID_S,
    ) -> tuple[bytes, bytes]:
        """A certificate for whoever is all of `uris`, and its new private key, in PEM."""
        key = Ed25519PrivateKey.from_private_bytes(env.rng.randbytes(_KEY_BYTES))
        now = env.clock.wall()
        first, last = (
            dt.datetime.fromtimestamp(at_s, dt.UTC)
            for at_s in (max(0.0, now - before_s), now + after_s)
        )
        serial = 1 + env.rng.getrandbits(_SERIAL_BITS)
        own, issuer = key.public_key(), self._key.public_key()
        builder = (
            _builder(_subject(name), self._shown.subject, own, issuer, serial, first, last)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris]),
                critical=False,
            )
        )
        return _pem(builder.sign(self._key, None)), private_pem(key)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: Ed25519PublicKey,
    issuer_key: Ed25519PublicKey,
    serial: int,
    first: dt.datetime,
    last: dt.datetime,
) -> x509.CertificateBuilder:
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(first)
        .not_valid_after(last)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(by, critical=False)
    )


def has_issued(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    """Whether `certificate` is of this very authority, with none between."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def private_pem(key: Ed25519PrivateKey) -> bytes:
    """The key as PEM, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


authority_of = lru_cache(maxsize=16)(Authority.derived)


def contexts_of(certificate: bytes, key: bytes, trusted: str) -> Contexts:
    """Who dials, and who listens, with this certificate, towards those whom `trusted` has issued theirs.

    Raises `ssl.SSLError`.
    """
    contexts = []
    # OpenSSL takes it from a path only, and a private key is for no disk.
    descriptor = os.memfd_create("identity")
    try:
        os.write(descriptor, certificate + key)
        for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
            context = ssl.SSLContext(protocol)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            if protocol == ssl.PROTOCOL_TLS_SERVER:
                # Resumed, a session would outlive the certificates that it began with.
                context.num_tickets = 0
            # The name is no host's: who has asked for somebody compares it with what is shown.
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.verify_flags = ssl.VerifyFlags(
                context.verify_flags | _NO_CHECK_TIME | ssl.VERIFY_X509_PARTIAL_CHAIN
            )
            context.load_verify_locations(cadata=trusted)
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
            contexts.append(context)
    finally:
        os.close(descriptor)
    client, server = contexts
    return client, server


def session_of(contexts: Contexts, *, dials: bool) -> TlsSession:
    """A session of its own for each connection."""
    client, server = contexts
    return TlsSession(client, _HOST) if dials else TlsSession(server)


def check_name(peer: Sequence[str], purpose: Purpose, name: str) -> None:
    """Raise `ImpostorError` if a certificate that the secret made is not for who says that it is `name`."""
    if [*peer] != [purpose.uri(name)]:
        said = ", ".join(peer) or "nothing"
        raise ImpostorError(f"it calls itself {name!r}, but its certificate says {said}")


class Identity(Shown):
    """One name of a process, and the sessions in which it shows that it is its own.

    `others` says who is let in and asked as well, of those whom `authorities` have issued certificates.
    """

    def __init__(
        self,
        secret: bytes,
        uri: str,
        env: Env,
        second: bytes = b"",
        *,
        others: Shown | None = None,
        authorities: tuple[str, ...] = (),
    ) -> None:
        super().__init__(env)
        self.authorities = authorities
        self._authority, self._uri, self._others = authority_of(secret), uri, others
        own = [authority_of(each).certificate for each in (secret, second) if each]
        self._trusted = "".join([*own, *authorities])
        self._issue()

    def _issue(self) -> None:
        self._issued_at = self._env.clock.wall()
        certificate, key = self._authority.issue([self._uri], self._env)
        self._contexts = contexts_of(certificate, key, self._trusted)

    def session(self, *, dials: bool) -> TlsSession:
        """See `Shown`. Issues a new certificate where the last is old."""
        if abs(self._env.clock.wall() - self._issued_at) > RENEWED_S:
            self._issue()
        return session_of(self._contexts, dials=dials)

    def check_dialler(self, peer: Sequence[str], purpose: Purpose) -> None:
        """See `Shown`: all who have the secret are equal."""
        if self._others is not None:
            self._others.check_dialler(peer, purpose)

    def check_listener(self, peer: Sequence[str], purpose: Purpose, name: str) -> None:
        if self._others is not None:
            self._others.check_listener(peer, purpose, name)
        else:
            check_name(peer, purpose, name)
