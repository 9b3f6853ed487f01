"""A fleet of a test: an authority of its own, and what it issues, as `trinamo certs` makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import attrs

from trinamo.cli.up.certs import issue_certificate, write_authority
from trinamo.runtime.config.config import SecurityTlsConfig
from trinamo.runtime.env import Env, RealEnv
from trinamo.transports.security.fleet import Fleet

Step = Literal["admit", "show"] | None


@attrs.frozen
class FleetOfTest:
    """An authority in a directory."""

    directory: Path

    @classmethod
    def make(cls, directory: Path) -> FleetOfTest:
        write_authority(directory, days=10)
        return cls(directory)

    def section(
        self, *roles: str, name: str = "", days: float = 1, change: Step = None
    ) -> SecurityTlsConfig:
        """A new certificate that says these roles; of the same name in place of the last one."""
        called = name or "-".join(roles)
        issue_certificate(self.directory, roles, called, days)
        return SecurityTlsConfig(
            certificate_file=str(self.directory / f"{called}.pem"),
            key_file=str(self.directory / f"{called}.key"),
            authority_file=str(self.directory / "authority.pem"),
            change=change,
        )

    def member(self, *roles: str, env: Env | None = None, name: str = "", days: float = 1) -> Fleet:
        """What a process with such a certificate shows."""
        return Fleet.of(self.section(*roles, name=name, days=days), env or RealEnv())

    def changing(self, step: Step, *roles: str, secret: bytes) -> Fleet:
        """What a process shows at this step of a change from `secret`, or back to it."""
        section = self.section(*roles, name=f"{'-'.join(roles)}.{step}", change=step)
        return Fleet.of(section, RealEnv(), [secret, b""])
