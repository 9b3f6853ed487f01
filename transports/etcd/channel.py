"""From endpoints to an open gRPC channel: addresses, TLS, and the options that matter.

No call is made here. The channel must be opened after the last fork of the process: gRPC's
threads do not survive one, which is why workers are spawned.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import grpc
import trio

from trinamo.runtime.config.planes import TlsConfig, need_endpoints
from trinamo.runtime.errors import ConfigError, ConnectError

# A page of 128 values of 1 MiB, and their keys.
REPLY_BYTES_MAX: Final = 160 << 20

_OPTIONS: Final = (
    # A server that hangs never ends a stream by itself; unanswered pings do (etcd issue 8980).
    # etcd refuses pings more often than every five seconds. Until they have found a member that
    # hangs, every third call of three members goes there and costs a try.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    # By default the pauses between attempts grow to two minutes, which looks like a dead watch.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A member that was moved to another machine has another address behind its name.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.max_receive_message_length", REPLY_BYTES_MAX),
    # Two planes in one process shall not share a connection: each fails and mends by itself.
    ("grpc.use_local_subchannel_pool", 1),
)


@attrs.frozen
class Endpoints:
    """The members of one cluster, as `host:port`; or a lone one, as `unix:/path`."""

    addresses: tuple[str, ...]
    uses_tls: bool

    @property
    def server_name(self) -> str | None:
        """The name for all members' certificates where gRPC cannot tell one from the target."""
        # It would look for the whole list of addresses in the certificate.
        several = len(self.addresses) > 1
        return self.addresses[0].rpartition(":")[0].strip("[]") if several else None


def parse_endpoints(endpoints: str | Sequence[str]) -> Endpoints:
    """Take `host:port` or URLs, alone, in a sequence or separated by commas; or one `unix:/path`.

    Raises `ConfigError` that names the part it cannot read.
    """
    parts = endpoints.split(",") if isinstance(endpoints, str) else endpoints
    given = [part.strip() for part in parts]
    if not given:
        raise ConfigError("no etcd endpoint is given")
    try:
        need_endpoints(given)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if given[0].startswith("unix:/"):
        return Endpoints((given[0].replace("unix:///", "unix:/"),), uses_tls=False)
    schemes = {each.startswith("https://") for each in given}
    if len(schemes) > 1:
        raise ConfigError("etcd endpoints must be all http or all https")
    return Endpoints(tuple(each.rpartition("://")[2].rstrip("/") for each in given), schemes.pop())


async def resolve(endpoints: Endpoints) -> str:
    """The gRPC target for all endpoints together.

    gRPC knows lists of addresses only, so several names are looked up here. Raises `ConnectError`
    if a name is not known.
    """
    if endpoints.addresses[0].startswith("unix:"):
        return endpoints.addresses[0]
    if len(endpoints.addresses) == 1 and _family(endpoints.addresses[0]) is None:
        return f"dns:///{endpoints.addresses[0]}"
    literals = [address for item in endpoints.addresses for address in await _look_up(item)]
    families = {_family(address) for address in literals}
    # A target is of one family; where a name has both, IPv4 is enough to reach the member.
    family = "ipv4" if "ipv4" in families else "ipv6"
    return f"{family}:" + ",".join(item for item in literals if _family(item) == family)


async def _look_up(address: str) -> list[str]:
    if _family(address) is not None:
        return [address]
    host, _, port = address.rpartition(":")
    try:
        found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
    except OSError as error:
        raise ConnectError(
            f"the etcd endpoint {address} cannot be resolved: {error.strerror}"
        ) from error
    return [
        f"[{sockaddr[0]}]:{port}" if family == trio.socket.AF_INET6 else f"{sockaddr[0]}:{port}"
        for family, _, _, _, sockaddr in found
    ]


def _family(address: str) -> str | None:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return f"ipv{ipaddress.ip_address(host).version}"
    except ValueError:
        return None


def open_channel(
    target: str, section: TlsConfig, *, uses_tls: bool, server_name: str | None
) -> Any:
    """A `grpc.Channel` to any member behind `target`; it connects with its first call.

    Raises `ConfigError` if the TLS files cannot be read.
    """
    options: list[tuple[str, Any]] = list(_OPTIONS)
    # With several members, calls go round; a dead one is left out. A name may stand for several.
    goes_round = "," in target or target.startswith("dns:")
    policy = "round_robin" if goes_round else "pick_first"
    options.append(("grpc.lb_policy_name", policy))
    if not uses_tls:
        return grpc.insecure_channel(target, options=options)
    if server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read(section.ca_file),
        private_key=_read(section.key_file),
        certificate_chain=_read(section.cert_file),
    )
    return grpc.secure_channel(target, credentials, options=options)


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"the etcd TLS file {path} cannot be read: {error.strerror}") from error
