"""The server's certificate: what is refused and how it is said, and what a renewal changes."""

from __future__ import annotations

import logging
import shutil
import ssl
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from tests.certificates import Authority
from trinamo import HttpService
from trinamo.runtime.config.http import HttpTlsConfig
from trinamo.runtime.errors import ConfigError
from trinamo.transports.http import certificates as certificates_module
from trinamo.transports.http.certificates import Certificates
from trinamo.transports.sockets.certificates import key_faults, validity_of


@pytest.fixture
def pair(authority: Authority, tmp_path: Path) -> tuple[Path, Path]:
    """A certificate and its key, which the test may change."""
    certificate, key = authority.sign("pair")
    return (
        Path(shutil.copy(certificate, tmp_path / "tls.crt")),
        Path(shutil.copy(key, tmp_path / "tls.key")),
    )


def of(certificate: Path | str, key: Path | str, **more: Any) -> HttpTlsConfig:
    return HttpTlsConfig(certificate_file=str(certificate), key_file=str(key), **more)


def test_the_expiry_is_what_another_reader_says(pair: tuple[Path, Path]) -> None:
    said = x509.load_pem_x509_certificate(pair[0].read_bytes()).not_valid_after_utc
    assert Certificates(of(*pair)).expires_at == said.timestamp()


@pytest.mark.parametrize("end", range(0, 200, 7))
def test_half_a_certificate_has_no_expiry(pair: tuple[Path, Path], end: int) -> None:
    whole = ssl.PEM_cert_to_DER_cert(pair[0].read_text())
    with pytest.raises(ValueError):  # noqa: PT011 -- whatever the library says of it
        validity_of(ssl.DER_cert_to_PEM_cert(whole[:end]))


def test_a_missing_file_is_named(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=r"http\.tls\.certificate_file: /none: No such file"):
        Certificates(of("/none", pair[1]))
    with pytest.raises(ConfigError, match=r"http\.tls\.key_file: /none: No such file"):
        Certificates(of(pair[0], "/none"))
    with pytest.raises(ConfigError, match=r"http\.tls\.client_ca_file: /none: No such file"):
        Certificates(of(*pair, client_ca_file="/none"))


def test_a_key_of_another_certificate_is_named(
    pair: tuple[Path, Path], authority: Authority
) -> None:
    _, other = authority.sign("other")
    with pytest.raises(ConfigError, match=r"is not the key of .* give both files of one"):
        Certificates(of(pair[0], other))


def test_files_that_hold_something_else_are_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    with pytest.raises(ConfigError, match="no certificate and key as PEM"):
        Certificates(of(nothing, pair[1]))
    with pytest.raises(ConfigError, match="no certificate and key as PEM"):
        Certificates(of(pair[0], nothing))
    with pytest.raises(ConfigError, match=r"client_ca_file: .* holds no certificate"):
        Certificates(of(*pair, client_ca_file=str(nothing)))


def test_a_locked_key_is_not_asked_for_at_the_terminal(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    locked = tmp_path / "locked.key"
    key = serialization.load_pem_private_key(pair[1].read_bytes(), password=None)
    form = serialization.PrivateFormat.PKCS8
    lock = serialization.BestAvailableEncryption(b"secret")
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, lock))
    with pytest.raises(ConfigError, match="locked by a password; unlock it with"):
        Certificates(of(pair[0], locked))


def test_a_key_that_everybody_may_read_is_a_warning(pair: tuple[Path, Path]) -> None:
    pair[1].chmod(0o644)
    (fault,) = key_faults("http.tls.key_file", str(pair[1]))
    assert "chmod 600" in fault
    pair[1].chmod(0o640)
    assert key_faults("http.tls.key_file", str(pair[1])) == []


def test_a_key_without_a_certificate_is_refused() -> None:
    with pytest.raises(ConfigError, match="key_file needs certificate_file"):
        HttpService.builder().config(tls={"key_file": "key.pem"}).build()
    with pytest.raises(ConfigError, match="client_ca_file is set, but certificate_file is null"):
        HttpService.builder().config(tls={"client_ca_file": "ca.pem"}).build()


def test_nothing_is_read_again_until_a_file_changes(pair: tuple[Path, Path]) -> None:
    certificates = Certificates(of(*pair))
    before = certificates.context
    certificates.renew()
    assert certificates.context is before
    pair[0].write_bytes(pair[0].read_bytes())
    certificates.renew()
    assert certificates.context is not before


@pytest.mark.parametrize("how", ["half", "gone", "key of another", "trusted", "being written"])
def test_a_broken_renewal_keeps_the_old_certificate_and_says_so(
    pair: tuple[Path, Path],
    authority: Authority,
    how: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    certificates = Certificates(of(*pair))
    before = certificates.context
    good = pair[0].read_bytes()
    if how == "half":
        pair[0].write_bytes(good[:100])
    elif how == "gone":
        pair[0].unlink()
    elif how == "trusted":
        # As `openssl x509 -trustout` writes it: OpenSSL takes it, and other readers do not.
        pair[0].write_bytes(good.replace(b" CERTIFICATE", b" TRUSTED CERTIFICATE"))
    elif how == "being written":
        # Half of it is there when it is read first, and all of it when OpenSSL reads it.
        pair[0].write_bytes(good + b"\n")
        halves = {str(pair[0]): good[:100].decode()}
        monkeypatch.setattr(
            certificates_module, "read_pem", lambda _, name: halves.get(name, "a key")
        )
    else:
        pair[0].write_bytes(authority.sign("another")[0].read_bytes())
    certificates.renew()
    certificates.renew()
    assert certificates.context is before
    assert certificates.is_renewal_broken
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "the old one stays: http.tls" in record.getMessage()

    monkeypatch.undo()
    pair[0].write_bytes(good)
    certificates.renew()
    assert not certificates.is_renewal_broken


def test_a_link_that_leads_elsewhere_is_a_renewal(
    pair: tuple[Path, Path], authority: Authority, tmp_path: Path
) -> None:
    """As Kubernetes renews a secret: it moves one link, and no name in the folder changes."""
    new = tmp_path / "new"
    new.mkdir()
    certificate, key = authority.sign("linked")
    shutil.copy(certificate, new / "tls.crt")
    shutil.copy(key, new / "tls.key")
    data = tmp_path / "data"
    data.symlink_to(tmp_path)
    certificates = Certificates(of(data / "tls.crt", data / "tls.key"))
    before = certificates.context
    (tmp_path / "next").symlink_to(new)
    (tmp_path / "next").rename(data)
    certificates.renew()
    assert certificates.context is not before


def name_of(stream: trio.SSLStream[trio.SocketStream]) -> str:
    subject = dict(pair[0] for pair in stream.getpeercert()["subject"])
    return str(subject["commonName"])


async def test_new_handshakes_get_the_new_certificate_while_streams_go_on(
    serve: Any, pair: tuple[Path, Path], authority: Authority
) -> None:
    trust = ssl.create_default_context(cafile=str(authority.ca_file))
    running = await serve(
        tls={
            "certificate_file": str(pair[0]),
            "key_file": str(pair[1]),
            "renewal_interval_s": 0.01,
        }
    )

    async def connect() -> trio.SSLStream[trio.SocketStream]:
        stream = await trio.open_ssl_over_tcp_stream("127.0.0.1", running.port, ssl_context=trust)
        await stream.do_handshake()
        return stream

    expiry = "certificate_expiry_timestamp_seconds"
    broken = "certificate_renewal_broken"
    first = await connect()
    assert name_of(first) == "pair"
    await running.wait_for(lambda: running.value(expiry, use="http") > 0)

    pair[0].write_text("broken")
    await running.wait_for(lambda: running.value(broken, use="http") == 1)
    async with await connect() as second:
        assert name_of(second) == "pair"

    certificate, key = authority.sign("renewed")
    pair[0].write_bytes(certificate.read_bytes())
    pair[1].write_bytes(key.read_bytes())
    await running.wait_for(lambda: running.value(broken, use="http") == 0)
    async with await connect() as third:
        assert name_of(third) == "renewed"
    await first.send_all(b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    with trio.fail_after(120):
        assert (await first.receive_some()).startswith(b"HTTP/1.1 200 ")
    await trio.aclose_forcefully(first)
    await running.wait_quiet()
