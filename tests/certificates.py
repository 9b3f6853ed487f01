"""Certificates for one test, made by `trustme`: an authority, and what it has signed.

They are as strict as a browser and Python 3.13 want them: key usage, names as alternatives, short lives.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import attrs
import trustme

DAYS = 30
"""So long each certificate lives, from the moment at which it was made: longer than the log warns before its end."""


@attrs.frozen
class Authority:
    """A certificate authority that writes what it signs into one directory."""

    directory: Path
    _authority: trustme.CA = attrs.field(factory=lambda: trustme.CA(organization_name="trinamo"))

    @property
    def ca_file(self) -> Path:
        return self.directory / "ca.pem"

    @classmethod
    def make(cls, directory: Path) -> Authority:
        directory.mkdir(parents=True, exist_ok=True)
        made = cls(directory)
        made._authority.cert_pem.write_to_path(str(made.ca_file))
        return made

    def sign(
        self, name: str, *, hosts: tuple[str, ...] = ("localhost", "127.0.0.1"), days: int = DAYS
    ) -> tuple[Path, Path]:
        """A certificate of this name for these hosts and addresses, and its key."""
        signed = self._authority.issue_cert(
            *hosts, common_name=name, not_after=datetime.now(UTC) + timedelta(days=days)
        )
        certificate, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        (chain,) = signed.cert_chain_pems
        chain.write_to_path(str(certificate))
        signed.private_key_pem.write_to_path(str(key))
        key.chmod(0o600)
        return certificate, key
