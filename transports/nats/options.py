"""How to reach the servers, in the words of nats-py: the section `event_plane.nats`, translated."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Any, Final

import attrs

from trinamo.runtime.config.planes import NatsConfig, TlsConfig

NAME: Final = "trinamo"
PINGS_OUTSTANDING_MAX: Final = 2


@attrs.frozen
class NatsOptions:
    """Where and how; `servers` win over those of the section."""

    servers: Sequence[str]
    section: NatsConfig
    tls: ssl.SSLContext | None = None

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
        section = self.section
        options: dict[str, Any] = {
            "servers": list(servers),
            "name": NAME,
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0.01,
            "connect_timeout": section.connect_timeout_s,
            "ping_interval": section.ping_interval_s,
            "max_outstanding_pings": PINGS_OUTSTANDING_MAX,
            # Subjects were checked by the sender's side already.
            "skip_subject_validation": True,
        }
        given = {
            "user": section.username,
            "password": section.password and section.password.reveal(),
            "token": section.token and section.token.reveal(),
            "nkeys_seed": section.nkey_seed_file,
            "user_credentials": section.credentials_file,
            "tls": self.tls,
            "tls_hostname": section.tls.server_name,
        }
        return options | {key: value for key, value in given.items() if value}


def tls_context(section: TlsConfig) -> ssl.SSLContext | None:
    """What the section asks for; None without TLS, or with that of a `tls://` address alone."""
    if not section.enabled:
        return None
    context = ssl.create_default_context(cafile=section.ca_file)
    if section.cert_file is not None:
        context.load_cert_chain(section.cert_file, section.key_file)
    return context
