"""The server's certificate: read from its files, and read again when they have been renewed.

Each reading makes a new context, so a handshake sees one whole certificate or another, and streams
under way are not touched. What this file does not do: speak TLS (`transports/sockets/tls.py`).
"""

from __future__ import annotations

import logging
import re
import ssl
import stat
from calendar import timegm
from pathlib import Path
from typing import Final

import attrs

from trinamo.runtime.config.http import HttpTlsConfig
from trinamo.runtime.config.keys import look_at
from trinamo.runtime.errors import ConfigError
from trinamo.runtime.metrics.metrics import Metrics

PROTOCOLS: Final = ("h2", "http/1.1")
_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_PEM_END: Final = "-----END CERTIFICATE-----"
_PEM_START: Final = "-----BEGIN CERTIFICATE-----"

log = logging.getLogger("trinamo.http")


@attrs.frozen
class _Loaded:
    context: ssl.SSLContext
    expires_at: float


class Certificates:
    """What the files of `http.tls` say; made only if there is a `certificate_file`.

    Raises `ConfigError`, with a sentence that says what to do, if they cannot be used.
    """

    def __init__(self, config: HttpTlsConfig) -> None:
        self._config = config
        self._seen = _look(config)
        self._loaded = _load(config)
        self.is_renewal_broken = False
        """The files have changed since, into something that cannot be used."""

    @property
    def context(self) -> ssl.SSLContext:
        """For the next handshake."""
        return self._loaded.context

    @property
    def expires_at(self) -> float:
        """When the certificate in use ends, in seconds since 1970."""
        return self._loaded.expires_at

    def renew(self) -> None:
        """Read the files again if they have changed.

        A file that cannot be used is one line in the log, and what was read before stays. Reads
        the disk: a few names each time, some kilobytes if they have changed.
        """
        # Looked at before they are read: what changes in between is seen the next time.
        seen = _look(self._config)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._loaded = _load(self._config)
        except ConfigError as error:
            self.is_renewal_broken = True
            text = "the certificate was not renewed, the old one stays: %s"
            log.error(text, error.message)  # noqa: TRY400 -- the sentence says it all
            return
        self.is_renewal_broken = False
        log.info("the certificate of %s is renewed", self._config.certificate_file)


def find_certificate_faults(config: HttpTlsConfig) -> list[str]:
    """What is allowed but not wise about the files of `config`; empty if there are none."""
    if config.key_file is None:
        return []
    try:
        mode = Path(config.key_file).stat().st_mode
    except OSError:
        return []
    if mode & stat.S_IROTH:
        return [
            f"http.tls.key_file: everybody on this machine may read {config.key_file}; chmod 600 it"
        ]
    return []


def _look(config: HttpTlsConfig) -> tuple[object, ...]:
    return look_at(config.certificate_file, config.key_file, config.client_ca_file)


def _load(config: HttpTlsConfig) -> _Loaded:
    assert config.certificate_file is not None
    assert config.key_file is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[config.minimum_version]
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(list(PROTOCOLS))
    chain = _read("certificate_file", config.certificate_file)
    _read("key_file", config.key_file)
    try:
        context.load_cert_chain(config.certificate_file, config.key_file, password=_no_password)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(_explain(config, error)) from error
    if config.client_ca_file is not None:
        _read("client_ca_file", config.client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(config.client_ca_file)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"http.tls.client_ca_file: {config.client_ca_file} holds no certificate as PEM"
            ) from error
    first = chain[chain.index(_PEM_START) : chain.index(_PEM_END)] + _PEM_END
    return _Loaded(context, find_expiry(ssl.PEM_cert_to_DER_cert(first)))


def _read(key: str, name: str) -> str:
    try:
        return Path(name).read_text("ascii", errors="replace")
    except OSError as error:
        advice = "" if isinstance(error, FileNotFoundError) else "; the process needs to read it"
        raise ConfigError(f"http.tls.{key}: {name}: {error.strerror}{advice}") from error


def _no_password() -> str:
    # Without this, OpenSSL would ask for it at the terminal.
    raise ConfigError(
        "http.tls.key_file: the key is locked by a password; unlock it with"
        " `openssl pkey -in key.pem -out unlocked.pem`"
    )


def _explain(config: HttpTlsConfig, error: Exception) -> str:
    reason = getattr(error, "reason", None)
    if reason == "KEY_VALUES_MISMATCH":
        return (
            f"http.tls.key_file: {config.key_file} is not the key of {config.certificate_file};"
            " give both files of one certificate"
        )
    if reason in ("EE_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"):
        return f"http.tls.certificate_file: {config.certificate_file} is too weak ({reason})"
    return (
        f"http.tls: {config.certificate_file} and {config.key_file} are no certificate and key as"
        f" PEM ({reason or error})"
    )


SEQUENCE: Final = 0x30
EXPLICIT_VERSION: Final = 0xA0
UTC_TIME: Final = 0x17
GENERALIZED_TIME: Final = 0x18
_TIME: Final = re.compile(rb"(\d{2}|\d{4})(\d\d)(\d\d)(\d\d)(\d\d)(\d\d)Z")
_CENTURY_STARTS: Final = 50
"""A year of two digits below this is of the 2000s (RFC 5280, section 4.1.2.5.1)."""


def find_expiry(der: bytes) -> float:
    """The end of a certificate's validity, in seconds since 1970 (RFC 5280, section 4.1).

    Python's `ssl` tells it of peers' certificates only.

    Raises `ValueError` for bytes that are no certificate.
    """
    certificate = _enter(der, 0, SEQUENCE)
    at = _enter(der, certificate, SEQUENCE)
    if der[at : at + 1] == bytes([EXPLICIT_VERSION]):
        at = _skip(der, at)
    # The serial number, the signature's algorithm, the issuer; then the validity.
    for _ in range(3):
        at = _skip(der, at)
    at = _skip(der, _enter(der, at, SEQUENCE))
    tag, start, end = _element(der, at)
    time = _TIME.fullmatch(der[start:end])
    if tag not in (UTC_TIME, GENERALIZED_TIME) or time is None:
        raise ValueError("the certificate's end is no time")
    year, month, day, hour, minute, second = map(int, time.groups())
    if tag == UTC_TIME:
        year += 2000 if year < _CENTURY_STARTS else 1900
    return float(timegm((year, month, day, hour, minute, second)))


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag, start and end of the contents of the element at `at`."""
    if at + 2 > len(der):
        raise ValueError("the certificate is cut short")
    tag, size, start = der[at], der[at + 1], at + 2
    if size & 0x80:
        count = size & 0x7F
        size = int.from_bytes(der[start : start + count], "big")
        start += count
    if start + size > len(der):
        raise ValueError("the certificate is cut short")
    return tag, start, start + size


def _enter(der: bytes, at: int, wanted: int) -> int:
    tag, start, _ = _element(der, at)
    if tag != wanted:
        raise ValueError("this is no certificate")
    return start


def _skip(der: bytes, at: int) -> int:
    return _element(der, at)[2]


class CertificateSeries:
    """Of one server that speaks TLS."""

    def __init__(self, metrics: Metrics) -> None:
        self._expiry = metrics.count(
            "http_certificate_expiry_timestamp_seconds",
            "When the HTTP server's certificate ends, in Unix time",
            may_fall=True,
        )
        self._is_broken = metrics.count(
            "http_certificate_renewal_broken",
            "1 while the files of the HTTP server's certificate have changed and cannot be used",
            may_fall=True,
        )

    def tell(self, expires_at: float, *, is_renewal_broken: bool) -> None:
        """The certificate in use ends at `expires_at`, in Unix time."""
        self._expiry.value = expires_at
        self._is_broken.value = is_renewal_broken
