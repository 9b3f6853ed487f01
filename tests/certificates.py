"""Certificates for one test, made with `openssl`: an authority, and what it has signed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import attrs

from tests.session.needs import OPENSSL

needs_openssl = OPENSSL.unless(shutil.which("openssl") is not None)
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@attrs.frozen
class Authority:
    """A certificate authority that lives in one directory."""

    directory: Path

    @property
    def ca_file(self) -> Path:
        return self.directory / "ca.pem"

    @classmethod
    def make(cls, directory: Path) -> Authority:
        directory.mkdir(parents=True, exist_ok=True)
        made = cls(directory)
        key, name = str(directory / "ca.key"), "/CN=an authority"
        _openssl("req", "-x509", *KEY, "-subj", name, "-keyout", key, "-out", str(made.ca_file))
        return made

    def sign(self, name: str, *, hosts: str = "DNS:localhost,IP:127.0.0.1") -> tuple[Path, Path]:
        """A certificate of this name for these hosts, and its key."""
        certificate, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        _openssl(
            *("req", "-x509", *KEY, "-subj", f"/CN={name}", "-addext", f"subjectAltName={hosts}"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-CA", str(self.ca_file), "-CAkey", str(self.directory / "ca.key")),
            *("-keyout", str(key), "-out", str(certificate)),
        )
        return certificate, key
