"""Where an upstream is, and what every request to it says: URL, key, TLS."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import attrs

from trinamo.runtime.config.keys import is_loopback
from trinamo.runtime.config.upstream import UpstreamConfig
from trinamo.runtime.errors import ConfigError

PORTS: Final = {"http": 80, "https": 443}
_PATH_DEFAULT: Final = "/v1"
_KEY_BYTES_MAX: Final = 8192


@attrs.frozen
class Address:
    """One upstream. Its key is in `authorization` alone, which `repr` does not show."""

    url: str
    """As it is told to people; without credentials, which a URL may not hold."""
    host: str
    port: int
    host_header: str
    path: str
    """Of the API, such as `/v1`, without a slash at the end."""
    tls: ssl.SSLContext | None = attrs.field(default=None, repr=False, eq=False)
    authorization: str = attrs.field(default="", repr=False)

    @property
    def root(self) -> str:
        """What `/health` and `/metrics` stand under."""
        return self.path.removesuffix(_PATH_DEFAULT)

    @property
    def shows_key(self) -> bool:
        """Whether a key goes to another machine in clear text."""
        if not self.authorization or self.tls is not None:
            return False
        return not is_loopback(self.host)


def find_address(url: str, section: UpstreamConfig) -> Address:
    """The upstream at `url`, with the key and the certificates that the configuration names.

    A URL without a path means `/v1`. Raises `ConfigError`, which never holds a key.
    """
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise ConfigError(f"the upstream's URL is wrong: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigError("an upstream's URL must not hold a password; use --upstream-key-env")
    if parts.scheme not in PORTS or not host or parts.query or parts.fragment:
        raise ConfigError(f"the upstream {url[:200]!r} is no URL such as http://host:8000/v1")
    if any(ord(c) <= 32 or ord(c) > 126 for c in url):
        raise ConfigError("the upstream's URL holds blanks, or characters beyond ASCII")
    tls: ssl.SSLContext | None = None
    if parts.scheme == "https":
        try:
            tls = ssl.create_default_context(cafile=section.ca_file)
        except (OSError, ssl.SSLError) as error:
            why = error.strerror or error
            raise ConfigError(f"worker.upstream.ca_file: {section.ca_file}: {why}") from error
    return Address(
        url=url.rstrip("/"),
        host=host,
        port=port or PORTS[parts.scheme],
        host_header=parts.netloc,
        path=parts.path.rstrip("/") or _PATH_DEFAULT,
        tls=tls,
        authorization=_authorization(section),
    )


def _authorization(section: UpstreamConfig) -> str:
    if section.key_env is not None:
        key = os.environ.get(section.key_env)
        if key is None:
            raise ConfigError(
                f"worker.upstream.key_env: there is no environment variable {section.key_env}"
            )
    elif section.key_file is None:
        return ""
    else:
        try:
            with Path(section.key_file).open("rb") as file:
                key = file.read(_KEY_BYTES_MAX).decode("ascii")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not ASCII"
            raise ConfigError(
                f"worker.upstream.key_file: {section.key_file} cannot be read: {why}"
            ) from None
    key = key.strip()
    if not key or any(ord(c) <= 32 or ord(c) > 126 for c in key):
        raise ConfigError("the upstream's key is empty, or holds characters that no header may")
    return f"Bearer {key}"
