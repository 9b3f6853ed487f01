from __future__ import annotations

from pathlib import Path

import pytest

from trinamo.runtime.config.config import (
    SECRET_BYTES_MAX,
    Config,
    SecurityConfig,
    load_config,
    read_secrets,
)
from trinamo.runtime.config.source import dump
from trinamo.runtime.errors import ConfigError

SECRET = b"correct horse battery staple, and more"


def section(path: Path) -> SecurityConfig:
    return SecurityConfig(secret_file=str(path))


def write(path: Path, text: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text)
    path.chmod(mode)
    return path


def test_no_secret_is_the_default() -> None:
    assert read_secrets(Config().security) == (b"", b"")


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640])
def test_the_secret_is_what_the_file_holds_but_for_its_line_end(tmp_path: Path, mode: int) -> None:
    assert read_secrets(section(write(tmp_path / "key", SECRET, mode))) == (SECRET, b"")
    assert read_secrets(section(write(tmp_path / "line", SECRET + b"\r\n", mode))) == (SECRET, b"")


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o666])
def test_a_secret_that_everybody_may_read_is_refused_with_what_to_do(
    tmp_path: Path, mode: int
) -> None:
    with pytest.raises(ConfigError, match=r"security\.secret_file: .* chmod o-r"):
        read_secrets(section(write(tmp_path / "key", SECRET, mode)))


@pytest.mark.parametrize("text", [b"", b"x" * 31, b"x" * 31 + b"\n", b"x" * (SECRET_BYTES_MAX + 1)])
def test_too_little_or_too_much_is_a_sentence(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ConfigError, match="trinamo certs secret"):
        read_secrets(section(write(tmp_path / "key", text)))


def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path, Path("a\0b")):
        with pytest.raises(ConfigError, match=r"security\.secret_file: cannot read"):
            read_secrets(section(path))
    with pytest.raises(ConfigError, match="not a plain file"):
        read_secrets(section(Path("/dev/zero")))


def test_a_second_secret_needs_a_first_and_is_read_as_one(tmp_path: Path) -> None:
    second = write(tmp_path / "second", SECRET[::-1])
    with pytest.raises(ConfigError, match=r"security\.secret_file is not"):
        read_secrets(SecurityConfig(second_secret_file=str(second)))
    first = str(write(tmp_path / "first", SECRET))
    both = SecurityConfig(secret_file=first, second_secret_file=str(second))
    assert read_secrets(both) == (SECRET, SECRET[::-1])
    write(second, b"short")
    with pytest.raises(ConfigError, match=r"security\.second_secret_file: .* holds 5 bytes"):
        read_secrets(both)


def test_only_the_path_is_ever_shown(tmp_path: Path) -> None:
    path = write(tmp_path / "key", SECRET)
    config = load_config(overrides={"security.secret_file": str(path)}, environ={})
    shown = dump(config)
    assert str(path) in shown
    assert SECRET.decode() not in shown
