"""What an operator watches of the HTTP server's certificate."""

from __future__ import annotations

from trinamo.runtime.metrics.metrics import Metrics


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
