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
from functools import lru_cache
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from trinamo.runtime.env import Env
from trinamo.runtime.errors import ConnectError
from trinamo.transports.sockets.tls import TlsSession

VALID_S: Final = 12 * 3600.0
"""How long before and after it is issued a certificate is valid: so much may two clocks differ."""
RENEWED_S: Final = VALID_S / 2
_KEY_BYTES: Final = 32
_SERIAL_BITS: Final = 127
_NO_CHECK_TIME: Final = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which `ssl` has no name."""
_HOST: Final = "trinamo"
"""Names nobody: who is meant is in the certificate, and must not be told to who listens on the way."""
_SUBJECT: Final = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "trinamo")])
_FIRST_DAY = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
_LAST_DAY = dt.datetime(9999, 12, 31, tzinfo=dt.UTC)


class Authority:
    """Of everybody who has `secret`: the same one in each process."""

    def __init__(self, secret: bytes) -> None:
        seed = HKDF(hashes.SHA256(), _KEY_BYTES, None, b"trinamo authority").derive(secret)
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
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
        own = self._key.public_key()
        builder = (
            self._builder(own, 1, _FIRST_DAY, _LAST_DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
        )
        self.certificate = _pem(builder.sign(self._key, None)).decode()
        """In PEM; byte for byte the same wherever it is derived."""

    def issue(self, uri: str, env: Env) -> bytes:
        """A certificate for whoever is `uri`, and its new private key, in PEM."""
        key = Ed25519PrivateKey.from_private_bytes(env.rng.randbytes(_KEY_BYTES))
        now = env.clock.wall()
        first, last = (
            dt.datetime.fromtimestamp(at_s, dt.UTC)
            for at_s in (max(0.0, now - VALID_S), now + VALID_S)
        )
        serial = 1 + env.rng.getrandbits(_SERIAL_BITS)
        builder = (
            self._builder(key.public_key(), serial, first, last)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False
            )
        )
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return _pem(builder.sign(self._key, None)) + private

    def _builder(
        self,
        key: Ed25519PublicKey,
        serial: int,
        first: dt.datetime,
        last: dt.datetime,
    ) -> x509.CertificateBuilder:
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(_SUBJECT)
            .issuer_name(_SUBJECT)
            .public_key(key)
            .serial_number(serial)
            .not_valid_before(first)
            .not_valid_after(last)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(issuer, critical=False)
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


authority_of = lru_cache(maxsize=16)(Authority)


class Identity:
    """One name of a process, and the sessions in which it shows that it is its own."""

    def __init__(self, secret: bytes, uri: str, env: Env, second: bytes = b"") -> None:
        self._authority, self._uri, self._env = authority_of(secret), uri, env
        self._trusted = [authority_of(each).certificate for each in (secret, second) if each]
        self._contexts = [
            self._context(protocol)
            for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
        ]
        self._issued_at = -RENEWED_S
        self._issue()

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            # Resumed, a session would outlive the certificates that it began with.
            context.num_tickets = 0
        # The name is no host's: `name_of` says it, and who has asked for somebody compares it.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags = ssl.VerifyFlags(context.verify_flags | _NO_CHECK_TIME)
        context.load_verify_locations(cadata="".join(self._trusted))
        return context

    def _issue(self) -> None:
        self._issued_at = self._env.clock.wall()
        issued = self._authority.issue(self._uri, self._env)
        # OpenSSL takes it from a path only, and a private key is for no disk.
        descriptor = os.memfd_create("identity")
        try:
            os.write(descriptor, issued)
            for context in self._contexts:
                context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)

    def session(self, *, dials: bool) -> TlsSession:
        """A session of its own for each connection. Issues a new certificate where the last is old."""
        if abs(self._env.clock.wall() - self._issued_at) > RENEWED_S:
            self._issue()
        client, server = self._contexts
        return TlsSession(client, _HOST) if dials else TlsSession(server)

    def peer_of(self, session: TlsSession) -> str:
        """Who is at the other end, once hands were shaken. Raises `ConnectError` if it is out of date."""
        shown: dict[str, Any] = session.peer_certificate() or {}
        first, last = (ssl.cert_time_to_seconds(shown[key]) for key in ("notBefore", "notAfter"))
        if not first <= self._env.clock.wall() <= last:
            raise ConnectError(
                f"its certificate is for {shown['notBefore']} to {shown['notAfter']}: the clocks of"
                " both machines differ by hours; set them right"
            )
        return "".join(value for kind, value in shown["subjectAltName"] if kind == "URI")
