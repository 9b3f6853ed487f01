"""The instances that discovery names, each asked for itself at the status port that it tells."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
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


@attrs.frozen(kw_only=True)
class Asking:
    """How processes are asked."""

    timeout_s: float = ASK_TIMEOUT_S
    asked_max: int | None = None
    """Instances that are asked, the first ones; None: all."""
    key: str = ""
    """Of a client, for a frontend that an operator has named."""
    wants_requests: bool = False
    """Whether frontends are asked for their requests, too."""
    dial: Callable[[str, str], Awaitable[str]] | None = None
    """Tries the address of an instance, by its id, as a frontend would; says why it is not reached,
    or nothing. None: that is not tried."""


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
    unreached: list[str] = attrs.field(factory=list)
    """Who does not reach it where requests go, and why; in words."""

    @property
    def is_engine(self) -> bool:
        """Whether it answers requests or computes prompts: not what one engine registers besides."""
        return self.metadata.get("for", "generate") in ("generate", "prefill")


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


async def ask_each(instances: Sequence[InstanceLook], asking: Asking) -> None:
    """Ask each that has a status port, and dial it; one port, of whatever endpoints, is asked once."""
    room = trio.CapacityLimiter(ASKED_AT_ONCE_MAX)

    async def ask(url: str, looks: list[InstanceLook]) -> None:
        async with room:
            try:
                health = await fetch_facts(url, asking.timeout_s)
            except TrinamoError as error:
                for look in looks:
                    look.problem = error.message
                return
        for look in looks:
            look.health = health

    async def dial(address: str, looks: list[InstanceLook]) -> None:
        assert asking.dial is not None
        async with room:
            why = await asking.dial(address, looks[0].id)
        for look in looks if why else ():
            look.unreached.append(why)

    async with open_nursery() as nursery:
        for url, looks in _grouped(instances, lambda each: each.metadata.get("status")):
            nursery.start_soon(ask, url, looks)
        if asking.dial is not None:
            for address, looks in _grouped(instances, lambda each: each.transports.get("tcp")):
                nursery.start_soon(dial, address, looks)


def _grouped(
    instances: Sequence[InstanceLook], place: Callable[[InstanceLook], str | None]
) -> Iterable[tuple[str, list[InstanceLook]]]:
    found: dict[str, list[InstanceLook]] = {}
    for each in instances:
        if where := place(each):
            found.setdefault(where, []).append(each)
    return found.items()


async def fetch_facts(url: str, timeout_s: float = ASK_TIMEOUT_S) -> dict[str, Any]:
    """What the status port at `url` says of its process."""
    answer = await fetch_json(f"{url}/health", timeout_s=timeout_s, bytes_max=ANSWER_BYTES_MAX)
    return answer if isinstance(answer, dict) else {}
