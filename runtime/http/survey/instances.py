"""The instances that discovery names, each asked for itself at the status port that it tells."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import attrs
import trio

from ...errors import TrinamoError
from ...nurseries import open_nursery
from ...planes import Entry
from ...protocol.discovery.instances import Instance
from .http_client import fetch_json

ASK_TIMEOUT_S: Final = 1.5
ASKED_AT_ONCE_MAX: Final = 64
ANSWER_BYTES_MAX: Final = 256 << 10
"""Of a status port, whose address any process may have registered."""


@attrs.define
class InstanceLook:
    """One instance; `health` is what its status port says, `problem` why it says nothing."""

    endpoint: str
    id: str
    lease_id: str
    incarnation: int
    is_draining: bool
    transports: dict[str, str]
    metadata: dict[str, str]
    health: dict[str, Any] | None = None
    problem: str = ""
    seen: str = ""
    """How the frontend sees it, if it is asked instead of etcd, or instead of the instance itself."""
    in_flight: int | None = None
    """The frontend's requests under way to it, if it is asked."""
    active: int | None = None
    """Requests that it has, whoever sent them, as the frontend was told; None if it was not."""
    kv_used: float | None = None
    """The fraction of its KV cache in use, likewise."""
    name: str = ""
    """What people call it, as far as anybody has said."""


def instance_look(instance: Instance, entry: Entry) -> InstanceLook:
    """What discovery says of an instance."""
    return InstanceLook(
        endpoint=instance.endpoint,
        id=instance.id,
        lease_id=f"{entry.lease_id:x}",
        incarnation=instance.incarnation,
        is_draining=instance.draining,
        transports=dict(instance.transports),
        metadata=dict(instance.metadata),
        name=instance.transports.get("http", "") if "upstream" in instance.metadata else "",
    )


async def ask_each(instances: Iterable[InstanceLook], timeout_s: float = ASK_TIMEOUT_S) -> None:
    """Ask each that has a status port; one port, of whatever endpoints, is asked once."""
    by_url: dict[str, list[InstanceLook]] = {}
    for instance in instances:
        if url := instance.metadata.get("status"):
            by_url.setdefault(url, []).append(instance)
    room = trio.CapacityLimiter(ASKED_AT_ONCE_MAX)
    async with open_nursery() as nursery:
        for url, looks in by_url.items():
            nursery.start_soon(_ask, url, looks, room, timeout_s)


async def _ask(
    url: str, looks: list[InstanceLook], room: trio.CapacityLimiter, timeout_s: float
) -> None:
    async with room:
        try:
            health = await fetch_facts(url, timeout_s)
        except TrinamoError as error:
            for look in looks:
                look.problem = error.message
            return
    for look in looks:
        look.health = health


async def fetch_facts(url: str, timeout_s: float = ASK_TIMEOUT_S) -> dict[str, Any]:
    """What the status port at `url` says of its process."""
    answer = await fetch_json(f"{url}/health", timeout_s=timeout_s, bytes_max=ANSWER_BYTES_MAX)
    return answer if isinstance(answer, dict) else {}
