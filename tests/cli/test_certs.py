"""`trinamo certs secret`: a file that every process of a cluster takes."""

from __future__ import annotations

import stat
from pathlib import Path

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
