"""`trinamo certs`: a secret that every process of a cluster takes, and a fleet's own authority."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography import x509

from tests.cli.places import Place
from trinamo.runtime.config.config import load_config, read_secrets


def test_a_secret_is_made_that_nobody_else_may_read_and_every_process_takes(tmp_path: Path) -> None:
    place, path = Place(tmp_path), tmp_path / "cluster.secret"
    made = place.run("certs", "secret", str(path))
    assert made.returncode == 0, made.stderr
    assert "copy it to every machine" in made.stdout
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    config = load_config(overrides={"security.secret_file": str(path)}, environ={})
    secret, _ = read_secrets(config.security)
    assert len(bytes.fromhex(secret.decode())) == 32
    assert secret.decode() not in made.stdout

    again = place.run("certs", "secret", str(path))
    assert again.returncode == 2
    assert f"cannot write {path}: File exists" in again.stderr
    assert read_secrets(config.security) == (secret, b"")


def test_an_authority_issues_what_says_a_role_and_keeps_its_key_to_itself(tmp_path: Path) -> None:
    place, fleet = Place(tmp_path), tmp_path / "fleet"
    made = place.run("certs", "init", str(fleet))
    assert made.returncode == 0, made.stderr
    assert "keep it off the fleet" in " ".join(made.stdout.split())
    assert stat.S_IMODE((fleet / "authority.key").stat().st_mode) == 0o600
    again = place.run("certs", "init", str(fleet))
    assert again.returncode == 2
    assert "authority.key: File exists" in again.stderr

    seen = set()
    for _ in range(2):
        words = ("--role", "worker", "--role", "prefill", "--name", "rack-7", "--days", "30")
        issued = place.run("certs", "issue", str(fleet), *words)
        assert issued.returncode == 0, issued.stderr
        certificate = x509.load_pem_x509_certificate((fleet / "rack-7.pem").read_bytes())
        seen.add(certificate.serial_number)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        said = names.get_values_for_type(x509.UniformResourceIdentifier)
        assert said == ["trinamo://role/worker", "trinamo://role/prefill"]
        assert stat.S_IMODE((fleet / "rack-7.key").stat().st_mode) == 0o600
    assert len(seen) == 2
    assert {path.name for path in fleet.iterdir()} == {
        "authority.key", "authority.pem", "rack-7.key", "rack-7.pem"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("role", "name", "said"),
    [
        ("boss", "a", "--role is 'boss'; there are frontend, worker, prefill, operator"),
        ("worker", "../a", "--name is '../a': letters, digits, dots and dashes"),
        ("worker", "authority", "and not 'authority'"),
        ("worker", "a", "trinamo certs init"),
    ],
)
def test_what_cannot_be_issued_is_told_with_what_to_do(
    tmp_path: Path, role: str, name: str, said: str
) -> None:
    words = ("--role", role, "--name", name)
    refused = Place(tmp_path).run("certs", "issue", str(tmp_path), *words)
    assert refused.returncode == 2
    assert said in refused.stderr


def test_rights_below_what_is_no_prefix_are_refused(tmp_path: Path) -> None:
    """`team-a` without its slash would be rights to keys that nobody has."""
    words = ("certs", "rights", "--role", "worker", "--key-prefix")
    refused = Place(tmp_path).run(*words, "team-a")
    assert refused.returncode == 2
    assert "control_plane.etcd.key_prefix" in refused.stderr
    assert "readwrite team-a/instances/" in Place(tmp_path).run(*words, "team-a/").stdout
