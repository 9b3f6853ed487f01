"""nats-py's client with one promise more: where TLS is configured, nothing is said in clear.

A NATS server speaks first, in clear, and its INFO says whether TLS follows. nats-py believes it,
so whoever sits on the way could say `tls_required: false` and be handed the token.
"""

from __future__ import annotations

from typing import Any

import nats.errors
from nats.aio.client import Client


class TlsRefusedError(nats.errors.Error):  # type: ignore[misc]  # nats-py has no types
    """The server, or somebody on the way to it, does not offer the TLS that is configured."""

    def __str__(self) -> str:
        return "TLS is configured and the server offers none; nothing was sent to it"


class NatsClient(Client):  # type: ignore[misc]  # nats-py has no types
    """A `Client` that, if it needs TLS, greets only over TLS."""

    def __init__(self, *, needs_tls: bool) -> None:
        super().__init__()
        self._needs_tls = needs_tls

    @property
    def has_jetstream(self) -> bool:
        """Whether the server says that it runs JetStream."""
        return bool(self._server_info.get("jetstream"))

    def _connect_command(self) -> bytes:
        # The first bytes that nats-py sends by itself, and the credentials are in them.
        if self._needs_tls and not _is_encrypted(self._transport):
            raise TlsRefusedError
        return bytes(super()._connect_command())


def _is_encrypted(transport: Any) -> bool:
    """Whether TLS is established. What cannot be told counts as clear text."""
    writer = getattr(transport, "_io_writer", None)
    if writer is not None:
        return writer.get_extra_info("ssl_object") is not None
    return bool(getattr(transport, "_using_tls", False))  # A WebSocket.
