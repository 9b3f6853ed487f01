"""What `trinamo doctor` says of the HTTP server's certificate. It reads the files, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from trinamo.runtime.config.config import Config
from trinamo.runtime.errors import ConfigError
from trinamo.transports.http.tls.certificates import Certificates, find_certificate_faults

from .finding import Finding, Verdict

DAY_S: Final = 86_400
DAYS_MIN: Final = 14
"""Left to a certificate; whoever renews them by machine does so before."""


def certificate_findings(config: Config, now: float) -> Iterator[Finding]:
    """Whether the files of `http.tls` can be used, and for how long; nothing without TLS.

    `now` is in seconds since 1970.
    """
    tls = config.http.tls
    if tls.certificate_file is None:
        return
    try:
        expires_at = Certificates(tls).expires_at
    except ConfigError as error:
        yield Finding("certificate", Verdict.MISSING, error.message, "mend the files of http.tls")
        return
    for fault in find_certificate_faults(tls):
        yield Finding("certificate", Verdict.WARNING, fault)
    days = int((expires_at - now) // DAY_S)
    end = datetime.fromtimestamp(expires_at, UTC)
    text = f"{tls.certificate_file} ends on {end:%Y-%m-%d}"
    if days < 0:
        yield Finding("certificate", Verdict.MISSING, f"{text}: it is over", "renew it")
    elif days < DAYS_MIN:
        yield Finding("certificate", Verdict.WARNING, f"{text}, in {days} days", "renew it")
    else:
        yield Finding("certificate", Verdict.GOOD, text)
