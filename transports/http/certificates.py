"""The server's certificate, and the context that is made of its files (`transports/sockets/certificates.py`).

What this file does not do: speak TLS (`transports/sockets/wire.py`).
"""

from __future__ import annotations

import logging
import ssl
from typing import Final

import attrs

from trinamo.runtime.config.http import HttpTlsConfig
from trinamo.runtime.errors import ConfigError
from trinamo.transports.sockets.certificates import (
    CertificateFiles,
    Validity,
    locked_key,
    read_pem,
    validity_of,
)

PROTOCOLS: Final = ("h2", "http/1.1")
_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}

log = logging.getLogger("trinamo.http")


@attrs.frozen
class _Loaded(Validity):
    context: ssl.SSLContext


class Certificates(CertificateFiles[_Loaded]):
    """What the files of `http.tls` say; made only if there is a `certificate_file`.

    Raises `ConfigError`, with a sentence that says what to do, if they cannot be used.
    """

    def __init__(self, config: HttpTlsConfig) -> None:
        assert config.certificate_file is not None
        files = (config.certificate_file, config.key_file, config.client_ca_file)
        super().__init__(lambda: _load(config), log, *files)

    @property
    def context(self) -> ssl.SSLContext:
        """For the next handshake."""
        return self.loaded.context


def _load(config: HttpTlsConfig) -> _Loaded:
    assert config.certificate_file is not None
    assert config.key_file is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[config.minimum_version]
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(list(PROTOCOLS))
    chain = read_pem("http.tls.certificate_file", config.certificate_file)
    read_pem("http.tls.key_file", config.key_file)
    try:
        context.load_cert_chain(config.certificate_file, config.key_file, password=_no_password)
        # Read before that, and by another library: the file may have been written meanwhile.
        validity = validity_of(chain)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(_explain(config, error)) from error
    if config.client_ca_file is not None:
        read_pem("http.tls.client_ca_file", config.client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(config.client_ca_file)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"http.tls.client_ca_file: {config.client_ca_file} holds no certificate as PEM"
            ) from error
    return _Loaded(context, **validity)


def _no_password() -> str:
    # Without this, OpenSSL would ask for it at the terminal.
    raise locked_key("http.tls.key_file")


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
