"""What a process shows where a fleet has an authority of its own: the certificate of `security.tls`.

It stands in place of what processes issue themselves from the secret (`identity.py`), on connections and
under what they write to etcd. No process has the authority's key, so a certificate says what its
holder may do (`roles.py`). It names a role, and no instance: which instance listens is what the holder says inside the connection, and nobody
between can change that. While a cluster changes over (`security.tls.change`), who has the secret alone is
let in and asked as well, by the name that its own certificate says.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal

import attrs
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from trinamo.runtime.env import Env
from trinamo.runtime.errors import ConfigError, ConnectError, ImpostorError
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.transports.sockets.certificates import (
    CertificateFiles,
    Validity,
    keep_renewed,
    key_faults,
    locked_key,
    read_pem,
)
from trinamo.transports.sockets.wire import TlsSession

from .identity import (
    Contexts,
    Shown,
    authority_of,
    check_name,
    contexts_of,
    has_issued,
    session_of,
)
from .roles import DIALS, LISTENS, Role, role_names, roles_in

if TYPE_CHECKING:
    from trinamo.runtime.config.config import SecurityTlsConfig
    from trinamo.runtime.metrics.metrics import Metrics

_log = logging.getLogger("trinamo.tcp")
_KEY: Final = "security.tls"
_RENEWAL_INTERVAL_S: Final = 5.0
_SHOWN_BYTES_MAX: Final = 1400
"""Of a certificate, which stands behind each entry that is signed with it."""


@attrs.frozen
class FleetCertificate(Validity):
    contexts: Contexts = attrs.field(repr=False)
    key: Ed25519PrivateKey = attrs.field(repr=False)
    shown: bytes
    """The certificate as DER."""
    authorities: tuple[str, ...]
    """Each as PEM, without those that had ended when the file was read."""
    roles: frozenset[Role]


class Fleet(Shown):
    """See `Shown`; one for all that a process does.

    Args:
        load: What makes it of files; raises `ConfigError`.
        names: Of these files. None: it never changes.
        change: The step of `security.tls.change`.
    """

    def __init__(
        self,
        load: Callable[[], FleetCertificate],
        env: Env,
        names: Sequence[str] = (),
        change: Literal["admit", "show"] | None = None,
    ) -> None:
        super().__init__(env)
        self._change = change
        self._files = CertificateFiles(load, _log, *names)

    @classmethod
    def of(cls, section: SecurityTlsConfig, env: Env, secrets: Sequence[bytes] = ()) -> Fleet:
        """Of the files of `security.tls`; `ConfigError` says why they cannot be used.

        Who has one of `secrets` is let in as well while the cluster changes over.
        """
        keys = ("certificate_file", "key_file", "authority_file")
        names = [getattr(section, key) for key in keys]
        for fault in key_faults(f"{_KEY}.key_file", section.key_file):
            _log.warning(fault)
        if section.change is not None:
            _log.warning(
                "%s.change is %s: who has the secret alone is let in, too; leave it out once every process"
                " shows a certificate",
                *(_KEY, section.change),
            )

        def load() -> FleetCertificate:
            texts = [read_pem(f"{_KEY}.{key}", name) for key, name in zip(keys, names, strict=True)]
            admitted = secrets if section.change is not None else ()
            return fleet_certificate(*texts, now=env.clock.wall(), admitted=admitted)

        return cls(load, env, names, section.change)

    @property
    def certificate(self) -> FleetCertificate:
        """The one in use."""
        return self._files.loaded

    @property
    def is_shown(self) -> bool:
        """Whether this process shows it, and not what the secret makes."""
        return self._change != "admit"

    @property
    def admits_secret(self) -> bool:
        """Whether who has the secret alone is a member, too."""
        return self._change is not None

    async def keep(self, metrics: Metrics) -> None:
        """Look for a renewed one, and tell when it ends; until cancelled."""
        await keep_renewed(self._files, metrics, "members", _RENEWAL_INTERVAL_S)

    def check_serving(self) -> None:
        """Raise `ConfigError` if nobody would believe that this process takes requests."""
        roles, wanted = self.certificate.roles, LISTENS[Purpose.REQUESTS]
        if not roles & wanted:
            raise _fault(
                "certificate_file",
                f"says {role_names(roles)}, and this process is to take requests, which a"
                f" {role_names(wanted)} does; give it a certificate of its own",
            )

    def session(self, *, dials: bool) -> TlsSession:
        return session_of(self.certificate.contexts, dials=dials)

    def check_dialler(self, peer: Sequence[str], purpose: Purpose) -> None:
        roles, wanted = roles_in(peer), DIALS[purpose]
        # Any certificate of the authority shakes hands, such as a web server's: what says no role is not yet the secret's.
        if self.admits_secret and [*peer] == [purpose.uri("")]:
            return
        if not roles & wanted:
            raise ConnectError(
                f"its certificate says {role_names(roles)}, and {purpose} are for"
                f" {role_names(wanted)}"
            )

    def is_worker(self, peer: Sequence[str]) -> bool:
        """Whether who was let in is one that answers requests, too."""
        roles = roles_in(peer)
        return bool(roles & LISTENS[Purpose.REQUESTS]) or (self.admits_secret and not roles)

    def check_listener(self, peer: Sequence[str], purpose: Purpose, name: str) -> None:
        """See `Shown`: who has the role may say which instance it is."""
        roles, wanted = roles_in(peer), LISTENS[purpose]
        if self.admits_secret and not roles:
            check_name(peer, purpose, name)
        elif not roles & wanted:
            raise ImpostorError(
                f"its certificate says {role_names(roles)}, and {purpose} are of"
                f" {role_names(wanted)}"
            )


def fleet_certificate(
    certificate_text: str,
    key_text: str,
    authority_text: str,
    *,
    now: float,
    admitted: Sequence[bytes] = (),
) -> FleetCertificate:
    """What PEM text holds; `ConfigError` says why a process could do nothing with it.

    Who has one of the secrets `admitted` shakes hands as well.
    """
    certificate = _parsed("certificate_file", certificate_text)[0]
    authorities = _parsed("authority_file", authority_text)
    key = _key_of(key_text)
    try:
        is_pair = certificate.public_key() == key.public_key()
    except (ValueError, UnsupportedAlgorithm):
        is_pair = False
    if not is_pair:
        raise _fault("key_file", "is not the key of certificate_file; give both files of one")
    issuer = next((each for each in authorities if has_issued(each, certificate)), None)
    if issuer is None:
        raise _fault(
            "certificate_file",
            f"was issued by {certificate.issuer.rfc4514_string()}, whose certificate is not in"
            " authority_file; put the one that issued it there",
        )
    for file, each in (("certificate_file", certificate), ("authority_file", issuer)):
        if each.not_valid_after_utc.timestamp() <= now:
            end = f"{each.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
            raise _fault(file, f"expired on {end}; renew it (`trinamo certs issue`)")
    # OpenSSL is told not to look at times: what one issues that has ended must not count.
    lasting = [each for each in authorities if each.not_valid_after_utc.timestamp() > now]
    authority_pems = tuple(each.public_bytes(Encoding.PEM).decode() for each in lasting)
    roles = roles_in(_uris(certificate))
    if not roles:
        raise _fault(
            "certificate_file",
            f"says no role; it needs a URI such as {Role.WORKER.uri} among its alternative names"
            " (`trinamo certs issue --role`)",
        )
    shown = certificate.public_bytes(Encoding.DER)
    if len(shown) > _SHOWN_BYTES_MAX:
        raise _fault(
            "certificate_file",
            f"holds {len(shown)} bytes, and {_SHOWN_BYTES_MAX} are the most: it stands behind each"
            " entry of etcd; give it fewer names, or an authority with an Ed25519 or ECDSA key",
        )
    try:
        derived = [authority_of(each).certificate for each in admitted if each]
        trusted = "".join([*authority_pems, *derived])
        contexts = contexts_of(certificate_text.encode(), key_text.encode(), trusted)
        # Shake hands with ourselves, as both ends; `ssl.SSLError` is what others would raise.
        dials, listens = (session_of(contexts, dials=each) for each in (True, False))
        data, is_done = b"", False
        while not is_done:
            dials.shake(data)
            is_done = listens.shake(dials.pending())
            data = listens.pending()
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", "") or error.reason
        raise _fault(
            "certificate_file", f"is none for both ends of a connection ({why})"
        ) from error
    return FleetCertificate(
        contexts,
        key,
        shown,
        authority_pems,
        roles,
        expires_at=min(each.not_valid_after_utc.timestamp() for each in (certificate, issuer)),
        valid_s=(
            certificate.not_valid_after_utc - certificate.not_valid_before_utc
        ).total_seconds(),
    )


def _fault(file: str, what: str) -> ConfigError:
    return ConfigError(f"{_KEY}.{file}: {what}")


def _parsed(file: str, text: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(text.encode())
    except ValueError as error:
        raise _fault(file, "holds no certificate as PEM") from error


def _key_of(text: str) -> Ed25519PrivateKey:
    try:
        key = load_pem_private_key(text.encode(), None)
    except TypeError as error:
        raise locked_key(f"{_KEY}.key_file") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _fault("key_file", "holds no private key as PEM") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _fault(
            "key_file",
            "is no Ed25519 key, with which processes sign what they write to etcd; have one made"
            " (`trinamo certs issue`; cert-manager: privateKey.algorithm: Ed25519)",
        )
    return key


def _uris(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return names.value.get_values_for_type(x509.UniformResourceIdentifier)
