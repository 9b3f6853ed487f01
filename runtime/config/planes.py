"""The configuration of the three planes, in the shape of the deployment presets.

Only shape, bounds and meaning; nothing here reads or connects. `config.py` has the other sections.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta

from .keys import (
    NAME_PATTERN,
    Addresses,
    Bytes,
    Count,
    FrameBytes,
    Port,
    Seconds,
    Secret,
    Section,
    Text,
    about,
    need_addresses,
    need_consent,
    need_together,
)
from .tcp import TcpConfig

Options = Annotated[
    Annotated[dict[str, str], Meta(max_length=64)],
    about("What an installed package's transport is opened with; as text `name=value,…`."),
]
_PLAIN = (
    "Send the password or token over a link without TLS beyond this machine, which is refused else."
)


def need_endpoints(endpoints: Sequence[str]) -> None:
    """Raise `ValueError` unless they are addresses of members of etcd, or that of one on a socket."""
    if len(endpoints) > 1 or not endpoints[0].startswith("unix:/"):
        said = (
            "etcd endpoint: say host:port, http://host:port or https://host:port, or one unix:/path"
        )
        need_addresses(endpoints, ("", "http", "https"), 0, said)


def need_servers(servers: Sequence[str]) -> None:
    """Raise `ValueError` unless they are addresses of NATS servers."""
    said = "address of a NATS server; nats://host:port is one"
    need_addresses(servers, ("nats", "tls", "ws", "wss"), 4222, said)


class TlsConfig(Section, frozen=True, kw_only=True):
    """TLS towards a plane's servers."""

    enabled: Annotated[bool, about("Speak TLS to the servers.")] = False
    ca_file: Annotated[
        Text | None,
        about(
            "Certificates to trust; null: `security.tls.authority_file`, else those of the system."
        ),
    ] = None
    cert_file: Annotated[Text | None, about("Our own certificate; needs `key_file`.")] = None
    key_file: Annotated[Text | None, about("The key of `cert_file`.")] = None
    server_name: Annotated[
        Text | None,
        about(
            "Name in every server's certificate; null: the host, of several etcd endpoints the first."
        ),
    ] = None

    def __post_init__(self) -> None:
        need_together("tls", cert_file=self.cert_file, key_file=self.key_file)
        for name in ("ca_file", "cert_file", "server_name"):
            if getattr(self, name) is not None and not self.enabled:
                raise ValueError(f"tls: {name} is set, but enabled is false")


class EtcdConfig(Section, frozen=True, kw_only=True):
    """The etcd cluster behind the control plane."""

    endpoints: Annotated[
        Addresses, about("`host:port` of each member, IPv6 in brackets; or one `unix:/path`.")
    ] = ("127.0.0.1:2379",)
    nodes: Annotated[
        Annotated[int, Meta(ge=1, le=9)],
        about("Members the cluster is planned with. An embedded server is always one."),
    ] = 1
    memory: Annotated[
        Bytes, about("Planned memory of one member; the database of an embedded one stays below.")
    ] = 2_000_000_000
    ssd: Annotated[
        bool, about("Members keep their log on an SSD: `doctor` looks whether `data_dir` does.")
    ] = False
    username: Annotated[Text | None, about("User; needs `password`.")] = None
    password: Annotated[Secret | None, about("Password; needs `username`.")] = None
    allow_plain_password: Annotated[bool, about(_PLAIN)] = False
    tls: TlsConfig = TlsConfig()
    key_prefix: Annotated[
        Annotated[str, Meta(max_length=128, pattern=r"^([A-Za-z0-9._-]+/)*$")],
        about(
            "Stands before every key, such as `team-a/`, so that clusters can share one etcd. The same in all"
            " processes of a cluster; NATS is shared by accounts."
        ),
    ] = ""
    lease_ttl_s: Annotated[
        Annotated[float, Meta(ge=2, le=86_400, extra={"unit": "s"})],
        about("An instance that stops renewing vanishes after this; etcd rounds up to seconds."),
    ] = 10.0
    connect_timeout_s: Annotated[Seconds, about("For the first answer at the start.")] = 5.0
    request_timeout_s: Annotated[Seconds, about("For one call with all its tries.")] = 5.0
    attempt_timeout_s: Annotated[
        Seconds, about("For one try; short, so that a lost leader costs little.")
    ] = 0.7
    silence_s: Annotated[
        Seconds, about("A watch stream that says nothing this long is given up for a new one.")
    ] = 6.0
    data_dir: Annotated[
        Text | None, about("Where an embedded server keeps its data; null: a temporary folder.")
    ] = None
    port: Annotated[
        Port,
        about(
            "Where an embedded server listens on 127.0.0.1, for every user of the machine."
            " 0: on a socket for this user alone."
        ),
    ] = 0

    def __post_init__(self) -> None:
        need_endpoints(self.endpoints)
        need_together("etcd", username=self.username, password=self.password)
        if self.password is not None and not (self.tls.enabled or self.allow_plain_password):
            need_consent("etcd", "password", self.endpoints)


class ControlPlaneConfig(Section, frozen=True, kw_only=True):
    """Registration, discovery and leases."""

    backend: Annotated[
        Annotated[str, Meta(pattern=NAME_PATTERN, examples=["etcd", "memory"])],
        about(
            "`etcd`; `memory`, for a single process and for tests; or the name under which an installed"
            " package offers a transport: `docs/write_a_transport.md`."
        ),
    ] = "etcd"
    options: Options = {}
    embedded: Annotated[
        bool | None,
        about(
            "Start a server of our own from the `embedded` extra, on a socket for this user alone unless"
            " `etcd.port` is set."
            " null: `trinamo up` does, for one node; other commands do not."
        ),
    ] = None
    etcd: EtcdConfig = EtcdConfig()

    def __post_init__(self) -> None:
        if self.embedded and self.etcd.nodes > 1:
            raise ValueError("embedded starts one etcd server, but etcd.nodes is more than 1")
        if self.embedded and (self.etcd.username is not None or self.etcd.tls.enabled):
            raise ValueError("an embedded etcd asks nobody who he is: no username, no tls")


class NatsConfig(Section, frozen=True, kw_only=True):
    """The NATS cluster behind the event plane."""

    servers: Annotated[Addresses, about("URL of each server.")] = ("nats://127.0.0.1:4222",)
    nodes: Annotated[
        Annotated[int, Meta(ge=1, le=9)],
        about("Servers the cluster is planned with. An embedded server is always one."),
    ] = 1
    memory: Annotated[
        Bytes, about("Planned memory of one server; an embedded one collects garbage near it.")
    ] = 1_000_000_000
    jetstream: Annotated[
        bool, about("Refuse servers without JetStream, which work queues need; ours has it.")
    ] = False
    username: Annotated[Text | None, about("User; needs `password`.")] = None
    password: Annotated[Secret | None, about("Password; needs `username`.")] = None
    token: Annotated[Secret | None, about("Token, instead of user and password.")] = None
    credentials_file: Annotated[Text | None, about("A `.creds` file, instead of both.")] = None
    nkey_seed_file: Annotated[
        Text | None, about("A file with an NKey seed, instead; needs the package `nkeys`.")
    ] = None
    allow_plain_password: Annotated[bool, about(_PLAIN)] = False
    tls: TlsConfig = TlsConfig()
    connect_timeout_s: Annotated[Seconds, about("For one attempt to connect.")] = 2.0
    start_timeout_s: Annotated[
        Seconds, about("For the first connection at the start; attempts are repeated until then.")
    ] = 5.0
    ping_interval_s: Annotated[
        Seconds, about("Idle time before a ping; two unanswered end the connection.")
    ] = 10.0
    drain_timeout_s: Annotated[Seconds, about("For what is queued when the plane closes.")] = 2.0
    ack_timeout_s: Annotated[
        Seconds, about("For a worker's typed answer where requests travel over NATS.")
    ] = 10.0
    outgoing_messages_max: Annotated[
        Count, about("Messages that wait to be sent; what is over is refused and counted.")
    ] = 65_536
    stream_replicas: Annotated[
        Annotated[int, Meta(ge=1, le=5)],
        about("On how many servers a work queue is kept; 3 where there are 3 or more."),
    ] = 1
    store_dir: Annotated[
        Text | None, about("Where an embedded server keeps JetStream; null: a temporary folder.")
    ] = None
    port: Annotated[
        Port, about("Where an embedded server listens on 127.0.0.1; 0: the system chooses.")
    ] = 0

    def __post_init__(self) -> None:
        need_together("nats", username=self.username, password=self.password)
        if any("@" in server for server in self.servers):
            # A URL is printed and logged everywhere; a password in it would be too.
            raise ValueError("nats: give user and password by their keys, not in servers")
        need_servers(self.servers)
        if len(self.ways) > 1:
            raise ValueError(f"nats: {' and '.join(self.ways)} exclude each other")
        # The two others answer a challenge, and what they sign with stays here.
        secret = "password" if self.token is None else "token"
        if getattr(self, secret) is not None and not (
            self.tls.enabled or self.allow_plain_password
        ):
            need_consent("nats", secret, self.servers)

    @property
    def ways(self) -> list[str]:
        """The keys by which we say who we are; at most one."""
        names = ("username", "token", "credentials_file", "nkey_seed_file")
        return [name for name in names if getattr(self, name) is not None]


class EventPlaneConfig(Section, frozen=True, kw_only=True):
    """Load, KV events, work queues, and requests where `data_plane.requests` says so."""

    backend: Annotated[
        Annotated[str, Meta(pattern=NAME_PATTERN, examples=["nats", "memory"])],
        about(
            "`nats`; `memory`, for a single process and for tests; or the name under which an installed"
            " package offers a transport."
        ),
    ] = "nats"
    options: Options = {}
    embedded: Annotated[
        bool | None,
        about(
            "Start a server of our own from the `embedded` extra, with a token of its own."
            " null: `trinamo up` does, for one node; other commands do not."
        ),
    ] = None
    nats: NatsConfig = NatsConfig()

    def __post_init__(self) -> None:
        if self.embedded and self.nats.nodes > 1:
            raise ValueError("embedded starts one NATS server, but nats.nodes is more than 1")
        if self.embedded and (self.nats.ways or self.nats.tls.enabled):
            raise ValueError(
                "an embedded NATS has a token of its own: no other credentials, no tls"
            )


class NixlConfig(Section, frozen=True, kw_only=True):
    """KV transfer by NIXL over UCX; see `docs/transfer_backends.md`."""

    enabled: Annotated[bool, about("Move KV blocks by NIXL where both ends can.")] = False
    rdma_interface: Annotated[
        Text | None,
        about("RDMA device or network interface, such as `ib0`; null: only peers on this host."),
    ] = None
    same_host: Annotated[
        bool, about("Let the kernel copy between processes of this host (UCX's `cma`).")
    ] = True
    mtu: Annotated[
        Literal[256, 512, 1024, 2048, 4096] | None,
        about("Path MTU of RDMA connections; refused without an RDMA device. null: the device's."),
    ] = None
    queue_depth: Annotated[
        Annotated[int, Meta(ge=1, le=4096)],
        about("Transfers at once; on RDMA devices also the length of the queues."),
    ] = 128
    completion_mode: Annotated[
        Literal["event", "polling"],
        about("`polling` looks without pause while transfers run: lower latency for a core."),
    ] = "event"
    fallback: Annotated[
        Literal["tcp", "mooncake", "mooncake_tcp"],
        about("What carries KV blocks where NIXL cannot."),
    ] = "tcp"
    progress_delay_s: Annotated[
        Annotated[float, Meta(ge=0.001, le=0.02, extra={"unit": "s"})],
        about("How long NIXL's own thread sleeps unless it is woken."),
    ] = 0.02
    notification_poll_s: Annotated[
        Seconds, about("Longest time until a peer's notification is noticed.")
    ] = 0.02


class MooncakeConfig(Section, frozen=True, kw_only=True):
    """KV transfer by Mooncake. It listens on all interfaces: `docs/transfer_backends.md`."""

    enabled: Annotated[bool, about("Move KV blocks by Mooncake where both ends can.")] = False
    protocol: Annotated[Literal["rdma", "tcp"], about("What Mooncake itself runs over.")] = "tcp"
    device: Annotated[Text | None, about("RDMA device; null: Mooncake chooses.")] = None
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=64)], about("Transfers at once; each blocks a thread.")
    ] = 4
    queue_depth: Annotated[
        Annotated[int, Meta(ge=1, le=4096)],
        about("Transfers that run or wait for a thread; at least `threads`."),
    ] = 128
    transfer_timeout_s: Annotated[
        Annotated[int, Meta(ge=5, le=86_400, extra={"unit": "s"})],
        about("How long the engine itself waits for a peer that hangs; it takes no less than 5."),
    ] = 5
    notification_poll_s: Annotated[
        Seconds, about("Longest time until a peer's notification is noticed.")
    ] = 0.02

    def __post_init__(self) -> None:
        if self.queue_depth < self.threads:
            raise ValueError("mooncake: queue_depth is less than threads")


class TransferConfig(Section, frozen=True, kw_only=True):
    """KV transfers of a worker whose engine has KV memory; see `docs/transfer.md`."""

    enabled: Annotated[
        bool, about("Offer the engine's KV memory to peers, and move blocks from and to theirs.")
    ] = True
    backends: Annotated[
        tuple[Literal["nixl", "mooncake", "mooncake_tcp", "tcp"], ...],
        about(
            "What moves blocks, in this order; tcp is the last, named or not. `mooncake` is by RDMA."
            " Empty: as `nixl.enabled` and its `fallback`, `mooncake.enabled` and its `protocol` say,"
            " which do not count otherwise."
        ),
    ] = ()
    host: Annotated[
        Text | None,
        about("Address to bind for transfers over TCP; null: that of `data_plane.tcp`."),
    ] = None
    port: Annotated[Port, about("Port to bind for them; 0: the system chooses.")] = 0
    advertise_host: Annotated[
        Text | None,
        about("Address told to peers, by Mooncake too; null: that of `data_plane.tcp`."),
    ] = None
    slice_bytes: Annotated[
        FrameBytes, about("Sent over TCP before another transfer of the same peer has its turn.")
    ] = 1 << 21
    checksum: Annotated[
        Literal["auto", "crc32", "none"],
        about(
            "Over TCP, of every block. `auto`: the best that both ends have; with a secret the tags that"
            " sealed blocks have anyway."
        ),
    ] = "auto"
    timeout_s: Annotated[
        Seconds, about("Of one transfer or grant of blocks, where its caller says nothing.")
    ] = 30.0
    attempt_timeout_s: Annotated[
        Seconds,
        about(
            "For a backend to confirm another block. Then another backend is tried; if there is none,"
            " a TCP stream that brought nothing in that time is closed and opened again."
        ),
    ] = 10.0
    settle_timeout_s: Annotated[
        Seconds,
        about("Until a failed attempt must let go of its blocks, so that another may move them."),
    ] = 5.0
    quarantine_after_s: Annotated[
        Seconds,
        about(
            "Until an ended transfer must let go of its blocks; then nobody gets them until it is "
            "proven that nothing touches them."
        ),
    ] = 10.0
    probe_timeout_s: Annotated[
        Seconds,
        about("For one sign of life of a peer's backend; a quarter of it while another one works."),
    ] = 2.0
    probe_interval_s: Annotated[Seconds, about("Between two probes of one that failed.")] = 5.0
    missing_grace_s: Annotated[
        Seconds,
        about("How long a peer that discovery does not name any more is kept while it answers."),
    ] = 15.0


class DataPlaneConfig(Section, frozen=True, kw_only=True):
    """Requests, response streams, KV blocks."""

    requests: Annotated[
        Literal["tcp", "nats"],
        about("What carries envelopes to workers; answers always stream back over TCP."),
    ] = "tcp"
    tcp: TcpConfig = TcpConfig()
    nixl: NixlConfig = NixlConfig()
    mooncake: MooncakeConfig = MooncakeConfig()
    transfer: TransferConfig = TransferConfig()

    @property
    def backends(self) -> list[str]:
        """What moves KV blocks, in the order in which they are tried; `tcp` is always the last."""
        chosen: list[str] = list(self.transfer.backends)
        if not chosen:
            if self.nixl.enabled:
                chosen += ["nixl", self.nixl.fallback]
            if self.mooncake.enabled:
                chosen.append("mooncake_tcp" if self.mooncake.protocol == "tcp" else "mooncake")
        return [*dict.fromkeys(name for name in chosen if name != "tcp"), "tcp"]

    def __post_init__(self) -> None:
        if {"mooncake", "mooncake_tcp"} <= {*self.backends}:
            found = (
                f"nixl.fallback is {self.nixl.fallback}, but mooncake.protocol is"
                f" {self.mooncake.protocol}"
                if not self.transfer.backends
                else "transfer.backends has mooncake and mooncake_tcp"
            )
            raise ValueError(f"{found}: one process has one Mooncake engine")
