"""How to reach the servers and for how long to try: what `open_nats` takes, in one value."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Any

import attrs

__all__ = ["NatsOptions"]


@attrs.frozen
class NatsOptions:
    """Immutable; `open_nats` documents the fields."""

    servers: Sequence[str]
    name: str = "trinamo"
    username: str = ""
    password: str = attrs.field(default="", repr=False)
    token: str = attrs.field(default="", repr=False)
    nkey_seed: str = attrs.field(default="", repr=False)
    nkey_seed_path: str = ""
    credentials_path: str = ""
    tls: ssl.SSLContext | None = None
    tls_hostname: str = ""
    tls_handshake_first: bool = False
    inbox_prefix: str = "_INBOX"
    connect_timeout_s: float = 2.0
    reconnect_wait_s: float = 0.1
    reconnect_wait_max_s: float = 2.0
    ping_interval_s: float = 10.0
    pings_outstanding_max: int = 2
    drain_timeout_s: float = 2.0
    outgoing_messages_max: int = 65_536
    outgoing_bytes_max: int = 64 * 1024 * 1024
    needs_jetstream: bool = False

    @property
    def needs_tls(self) -> bool:
        """Whether any server is to be spoken to by TLS; then all are."""
        return self.tls is not None or any(
            server.startswith(("tls://", "wss://")) for server in self.servers
        )

    def client_options(self, servers: Sequence[str]) -> dict[str, Any]:
        """The keyword arguments of nats-py's `connect` for one connection, without callbacks.

        nats-py's own reconnection is off: it gives up for good on some server errors, and hides
        how much of what was published is lost with a connection.
        """
        options: dict[str, Any] = {
            "servers": list(servers),
            "name": self.name,
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0.01,
            "connect_timeout": self.connect_timeout_s,
            "ping_interval": self.ping_interval_s,
            "max_outstanding_pings": self.pings_outstanding_max,
            # Subjects were checked by the sender's side already.
            "skip_subject_validation": True,
            "tls_handshake_first": self.tls_handshake_first,
        }
        given = {
            "user": self.username,
            "password": self.password,
            "token": self.token,
            "nkeys_seed_str": self.nkey_seed,
            "nkeys_seed": self.nkey_seed_path,
            "user_credentials": self.credentials_path,
            "tls": self.tls,
            "tls_hostname": self.tls_hostname,
        }
        return options | {key: value for key, value in given.items() if value}
