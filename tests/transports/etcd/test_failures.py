"""What the words of gRPC and etcd are taken to mean, and what endpoints may look like."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from trinamo.runtime.config.planes import TlsConfig
from trinamo.runtime.errors import (
    CompactedError,
    ConfigError,
    ConnectError,
    ControlPlaneError,
    LeaseLostError,
    OverloadedError,
    TrinamoError,
)
from trinamo.transports.etcd.bridge import Endpoints, open_channel, parse_endpoints, resolve
from trinamo.transports.etcd.rpc import CallVerdict, StatusError, final_error, judge

Code = grpc.StatusCode


# fmt: off
VERDICTS = [
    (Code.UNAVAILABLE, "failed to connect to all addresses; last error: refused",   CallVerdict.UNSENT),
    (Code.UNAVAILABLE, "connections to all backends failing; last error: refused",  CallVerdict.UNSENT),
    (Code.UNAVAILABLE, "errors resolving no-such-host:1: not found",                CallVerdict.UNSENT),
    (Code.UNAVAILABLE, "Socket closed",                                             CallVerdict.UNKNOWN),
    (Code.UNAVAILABLE, "Stream removed (recvmsg:Connection reset by peer (104))",   CallVerdict.UNKNOWN),
    (Code.UNAVAILABLE, "etcdserver: leader changed",                                CallVerdict.UNKNOWN),
    (Code.UNAVAILABLE, "etcdserver: request timed out",                             CallVerdict.UNKNOWN),
    (Code.DEADLINE_EXCEEDED, "Deadline Exceeded",                                   CallVerdict.UNKNOWN),
    (Code.CANCELLED, "Channel closed!",                                             CallVerdict.UNKNOWN),
    (Code.UNKNOWN, "",                                                              CallVerdict.UNKNOWN),
    (Code.UNAUTHENTICATED, "etcdserver: invalid auth token",                        CallVerdict.DENIED),
    (Code.INVALID_ARGUMENT, "etcdserver: user name is empty",                       CallVerdict.DENIED),
    (Code.INVALID_ARGUMENT, "etcdserver: revision of auth store is old",            CallVerdict.DENIED),
    (Code.INVALID_ARGUMENT, "etcdserver: key is not provided",                      CallVerdict.FINAL),
    (Code.PERMISSION_DENIED, "etcdserver: permission denied",                       CallVerdict.FINAL),
    (Code.NOT_FOUND, "etcdserver: requested lease not found",                       CallVerdict.FINAL),
]
ERRORS: list[tuple[grpc.StatusCode, str, type[TrinamoError]]] = [
    (Code.NOT_FOUND, "etcdserver: requested lease not found",                        LeaseLostError),
    (Code.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted",    CompactedError),
    (Code.OUT_OF_RANGE, "etcdserver: too large lease TTL",                        ControlPlaneError),
    (Code.RESOURCE_EXHAUSTED, "etcdserver: too many requests",                      OverloadedError),
    (Code.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded",        ControlPlaneError),
    (Code.PERMISSION_DENIED, "etcdserver: permission denied",                     ControlPlaneError),
]
# fmt: on


@pytest.mark.parametrize(("code", "text", "verdict"), VERDICTS)
def test_only_words_that_say_so_mean_unsent(
    code: grpc.StatusCode, text: str, verdict: CallVerdict
) -> None:
    assert judge(StatusError(code.name, text)) is verdict


@pytest.mark.parametrize(("code", "text", "expected"), ERRORS)
def test_a_no_of_the_store_is_definite(
    code: grpc.StatusCode, text: str, expected: type[TrinamoError]
) -> None:
    error = final_error(StatusError(code.name, text))
    assert type(error) is expected
    assert error.definite
    assert text in str(error)


@pytest.mark.parametrize(
    ("given", "addresses", "uses_tls"),
    [
        ("127.0.0.1:2379", ("127.0.0.1:2379",), False),
        ("http://etcd:2379/", ("etcd:2379",), False),
        ("https://a:1, https://b:2", ("a:1", "b:2"), True),
        (["a:1", "http://b:2"], ("a:1", "b:2"), False),
        ("[::1]:2379", ("[::1]:2379",), False),
    ],
)
def test_endpoints_are_read_in_every_usual_form(
    given: str | list[str], addresses: tuple[str, ...], uses_tls: bool
) -> None:
    assert parse_endpoints(given) == Endpoints(addresses, uses_tls)


@pytest.mark.parametrize(
    "given", ["", "host", ":1", "host:port", "ftp://host:1", "a:1,", "a:1,https://b:1"]
)
def test_endpoints_that_make_no_sense_are_named(given: str) -> None:
    with pytest.raises(ConfigError, match="etcd endpoint"):
        parse_endpoints(given)


def test_no_endpoint_at_all_is_told() -> None:
    with pytest.raises(ConfigError, match="no etcd endpoint"):
        parse_endpoints([])


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ("etcd.example:2379", "dns:///etcd.example:2379"),
        ("127.0.0.1:1,127.0.0.2:2", "ipv4:127.0.0.1:1,127.0.0.2:2"),
        ("[::1]:1,[::2]:2", "ipv6:[::1]:1,[::2]:2"),
        ("127.0.0.1:1,[::2]:2", "ipv4:127.0.0.1:1"),
    ],
)
async def test_endpoints_become_one_target(given: str, target: str) -> None:
    assert await resolve(parse_endpoints(given)) == target


async def test_a_name_among_several_that_is_unknown_is_a_connect_error() -> None:
    with pytest.raises(ConnectError, match=r"no-such-host\.invalid:1"):
        await resolve(parse_endpoints("127.0.0.1:1,no-such-host.invalid:1"))


def test_a_tls_file_that_is_missing_is_named(tmp_path: Path) -> None:
    section = TlsConfig(enabled=True, ca_file=str(tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match=r"missing\.pem"):
        open_channel("ipv4:127.0.0.1:1", section, uses_tls=True, server_name=None)
