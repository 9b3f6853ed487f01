"""Who may what, where a fleet's own authority says in certificates what somebody is.

One table: `docs/security.md` has it in words. Without such an authority all members are equal.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final

from trinamo.runtime.kv.transfer.metadata import NIXL_METADATA_KEY
from trinamo.runtime.process.settings import SETTINGS_PREFIX
from trinamo.runtime.protocol.discovery.instances import FRONTEND_PREFIX, INSTANCE_PREFIX
from trinamo.runtime.protocol.discovery.model_cards import MODEL_PREFIX
from trinamo.runtime.protocol.streams.membership import Purpose
from trinamo.runtime.weights.messages import WEIGHTS_PREFIX


class Role(enum.StrEnum):
    """What a certificate says that its holder is; it may say several."""

    FRONTEND = "frontend"
    WORKER = "worker"
    """Answers requests of clients: alone, or as the one that decodes."""
    PREFILL = "prefill"
    """Computes prompts for workers, and answers no client."""
    OPERATOR = "operator"

    @property
    def uri(self) -> str:
        return f"trinamo://role/{self}"


_ALL: Final = frozenset(Role)
_SERVING: Final = frozenset({Role.WORKER, Role.PREFILL})
LISTENS: Final = {Purpose.REQUESTS: _SERVING, Purpose.STREAMS: _ALL, Purpose.TRANSFERS: _SERVING}
"""Whom a dialler believes that it serves this."""
DIALS: Final = {Purpose.REQUESTS: _ALL, Purpose.STREAMS: _SERVING, Purpose.TRANSFERS: _SERVING}
"""Who is let in to ask for this."""
WRITES: Final = {
    INSTANCE_PREFIX: _SERVING,
    MODEL_PREFIX: frozenset({Role.WORKER}),
    WEIGHTS_PREFIX: _SERVING,
    FRONTEND_PREFIX: frozenset({Role.FRONTEND}),
    SETTINGS_PREFIX: frozenset({Role.OPERATOR}),
}
"""Whose signature counts for the entries of etcd below a prefix."""
_METADATA: Final = f"/{NIXL_METADATA_KEY}/"


def writers_of(key: str) -> frozenset[Role] | None:
    """Who may write an entry of etcd; None for one that nobody signs."""
    for prefix, writers in WRITES.items():
        if key.startswith(prefix):
            return writers
    return _SERVING if _METADATA in key else None


def roles_in(uris: Iterable[str]) -> frozenset[Role]:
    """What a certificate with these names says; what is no role of ours says nothing."""
    said = frozenset(uris)
    return frozenset(role for role in Role if role.uri in said)


def role_names(roles: Iterable[Role]) -> str:
    return " or ".join(sorted(roles)) or "no role"
