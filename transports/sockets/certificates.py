"""Certificates in files: read, and read again when they have been renewed.

Each reading makes a new context, so a handshake sees one whole certificate or another, and streams
under way are not touched. What this file does not do: say what is in a context.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import attrs
import trio

from trinamo.runtime.config.keys import look_at
from trinamo.runtime.errors import ConfigError
from trinamo.runtime.metrics.metrics import Metrics

WARNED_S: Final = 7 * 86400.0
"""So long before its end the log warns of a certificate, or in the last quarter of a shorter one's time."""


@attrs.frozen(kw_only=True)
class Validity:
    """What was made of the files: when the certificate ends, in seconds since 1970, and how long it is valid in all."""

    expires_at: float
    valid_s: float


T = TypeVar("T", bound=Validity)


class CertificateFiles(Generic[T]):
    """What `load` makes of files, and makes again when they have changed.

    Raises `ConfigError`, with a sentence that says what to do, if they cannot be used.
    """

    def __init__(self, load: Callable[[], T], log: logging.Logger, *names: str | None) -> None:
        self._load, self._log, self._names = load, log, names
        # Looked at before they are read: what changes in between is seen the next time.
        self._seen = look_at(*self._names)
        self.loaded = load()
        """Of the files as they were when they could last be used."""
        self.is_renewal_broken = False
        """The files have changed since, into something that cannot be used."""

    @property
    def expires_at(self) -> float:
        """When the certificate in use ends, in seconds since 1970."""
        return self.loaded.expires_at

    def warn(self, left_s: float) -> None:
        when = f"expires in {left_s / 3600:.0f} hours" if left_s > 0 else "has expired"
        self._log.warning("the certificate of %s %s: renew it", self._names[0], when)

    def renew(self) -> None:
        """Read the files again if they have changed.

        A file that cannot be used is one line in the log, and what was read before stays. Reads
        the disk: a few names each time, some kilobytes if they have changed.
        """
        seen = look_at(*self._names)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self.loaded = self._load()
        except ConfigError as error:
            self.is_renewal_broken = True
            text = "the certificate was not renewed, the old one stays: %s"
            self._log.error(text, error.message)
            return
        self.is_renewal_broken = False
        self._log.info("the certificate of %s is renewed", self._names[0])


class CertificateSeries:
    """Of one use that a process has for a certificate: `http`, or `members`."""

    def __init__(self, metrics: Metrics, use: str) -> None:
        self._expiry = metrics.counts(
            "certificate_expiry_timestamp_seconds",
            "When the certificate in use ends, in Unix time",
            "use",
            may_fall=True,
        ).tally(use)
        self._is_broken = metrics.counts(
            "certificate_renewal_broken",
            "1 while the certificate's files have changed and cannot be used",
            "use",
            may_fall=True,
        ).tally(use)

    def tell(self, files: CertificateFiles[Any]) -> None:
        self._expiry.value = files.expires_at
        self._is_broken.value = files.is_renewal_broken


async def keep_renewed(
    files: CertificateFiles[Any], metrics: Metrics, use: str, interval_s: float
) -> None:
    """Look for a new certificate from time to time, and tell of the one in use; until cancelled."""
    told = CertificateSeries(metrics, use)
    warned_of = 0.0
    while True:
        told.tell(files)
        left_s = files.expires_at - metrics.clock.wall()
        if left_s < min(WARNED_S, files.loaded.valid_s / 4) and warned_of != files.expires_at:
            warned_of = files.expires_at
            files.warn(left_s)
        await trio.sleep(interval_s)
        files.renew()


def read_pem(key: str, name: str) -> str:
    """The text of the file `name`, of the configuration's `key`; `ConfigError` if it cannot be read."""
    try:
        return Path(name).read_text("ascii", errors="replace")
    except OSError as error:
        advice = "" if isinstance(error, FileNotFoundError) else "; the process needs to read it"
        raise ConfigError(f"{key}: {name}: {error.strerror}{advice}") from error


def locked_key(key: str) -> ConfigError:
    """Of a private key, at `key` of the configuration, that wants a password."""
    return ConfigError(
        f"{key}: the key is locked by a password; unlock it with"
        " `openssl pkey -in key.pem -out unlocked.pem`"
    )


def key_faults(key: str, name: str | None) -> list[str]:
    """What is allowed but not wise about the private key in the file `name`; empty if nothing."""
    try:
        mode = 0 if name is None else Path(name).stat().st_mode
    except OSError:
        return []
    if mode & stat.S_IROTH:
        return [f"{key}: everybody on this machine may read {name}; chmod 600 it"]
    return []


def validity_of(chain: str) -> dict[str, float]:
    """The fields of `Validity` for the first certificate of PEM text.

    Python's `ssl` tells it of peers' certificates only. Raises `ValueError` if there is none.
    """
    # Its import takes a while, and who has no certificate in files never needs it.
    from cryptography import x509  # noqa: PLC0415

    first = x509.load_pem_x509_certificate(chain.encode())
    ends, begins = first.not_valid_after_utc, first.not_valid_before_utc
    return {"expires_at": ends.timestamp(), "valid_s": (ends - begins).total_seconds()}
