"""What the doctor says of a certificate."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.transports.security.fleets import FleetOfTest
from trinamo.cli.doctor.examination import certificate_findings
from trinamo.cli.doctor.finding import FindingVerdict
from trinamo.runtime.config.config import Config, SecurityConfig
from trinamo.runtime.config.http import HttpConfig, HttpTlsConfig


def now() -> float:
    return time.time()


def config_of(certificate: Path, key: Path) -> Config:
    tls = HttpTlsConfig(certificate_file=str(certificate), key_file=str(key))
    return Config(http=HttpConfig(tls=tls))


def test_without_tls_there_is_nothing_to_say() -> None:
    assert list(certificate_findings(Config(), now())) == []


@pytest.mark.parametrize(
    ("days", "verdict", "text"),
    [
        (-30, FindingVerdict.GOOD, "ends on"),
        (0, FindingVerdict.WARNING, "in 1 days"),
        (3, FindingVerdict.MISSING, "over"),
    ],
)
def test_what_is_left_of_it_decides(
    tmp_path: Path, days: int, verdict: FindingVerdict, text: str
) -> None:
    """It is made for two days."""
    config = config_of(*Authority.make(tmp_path).sign("server", days=2))
    (finding,) = certificate_findings(config, now() + days * 86_400)
    assert finding.verdict is verdict
    assert text in finding.text


def test_a_file_that_is_missing_and_a_key_for_everybody_are_told(tmp_path: Path) -> None:
    certificate, key = Authority.make(tmp_path).sign("server", days=2)
    key.chmod(0o644)
    found = list(certificate_findings(config_of(certificate, key), now()))
    assert [each.verdict for each in found] == [FindingVerdict.WARNING, FindingVerdict.WARNING]
    key.unlink()
    (finding,) = certificate_findings(config_of(certificate, key), now())
    assert finding.verdict is FindingVerdict.MISSING
    assert "No such file" in finding.text


def test_of_a_fleet_s_own_certificate_the_same_is_told(tmp_path: Path) -> None:
    tls = FleetOfTest.make(tmp_path / "fleet").section("worker", days=9)
    config = Config(security=SecurityConfig(secret_file="secret", tls=tls))
    (finding,) = certificate_findings(config, now())
    assert finding.verdict is FindingVerdict.WARNING
    assert f"{tls.certificate_file} ends on" in finding.text
    assert "in 8 days" in finding.text
    assert tls.authority_file is not None
    Path(tls.authority_file).write_text("nothing")
    (finding,) = certificate_findings(config, now())
    assert "security.tls.authority_file: holds no certificate as PEM" in finding.text
    assert finding.remedy == "mend the files of security.tls"
