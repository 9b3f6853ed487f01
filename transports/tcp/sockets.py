"""TCP sockets as every tcp plane wants them: options, addresses, listeners, dialling.

Goes through `trio.socket` only, so that the simulator's socket factory serves it unchanged.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import logging
import socket as stdlib_socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from trinamo.runtime.config.keys import is_everywhere
from trinamo.runtime.config.tcp import TcpConfig
from trinamo.runtime.errors import ConfigError, ConnectError
from trinamo.runtime.logs.text import reason

from .unfinished import ByteBudget, Pending, Unfinished

if TYPE_CHECKING:
    from trinamo.runtime.env import Env
    from trinamo.transports.security.fleet import Fleet
    from trinamo.transports.security.identity import Identity, Shown

_log = logging.getLogger("trinamo.tcp")
_HOST_CHARS_MAX: Final = 255
_PORT_DIGITS_MAX: Final = 5
_SIOCGIFADDR: Final = 0x8915
_IF_INET6: Final = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE: Final = 0x00


def interface_address(name: str) -> str:
    """The IPv4 address of interface `name`, else its global IPv6 address.

    Link-local addresses are never chosen: peers could not reach them without a scope. Raises
    `ConfigError` naming the interfaces there are.
    """
    with stdlib_socket.socket(stdlib_socket.AF_INET, stdlib_socket.SOCK_DGRAM) as probe:
        question = struct.pack("256s", name.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, question)
            return stdlib_socket.inet_ntoa(answer[20:24])
        except OSError:
            pass  # It has no IPv4 address, or is not there.
    for line in _IF_INET6.read_text().splitlines() if _IF_INET6.exists() else ():
        packed, _, _, scope, _, interface = line.split()
        if interface == name and int(scope, 16) == _GLOBAL_SCOPE:
            return stdlib_socket.inet_ntop(stdlib_socket.AF_INET6, bytes.fromhex(packed))
    known = ", ".join(sorted(n for _, n in stdlib_socket.if_nameindex()))
    raise ConfigError(f"network interface {name!r} has no usable address; there are: {known}")


class TcpOptions(TcpConfig, frozen=True, kw_only=True):
    """The section `data_plane.tcp`, and what the planes that share it have in common.

    Make them with `of`; `msgspec.structs.replace` keeps the budgets.
    """

    secret: bytes = b""
    """What all processes of the cluster share, from `security.secret_file`: it seals each connection."""
    second_secret: bytes = b""
    """Who has this is let in and asked as well, from `security.second_secret_file`."""
    fleet: Fleet | None = None
    """What `security.tls` names: connections are sealed with it in place of what the secret makes."""
    is_clear_allowed: bool = False
    """Whether, without a secret, others than loopback are bound: `security.clear_tcp`."""
    budget: ByteBudget = ByteBudget(0)
    """What the connections of all planes with these options hold of frames that are not whole."""
    towards: tuple[str, ...] = ()
    """The servers of the control plane. Bound to every address, we are told to peers by the one that
    we ask these from. None: this machine is all there is."""
    payloads: ByteBudget = ByteBudget(0)
    """And of unary requests that run. Of its own: a frame that is whole must find room here while
    others wait there."""
    identities: dict[tuple[bytes, bytes, str], Identity] = {}
    """What the planes with these options show to their peers, by who they are there."""

    def __post_init__(self) -> None:
        for name in ("budget", "payloads"):
            if not getattr(self, name).bytes_max:
                msgspec.structs.force_setattr(self, name, ByteBudget(self.unfinished_bytes_max))

    def __repr__(self) -> str:
        """Without the secret."""
        return f"{type(self).__name__}(host={self.host!r}, port={self.port})"

    @property
    def authority_key(self) -> str:
        """The key of the configuration by which members know each other."""
        return "security.secret_file" if self.fleet is None else "security.tls.authority_file"

    def shown(self, uri: str, env: Env) -> Shown:
        """What who is `uri` shows of those who have a secret, or of a fleet's own authority."""
        if self.fleet is not None and self.fleet.is_shown:
            return self.fleet
        # Brings `cryptography` along, which who has no secret never needs.
        from trinamo.transports.security.identity import Identity  # noqa: PLC0415

        key = (self.secret, self.second_secret, uri)
        # They may be others since: files are read again.
        authorities = () if self.fleet is None else self.fleet.certificate.authorities
        if key not in self.identities or self.identities[key].authorities != authorities:
            self.identities[key] = Identity(
                *(self.secret, uri, env, self.second_secret),
                others=self.fleet,
                authorities=authorities,
            )
        return self.identities[key]

    def unfinished(self, decoder: Pending) -> Unfinished:
        """The bound on what one connection's decoder holds."""
        return Unfinished(
            decoder, self.budget, buffer_bytes=self.buffer_bytes, timeout_s=self.frame_timeout_s
        )


def tune(stream: trio.SocketStream, options: TcpOptions) -> None:
    """No Nagle delay, and both halves of half-open detection.

    Keep-alive notices a dead peer while we are silent, TCP_USER_TIMEOUT while data of ours is
    unacknowledged; each alone misses the other case.
    """
    tcp = stdlib_socket.IPPROTO_TCP
    try:
        stream.setsockopt(tcp, stdlib_socket.TCP_NODELAY, 1)
        stream.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_KEEPALIVE, 1)
        stream.setsockopt(tcp, stdlib_socket.TCP_KEEPIDLE, options.keepalive_idle_s)
        stream.setsockopt(tcp, stdlib_socket.TCP_KEEPINTVL, options.keepalive_interval_s)
        stream.setsockopt(tcp, stdlib_socket.TCP_KEEPCNT, options.keepalive_count)
        stream.setsockopt(tcp, stdlib_socket.TCP_USER_TIMEOUT, int(options.user_timeout_s * 1000))
    except OSError as error:
        # The peer may be gone already; the first read says so in its own words.
        if error.errno not in (errno.EINVAL, errno.ENOTCONN, errno.ECONNRESET):
            raise


def format_address(host: str, port: int) -> str:
    """`host:port`, with brackets round an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The host and port of `host:port` or `[v6]:port`; anything else is a `ConnectError`."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    # The lengths first: a peer's word may be as long as a frame, and `int` refuses what is too long.
    is_port = 0 < len(port) <= _PORT_DIGITS_MAX and port.isdecimal() and 0 < int(port) < 65536
    if not colon or not 0 < len(host) <= _HOST_CHARS_MAX or not is_port:
        raise ConnectError(f"{address[:_HOST_CHARS_MAX]!r} is not a host:port address")
    return host, int(port)


def _family(host: str) -> stdlib_socket.AddressFamily | None:
    try:
        version = ipaddress.ip_address(host.partition("%")[0]).version
    except ValueError:
        return None
    return stdlib_socket.AF_INET if version == 4 else stdlib_socket.AF_INET6


async def open_listener(options: TcpOptions) -> tuple[trio.SocketListener, str]:
    """Bind and listen; the listener and the address to advertise.

    Raises `ConfigError` naming the address when it is taken or not ours, and for one beyond
    loopback when there is no secret to ask peers for.
    """
    if options.secret:
        # Derived at the start: the library that it takes holds all up while it is imported.
        from trinamo.transports.security.identity import authority_of  # noqa: PLC0415

        authority_of(options.secret)
    host = interface_address(options.interface) if options.interface else options.host
    family = _family(host)
    try:
        if family is None:
            # The first address that a name stands for; the others, if any, are left alone.
            listener, *others = await trio.open_tcp_listeners(
                options.port, host=host, backlog=options.backlog
            )
            for other in others:
                await other.aclose()
        else:
            socket = trio.socket.socket(family, stdlib_socket.SOCK_STREAM)
            try:
                socket.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_REUSEADDR, 1)
                await socket.bind((host, options.port))
                socket.listen(options.backlog)
            except BaseException:
                socket.close()
                raise
            listener = trio.SocketListener(socket)
    except OSError as error:
        raise ConfigError(_bind_sentence(host, options.port, error)) from error
    except UnicodeError as error:
        raise ConfigError(f"cannot listen on {host!r}: that is no host name") from error
    bound_host, bound_port = listener.socket.getsockname()[:2]
    if not options.secret and not ipaddress.ip_address(bound_host.partition("%")[0]).is_loopback:
        where = format_address(bound_host, bound_port)
        if not options.is_clear_allowed:
            listener.socket.close()
            raise ConfigError(
                f"cannot listen on {where}: without security.secret_file only loopback addresses such"
                " as 127.0.0.1 are bound. Make a file with `trinamo certs secret FILE`, put it on every"
                " machine of the cluster, and name it there. (security.clear_tcp binds others all the"
                " same, for anybody who reaches them to read, change and ask.)"
            )
        _log.warning(
            "listens on %s in clear, as security.clear_tcp allows: whoever reaches it can read, change"
            " and ask what members do; security.secret_file closes it",
            where,
        )
    try:
        advertised = options.advertise_host or await _reachable(bound_host, options.towards)
    except BaseException:
        listener.socket.close()
        raise
    return listener, format_address(advertised, bound_port)


def _bind_sentence(host: str, port: int, error: OSError) -> str:
    where = format_address(host, port)
    if error.errno == errno.EADDRINUSE:
        return f"cannot listen on {where}: the port is in use; choose another, or 0 for any"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"cannot listen on {where}: this machine has no such address"
    return f"cannot listen on {where}: {error.strerror or error}"


async def _reachable(bound_host: str, servers: tuple[str, ...]) -> str:
    """What to tell peers: where we are bound, or, bound to every address, where `servers` see us.

    Raises `ConfigError` if there is no way to any of them.
    """
    if not is_everywhere(bound_host):
        return bound_host
    places = [each.rpartition("//")[2] for each in servers if not each.startswith("unix:")]
    family = stdlib_socket.AF_INET6 if ":" in bound_host else stdlib_socket.AF_INET
    for place in places:
        try:
            found = await trio.socket.getaddrinfo(
                *split_address(place), family, stdlib_socket.SOCK_DGRAM
            )
            with trio.socket.socket(family, stdlib_socket.SOCK_DGRAM) as socket:
                # The kernel looks the way up; no packet is sent.
                await socket.connect(found[0][4])
                return str(socket.getsockname()[0]).partition("%")[0]
        except (OSError, ConnectError, UnicodeError):
            continue
    if places:
        raise ConfigError(
            f"bound to {bound_host}, but there is no way from here to {', '.join(places)} that would"
            " say at which address peers reach this machine: set data_plane.tcp.advertise_host"
        )
    return "::1" if ":" in bound_host else "127.0.0.1"


async def dial(address: str, options: TcpOptions) -> trio.SocketStream:
    """Connect to `host:port`, tuned; `ConnectError` if that fails or takes too long."""
    host, port = split_address(address)
    family = _family(host)
    try:
        with trio.fail_after(options.connect_timeout_s):
            if family is None:
                stream = await trio.open_tcp_stream(host, port)
            else:
                # A literal address needs no resolver and no race of attempts: a third of the cost.
                socket = trio.socket.socket(family, stdlib_socket.SOCK_STREAM)
                try:
                    await socket.connect((host, port))
                except BaseException:
                    socket.close()
                    raise
                stream = trio.SocketStream(socket)
    except trio.TooSlowError:
        raise ConnectError(
            f"cannot be reached at {address}: no answer within {options.connect_timeout_s:g} s"
        ) from None
    except OSError as error:
        raise ConnectError(f"cannot be reached at {address}: {reason(error)}") from error
    except ValueError as error:
        # The address is a peer's word, or one from discovery: a null byte, or no host name at all.
        raise ConnectError(f"cannot be reached at {address!r}: that is no host name") from error
    tune(stream, options)
    return stream
